"""Static K/V rows for trees: written by slot, kept by path, reused by later calls.

How many are committed is the decoding state's to say. While the stock path writes rows one after another, as a
prompt's, each layer counts what it has ahead of those, and `settle` hands that on.

Three numbers that are easily confused: an id's index in the sequence, its position (what rotary embeddings see) and
its slot (its row here). This file knows slots only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from .draft_tree import TreeRows
from .state import Count, Path

_ROW_MULTIPLE = 64  # launched plainly, attention reads the committed rows rounded up to this
_MIN_CAPACITY = 256
_MOST_AHEAD = 4096  # tokens for which a call reserves rows at once
_CacheT = TypeVar("_CacheT", bound="TreeCache")


def capacity_for(rows: int) -> int:
    """The buffer size that holds `rows`: powers of two, so that calls of other lengths find theirs already there."""
    return max(_MIN_CAPACITY, 1 << (rows - 1).bit_length())


def rows_ahead(room: int, nodes: int) -> int:
    """Rows to reserve behind a text that may have `room` more tokens, with a tree of `nodes` nodes behind the last."""
    return min(room, _MOST_AHEAD) + nodes + 1


@dataclass
class RowPlan:
    """What all layers of a cache share: where the next rows go, how many fit, and the memory of those alike."""

    capacity: int
    layers: int
    length: Count  # committed rows
    stack: torch.Tensor | None = None  # (layers, 2, B, heads, capacity, head_dim)
    tree: TreeRows | None = None  # while one is open
    slots: range | None = None  # its rows', root first
    view: int = 0  # rows that attention reads while a tree is open
    written: int = 0  # rows that may hold something

    def buffers(
        self, place: int | None, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Empty buffers for rows like these, of the layer at `place`; in the stack if like the first layer's.

        A layer without a place in the stack has its own.
        """
        shape = torch.Size((self.layers, 2, *keys.shape[:2], self.capacity, keys.shape[-1]))
        if place is not None and values.shape[-1] == keys.shape[-1] and values.dtype == keys.dtype:
            if place == 0 and not _alike(self.stack, shape, keys):
                self.stack = _empty(shape, keys)
            if self.stack is not None and _alike(self.stack, shape, keys):
                return self.stack[place, 0].zero_(), self.stack[place, 1].zero_()
        own = (*keys.shape[:2], self.capacity)
        return _empty((*own, keys.shape[-1]), keys), _empty((*own, values.shape[-1]), values)


def _alike(stack: torch.Tensor | None, shape: torch.Size, rows: torch.Tensor) -> bool:
    return stack is not None and (stack.shape, stack.dtype, stack.device) == (shape, rows.dtype, rows.device)


def _empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    # Zeros, not empty: masked rows are read too, and 0 * NaN would get through a softmax. Ordinary tensors even in
    # inference mode, since a later call may write to them outside of it.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


