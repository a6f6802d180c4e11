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
        assert float((ours.double() - best).norm() / best.norm()) < tolerance
        assert torch.equal(ours, twice)
    assert not any(counters.any() for kept in kernel._COUNTERS.values() for counters in kept)


SMALL = Blocks(16, 16, 16, 5, 4, 2)
CASES = {
    "one weight": Case(outputs=(40,), blocks=SMALL),
    "two weights": Case(outputs=(5, 40), blocks=SMALL),
    "three weights": Case(blocks=SMALL),
    "biases": Case(biases=True, blocks=SMALL),
    "gate and up": Case(outputs=(40, 40), gated=True, blocks=SMALL),
    "one row": Case(rows=1, blocks=SMALL),
    "64 rows": Case(rows=64, biases=True, blocks=SMALL._replace(rows=64)),
    "65 rows": Case(rows=65, blocks=SMALL._replace(rows=64)),
    "200 rows": Case(rows=200, outputs=(33, 33), gated=True, blocks=Blocks(32, 64, 32, 5, 4, 2)),
    "one output": Case(outputs=(1, 1, 1), biases=True, blocks=SMALL),
    "even sizes": Case(rows=32, outputs=(32, 16, 16), inner=64, blocks=SMALL),
    "one program": Case(blocks=SMALL._replace(programs=1)),
    "a program a tile": Case(blocks=SMALL._replace(programs=8)),
    "a program a block": Case(blocks=SMALL._replace(programs=1000)),
    "many programs, gate and up": Case(outputs=(40, 40), gated=True, blocks=SMALL._replace(programs=11)),
    "input on the left": Case(biases=True, blocks=SMALL._replace(transposed=False)),
    "input on the left, gate and up": Case(
        outputs=(40, 40), gated=True, blocks=SMALL._replace(transposed=False, programs=7)
    ),
    "descriptors": Case(biases=True, blocks=SMALL._replace(tma=True)),
    "descriptors, gate and up": Case(outputs=(40, 40), gated=True, blocks=SMALL._replace(tma=True)),
    "no hints": Case(blocks=SMALL._replace(hints=False)),
    "chosen blocks": Case(rows=70, outputs=(300, 100, 50), inner=200),
    "chosen blocks, gate and up": Case(rows=70, outputs=(300, 300), inner=200, gated=True),
    "float16": Case(dtype=torch.float16, biases=True),
    "float16, gate and up": Case(rows=200, outputs=(100, 100), gated=True, dtype=torch.float16),
}


def test_wrong_arguments_are_named() -> None:
    x, weights, _ = Case().inputs()
    with pytest.raises(ValueError, match="From 1 to 3 weights"):
        kernel.linears_triton(x, [])
    with pytest.raises(ValueError, match="as many biases"):
        kernel.linears_triton(x, weights, [x[0]])
    with pytest.raises(TypeError, match="float16"):
        kernel.linears_triton(x.half(), weights)
    with pytest.raises(ValueError, match="contiguous, of 72 columns"):
        kernel.linears_triton(x, [weights[0].mT.contiguous().mT])
    with pytest.raises(ValueError, match=r"`gate` is \(40, 72\)"):
        kernel.gated_linear_triton(x, *weights[:2])


def test_nothing_to_compute() -> None:
    for rows, outputs, inner in ((0, 4, 8), (3, 0, 8), (3, 4, 0)):
        x, weights, _ = Case(rows, (outputs,), inner).inputs()
        (output,) = kernel.linears_triton(x, weights)
        assert output.shape == (rows, outputs) and not output.any()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN: outputs that nobody writes, and parts that are read before they are written."""
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
    for apart in (torch.cat([x, x], dim=1)[:, :72], x.mT.contiguous().mT):
        for ours, best in zip(case.run(apart, weights, None), exact(case, x, weights, None), strict=True):
            torch.testing.assert_close(ours.double(), best, rtol=1e-4, atol=1e-5)


@starts_the_interpreter
def test_kernel_under_the_interpreter() -> None:
    run_interpreted(__file__, "interpreted_kernel")


TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
WIDE = [
    Case(rows, outputs, inner, gated=gated)
    for rows in (1, 16, 17, 64, 65, 128, 200, 256)
    for outputs, inner, gated in (
        ((1024, 256, 256), 1024, False),
        ((4096,), 2560, False),
        ((1500, 1500), 1000, True),
        ((50257,), 768, False),
    )
]
GPU_CASES = {
    **CASES,
    **{f"{case.rows} rows, {case.outputs} outputs, {case.inner}": case for case in WIDE},
    **{
        f"{blocks}, {'gated' if gated else 'plain'}": Case(
            64, (1024, 1024), 2048, biases=not gated, gated=gated, blocks=blocks
        )
        for gated in (False, True)
        for blocks in (
            Blocks(64, 64, 64, 132, 4, 3),
            Blocks(64, 64, 64, 132, 4, 3, transposed=False),
            Blocks(64, 64, 64, 132, 4, 3, tma=True),
            Blocks(64, 64, 64, 132, 4, 3, overlap=True),
            Blocks(64, 64, 64, 132, 4, 3, tma=True, overlap=True),
        )
    },
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs CUDA")
class TestOnGPU:
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize("name", GPU_CASES)
    @pytest.mark.usefixtures("poisoned")
    def test_kernel_equals_float64(self, name: str, dtype: torch.dtype) -> None:
        case = replace(GPU_CASES[name], device="cuda", dtype=dtype)
        if dtype == torch.float32 and case.blocks is not None and case.blocks.outputs >= 64:
            pytest.skip("blocks for two bytes an element")
        compare(case, TOLERANCES[dtype])

    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("overlap", [False, True])
    def test_a_graph_gives_the_same_bits_each_time(self, gated: bool, overlap: bool) -> None:
        blocks = Blocks(64, 64, 64, 264, 4, 3, overlap=overlap)
        case = Case(64, (1024, 1024), 1024, gated=gated, blocks=blocks, dtype=torch.bfloat16, device="cuda")
        x, weights, _ = case.inputs()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            case.run(x, weights, None)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            first = case.run(x, weights, None)
            second = case.run(first[0], weights, None)  # must see all of what comes before
        kept = None
        for _ in range(200):
            for output in (*first, *second):
                output.fill_(torch.nan)
            graph.replay()
            now = [output.clone() for output in (*first, *second)]
            kept = kept or now
            assert all(torch.equal(ours, before) for ours, before in zip(now, kept, strict=True))
        for ours, best in zip(second, exact(case, first[0], weights, None), strict=True):
            assert float((ours.double() - best).norm() / best.norm()) < TOLERANCES[torch.bfloat16]
