# mypy: disable-error-code="import-not-found, no-redef, no-untyped-def, untyped-decorator"
"""Linear layers of few rows in Triton, bound by reading weights: several weights over one input in one launch.

The blocks of all products, tile after tile along the inner dimension, form one line that is cut into equal shares, one
a program (stream-K: Osama et al., 2023). A tile that a cut falls into is joined by the last of its programs to arrive,
in the order of the shares, so that results do not depend on who that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


class Blocks(NamedTuple):
    """How the kernel is cut."""

    outputs: int  # rows of a weight in a tile (of each of the two, where they are gate and up)
    rows: int  # of the input in a tile
    inner: int  # of the inner dimension at a time
    programs: int  # for each block of rows, at most
    warps: int
    stages: int  # of the loads' pipeline
    transposed: bool = True  # weights are the left side of the products, whose rows come in 64s on tensor cores
    tma: bool = False  # tiles are copied by descriptors
    hints: bool = True  # to the L2 cache: weights are not read again, the input is
    overlap: bool = False  # begin to read weights before the previous kernel has ended


def choose_blocks(rows: int, gated: bool, itemsize: int, processors: int = 132) -> Blocks:
    """Blocks by shape alone; `benchmarks/linear.py --sweep` tries others.

    Args:
        rows: Of the input.
        gated: Two weights share a tile.
        itemsize: Bytes of an element.
        processors: Multiprocessors of the device.
    """
    if itemsize == 4:
        return Blocks(32, 16, 32, 2 * processors, 4, 2)
    block_rows = max(16, min(128, triton.next_power_of_2(rows)))
    outputs = 64 if gated else 128
    if block_rows == 128:
        return Blocks(outputs, block_rows, 64, processors, 8, 4)
    return Blocks(outputs, block_rows, 64, 2 * processors, 4, 4)


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


_COUNTERS: dict[tuple[torch.device, int], list[torch.Tensor]] = {}  # of a stream; the last are in use


def _counters(device: torch.device, count: int) -> torch.Tensor:
    """Zeros, which each launch leaves as zeros: launches of one stream never overlap, and share them.

    A graph shares those of the stream that it is captured on, if a launch came before; otherwise it makes its own.
    """
    on_gpu = device.type == "cuda"
    kept = _COUNTERS.setdefault((device, torch.cuda.current_stream(device).cuda_stream if on_gpu else 0), [])
    if kept and len(kept[-1]) >= count:
        return kept[-1]
    zeros = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    if not (on_gpu and torch.cuda.is_current_stream_capturing()):
        kept.append(zeros)  # behind the smaller ones, which graphs may use
    return zeros


def linears_triton(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None = None,
    blocks: Blocks | None = None,
) -> list[torch.Tensor]:
    """Up to three linear layers over one input.

    Args:
        x: `(M, K)`.
        weights: Each `(N_i, K)`, contiguous.
        biases: Each `(N_i,)`.
        blocks: Instead of `choose_blocks`'s choice.

    Returns:
        Each `(M, N_i)`.

    Raises:
        TypeError: Dtypes differ.
        ValueError: Shapes do not match, or a weight is not contiguous.
    """
    if not 1 <= len(weights) <= 3 or (biases is not None and len(biases) != len(weights)):
        raise ValueError(f"From 1 to 3 weights, and as many biases or none, not {len(weights)}.")
    outputs = [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]
    _launch(x, weights, biases, outputs, blocks, gated=False)
    return outputs


def gated_linear_triton(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, blocks: Blocks | None = None
) -> torch.Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`, rounded once.

    Args:
        x: `(M, K)`.
        gate, up: `(N, K)`, contiguous.
        blocks: Instead of `choose_blocks`'s choice.

    Returns:
        `(M, N)`.

    Raises:
        TypeError: Dtypes differ.
        ValueError: Shapes do not match, or a weight is not contiguous.
    """
    if gate.shape != up.shape:
        raise ValueError(f"`gate` is {tuple(gate.shape)}, `up` is {tuple(up.shape)}: they must be the same.")
    output = x.new_empty(x.shape[0], gate.shape[0])
    _launch(x, (gate, up), None, (output,), blocks, gated=True)
    return output


