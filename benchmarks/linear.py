"""Time of the kernel for linear layers of few rows beside torch's own and the time that reading the weights takes.

    PYTHONPATH=src python benchmarks/linear.py

Every call is one of many layers' in a CUDA graph, each with weights of its own, so that the L2 cache does not hold
them. `--sweep` tries other blocks: `choose_blocks` follows what it prints.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch.nn.functional import linear, silu

from timing import copy_bandwidth, graph_microseconds

if torch.cuda.is_available():
    from hf_ddtree import linear_kernel as kernel
    from hf_ddtree.linear_kernel import Blocks


class Shape(NamedTuple):
    outputs: tuple[int, ...]
    inner: int
    gated: bool = False

    @property
    def elements(self) -> int:
        return sum(self.outputs) * self.inner


SHAPES = {  # of Qwen3-8B
    "qkv": Shape((4096, 1024, 1024), 4096),
    "o": Shape((4096,), 4096),
    "gate_up": Shape((12288, 12288), 4096, gated=True),
    "down": Shape((4096,), 12288),
    "head": Shape((151936,), 4096),
}
LAYERS = {"qkv": 36, "o": 36, "gate_up": 36, "down": 36, "head": 1}
Layer = tuple[torch.Tensor, ...]  # its weights


@torch.compile(dynamic=False)
def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate) * up


def torch_call(shape: Shape, x: torch.Tensor, layer: Layer) -> Sequence[torch.Tensor]:
    """Each weight by itself, and an elementwise kernel for the gate: as compiled layers do it."""
    outputs = [linear(x, weight) for weight in layer]
    return [gated(*outputs)] if shape.gated else outputs


def kernel_call(shape: Shape, x: torch.Tensor, layer: Layer, blocks: Blocks | None = None) -> Sequence[torch.Tensor]:
    if shape.gated:
        return [kernel.gated_linear_triton(x, *layer, blocks=blocks)]
    return kernel.linears_triton(x, layer, blocks=blocks)


def make_layers(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Layer]:
    """As many as hold 400 MB, far more than L2."""
    count = max(1, -(-400_000_000 // (shape.elements * dtype.itemsize)))
    return [
        tuple(torch.randn(size, shape.inner, dtype=dtype, device=device) / shape.inner**0.5 for size in shape.outputs)
        for _ in range(count)
    ]


def microseconds(call: Callable[[Layer], object], layers: list[Layer], repeats: int) -> float:
    """Median time of one layer."""

    def run() -> None:
        for layer in layers:
            call(layer)

    return graph_microseconds(run, repeats) / len(layers)


def relative_error(outputs: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The worst output's, in a norm of the whole; NaN where either is."""
    errors = [(ours.double() - best).norm() / best.norm() for ours, best in zip(outputs, exact, strict=True)]
    return float(torch.stack(errors).max())


def exact_outputs(shape: Shape, x: torch.Tensor, layer: Layer) -> list[torch.Tensor]:
    # In float32 without TF32, torch's default, and by parts: the head in float64 would need gigabytes.
    outputs = [torch.cat([x.float() @ part.float().T for part in weight.split(16384)], dim=1) for weight in layer]
    return [(silu(outputs[0]) * outputs[1]).double()] if shape.gated else [output.double() for output in outputs]


