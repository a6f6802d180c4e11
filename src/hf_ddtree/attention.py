"""Attention of one round over static K/V rows: what is committed, and the round's own columns behind it.

`tree_attention` runs a Triton kernel on NVIDIA GPUs and plain tensors elsewhere. Nothing on the host depends on the
committed length, so one CUDA graph serves every length.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .visibility import Visibility

ATTENTION = "hf_ddtree"  # its name in transformers' interface


class Rows(NamedTuple):
    """The static rows of one layer, `S` slots."""

    keys: torch.Tensor  # (B, Hkv, S, D)
    values: torch.Tensor  # (B, Hkv, S, Dv)


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: Rows,
    seen: Visibility,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write a round's keys and values behind the committed rows, and attend to both.

    The softmax is in float32. A query that sees nothing gets zeros. What a query does not see does not reach it, not
    even as NaN; only committed rows inside some queries' window and outside of others' reach all of them when they
    are not finite. Where `seen` has a `start`, a NaN may reach all, and a query that sees nothing gets anything.

    Args:
        query: `(B, H, Q, D)`, float32, bfloat16 or float16 as are keys and values.
        key: `(B, Hkv, C, D)`, the columns of this round; `H` is a multiple of `Hkv`.
        value: `(B, Hkv, C, Dv)`.
        rows: What stands in the cache, changed in place: `key` and `value` are written at slots `length` to
            `length + C - 1`.
        seen: What the queries see of both.
        scaling: Of the scores.
        softcap: Scores `s` become `softcap * tanh(s / softcap)`.
        sinks: `(H,)`, a logit per head that takes part in the denominator only.

    Returns:
        `(B, Q, H, Dv)`, contiguous, in the query's dtype.
    """
    arguments = query, key, value, rows, seen, scaling, softcap, sinks
    if seen.start is not None and softcap is None and sinks is None:
        return tree_attention_folded(query, key, value, rows, seen, scaling)
    if query.device.type == "cuda" and (kernel := _kernel()) is not None:
        with torch.cuda.device_of(query):  # Triton launches on the current device
            output: torch.Tensor = kernel.tree_attention_triton(*arguments)
            return output
    return tree_attention_reference(*arguments)


def tree_attention_folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows, seen: Visibility, scaling: float
) -> torch.Tensor:
    """`tree_attention` by torch's own, without cap and sinks: a K/V head is read once for all of its queries, with one
    mask for all layers, over the slots that `seen` speaks of, from its `start` on this round's."""
    assert seen.start is not None
    for kept, new in ((rows.keys, key), (rows.values, value)):
        kept[:, :, seen.start : seen.start + new.shape[2]] = new
    batch, heads, queries, dim = query.shape
    kv_heads, slots = key.shape[1], seen.committed.shape[1]
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, kv_heads, -1, dim),
        rows.keys[:, :, :slots],
        rows.values[:, :, :slots],
        attn_mask=seen.mask(heads // kv_heads, query.dtype),
        scale=scaling,
    )
    return attended.view(batch, heads, queries, -1).transpose(1, 2).contiguous()


