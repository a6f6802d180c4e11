"""The kernel for linear layers of few rows against products in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from interpreter import INTERPRETED, run_interpreted, starts_the_interpreter

kernel = pytest.importorskip("hf_ddtree.linear_kernel")
Blocks = kernel.Blocks


@dataclass
class Case:
    """Shapes and options of one call."""

    rows: int = 17
    outputs: tuple[int, ...] = (40, 24, 33)
    inner: int = 72
    biases: bool = False
    gated: bool = False
    blocks: Any = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def inputs(self) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor] | None]:
        torch.manual_seed(0)
        x = torch.randn(self.rows, self.inner)
        weights = [torch.randn(size, self.inner) / self.inner**0.5 for size in self.outputs]
        biases = [torch.randn(size) for size in self.outputs]
        move = {"device": self.device, "dtype": self.dtype}
        moved = [[tensor.to(**move) for tensor in tensors] for tensors in (weights, biases)]
        return x.to(**move), moved[0], moved[1] if self.biases else None

    def run(
        self, x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor] | None
    ) -> Sequence[torch.Tensor]:
        if self.gated:
            return [kernel.gated_linear_triton(x, *weights, blocks=self.blocks)]
        outputs: list[torch.Tensor] = kernel.linears_triton(x, weights, biases, blocks=self.blocks)
        return outputs


def exact(
    case: Case, x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor] | None
) -> list[torch.Tensor]:
    outputs = [x.double() @ weight.double().T for weight in weights]
    if biases is not None:
        outputs = [output + bias.double() for output, bias in zip(outputs, biases, strict=True)]
    return [silu(outputs[0]) * outputs[1]] if case.gated else outputs


def compare(case: Case, tolerance: float) -> None:
    """Each output is the product, in a norm of the whole, and a second call gives the same bits."""
    inputs = case.inputs()
    outputs, again = case.run(*inputs), case.run(*inputs)
    for ours, twice, best in zip(outputs, again, exact(case, *inputs), strict=True):
        assert ours.shape == best.shape and ours.dtype == case.dtype
        assert float((ours.double() - best).norm()) <= tolerance * float(best.norm())
        assert torch.equal(ours, twice)


SMALL = Blocks(16, 16, 16, 4, 2)
CASES = {
    "two weights": Case(outputs=(5, 40), blocks=SMALL),
    "three weights": Case(blocks=SMALL),
    "biases": Case(biases=True, blocks=SMALL),
    "gate and up": Case(outputs=(40, 40), gated=True, blocks=SMALL),
    "one row": Case(rows=1, blocks=SMALL),
    "65 rows": Case(rows=65, biases=True, blocks=SMALL._replace(rows=64)),
    "one output": Case(outputs=(1, 1, 1), biases=True, blocks=SMALL),
    "one output, gate and up": Case(outputs=(1, 1), gated=True, blocks=SMALL),
    "even sizes": Case(rows=32, outputs=(32, 16, 16), inner=64, blocks=SMALL),
    "by pointers": Case(biases=True, blocks=SMALL._replace(tma=False)),
    "by pointers, gate and up": Case(outputs=(40, 40), gated=True, blocks=SMALL._replace(tma=False)),
    "rows that are not aligned": Case(inner=71, biases=True, blocks=SMALL),
    "nothing to add up": Case(inner=0, biases=True, blocks=SMALL),
    "no rows": Case(rows=0, blocks=SMALL),
    "no outputs": Case(outputs=(0, 40), biases=True, blocks=SMALL),
    "chosen blocks": Case(rows=70, outputs=(300, 100, 50), inner=200),
    "chosen blocks, gate and up": Case(rows=200, outputs=(300, 300), inner=200, gated=True),
    "float16": Case(dtype=torch.float16, biases=True),
    "float16, gate and up": Case(rows=200, outputs=(100, 100), gated=True, dtype=torch.float16),
}


def test_wrong_arguments_are_named() -> None:
    x, weights, _ = Case().inputs()
    with pytest.raises(ValueError, match="Two or three weights"):
        kernel.linears_triton(x, weights[:1])
    with pytest.raises(ValueError, match="as many biases"):
        kernel.linears_triton(x, weights, [x[0]])
    with pytest.raises(TypeError, match="float16"):
        kernel.linears_triton(x.half(), weights)
    with pytest.raises(ValueError, match="contiguous, of 72 columns"):
        kernel.linears_triton(x, [weight.mT.contiguous().mT for weight in weights])
    with pytest.raises(ValueError, match=r"`gate` is \(40, 72\)"):
        kernel.gated_linear_triton(x, *weights[:2])


def test_blocks_fit_shared_memory() -> None:
    for rows in (1, 64, 65, 300):
        for gated in (False, True):
            blocks = kernel.choose_blocks(rows, gated, shared=101376)
            tile = blocks.outputs * (2 if gated else 1) + blocks.rows
            assert 1 < blocks.stages <= 101376 // (2 * blocks.inner * tile)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN, and so are outputs that nobody writes."""
    new_empty = torch.Tensor.new_empty

    def poison(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = new_empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)


@pytest.mark.skipif(not INTERPRETED, reason="run by test_kernel_under_the_interpreter")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel(name: str) -> None:
    compare(CASES[name], 1e-6 if CASES[name].dtype == torch.float32 else 1e-3)


@pytest.mark.skipif(not INTERPRETED, reason="run by test_kernel_under_the_interpreter")
@pytest.mark.usefixtures("poisoned")
def test_interpreted_kernel_of_rows_that_lie_apart() -> None:
    case = Case(blocks=SMALL)
    x, weights, _ = case.inputs()
    shifted = torch.cat([x[:, :1], x, x[:, :3]], dim=1)[:, 1:73]  # no address of a descriptor
    for apart in (torch.cat([x, x], dim=1)[:, :72], shifted, x.mT.contiguous().mT):
        for ours, best in zip(case.run(apart, weights, None), exact(case, x, weights, None), strict=True):
            torch.testing.assert_close(ours.double(), best, rtol=1e-4, atol=1e-5)


@starts_the_interpreter
def test_kernel_under_the_interpreter() -> None:
    run_interpreted(__file__, "interpreted_kernel")


TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
WIDE = [
    Case(rows, outputs, inner, biases=not gated, gated=gated, blocks=blocks)
    for rows in (1, 16, 17, 64, 65, 128, 200, 256)
    for outputs, inner, gated in (
        ((1024, 256, 256), 1024, False),
        ((4096, 4096), 2560, False),
        ((1500, 1500), 1000, True),
        ((1536, 1536), 576, True),
    )
    for blocks in (None, Blocks(64, 64, 64, 4, 3), Blocks(64, 64, 64, 4, 3, tma=False))
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs CUDA")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.usefixtures("poisoned")
class TestOnGPU:
    @pytest.mark.parametrize("name", CASES)
    def test_small_products_equal_float64(self, name: str, dtype: torch.dtype) -> None:
        compare(replace(CASES[name], device="cuda", dtype=dtype), TOLERANCES[dtype])

    @pytest.mark.parametrize("case", WIDE, ids=str)
    def test_wide_products_equal_float64(self, case: Case, dtype: torch.dtype) -> None:
        compare(replace(case, device="cuda", dtype=dtype), TOLERANCES[dtype])
