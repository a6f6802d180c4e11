"""What the library keeps on a target between calls: a lock, the buffers and captured steps of the last ones, and
what was accepted of drafters."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .tree_cache import DraftCache, TreeCache

_ATTRIBUTE = "_hf_ddtree_state"
_creating = threading.Lock()


class Buffers:
    """What a call writes to: rows of the target and of a drafter's context, and the rounds captured over them.

    Args:
        model: The target.
        kept: Whether later calls will use them again.
    """

    def __init__(self, model: Any, kept: bool) -> None:
        self.kept = kept
        self.cache = TreeCache.for_config(model.config.get_text_config(decoder=True))
        self.context = DraftCache([])
        self.rounds: dict[Any, Any] = {}
        # What the graph of prompts was made for, and the graph, or `None` if there can be none.
        self.prompt: tuple[Any, Any | None] | None = None
        self._drafter: weakref.ref[Any] | None = None
        self._left: torch.cuda.Event | None = None

    def context_of(self, drafter: Any) -> DraftCache:
        """The rows of a drafter's context; another drafter than the last call's gets new ones."""
        if self._drafter is None or self._drafter() is not drafter:
            self._drafter, self.context = weakref.ref(drafter), DraftCache.for_config(drafter.config)
            self.rounds.clear()
        return self.context

    def reset(self) -> None:
        self.cache.reset()
        self.context.reset()

    def leave(self, device: torch.device) -> None:
        """Note where the call that ends has come to on its stream."""
        if device.type == "cuda":
            self._left = torch.cuda.current_stream(device).record_event()

    def enter(self, device: torch.device) -> None:
        """Have the stream of a call that begins wait for the last one's, should it be another."""
        if self._left is not None and device.type == "cuda":
            torch.cuda.current_stream(device).wait_event(self._left)


class TargetState:
    """Held in the model's `__dict__`, so that it lives and dies with the model. Copies and pickles go without it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.busy = False
        self.buffers: Buffers | None = None
        self.acceptances: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by drafter
        self.uncompiled = 0  # calls that need the uncompiled forward now
        self.compiled: Any = None  # what they put aside

    def __deepcopy__(self, memo: Any) -> TargetState:
        return TargetState()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # readable where this package is not installed


def state_of(model: Any) -> TargetState:
    with _creating:
        state = model.__dict__.get(_ATTRIBUTE)
        if state is None:
            state = model.__dict__[_ATTRIBUTE] = TargetState()
        return state


@contextmanager
def claim(model: Any) -> Iterator[Buffers]:
    """The target's empty buffers. A call beside or inside another does not wait: it gets buffers of its own."""
    state = state_of(model)
    with state.lock:
        first, state.busy = not state.busy, True
    if not first:
        yield Buffers(model, kept=False)
        return
    try:
        if state.buffers is None:
            state.buffers = Buffers(model, kept=True)
        state.buffers.enter(model.device)
        state.buffers.reset()  # should the last call have been interrupted in doing so
        yield state.buffers
    finally:
        try:
            if state.buffers is not None:
                state.buffers.reset()
                state.buffers.leave(model.device)
        finally:
            state.busy = False


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Run the uncompiled forward of a model compiled in place: the graph does not know hooks that came after it."""
    state = state_of(model)
    with state.lock:
        if state.uncompiled == 0:
            state.compiled, model._compiled_call_impl = model._compiled_call_impl, None
        state.uncompiled += 1
    try:
        yield
    finally:
        with state.lock:
            state.uncompiled -= 1
            if state.uncompiled == 0:
                model._compiled_call_impl, state.compiled = state.compiled, None


def release_buffers(model: Any) -> None:
    """Free the buffers and captured graphs that earlier `ddtree` calls left on `model` for later ones.

    Args:
        model: A target, or what wraps one (`torch.compile`, an adapter).
    """
    for module in model.modules():  # what torch.compile or an adapter wraps is one of them
        if module.__dict__.get(_ATTRIBUTE) is not None:
            state_of(module).buffers = None
    gc.collect()  # graphs and what they belong to know each other
