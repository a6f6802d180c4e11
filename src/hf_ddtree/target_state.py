"""What the library keeps on a target between calls: a lock and the cache's buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import DynamicCache

from .tree_cache import TreeCache

_ATTRIBUTE = "_hf_ddtree_state"


class TargetState:
    """Held in the model's `__dict__`, so that it lives and dies with the model. Copies and pickles are empty."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.busy = False
        self.cache: TreeCache | None = None

    def __deepcopy__(self, memo: Any) -> TargetState:
        return TargetState()

    def __reduce__(self) -> tuple[Any, ...]:
        return TargetState, ()


@contextmanager
def claim(model: Any) -> Iterator[TreeCache]:
    """The target's empty cache, for one call at a time; a call from inside another gets a cache of its own."""
    state = model.__dict__.setdefault(_ATTRIBUTE, TargetState())
    with state.lock:
        if state.busy:
            yield new_cache(model)
            return
        state.busy = True
        try:
            if state.cache is None:
                state.cache = new_cache(model)
            state.cache.reset()
            yield state.cache
        finally:
            state.busy = False
            if state.cache is not None:
                state.cache.reset()


def release_buffers(model: Any) -> None:
    """Free the cache buffers that earlier `ddtree` calls left on `model` for later ones."""
    state = model.__dict__.get(_ATTRIBUTE)
    if state is not None:
        with state.lock:
            state.cache = None


def new_cache(model: Any) -> TreeCache:
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return TreeCache([bool(layer.is_sliding) for layer in layers])
