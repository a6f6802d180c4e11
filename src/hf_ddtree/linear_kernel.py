# mypy: disable-error-code="import-not-found, no-redef, no-untyped-def, untyped-decorator"
"""Linear layers of few rows in Triton, bound by reading weights: two or three over one input in one launch.

Each program computes one tile, some outputs of one weight (or of gate and up), over the whole inner dimension. Weights
are the left side of the products, whose rows come in 64s on tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


class Blocks(NamedTuple):
    """How the kernel is cut."""

    outputs: int  # of a tile, rows of a weight (of each of the two, where they are gate and up)
    rows: int  # of the input in a tile
    inner: int  # of the inner dimension at a time
    warps: int
    stages: int  # of the loads' pipeline
    tma: bool = True  # copy tiles by descriptors, where the device has them and the tensors are aligned


def choose_blocks(rows: int, gated: bool, shared: int = 232448) -> Blocks:
    """Blocks for two bytes an element, by shape alone; `benchmarks/linear.py --sweep` tries others.

    Args:
        rows: Of the input.
        gated: The weights are gate and up.
        shared: Bytes of shared memory that a program may have.
    """
    block_rows = max(16, min(128, triton.next_power_of_2(rows)))
    if gated or rows > 128:
        blocks = Blocks(64, block_rows, 64, 4, 3 if gated and block_rows == 128 else 4)
    else:
        blocks = Blocks(64, block_rows, 128, 4, 6)
    stage = 2 * blocks.inner * (blocks.outputs * (2 if gated else 1) + block_rows)
    return blocks._replace(stages=max(1, min(blocks.stages, shared // stage)))


@lru_cache
def _limits(device: torch.device) -> tuple[int, bool]:
    """Bytes of shared memory that a program may have, and whether the device copies tiles by descriptors."""
    if device.type != "cuda":
        return 232448, True
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin, properties.major >= 9


def linears_triton(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None = None,
    blocks: Blocks | None = None,
) -> list[torch.Tensor]:
    """Linear layers over one input.

    Args:
        x: `(M, K)`.
        weights: Two or three, each `(N_i, K)`, contiguous.
        biases: Each `(N_i,)`.
        blocks: Instead of `choose_blocks`'s choice.

    Returns:
        Each `(M, N_i)`.

    Raises:
        TypeError: Dtypes differ.
        ValueError: Shapes do not match, or a weight is not contiguous.
    """
    if len(weights) not in (2, 3) or (biases is not None and len(biases) != len(weights)):
        raise ValueError(f"Two or three weights, and as many biases or none, not {len(weights)}.")
    outputs = [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]
    _launch(x, weights, biases, outputs, blocks)
    return outputs


def gated_linear_triton(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, blocks: Blocks | None = None
) -> torch.Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`, rounded once: `(M, K)`, twice `(N, K)`, result `(M, N)`."""
    if gate.shape != up.shape:
        raise ValueError(f"`gate` is {tuple(gate.shape)}, `up` is {tuple(up.shape)}: they must be the same.")
    output = x.new_empty(x.shape[0], gate.shape[0])
    _launch(x, (gate, up), None, (output,), blocks)
    return output


def _is_aligned(tensor: torch.Tensor) -> bool:  # as descriptors need it
    stride = tensor.stride(0) * tensor.element_size()
    return tensor.numel() > 0 and tensor.data_ptr() % 16 == 0 and stride % 16 == 0


