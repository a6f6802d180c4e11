"""What the library keeps on a target between calls: a lock and the cache's buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .tree_cache import TreeCache

_ATTRIBUTE = "_hf_ddtree_state"
_creating = threading.Lock()


class TargetState:
    """Held in the model's `__dict__`, so that it lives and dies with the model. Copies and pickles go without it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.busy = False
        self.cache: TreeCache | None = None
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
def claim(model: Any) -> Iterator[TreeCache]:
    """The target's empty cache. A call beside or inside another does not wait: it gets a cache of its own."""
    state = state_of(model)
    with state.lock:
        first, state.busy = not state.busy, True
    if not first:
        yield new_cache(model)
        return
    try:
        if state.cache is None:
            state.cache = new_cache(model)
        state.cache.reset()  # should the last call have been interrupted in doing so
        yield state.cache
    finally:
        try:
            if state.cache is not None:
                state.cache.reset()
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
    """Free the cache buffers that earlier `ddtree` calls left on `model` for later ones."""
    for module in model.modules():  # what torch.compile or an adapter wraps is one of them
        if module.__dict__.get(_ATTRIBUTE) is not None:
            state_of(module).cache = None


def new_cache(model: Any) -> TreeCache:
    return TreeCache.for_config(model.config.get_text_config(decoder=True))