def tree_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: Rows,
    seen: Visibility,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`tree_attention` in plain tensors, for any device; it costs all slots that `seen` speaks of."""
    new_slots = seen.length[:, None] + torch.arange(key.shape[2], device=key.device)  # (B, C)
    for kept, new in ((rows.keys, key), (rows.values, value)):
        kept.scatter_(2, new_slots[:, None, :, None].expand_as(new), new)
    batch, _, queries, dim = query.shape
    kv_heads, capacity = key.shape[1], seen.committed.shape[1]
    rows = Rows(rows.keys[:, :, :capacity], rows.values[:, :, :capacity])
    allowed = seen.allowed()  # (B, Q, S)
    grouped = query.reshape(batch, kv_heads, -1, queries, dim).flatten(2, 3).float()  # (B, Hkv, G * Q, D)
    scores = (grouped @ rows.keys.float().transpose(2, 3)).mul_(scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(batch, kv_heads, -1, queries, capacity).masked_fill(~allowed[:, None, None], -torch.inf)
    highest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    if sinks is not None:
        sinks = sinks.float().view(1, kv_heads, -1, 1, 1)
        highest = torch.maximum(highest, sinks)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - highest)

    # A weight of 0 does not keep NaN out of a product, so such values are cut, and given to those that see them.
    finite = rows.values.isfinite()
    output = weights.flatten(2, 3) @ rows.values.float().masked_fill(~finite, 0)
    output = output.view(batch, kv_heads, -1, queries, value.shape[3]) / torch.where(total == 0, 1, total)
    spoilt = (allowed[:, None] & ~finite.all(-1)[:, :, None]).any(-1)  # (B, Hkv, Q)
    output = output.masked_fill(spoilt[:, :, None, :, None], torch.nan)
    return output.flatten(1, 2).transpose(1, 2).to(query.dtype).contiguous()


@functools.cache
def _kernel() -> Any | None:
    """The module of the kernel, where it can run; triton is slow to import."""
    if torch.version.hip or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(".attention_kernel", __package__)


# What layers pass on that says nothing of the scores, or what a forward's `Visibility` says already.
_WITHOUT_EFFECT = (
    "sliding_window is_causal position_ids use_cache cache_position output_attentions output_hidden_states "
    "output_router_logits return_dict logits_to_keep"
).split()

# A compiler that saw the rows would copy them in order to change them: it gets a number instead, in a tensor on the
# host, since it would compile anew for each number that it can read.
_ROWS: dict[int, Any] = {}
_SEEN: dict[int, Visibility] = {}  # by layers that have yet to attend in the present forward
_numbers = itertools.count()


def _attend_to_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    number: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    cache_layer, seen = _ROWS[int(number)], _SEEN.pop(int(number), None)
    if seen is None:
        raise NotImplementedError("layers with attention of their own")
    rows = Rows(cache_layer.keys, cache_layer.values)
    for new, kept in zip((key, value), rows, strict=True):
        if (new.shape[:2], new.shape[3], new.dtype) != (kept.shape[:2], kept.shape[3], kept.dtype):
            raise NotImplementedError("attention over other keys or values than the cache keeps")
    return tree_attention(query, key, value, rows, seen, scaling, softcap, sinks)


_attend = torch.library.custom_op("hf_ddtree::attend", _attend_to_rows, mutates_args=())


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over a shadow's rows, inside `attending`.

    Raises:
        NotImplementedError: The layer asks for something that changes the scores in another way.
    """
    if attention_mask is not None and attention_mask.numel() > 1:  # what is passed in has one element
        raise NotImplementedError("attention that makes a mask of its own")
    for name, given in kwargs.items():
        if name not in _WITHOUT_EFFECT and (isinstance(given, torch.Tensor) or given):
            raise NotImplementedError(f"attention with `{name}`")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Without a compiler an operator is but a detour.
    run, rows = (_attend if torch.compiler.is_compiling() else _attend_to_rows), module.__dict__["hf_ddtree_rows"]
    return run(query, key, value, rows, scaling, softcap, s_aux), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)


@contextmanager
def attending(layers: Iterable[nn.Module], seen: Iterable[Visibility]) -> Iterator[None]:
    """A forward of a shadow, all of whose layers must attend to their rows, and once.

    Args:
        layers: The shadow's.
        seen: What each of them sees.

    Raises:
        NotImplementedError: A layer has attention of its own, or is run several times.
    """
    waiting = {int(layer.__dict__["hf_ddtree_rows"]): own for layer, own in zip(layers, seen, strict=True)}
    _SEEN.update(waiting)
    try:
        yield
    finally:
        missed = [number for number in waiting if _SEEN.pop(number, None) is not None]
    if missed:
        raise NotImplementedError("layers with attention of their own")


def give_rows(owner: Any, layer: nn.Module, cache_layer: Any) -> None:
    """Let a shadow's layer attend to the `keys` and `values` that a cache layer then has, as long as `owner` lives."""
    number = next(_numbers)
    _ROWS[number] = cache_layer
    weakref.finalize(owner, _ROWS.pop, number, None)
    for module in layer.modules():
        module.__dict__["hf_ddtree_rows"] = torch.tensor(number, device="cpu")