def _launch(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    outputs: Sequence[torch.Tensor],
    blocks: Blocks | None,
) -> None:
    """Fill `outputs`, one for each weight, or one for gate and up."""
    if len({tensor.dtype for tensor in (x, *weights, *(biases or ()))}) > 1:
        raise TypeError(f"The input's dtype is {x.dtype}: that of all weights and biases must be the same.")
    rows, inner = x.shape
    if any(weight.shape[1] != inner or not weight.is_contiguous() for weight in weights):
        raise ValueError(f"Each weight must be contiguous, of {inner} columns.")
    if x.stride(1) != 1:
        x = x.contiguous()
    gated = len(outputs) < len(weights)
    shared, tma = _limits(x.device)
    blocks = blocks or choose_blocks(rows, gated, shared)
    operands: list[Any] = [x, *weights]
    if tma := tma and blocks.tma and all(map(_is_aligned, operands)):
        tiles = [[blocks.rows, blocks.inner], *[[blocks.outputs, blocks.inner]] * len(weights)]
        operands = [TensorDescriptor.from_tensor(*pair) for pair in zip(operands, tiles, strict=True)]
    sizes = [output.shape[1] for output in outputs]

    def three(values: Sequence[Any]) -> list[Any]:
        return [*values, values[-1], values[-1]][:3]

    _linears_kernel[triton.cdiv(rows, blocks.rows), sum(triton.cdiv(size, blocks.outputs) for size in sizes)](
        operands[0], *three(operands[1:]), *three(biases or [None]), *three(outputs), x.stride(0), rows,
        *[*sizes, 0, 0][:3], inner, GATED=gated, HAS_BIAS=biases is not None, ROWS=blocks.rows,
        OUTPUTS=blocks.outputs, INNER=blocks.inner, EVEN_INNER=inner % blocks.inner == 0, TMA=tma,
        STAGES=blocks.stages, num_warps=blocks.warps,
    )  # fmt: skip


@triton.jit
def _pick(which, first, second, third):
    if which == 1:
        first = second
    elif which == 2:
        first = third
    return first


@triton.jit
def _load(
    source, row, column, rows, columns, stride, BLOCK: tl.constexpr, INNER: tl.constexpr, EVEN_INNER: tl.constexpr,
    POLICY: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
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
def _linears_kernel(
    x, weight0, weight1, weight2, bias0, bias1, bias2, output0, output1, output2, x_stride, rows, n0, n1, n2, inner,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr,
    EVEN_INNER: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Blocks of rows run side by side, so that all but the first find the weights in L2.
    row, tile = tl.program_id(0) * ROWS, tl.program_id(1)
    weight, output_ptr, outputs = weight0, output0, n0
    if not GATED:
        tiles0, tiles1 = tl.cdiv(n0, OUTPUTS), tl.cdiv(n1, OUTPUTS)
        which = (tile >= tiles0).to(tl.int32) + (tile >= tiles0 + tiles1).to(tl.int32)
        tile -= tl.where(which > 0, tiles0, 0) + tl.where(which > 1, tiles1, 0)
        weight = _pick(which, weight0, weight1, weight2)
        output_ptr = _pick(which, output0, output1, output2)
        outputs = tl.where(which == 0, n0, tl.where(which == 1, n1, n2))  # a size of 1 is not of `_pick`'s one type
    output = tile * OUTPUTS

    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up_total = total
    for k in tl.range(0, inner, INNER, num_stages=STAGES):
        w = _load(weight, output, k, outputs, inner, inner, OUTPUTS, INNER, EVEN_INNER, "evict_first", TMA)
        x_block = _load(x, row, k, rows, inner, x_stride, ROWS, INNER, EVEN_INNER, "evict_last", TMA).trans()
        total = tl.dot(w, x_block, total, input_precision="ieee")
        if GATED:
            w = _load(weight1, output, k, outputs, inner, inner, OUTPUTS, INNER, EVEN_INNER, "evict_first", TMA)
            up_total = tl.dot(w, x_block, up_total, input_precision="ieee")

    m = row + tl.arange(0, ROWS)
    n = output + tl.arange(0, OUTPUTS)
    if HAS_BIAS:
        bias_ptr = _pick(which, bias0, bias1, bias2)
        total += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = total / (1 + tl.exp(-total)) * up_total
    pointers = output_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    result = total.trans().to(output_ptr.dtype.element_ty)
    tl.store(pointers, result, mask=(m < rows)[:, None] & (n < outputs)[None, :])