def candidates(shape: Shape, rows: int, processors: int) -> list[Blocks]:
    """At most 24. Two gated weights share a tile: each gets half of the tile's outputs."""
    block_rows = max(16, min(128 if rows <= 128 else 256, 1 << (rows - 1).bit_length()))
    # Outputs of a tile, inner, programs a processor, warps, stages.
    if block_rows <= 64:
        tiles = [
            (128, 64, 1, 4, 8), (128, 64, 1, 8, 8), (128, 128, 1, 4, 4), (256, 64, 1, 8, 5), (64, 128, 1, 4, 6),
            (128, 64, 2, 4, 4), (64, 128, 2, 4, 3), (128, 128, 2, 4, 2), (64, 64, 2, 4, 6),
        ]  # fmt: skip
    elif block_rows == 128:
        tiles = [
            (128, 64, 1, 4, 6), (128, 64, 1, 8, 6), (128, 128, 1, 8, 3), (256, 64, 1, 8, 4), (64, 64, 2, 4, 4),
            (128, 64, 2, 8, 3), (128, 64, 2, 4, 3),
        ]  # fmt: skip
    else:
        tiles = [(128, 64, 1, 8, 4), (64, 64, 1, 8, 5), (64, 128, 1, 8, 2), (64, 64, 1, 4, 5)]
    share = 2 if shape.gated else 1

    def fit(outputs: int, inner: int, each: int, warps: int, stages: int, transposed: bool, tma: bool) -> Blocks:
        outputs = max(64, outputs // share)  # tensor cores' products have 64 rows on the left
        stages = min(stages, 225_000 // each // (2 * inner * (outputs * share + block_rows)))
        return Blocks(outputs, block_rows, inner, processors * each, warps, max(2, stages), transposed, tma)

    choices = product(tiles, (True,), (False, True))
    chosen = [fit(*tile, transposed, tma) for tile, transposed, tma in choices]
    if block_rows >= 64:
        chosen += [fit(128, 64, 1, 4 * block_rows // 64, 8, False, tma) for tma in (False, True)]
    # Whole tiles, no joins.
    whole = sum(-(-size // 64) for size in shape.outputs) // share
    chosen += [fit(64, 64, 2, 4, 4, True, tma)._replace(programs=whole) for tma in (False, True)]
    return list(dict.fromkeys(chosen))[:24]


def variants(blocks: Blocks) -> list[Blocks]:
    """Of what turned out best."""
    return [
        blocks._replace(overlap=True),
        *([] if blocks.tma else [blocks._replace(hints=False)]),
        blocks._replace(programs=blocks.programs * 2),
    ]


def compile_kernels(shape: Shape, x: torch.Tensor, layer: Layer, choices: list[Blocks], workers: int) -> None:
    """Compile in parallel, as far as Python lets it; what fails will fail again when it runs, and be named there."""
    outputs = [x.new_empty(x.shape[0], weight.shape[0]) for weight in layer]
    device = torch.cuda.current_device()

    def compile_one(blocks: Blocks) -> None:
        torch.cuda.set_device(device)
        prepared = kernel.launch_arguments(x, layer, None, outputs, blocks, shape.gated)
        assert prepared is not None
        grid, args, kwargs = prepared
        with suppress(Exception):
            kernel._linears_kernel.warmup(*args, grid=grid, **kwargs)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(compile_one, choices))


def sweep(
    shape: Shape, x: torch.Tensor, layers: list[Layer], repeats: int, workers: int, floor: float, deadline: float
) -> None:
    exact = exact_outputs(shape, x, layers[0])
    results: list[tuple[float, Blocks]] = []

    def measure(choices: list[Blocks]) -> None:
        compile_kernels(shape, x, layers[0], choices, workers)
        for blocks in choices:
            if time.monotonic() > deadline:
                print("    out of time: the rest is left out", flush=True)
                return
            try:
                error = relative_error(kernel_call(shape, x, layers[0], blocks), exact)
                time_ = microseconds(lambda layer, b=blocks: kernel_call(shape, x, layer, b), layers, repeats)
            except Exception as problem:
                print(f"    {type(problem).__name__} {str(problem).splitlines()[:1]} {blocks}", flush=True)
                if isinstance(problem, torch.AcceleratorError):
                    raise
                continue
            if not error < 1e-2:
                print(f"    wrong, by {error:.0e}: {blocks}", flush=True)
                continue
            results.append((time_, blocks))

    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    measure(candidates(shape, x.shape[0], processors))
    tried = [blocks for _, blocks in results]
    best = [blocks for _, blocks in sorted(results)[:2]]
    measure([choice for blocks in best for choice in variants(blocks) if choice not in tried])
    for time_, blocks in sorted(results)[:5]:
        print(f"    {time_:8.1f} us {floor / time_:4.0%}  {blocks}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--workers", type=int, default=16, help="that compile what a sweep tries")
    parser.add_argument("--seconds", type=float, default=110, help="after which a sweep ends")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a GPU.")
    torch.manual_seed(0)
    deadline = time.monotonic() + args.seconds
    device, dtype = torch.device("cuda"), getattr(torch, args.dtype)
    speed = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy: {speed / 1e12:.2f} TB/s")
    print("microseconds a layer, and the share of the copy's bandwidth at which its weights were read")
    print("shape    rows   floor         torch        joined        kernel   error", flush=True)
    totals: dict[tuple[int, str], float] = {}
    for name in args.shapes:
        shape = SHAPES[name]
        layers = make_layers(shape, dtype, device)
        floor = shape.elements * dtype.itemsize / speed * 1e6
        for rows in args.rows:
            x = torch.randn(rows, shape.inner, dtype=dtype, device=device)
            joined = [(torch.cat(layer),) for layer in layers]
            times = {
                "torch": microseconds(partial(torch_call, shape, x), layers, args.repeats),
                "joined": microseconds(lambda layer, x=x: linear(x, *layer), joined, args.repeats),  # without the gate
                "kernel": microseconds(partial(kernel_call, shape, x), layers, args.repeats),
            }
            del joined
            error = relative_error(kernel_call(shape, x, layers[0]), exact_outputs(shape, x, layers[0]))
            line = "".join(f"{time_:8.1f} {floor / time_:4.0%} " for time_ in times.values())
            print(f"{name:8} {rows:4d} {floor:7.1f} {line} {error:7.0e}", flush=True)
            for method, time_ in [("floor", floor), *times.items()]:
                totals[rows, method] = totals.get((rows, method), 0) + LAYERS[name] * time_ / 1e3
            if args.sweep:
                sweep(shape, x, layers, max(5, args.repeats // 3), args.workers, floor, deadline)
    for rows in args.rows:
        line = "  ".join(f"{method} {totals[rows, method]:.2f}" for method in ("floor", "torch", "joined", "kernel"))
        print(f"{rows} rows, ms of 36 layers and one head: {line}", flush=True)


if __name__ == "__main__":
    main()
