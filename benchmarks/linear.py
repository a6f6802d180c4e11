"""Time of the kernel for linear layers of few rows beside torch's own and the time that reading the weights takes.

    PYTHONPATH=src python benchmarks/linear.py --sweep

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
from typing import NamedTuple

import torch
from torch.nn.functional import linear, silu

from timing import copy_bandwidth, graph_microseconds

if torch.cuda.is_available():
    from hf_ddtree.linear_kernel import Blocks, choose_blocks, gated_linear_triton, linears_triton


class Shape(NamedTuple):
    outputs: tuple[int, ...]
    inner: int
    gated: bool = False

    @property
    def elements(self) -> int:
        return sum(self.outputs) * self.inner


SHAPES = {  # of Qwen3-8B, Llama-3.2-1B, SmolLM2-135M
    "8b-qkv": Shape((4096, 1024, 1024), 4096),
    "8b-gate-up": Shape((12288, 12288), 4096, gated=True),
    "1b-qkv": Shape((2048, 512, 512), 2048),
    "1b-gate-up": Shape((8192, 8192), 2048, gated=True),
    "135m-qkv": Shape((576, 192, 192), 576),
    "135m-gate-up": Shape((1536, 1536), 576, gated=True),
}
Layer = tuple[torch.Tensor, ...]  # its weights


def torch_call(
    shape: Shape, x: torch.Tensor, gate: Callable[..., torch.Tensor], layer: Layer
) -> Sequence[torch.Tensor]:
    """Each weight by itself, and an elementwise kernel for the gate: as compiled layers do it."""
    outputs = [linear(x, weight) for weight in layer]
    return [gate(*outputs)] if shape.gated else outputs


def kernel_call(shape: Shape, x: torch.Tensor, blocks: Blocks, layer: Layer) -> Sequence[torch.Tensor]:
    return [gated_linear_triton(x, *layer, blocks=blocks)] if shape.gated else linears_triton(x, layer, blocks=blocks)


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate) * up


def make_layers(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Layer]:
    """As many as hold 300 MB, far more than L2."""
    count = -(-300_000_000 // (shape.elements * dtype.itemsize))
    return [
        tuple(torch.randn(size, shape.inner, dtype=dtype, device=device) / shape.inner**0.5 for size in shape.outputs)
        for _ in range(count)
    ]


def microseconds(call: Callable[[Layer], object], layers: list[Layer], repeats: int) -> float:
    """Median time of one layer."""
    return graph_microseconds(lambda: [call(layer) for layer in layers], repeats) / len(layers)


def relative_error(outputs: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The worst output's, in a norm of the whole; NaN where either is."""
    errors = [(ours.double() - best).norm() / best.norm() for ours, best in zip(outputs, exact, strict=True)]
    return float(torch.stack(errors).max())


def exact_outputs(shape: Shape, x: torch.Tensor, layer: Layer) -> list[torch.Tensor]:
    outputs = [x.double() @ weight.double().T for weight in layer]
    return [silu(outputs[0]) * outputs[1]] if shape.gated else outputs


def candidates(shape: Shape, rows: int) -> list[Blocks]:
    """Blocks to try, the choice first."""
    chosen = choose_blocks(rows, shape.gated)
    tiles = [  # outputs, inner, warps, stages
        (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (64, 64, 8, 4), (64, 128, 4, 3), (64, 128, 4, 6),
        (64, 128, 8, 4), (64, 256, 4, 3), (32, 64, 4, 6), (32, 128, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3),
    ]  # fmt: skip
    found = [chosen, chosen._replace(tma=False)]
    found += [Blocks(outputs, chosen.rows, *others) for outputs, *others in tiles]
    if rows > 128:
        found += [Blocks(64, 256, 64, 8, 4), Blocks(64, 256, 64, 8, 2)]
    if rows > 64:
        found += [Blocks(64, 64, 64, 4, 4), Blocks(64, 64, 128, 4, 3)]

    def fit(blocks: Blocks) -> Blocks:
        stage = 2 * blocks.inner * (blocks.outputs * (2 if shape.gated else 1) + blocks.rows)
        return blocks._replace(stages=max(1, min(blocks.stages, 230_000 // stage)))

    return [blocks for blocks in dict.fromkeys(map(fit, found)) if blocks.stages > 1]


def compile_all(calls: list[Callable[[], object]], workers: int) -> None:
    """Compile in parallel, as far as Python lets it; what fails will fail again when it is timed, and be named."""

    def attempt(call: Callable[[], object]) -> None:
        with suppress(Exception):
            call()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(attempt, calls))
    torch.cuda.synchronize()


def describe(blocks: Blocks) -> str:
    size = f"{blocks.outputs}x{blocks.rows}x{blocks.inner}"
    return f"{size} warps {blocks.warps} stages {blocks.stages} {'tma' if blocks.tma else 'pointers'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--show", type=int, default=4, help="of the best blocks of a sweep")
    parser.add_argument("--workers", type=int, default=16, help="that compile what a sweep tries")
    parser.add_argument("--seconds", type=float, default=105, help="after which a sweep tries nothing more")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a GPU.")
    start = time.monotonic()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 100
    gate = torch.compile(silu_product, dynamic=False)
    device, dtype = torch.device("cuda"), getattr(torch, args.dtype)
    speed = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy: {speed / 1e12:.2f} TB/s", flush=True)
    table = []
    for name in args.shapes:
        shape = SHAPES[name]
        layers = make_layers(shape, dtype, device)
        floor = shape.elements * dtype.itemsize / speed * 1e6
        for rows in args.rows:
            x = torch.randn(rows, shape.inner, dtype=dtype, device=device)
            exact = exact_outputs(shape, x, layers[0])
            theirs = microseconds(partial(torch_call, shape, x, gate), layers, args.repeats)
            choices = candidates(shape, rows)[: None if args.sweep else 1]
            if time.monotonic() - start > args.seconds:
                choices = choices[:1]
            compile_all([partial(kernel_call, shape, x, blocks, layers[0]) for blocks in choices], args.workers)
            results: list[tuple[float, Blocks]] = []
            for blocks in choices:
                if results and time.monotonic() - start > args.seconds:
                    print("out of time: the rest is left out")
                    break
                call = partial(kernel_call, shape, x, blocks)
                try:
                    error = relative_error(call(layers[0]), exact)
                    ours = microseconds(call, layers, args.repeats)
                except torch.AcceleratorError:
                    raise
                except Exception as problem:
                    print(f"{name} {rows}: {type(problem).__name__} {str(problem)[:80]!r} {describe(blocks)}")
                    continue
                if error < 1e-2:
                    results.append((ours, blocks))
                else:
                    print(f"{name} {rows}: wrong, by {error:.0e}: {describe(blocks)}")
            results.sort()
            for ours, blocks in results[: args.show] if args.sweep else ():
                print(f"{name:12} {rows:3d} {ours:6.1f}  {describe(blocks)}", flush=True)
            chosen = next((ours for ours, blocks in results if blocks == choices[0]), float("nan"))
            best, blocks = results[0] if results else (float("nan"), choices[0])
            table.append(
                f"{name:12} {rows:4d} {floor:6.1f} {theirs:6.1f} {chosen:7.1f} {best:6.1f} {theirs / best:5.2f}  "
                f"{describe(blocks)}"
            )
        del layers
    print(
        f"\nmicroseconds a layer, after {time.monotonic() - start:.0f} s; floor: its weights at the copy's bandwidth"
    )
    print("shape        rows  floor  torch  chosen   best  gain  best blocks")
    print("\n".join(table))


if __name__ == "__main__":
    main()
