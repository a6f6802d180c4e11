# mypy: disable-error-code="import-not-found, no-redef, no-untyped-def, untyped-decorator"
"""`tree_attention` in Triton: flash decoding, whose columns are split among programs; a second kernel joins them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .attention import Rows
from .visibility import Visibility


class Blocks(NamedTuple):
    """How the kernel is cut: `rows` queries (a group's heads folded in) and `columns` slots at a time."""

    rows: int
    columns: int
    splits: int  # of the columns, at most
    warps: int
    stages: int  # of the loads' pipeline


def choose_blocks(
    rows: int, heads: int, capacity: int, dim: int, itemsize: int, processors: int = 132, shared: int = 232448
) -> Blocks:
    """Blocks by shape alone; `benchmarks/attention.py --sweep` tries others.

    Args:
        rows: Query rows of one K/V head, `G * Q`.
        heads: K/V heads times batch.
        capacity: Static slots.
        dim: The larger head dimension, as padded.
        itemsize: Bytes of an element.
        processors: Multiprocessors of the device.
        shared: Bytes of shared memory that a program may have.
    """
    if itemsize == 4:  # no tensor cores: the products take their operands through registers
        block_rows, columns, warps, stages, registers = 32, 32, 4, 2, 32
    elif (
        rows <= 64 and dim <= 128
    ):  # bound by reading K/V: two small programs a processor, with deep pipelines of loads
        block_rows, columns, warps, stages, registers = 64, 64, 4, 3, 64
    else:  # each block of rows reads K/V again, from L2: as large a block as registers hold
        block_rows, columns, warps, stages, registers = 128, 64, 8, 3, 64
    # `registers` are those of a thread that hold the output.
    block_rows = max(16, min(block_rows, triton.next_power_of_2(rows), registers * 32 * warps // dim))
    while itemsize * dim * (block_rows + 2 * stages * columns) > shared and stages > 1:
        stages, columns = (stages, columns // 2) if columns > 16 else (stages - 1, columns)
    # As many splits as let all programs run at once: more would wait, and each split costs a float32 copy of the
    # output.
    at_once = processors * (2 if warps == 4 else 1)
    splits = at_once // (triton.cdiv(rows, block_rows) * heads)
    return Blocks(block_rows, columns, max(1, min(splits, triton.cdiv(capacity, columns), 32)), warps, stages)


@lru_cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def tree_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: Rows,
    seen: Visibility,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """`tree_attention` as a Triton kernel.

    Args:
        blocks: Instead of `choose_blocks`'s choice.

    Raises:
        TypeError: The rows' dtype is not the query's.
        ValueError: The elements of a row do not lie side by side.
    """
    if len({tensor.dtype for tensor in (query, key, value, rows.keys, rows.values)}) > 1:
        raise TypeError(f"The query's dtype is {query.dtype}, the rows' {rows.keys.dtype}: they must be the same.")
    if rows.keys.stride(3) != 1 or rows.values.stride(3) != 1:
        raise ValueError("The last dimension of the rows' keys and values must have stride 1.")
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    length, committed, first, visible = (
        x if x is None else x.contiguous() for x in (seen.length, seen.committed, seen.first, seen.visible)
    )
    batch, heads, queries, dim = query.shape
    kv_heads, columns, capacity, value_dim = key.shape[1], key.shape[2], rows.keys.shape[2], value.shape[3]
    query_rows = heads // kv_heads * queries
    block_dim, block_value_dim = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    if blocks is None:
        limits = _limits(query.device) if query.is_cuda else ()
        largest = max(block_dim, block_value_dim)
        blocks = choose_blocks(query_rows, batch * kv_heads, capacity, largest, query.element_size(), *limits)
    output = query.new_empty(batch, queries, heads, value_dim)
    partial_output = query.new_empty(batch * kv_heads, query_rows, blocks.splits, value_dim, dtype=torch.float32)
    partial_highest = query.new_empty(batch * kv_heads, query_rows, blocks.splits, dtype=torch.float32)
    partial_total = torch.empty_like(partial_highest)
    _split_kernel[triton.cdiv(query_rows, blocks.rows), batch * kv_heads, blocks.splits](
        query, key, value, rows.keys, rows.values,
        length, committed, first, visible,
        partial_output, partial_highest, partial_total,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *rows.keys.stride()[:3], *rows.values.stride()[:3],
        query_rows, queries, columns, capacity,
        scaling, blocks.splits, softcap or 1.0,
        KV_HEADS=kv_heads,
        HAS_FIRST=first is not None,
        HAS_SOFTCAP=softcap is not None,
        DIM=dim,
        VALUE_DIM=value_dim,
        BLOCK_DIM=block_dim,
        BLOCK_VALUE_DIM=block_value_dim,
        BLOCK_ROWS=blocks.rows,
        BLOCK_COLUMNS=blocks.columns,
        STAGES=blocks.stages,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=blocks.warps,
    )  # fmt: skip
    _join_kernel[query_rows, batch * kv_heads](
        partial_output,
        partial_highest,
        partial_total,
        length,
        first,
        sinks,
        output,
        query_rows,
        queries,
        columns,
        blocks.splits,
        KV_HEADS=kv_heads,
        HAS_FIRST=first is not None,
        HAS_SINKS=sinks is not None,
        VALUE_DIM=value_dim,
        BLOCK_VALUE_DIM=block_value_dim,
        BLOCK_COLUMNS=blocks.columns,
        BLOCK_SPLITS=triton.next_power_of_2(blocks.splits),
        num_warps=1 if blocks.splits * block_value_dim <= 1024 else 4,
    )
    return output


_LOWEST = tl.constexpr(-1e30)  # finite, so that rows that see nothing need no care: exp2(-inf - _LOWEST) is 0
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _share(length, columns, first_ptr, query, splits, HAS_FIRST: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """The first slot that any query sees or that is written, the end of all slots, and how many slots a split gets."""
    start = 0
    if HAS_FIRST:
        start = tl.minimum(tl.maximum(tl.load(first_ptr + query).to(tl.int32), 0), length)
    end = length + columns
    return start, end, tl.cdiv(tl.cdiv(end - start, BLOCK_COLUMNS), splits) * BLOCK_COLUMNS


@triton.jit
def _attend(
    q,
    k,
    v,
    allowed,
    output,
    highest,
    total,
    scaling,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax; `highest` is in units of log 2."""
    scores = tl.dot(q, k, input_precision=PRECISION)
    if HAS_SOFTCAP:
        # tanh; where exp overflows, 2 / inf is the 0 that it should be.
        scores = softcap * (1 - 2 / (tl.exp(2 * (scores * scaling / softcap)) + 1))
        scaling = 1.0
    scaling *= _LOG2_E
    scores = tl.where(allowed, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scaling)
    weights = tl.exp2(scores * scaling - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    total = total * shrink + tl.sum(weights, 1)
    output = tl.dot(weights.to(v.dtype), v, output * shrink[:, None], input_precision=PRECISION)
    return output, new_highest, total


@triton.jit(do_not_specialize=["splits"])
def _split_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_rows_ptr,
    value_rows_ptr,
    length_ptr,
    committed_ptr,
    first_ptr,
    visible_ptr,
    partial_output_ptr,
    partial_highest_ptr,
    partial_total_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_q,
    key_stride_b,
    key_stride_h,
    key_stride_c,
    value_stride_b,
    value_stride_h,
    value_stride_c,
    key_rows_stride_b,
    key_rows_stride_h,
    key_rows_stride_s,
    value_rows_stride_b,
    value_rows_stride_h,
    value_rows_stride_s,
    rows,
    queries,
    columns,
    capacity,
    scaling,
    splits,
    softcap,
    KV_HEADS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Blocks of rows run side by side, so that all but the first find their K/V in L2.
    row_block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, kv_head = (head // KV_HEADS).to(tl.int64), (head % KV_HEADS).to(tl.int64)
    length = tl.load(length_ptr + b).to(tl.int32)
    start, end, share = _share(length, columns, first_ptr, b * queries, splits, HAS_FIRST, BLOCK_COLUMNS)
    begin = start + split * share
    if begin >= end:
        return
    end = tl.minimum(begin + share, end)

    row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < rows
    q_index = row % queries
    q_head = kv_head * (rows // queries) + row // queries
    d = tl.arange(0, BLOCK_DIM)
    is_d = d < DIM
    value_d = tl.arange(0, BLOCK_VALUE_DIM)
    is_value_d = value_d < VALUE_DIM
    block_column = tl.arange(0, BLOCK_COLUMNS)
    q = tl.load(
        query_ptr + b * query_stride_b + (q_head * query_stride_h + q_index * query_stride_q)[:, None] + d[None, :],
        mask=is_row[:, None] & is_d[None, :],
        other=0.0,
    )
    first = tl.zeros([BLOCK_ROWS], tl.int32)
    if HAS_FIRST:
        first = tl.load(first_ptr + b * queries + q_index, mask=is_row, other=0).to(tl.int32)
    output = tl.zeros([BLOCK_ROWS, BLOCK_VALUE_DIM], tl.float32)
    highest = tl.full([BLOCK_ROWS], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)

    key_ptr += b * key_stride_b + kv_head * key_stride_h
    value_ptr += b * value_stride_b + kv_head * value_stride_h
    key_rows_ptr += b * key_rows_stride_b + kv_head * key_rows_stride_h
    value_rows_ptr += b * value_rows_stride_b + kv_head * value_rows_stride_h
    new_begin, new_end = tl.maximum(begin - length, 0), end - length
    if row_block == 0:
        for start in range(new_begin, new_end, BLOCK_COLUMNS):
            column = start + block_column
            slot = (length + column).to(tl.int64)[:, None]
            mask = (column < new_end)[:, None] & is_d[None, :]
            k = tl.load(key_ptr + column[:, None] * key_stride_c + d[None, :], mask=mask)
            tl.store(key_rows_ptr + slot * key_rows_stride_s + d[None, :], k, mask=mask)
            mask = (column < new_end)[:, None] & is_value_d[None, :]
            v = tl.load(value_ptr + column[:, None] * value_stride_c + value_d[None, :], mask=mask)
            tl.store(value_rows_ptr + slot * value_rows_stride_s + value_d[None, :], v, mask=mask)

    committed_end = tl.minimum(end, length)
    committed_ptr += b * capacity
    has_padding = 0
    for start in range(begin, committed_end, 1024):
        slot = start + tl.arange(0, 1024)
        real = tl.load(committed_ptr + slot, mask=slot < committed_end, other=1)
        has_padding = tl.maximum(has_padding, 1 - tl.min(real.to(tl.int32), 0))
    # Padding is rare, and to look for it in each step would hold up the loads of K/V: one of these loops is empty.
    for PADDED in tl.static_range(2):
        stop = tl.where(has_padding == PADDED, committed_end, begin)
        for start in tl.range(begin, stop, BLOCK_COLUMNS, num_stages=STAGES):
            slot = start + block_column
            real = slot < committed_end
            if PADDED:
                real &= tl.load(committed_ptr + slot, mask=real, other=0).to(tl.int1)
            offset = slot.to(tl.int64)
            k = tl.load(
                key_rows_ptr + offset[None, :] * key_rows_stride_s + d[:, None],
                mask=real[None, :] & is_d[:, None],
                other=0.0,
            )
            v = tl.load(
                value_rows_ptr + offset[:, None] * value_rows_stride_s + value_d[None, :],
                mask=real[:, None] & is_value_d[None, :],
                other=0.0,
            )
            allowed = real[None, :]
            if HAS_FIRST:
                allowed = allowed & (first[:, None] <= slot[None, :])
            output, highest, total = _attend(
                q, k, v, allowed, output, highest, total, scaling, softcap, HAS_SOFTCAP, PRECISION
            )

    # This round's columns come from `key` and `value`: their slots may not be written yet.
    for start in tl.range(new_begin, new_end, BLOCK_COLUMNS, num_stages=1):
        column = start + block_column
        is_column = column < new_end
        v_tile = value_ptr + column[:, None] * value_stride_c + value_d[None, :]
        v = tl.load(v_tile, mask=is_column[:, None] & is_value_d[None, :], other=0.0)
        finite = tl.min((tl.abs(v.to(tl.float32)) < float("inf")).to(tl.int32), 1) > 0
        k = tl.load(
            key_ptr + column[None, :] * key_stride_c + d[:, None],
            mask=is_column[None, :] & is_d[:, None],
            other=0.0,
        )
        allowed = tl.load(
            visible_ptr + b * queries * columns + (q_index * columns)[:, None] + column[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0,
        ).to(tl.int1)
        v = tl.load(v_tile, mask=(is_column & finite)[:, None] & is_value_d[None, :], other=0.0)
        spoilt = tl.max((allowed & ~finite[None, :]).to(tl.int32), 1)
        output, highest, total = _attend(
            q, k, v, allowed, output, highest, total, scaling, softcap, HAS_SOFTCAP, PRECISION
        )
        total = tl.where(spoilt > 0, float("nan"), total)

    partial = (head.to(tl.int64) * rows + row) * splits + split
    tl.store(partial_highest_ptr + partial, highest, mask=is_row)
    tl.store(partial_total_ptr + partial, total, mask=is_row)
    tl.store(
        partial_output_ptr + partial[:, None] * VALUE_DIM + value_d[None, :],
        output,
        mask=is_row[:, None] & is_value_d[None, :],
    )


@triton.jit(do_not_specialize=["splits"])
def _join_kernel(
    partial_output_ptr,
    partial_highest_ptr,
    partial_total_ptr,
    length_ptr,
    first_ptr,
    sinks_ptr,
    output_ptr,
    rows,
    queries,
    columns,
    splits,
    KV_HEADS: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    b, kv_head = (head // KV_HEADS).to(tl.int64), head % KV_HEADS
    length = tl.load(length_ptr + b).to(tl.int32)
    start, end, share = _share(length, columns, first_ptr, b * queries, splits, HAS_FIRST, BLOCK_COLUMNS)
    split = tl.arange(0, BLOCK_SPLITS)
    is_live = start + split * share < end  # the others have written nothing
    d = tl.arange(0, BLOCK_VALUE_DIM)
    is_d = d < VALUE_DIM
    partial = (head.to(tl.int64) * rows + row) * splits + split
    partial_highest = tl.load(partial_highest_ptr + partial, mask=is_live, other=_LOWEST)
    partial_total = tl.load(partial_total_ptr + partial, mask=is_live, other=0.0)
    partial_output = tl.load(
        partial_output_ptr + partial[:, None] * VALUE_DIM + d[None, :],
        mask=is_live[:, None] & is_d[None, :],
        other=0.0,
    )
    highest = tl.max(partial_highest, 0)
    q_head = kv_head * (rows // queries) + row // queries
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + q_head).to(tl.float32) * _LOG2_E
        highest = tl.maximum(highest, sink)
    weights = tl.exp2(partial_highest - highest)
    total = tl.sum(weights * partial_total, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - highest)
    output = tl.sum(weights[:, None] * partial_output, 0) / tl.where(total == 0, 1.0, total)
    output_row = (b * queries + row % queries) * (KV_HEADS * (rows // queries)) + q_head
    tl.store(output_ptr + output_row * VALUE_DIM + d, output.to(output_ptr.dtype.element_ty), mask=is_d)