def _launch(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    outputs: Sequence[torch.Tensor],
    blocks: Blocks | None,
    gated: bool,
) -> None:
    arguments = launch_arguments(x, weights, biases, outputs, blocks, gated)
    if arguments is not None:
        grid, args, kwargs = arguments
        _linears_kernel[grid](*args, **kwargs)


def launch_arguments(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    outputs: Sequence[torch.Tensor],
    blocks: Blocks | None,
    gated: bool,
) -> tuple[tuple[int, int], list[Any], dict[str, Any]] | None:
    """Grid and arguments of the kernel, or `None` where there is nothing to compute."""
    if len({tensor.dtype for tensor in (x, *weights, *(biases or ()))}) > 1:
        raise TypeError(f"The input's dtype is {x.dtype}: that of all weights and biases must be the same.")
    rows, inner = x.shape
    if any(weight.shape[1] != inner or not weight.is_contiguous() for weight in weights):
        raise ValueError(f"Each weight must be contiguous, of {inner} columns.")
    if min(rows, inner) == 0:
        for output in outputs:
            output.zero_()
        return None
    if x.stride(1) != 1:
        x = x.contiguous()
    if blocks is None:
        blocks = choose_blocks(rows, gated, x.element_size(), _processors(x.device))
    row_blocks = triton.cdiv(rows, blocks.rows)
    sizes = [weight.shape[0] for weight in weights]
    tiles = sum(triton.cdiv(size, blocks.outputs) for size in (sizes[:1] if gated else sizes))
    if tiles == 0:
        return None
    programs = min(blocks.programs, tiles * triton.cdiv(inner, blocks.inner))
    joined = tiles % programs != 0
    area = blocks.outputs * blocks.rows * (2 if gated else 1)
    # The parts' pipeline has no more shared memory than that of the loads.
    tile_bytes = (blocks.outputs * (2 if gated else 1) + blocks.rows) * blocks.inner * x.element_size()
    join_stages = min(4, 1 + blocks.stages * tile_bytes // (4 * area))
    partial = x.new_empty(row_blocks * programs * 2 * area if joined else 1, dtype=torch.float32)
    operands: list[Any] = [x, *weights]
    if blocks.tma:
        operands = [
            TensorDescriptor.from_tensor(tensor, [block, blocks.inner])
            for tensor, block in zip(operands, [blocks.rows] + 3 * [blocks.outputs], strict=False)
        ]

    def three(values: Sequence[Any] | None) -> list[Any]:
        return [*(values or ()), None, None, None][:3]

    args = [
        operands[0],
        *three(operands[1:]),
        *three(biases),
        *three(outputs),
        partial,
        _counters(x.device, tiles * row_blocks),
        x.stride(0),
        rows,
        *[*sizes, 0, 0][:3],
        inner,
    ]
    kwargs = {
        "WEIGHTS": len(weights),
        "GATED": gated,
        "HAS_BIAS": biases is not None,
        "ROWS": blocks.rows,
        "OUTPUTS": blocks.outputs,
        "INNER": blocks.inner,
        "EVEN_OUTPUTS": all(size % 16 == 0 for size in sizes),
        "EVEN_INNER": inner % blocks.inner == 0,
        "JOINED": joined,
        "TRANSPOSED": blocks.transposed,
        "TMA": blocks.tma,
        "HINTS": blocks.hints,
        "OVERLAP": blocks.overlap,
        "STAGES": blocks.stages,
        "JOIN_STAGES": join_stages,
        "AHEAD": triton.next_power_of_2(blocks.stages * blocks.inner),
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": blocks.warps,
    }
    if blocks.overlap:
        kwargs["launch_pdl"] = True
    return (row_blocks, programs), args, kwargs


@triton.jit
def _pick(which, first, second, third, COUNT: tl.constexpr):
    if COUNT > 1:  # noqa: SIM102 (known when it is compiled)
        if which == 1:
            first = second
    if COUNT > 2:  # noqa: SIM102
        if which == 2:
            first = third
    return first


@triton.jit
def _place(
    tile, n0, n1, n2, WEIGHTS: tl.constexpr, GATED: tl.constexpr, OUTPUTS: tl.constexpr, EVEN_OUTPUTS: tl.constexpr
):
    """A tile's weight, first output, and the weight's number of outputs."""
    which = 0
    if not GATED:
        tiles0, tiles1 = tl.cdiv(n0, OUTPUTS), tl.cdiv(n1, OUTPUTS)
        which = (tile >= tiles0).to(tl.int32) + (tile >= tiles0 + tiles1).to(tl.int32)
        tile -= tl.where(which > 0, tiles0, 0) + tl.where(which > 1, tiles1, 0)
    outputs = _pick(which, n0, n1, n2, WEIGHTS)
    if EVEN_OUTPUTS:
        outputs = tl.multiple_of(outputs, 16)
    return which, tile * OUTPUTS, outputs


@triton.jit
def _load(
    source,
    row,
    column,
    rows,
    columns,
    stride,
    BLOCK: tl.constexpr,
    INNER: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    POLICY: tl.constexpr,
    TMA: tl.constexpr,
):
    """A block `(BLOCK, INNER)` from `row` and `column` on, zero outside."""
    if TMA:
        return source.load([row, column])
    else:
        r = row + tl.arange(0, BLOCK)
        c = column + tl.arange(0, INNER)
        mask = (r < rows)[:, None]
        if not EVEN_INNER:
            mask = mask & (c < columns)[None, :]
        pointers = (source + r.to(tl.int64) * stride)[:, None] + c[None, :]
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def _multiply(x, weight, total, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr):
    if TRANSPOSED:
        return tl.dot(weight, tl.trans(x), total, input_precision=PRECISION)
    else:
        return tl.dot(x, tl.trans(weight), total, input_precision=PRECISION)


@triton.jit
def _prefetch(weight, row, column, rows, columns, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Have L2 read a block `(BLOCK, SPAN)`, by lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    r = tl.minimum(row + tl.arange(0, BLOCK), rows - 1)
    c = tl.minimum(column + tl.arange(0, SPAN // LINE) * LINE, columns - 1)
    pointers = (weight + r.to(tl.int64) * columns)[:, None] + c[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _sum(
    x,
    weight,
    up,
    row,
    output,
    begin,
    end,
    rows,
    outputs,
    inner,
    x_stride,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TMA: tl.constexpr,
    HINTS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile's sum over the blocks from `begin` to `end` of the inner dimension; for gate and up, two."""
    ONCE: tl.constexpr = "evict_first" if HINTS else ""
    AGAIN: tl.constexpr = "evict_last" if HINTS else ""
    total = tl.zeros([OUTPUTS if TRANSPOSED else ROWS, ROWS if TRANSPOSED else OUTPUTS], tl.float32)
    up_total = total
    for block in tl.range(begin, end, num_stages=STAGES):
        k = block * INNER
        w = _load(weight, output, k, outputs, inner, inner, OUTPUTS, INNER, EVEN_INNER, ONCE, TMA)
        x_block = _load(x, row, k, rows, inner, x_stride, ROWS, INNER, EVEN_INNER, AGAIN, TMA)
        total = _multiply(x_block, w, total, TRANSPOSED, PRECISION)
        if GATED:
            w = _load(up, output, k, outputs, inner, inner, OUTPUTS, INNER, EVEN_INNER, ONCE, TMA)
            up_total = _multiply(x_block, w, up_total, TRANSPOSED, PRECISION)
    return total, up_total


@triton.jit
def _write(
    total,
    up_total,
    bias_ptr,
    output_ptr,
    row,
    output,
    rows,
    outputs,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    if TRANSPOSED:
        total = tl.trans(total)
        if GATED:
            up_total = tl.trans(up_total)
    m = row + tl.arange(0, ROWS)
    n = output + tl.arange(0, OUTPUTS)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = total / (1 + tl.exp(-total)) * up_total
    pointers = output_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(pointers, total.to(output_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.jit(do_not_specialize=["n0", "n1", "n2"])
def _linears_kernel(
    x,
    weight0,
    weight1,
    weight2,
    bias0,
    bias1,
    bias2,
    output0,
    output1,
    output2,
    partial_ptr,
    counter_ptr,
    x_stride,
    rows,
    n0,
    n1,
    n2,
    inner,
    WEIGHTS: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN_OUTPUTS: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    JOINED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TMA: tl.constexpr,
    HINTS: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
    JOIN_STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Blocks of rows run side by side, so that all but the first find the weights in L2.
    row_block, program = tl.program_id(0), tl.program_id(1)
    row_blocks, programs = tl.num_programs(0), tl.num_programs(1)
    tiles = tl.cdiv(n0, OUTPUTS)
    if not GATED:
        tiles += tl.cdiv(n1, OUTPUTS) + tl.cdiv(n2, OUTPUTS)
    blocks = tl.cdiv(inner, INNER)  # of a tile
    line = tiles * blocks
    begin, end = program * line // programs, (program + 1) * line // programs
    row = row_block * ROWS
    LEFT: tl.constexpr = OUTPUTS if TRANSPOSED else ROWS
    RIGHT: tl.constexpr = ROWS if TRANSPOSED else OUTPUTS
    PARTS: tl.constexpr = 2 if GATED else 1
    element = tl.arange(0, LEFT)[:, None] * RIGHT + tl.arange(0, RIGHT)[None, :]

    if OVERLAP:
        gdc_launch_dependents()
        if not TMA:
            which, output, outputs = _place(begin // blocks, n0, n1, n2, WEIGHTS, GATED, OUTPUTS, EVEN_OUTPUTS)
            weight = weight0 if GATED else _pick(which, weight0, weight1, weight2, WEIGHTS)
            _prefetch(weight, output, begin % blocks * INNER, outputs, inner, OUTPUTS, AHEAD)
            if GATED:
                _prefetch(weight1, output, begin % blocks * INNER, outputs, inner, OUTPUTS, AHEAD)
        gdc_wait()

    for tile in tl.range(begin // blocks, tl.cdiv(end, blocks), num_stages=1):
        which, output, outputs = _place(tile, n0, n1, n2, WEIGHTS, GATED, OUTPUTS, EVEN_OUTPUTS)
        first, last = tl.maximum(begin - tile * blocks, 0), tl.minimum(end - tile * blocks, blocks)
        weight = weight0 if GATED else _pick(which, weight0, weight1, weight2, WEIGHTS)
        total, up_total = _sum(
            x, weight, weight1, row, output, first, last, rows, outputs, inner, x_stride, GATED, ROWS, OUTPUTS, INNER,
            EVEN_INNER, TRANSPOSED, TMA, HINTS, STAGES, PRECISION,
        )  # fmt: skip
        output_ptr = output0 if GATED else _pick(which, output0, output1, output2, WEIGHTS)
        bias_ptr = _pick(which, bias0, bias1, bias2, WEIGHTS) if HAS_BIAS else bias0

        if not JOINED or last - first == blocks:
            _write(
                total, up_total, bias_ptr, output_ptr, row, output, rows, outputs, GATED, HAS_BIAS, ROWS, OUTPUTS,
                TRANSPOSED,
            )  # fmt: skip
        else:
            # A program has up to two parts of tiles, of its first and of its last.
            mine = ((row_block * programs + program) * 2 + (begin < tile * blocks).to(tl.int32)).to(tl.int64)
            mine *= PARTS * LEFT * RIGHT
            tl.store(partial_ptr + mine + element, total)
            if GATED:
                tl.store(partial_ptr + mine + LEFT * RIGHT + element, up_total)
            tl.debug_barrier()  # all of the program's threads have stored
            first_program = ((tile * blocks + 1) * programs - 1) // line
            last_program = ((tile + 1) * blocks * programs - 1) // line
            counter = counter_ptr + tile * row_blocks + row_block
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
            if arrived == last_program - first_program:
                tl.store(counter, 0)
                total = tl.zeros([LEFT, RIGHT], tl.float32)
                up_total = total
                for other in tl.range(first_program, last_program + 1, num_stages=JOIN_STAGES):
                    is_behind = (other * line // programs < tile * blocks).to(tl.int32)
                    theirs = ((row_block * programs + other) * 2 + is_behind).to(tl.int64) * (PARTS * LEFT * RIGHT)
                    total += tl.load(partial_ptr + theirs + element, cache_modifier=".cg")
                    if GATED:
                        up_total += tl.load(partial_ptr + theirs + LEFT * RIGHT + element, cache_modifier=".cg")
                _write(
                    total, up_total, bias_ptr, output_ptr, row, output, rows, outputs, GATED, HAS_BIAS, ROWS, OUTPUTS,
                    TRANSPOSED,
                )  # fmt: skip
