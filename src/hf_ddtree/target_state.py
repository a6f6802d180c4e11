"""What the library keeps on a target between calls: a lock, and the buffers and graphs of the last ones."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .dynamo import Aside, put_aside, put_back
from .state import DecodingState
from .tree_cache import DraftCache, TreeCache
from .tree_policy import TreePolicy, policy_class

_ATTRIBUTE = "_hf_ddtree_state"
_creating = threading.Lock()


_MOST_DRAFTERS = 4  # whose contexts and graphs are kept


class DrafterBuffers:
    """What belongs to a drafter: its context's rows, its features of a round, and the graphs over them.

    Args:
        drafter: Whose they are; they do not keep it.
        state: Counts the rows.
    """

    def __init__(self, drafter: Any, state: DecodingState) -> None:
        self.drafter = weakref.ref(drafter)
        self.context = DraftCache.for_config(drafter.config, state.context_length)
        self.features = torch.zeros(1, 0, 0)
        self.policies: dict[str, TreePolicy] = {}
        self.kinds: dict[Any, Any] = {}  # of rounds
        self.made_for: tuple[Any, Any] | None = None  # where target and drafter, and the rows of each, lay for them

    def policy(self, name: str, config: Any, device: torch.device) -> TreePolicy:
        """The tree policy of that name, the same for each call, since graphs write to what it remembers.

        Args:
            name: In [`DDTreeConfig`].
            config: The target's text config.
            device: Where trees are built.
        """
        if type(self.policies.get(name)) is not policy_class(name):
            with torch.inference_mode(False):
                self.policies[name] = policy_class(name)(config, device)
        return self.policies[name]

    def features_like(self, most: int, width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """`(1, most, width)` there, the same for each call of these, since graphs write to it."""
        if (self.features.shape, self.features.device, self.features.dtype) != ((1, most, width), device, dtype):
            with torch.inference_mode(False):
                self.features = torch.zeros(1, most, width, dtype=dtype, device=device)
        return self.features


class Buffers:
    """What a call writes to: where it stands, rows of the target, and what belongs to its drafter.

    Args:
        model: The target.
        kept: Whether later calls will use them again.
        device: Where the target takes its input; its own by default.
    """

    def __init__(self, model: Any, kept: bool, device: torch.device | None = None) -> None:
        self.kept = kept
        self.state = DecodingState(device or model.device)
        self.cache = TreeCache.for_config(model.config.get_text_config(decoder=True), self.state.length)
        self.drafters: list[DrafterBuffers] = []  # the last used is the last
        self.layers: Any = None  # ours for launched rounds, or why there are none
        self.layers_made_for: Any = None
        self.prompts: dict[Any, Any | None] = {}  # graphs, by tap layers; `None` where there can be none
        self.prompts_made_for: Any = None
        self._left: torch.cuda.Event | None = None

    def of(self, drafter: Any) -> DrafterBuffers:
        """What belongs to a drafter, new if it was not used lately."""
        own = next((x for x in self.drafters if x.drafter() is drafter), None) or DrafterBuffers(drafter, self.state)
        others = [x for x in self.drafters if x is not own and x.drafter() is not None]
        self.drafters = [*others[1 - _MOST_DRAFTERS :], own]
        return own

    def reset(self) -> None:
        self.cache.reset()
        for own in self.drafters:
            own.context.reset()

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
        self.compiled: list[Aside] = []  # what they put aside

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
def claim(model: Any, device: torch.device | None = None) -> Iterator[Buffers]:
    """The target's empty buffers. A call beside or inside another does not wait: it gets buffers of its own.

    Args:
        model: The target.
        device: Where it takes its input; its own by default.
    """
    state = state_of(model)
    with state.lock:
        first, state.busy = not state.busy, True
    if not first:
        yield Buffers(model, kept=False, device=device)
        return
    try:
        buffers = state.buffers  # others may release them meanwhile
        if buffers is None or buffers.state.device != (device or model.device):
            buffers = state.buffers = None  # nothing may hold their memory while the next are made
            buffers = state.buffers = Buffers(model, kept=True, device=device)
        buffers.enter(model.device)
        buffers.reset()  # should the last call have been interrupted in doing so
        yield buffers
    finally:
        try:
            if buffers is not None:
                buffers.reset()
                buffers.leave(model.device)
        finally:
            state.busy = False


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Run what lies beneath where the caller compiled a model or parts of it: no hook fires in a graph."""
    state = state_of(model)
    with state.lock:
        if state.uncompiled == 0:
            state.compiled = put_aside(model)
        state.uncompiled += 1
    try:
        yield
    finally:
        with state.lock:
            state.uncompiled -= 1
            if state.uncompiled == 0:
                put_back(state.compiled)
                state.compiled = []


def release_buffers(model: Any) -> None:
    """Free the buffers and captured graphs that earlier `ddtree` calls left on `model` for later ones.

    Args:
        model: A target, or what wraps one (`torch.compile`, an adapter).
    """
    for module in model.modules():  # what torch.compile or an adapter wraps is one of them
        if module.__dict__.get(_ATTRIBUTE) is not None:
            state_of(module).buffers = None
    gc.collect()  # graphs and what they belong to know each other