class TreeLayer(CacheLayerMixin):
    """K/V rows of one attention layer, `(B, heads, capacity, head_dim)`.

    Full length for sliding-window layers too: a window belongs into the mask, since rows once evicted cannot come back
    when the nodes that pushed them out are rejected. The keys of an indexer that chooses rows (sparse attention) are
    the rows of another layer, without values.
    """

    is_croppable = True
    is_compileable = False

    def __init__(self, plan: RowPlan, place: int | None, is_sliding: bool) -> None:
        super().__init__()
        self.plan = plan
        self.place = place
        self.is_sliding = is_sliding
        self.indexer: TreeLayer | None = None
        self.ahead = 0  # rows that the stock path has written behind the committed ones

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        with torch.inference_mode(False):
            self.keys, self.values = self.plan.buffers(self.place, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a prompt's rows behind the last one, or, while a tree is being verified, the tree's at its slots."""
        if self.get_seq_length():
            self._promote(key_states, value_states)
            key_states, value_states = key_states.to(self.keys.dtype), value_states.to(self.values.dtype)
        elif not self._fits(key_states, value_states):
            self.lazy_initialization(key_states, value_states)
        slots = self.plan.slots
        if slots is not None:
            view = self.plan.view
        else:
            start = self.get_seq_length()
            view = start + key_states.shape[-2]
            if view > self.keys.shape[2]:
                raise RuntimeError(f"{key_states.shape[-2]} rows behind {start} do not fit {self.keys.shape[2]}.")
            self.plan.written = max(self.plan.written, view)
            slots = range(start, view)
            self.ahead += key_states.shape[-2]
        self.keys[:, :, slots.start : slots.stop] = key_states
        self.values[:, :, slots.start : slots.stop] = value_states
        return self.keys[:, :, :view], self.values[:, :, :view]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """The same for an indexer's keys, `(B, N, D)`."""
        if self.indexer is None:
            self.indexer = TreeLayer(self.plan, None, is_sliding=False)
        rows = indexer_key_states[:, None]
        return self.indexer.update(rows, rows[..., :0])[0][:, 0]

    def __deepcopy__(self, memo: Any) -> TreeLayer:
        """For a model that runs layers several times, each time with rows of their own: an empty layer beside it."""
        return TreeLayer(self.plan, None, self.is_sliding)

    @property
    def in_stack(self) -> bool:
        """Whether its buffers are part of the memory that layers alike share."""
        stack = self.plan.stack
        return stack is not None and self.place is not None and self.keys.data_ptr() == stack[self.place, 0].data_ptr()

    def move(self, source: torch.Tensor, target: torch.Tensor | slice) -> None:
        """Copy the rows at slots `source (B, P)` to slots `target`, `(B, P)` or consecutive."""
        for buffer in (self.keys, self.values):
            _move_rows(buffer, source, target)

    def grow(self) -> None:
        """Move to buffers of the owner's capacity."""
        if self.is_initialized and self.keys.shape[2] < self.plan.capacity:
            old, length = (self.keys, self.values), self.get_seq_length()
            self.lazy_initialization(*old)
            for new, rows in zip((self.keys, self.values), old, strict=True):
                new[:, :, :length] = rows[:, :, :length]

    def _promote(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Bring committed rows to the type of wider new ones, as concatenating them would."""
        length = self.get_seq_length()
        for name, rows in (("keys", key_states), ("values", value_states)):
            buffer = getattr(self, name)
            dtype = torch.promote_types(buffer.dtype, rows.dtype)
            if buffer.dtype != dtype or buffer.device != rows.device:
                wider = _empty((*rows.shape[:2], self.plan.capacity, rows.shape[-1]), rows[:, :, :0].to(dtype))
                wider[:, :, :length] = buffer[:, :, :length]
                setattr(self, name, wider)
                self.dtype, self.device = dtype, rows.device

    def _fits(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether the buffers are those of this model as it is now (it may have been cast or moved since)."""
        return self.is_initialized and all(
            buffer.dtype == rows.dtype
            and buffer.device == rows.device
            and buffer.shape[:2] == rows.shape[:2]
            and buffer.shape[3] == rows.shape[3]
            for buffer, rows in ((self.keys, key_states), (self.values, value_states))
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.plan.length.host + self.ahead if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget all rows and clear what was written: a NaN left there would reach the next call through the mask."""
        self.ahead = 0
        if self.is_initialized:
            self.keys[:, :, : self.plan.written].zero_()
            self.values[:, :, : self.plan.written].zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` rows (transformers' sign), of those ahead of the committed ones."""
        self.ahead -= abs(tokens_to_remove) if self.ahead else 0


class TreeCache(Cache):
    """
    The target's cache while trees are verified.

    A prompt is appended through the stock path, row after row, and counted by `settle`. Then each round calls `open`,
    runs the target, and calls `keep`; the decoding state moves `count` on.

    Args:
        sliding (`Sequence[bool]`): One entry a cache layer: whether it is a sliding-window layer.
        capacity (`int`): Rows; see `reserve`.
        count (`Count`): Of the committed rows; one of its own by default.
    """

    def __init__(self, sliding: Sequence[bool], capacity: int = _MIN_CAPACITY, count: Count | None = None) -> None:
        self.plan = RowPlan(capacity, len(sliding), count or Count())
        super().__init__(layers=[TreeLayer(self.plan, i, is_sliding) for i, is_sliding in enumerate(sliding)])

    @classmethod
    def for_config(cls: type[_CacheT], config: Any, count: Count | None = None) -> _CacheT:
        """An empty cache with the layers that transformers gives a model of this config."""
        sliding = [bool(getattr(layer, "is_sliding", False)) for layer in DynamicCache(config=config).layers]
        return cls(sliding, count=count)

    @property
    def parts(self) -> list[TreeLayer]:
        """All that holds rows: the layers and their indexers."""
        return [*self.layers, *(layer.indexer for layer in self.layers if layer.indexer is not None)]

    @property
    def capacity(self) -> int:
        """Rows that the buffers hold."""
        return self.plan.capacity

    @property
    def places(self) -> tuple[int, ...]:
        """Where the buffers lie, as far as they have a place, and how many rows they hold."""
        return self.capacity, *(layer.is_initialized and layer.keys.data_ptr() for layer in self.layers)

    @property
    def slots(self) -> range | None:
        """The open tree's slots, root first."""
        return self.plan.slots

    @property
    def view(self) -> int:
        """Rows that attention reads while a tree is open: the mask's columns."""
        return self.plan.view

    @property
    def count(self) -> Count:
        """Of the committed rows."""
        return self.plan.length

    @property
    def length(self) -> int:
        """Committed rows, and those that the stock path has written since `settle`."""
        return self.count.host + max((layer.ahead for layer in self.layers), default=0)

    @property
    def is_initialized(self) -> bool:
        """Whether there are rows: some models tell a prompt by this, and other calls leave buffers behind."""
        return self.length > 0 and bool(super().is_initialized)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows, keeping what is committed."""
        if rows > self.capacity:
            self.plan.capacity = capacity_for(rows)
            for layer in self.parts:
                layer.grow()

    def settle(self) -> None:
        """Count the rows that the stock path has written as committed."""
        if any(layer.ahead for layer in self.parts):
            self.count.set(self.length)
            for layer in self.parts:
                layer.ahead = 0

    def open(self, tree: TreeRows) -> None:
        """Let the next forward write a tree's rows behind the committed ones; every layer sees the tree.

        Args:
            tree: `N + 1` rows, root first.
        """
        self.settle()
        length, rows = self.count.host, tree.depths.shape[1]
        if length + rows > self.capacity:
            raise RuntimeError(f"A tree of {rows} rows at {length} does not fit {self.capacity} rows.")
        self.touch(rows)
        self.plan.view = min(-(-(length + rows) // _ROW_MULTIPLE) * _ROW_MULTIPLE, self.capacity)
        self.plan.slots, self.plan.tree = range(length, length + rows), tree

    def close(self) -> None:
        """Close the tree, if one is open: those of its rows that were not kept will be written over."""
        self.plan.slots = self.plan.tree = None

    def keep(self, path: Path) -> None:
        """Bring the rows of a path through the open tree to where they belong, and close the tree.

        Until the next `open` it may be called again with fewer rows of that path, which lie there already.
        """
        if self.slots is None:
            return
        start, rows = self.slots.start, path.rows
        if path.on_host is None:
            first = self.count.tensor[:, None]
            target = first + torch.arange(rows.shape[1], device=rows.device)
            self._move(torch.where(rows >= 0, first + rows, target), target)
        elif list(path.on_host) != list(range(len(path.on_host))):
            self._move(rows + start, slice(start, start + rows.shape[1]))
        self.close()

    def touch(self, rows: int) -> None:
        """Note that `rows` rows behind the committed ones are about to be written."""
        self.plan.written = max(self.plan.written, self.count.host + rows)

    def _move(self, source: torch.Tensor, target: torch.Tensor | slice) -> None:
        """Copy the rows at slots `source (B, P)` to slots `target`, `(B, P)` or consecutive, in all layers."""
        stack = self.plan.stack
        if stack is not None and all(layer.is_initialized and layer.in_stack for layer in self.parts):
            # Indexing kernels count bytes in 32 bits.
            for part in stack.split(max(1, 2**31 // (stack[0].numel() * stack.element_size() + 1))):
                _move_rows(part, source, target)
            return
        for layer in self.parts:
            if layer.is_initialized:
                layer.move(source, target)

    def reset(self) -> None:
        """Forget all rows, keep the buffers (cleared)."""
        self.close()
        if self.plan.written or self.length:
            for layer in self.parts:
                layer.reset()
            self.count.set(0)
        self.plan.written = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` rows (transformers' sign)."""
        if any(layer.ahead for layer in self.parts):
            for layer in self.parts:
                layer.crop(tokens_to_remove)
        else:
            self.count.set(self.count.host - abs(tokens_to_remove))

    def load(self, cache: Cache) -> None:
        """Take over the rows of another cache, from the first one on."""
        self.reset()
        length = int(cache.get_seq_length())
        self.reserve(length)
        self.plan.written = length
        for theirs in cache.layers[len(self.layers) :]:  # that the model has added
            self.layers.append(TreeLayer(self.plan, None, bool(getattr(theirs, "is_sliding", False))))
        for mine, theirs in zip(self.layers, cache.layers, strict=False):
            if getattr(theirs, "keys", None) is None or length == 0:
                continue
            held = min(length, theirs.keys.shape[2])
            # A dynamic sliding layer has dropped the rows before its window, a static one has rows to spare.
            keys, values = (
                rows[:, :, :held] if theirs.keys.shape[2] > length else rows[:, :, -held:]
                for rows in (theirs.keys, theirs.values)
            )
            if not mine._fits(keys, values):
                mine.lazy_initialization(keys, values)
            mine.keys[:, :, length - held : length] = keys
            mine.values[:, :, length - held : length] = values
            if (indexer_keys := getattr(theirs, "indexer_keys", None)) is not None:
                mine.update_indexer(indexer_keys[:, :length])
                mine.indexer.ahead = 0
        self.count.set(length)

    def export(self, cache: Cache) -> None:
        """Append the rows that `cache` does not have yet to it."""
        have, length = int(cache.get_seq_length()), self.length
        if length <= have:
            return
        if cache.layer_class_to_replicate is None:
            for layer in self.layers[len(cache.layers) :]:  # that the model has added
                cache.layers.append(copy.deepcopy(next(x for x in cache.layers if x.is_sliding == layer.is_sliding)))
        for index, layer in enumerate(self.layers):
            if layer.is_initialized:
                cache.update(layer.keys[:, :, have:length].clone(), layer.values[:, :, have:length].clone(), index)
            if layer.indexer is not None:
                cache.update_indexer(layer.indexer.keys[:, 0, have:length].clone(), index)


class DraftCache(TreeCache):
    """
    A drafter's context, with the offsets of transformers' `DFlashCache`: in one forward, keys and values are
    `context_rows` rows more than queries.
    """

    context_rows = 0

    def set_previous_accepted_tokens(self, number_of_accepted_tokens: int) -> None:
        self.context_rows = number_of_accepted_tokens

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length + self.context_rows

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + self.context_rows + query_length, 0


def _move_rows(buffer: torch.Tensor, source: torch.Tensor, target: torch.Tensor | slice) -> None:
    """Copy rows of `buffer (..., B, heads, S, D)` from slots `source (B, P)` to slots `target`."""

    def index(slots: torch.Tensor) -> torch.Tensor:
        return slots.to(buffer.device)[:, None, :, None].expand(*buffer.shape[:-2], -1, buffer.shape[-1])

    rows = buffer.gather(-2, index(source))
    if isinstance(target, slice):  # where scattering is slow, as on a CPU
        buffer[..., target, :] = rows
    else:
        buffer.scatter_(-2, index(target), rows)
