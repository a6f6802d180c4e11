"""Time of `tree_attention` beside torch's own attention and the time that reading the committed rows takes.

    PYTHONPATH=src python benchmarks/attention.py

Every call is one of many layers' in a CUDA graph, each with rows of its own, so that the L2 cache does not hold them.
`--sweep` tries other block sizes: `choose_blocks` follows what it prints.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_ddtree.attention import Rows, tree_attention, tree_attention_reference
from hf_ddtree.verifier import tree_mask
from hf_ddtree.visibility import Visibility
from timing import copy_bandwidth, graph_microseconds

if TYPE_CHECKING:  # the kernel needs Triton, and all but the sweep run without
    from hf_ddtree.attention_kernel import Blocks


class Round(NamedTuple):
    """Inputs of one layer; the rows are each layer's own."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    seen: Visibility
    mask: torch.Tensor  # (1, 1, Q, S), additive, of the columns above

    def call(self, attend: Callable[..., torch.Tensor], rows: torch.Tensor, **kwargs: Blocks) -> torch.Tensor:
        own = Rows(rows[0], rows[1])
        return attend(self.query, self.key, self.value, own, self.seen, self.query.shape[-1] ** -0.5, **kwargs)

    def sdpa(self, rows: torch.Tensor) -> torch.Tensor:
        """As a static cache is attended to."""
        columns = self.key.shape[2]
        slots = self.seen.length + torch.arange(columns, device=rows.device)
        rows[0].index_copy_(2, slots, self.key)
        rows[1].index_copy_(2, slots, self.value)
        output = scaled_dot_product_attention(self.query, rows[0], rows[1], self.mask, enable_gqa=True)
        return output.transpose(1, 2)


def make_round(args: argparse.Namespace, queries: int, length: int, dtype: torch.dtype) -> Round:
    def random(heads: int) -> torch.Tensor:
        return torch.randn(1, queries, heads, args.head_dim, device=args.device, dtype=dtype).transpose(1, 2)

    capacity = capacity_of(args, length)
    visible = torch.rand(1, queries, queries, device=args.device) < 0.3
    visible |= torch.eye(queries, dtype=torch.bool, device=args.device)
    committed = torch.ones(1, capacity, dtype=torch.bool, device=args.device)
    seen = Visibility(torch.tensor([length], device=args.device), committed, None, visible)
    return Round(
        query=random(args.heads),
        key=random(args.kv_heads),
        value=random(args.kv_heads),
        seen=seen,
        mask=tree_mask(seen, dtype),
    )


def capacity_of(args: argparse.Namespace, length: int) -> int:
    return args.capacity or max(256, 1 << (length + 256).bit_length())


def microseconds(attend: Callable[[torch.Tensor], object], layers: torch.Tensor, repeats: int) -> float:
    """Median time of one layer."""

    def run() -> None:
        for rows in layers:
            attend(rows)

    if layers.is_cuda:
        return graph_microseconds(run, repeats) / len(layers)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times) / len(layers)


def candidates(itemsize: int) -> list[Blocks]:
    """Block sizes that compile to something sensible; the number of splits needs no compiling."""
    from hf_ddtree.attention_kernel import Blocks

    tiles = [(64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8)]
    if itemsize == 4:
        tiles = [(16, 32, 4), (32, 32, 4), (32, 64, 8)]
    return [
        Blocks(rows, columns, splits, warps, stages)
        for (rows, columns, warps), stages, splits in product(tiles, (2, 3, 4), (1, 2, 4, 8, 12, 16, 24, 32))
    ]


def sweep(round_: Round, layers: torch.Tensor, repeats: int) -> None:
    from hf_ddtree.attention_kernel import tree_attention_triton

    results = []
    for blocks in candidates(layers.element_size()):
        try:
            time_ = microseconds(
                lambda rows, blocks=blocks: round_.call(tree_attention_triton, rows, blocks=blocks), layers, repeats
            )
        except Exception as error:  # too much shared memory
            if "resource" not in str(error):
                raise
            continue
        results.append((time_, blocks))
    for time_, blocks in sorted(results)[:6]:
        print(f"    {time_:8.1f} us  {blocks}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--queries", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--capacity", type=int, help="static slots (a power of two above the length)")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    speed = copy_bandwidth(torch.device(args.device))
    print(f"copy: {speed / 1e12:.2f} TB/s; microseconds a layer")
    print("queries  length   slots   floor     op   sdpa   error", flush=True)
    for length, queries in product(args.lengths, args.queries):
        capacity = capacity_of(args, length)
        shape = (args.layers, 2, 1, args.kv_heads, capacity, args.head_dim)
        layers = torch.randn(shape, device=args.device, dtype=dtype)
        round_ = make_round(args, queries, length, dtype)
        exact = round_.call(tree_attention_reference, layers[0]).double()
        error = (round_.call(tree_attention, layers[0]).double() - exact).norm() / exact.norm()
        floor = 2 * args.kv_heads * (length + queries) * args.head_dim * layers.element_size() / speed * 1e6
        ours = microseconds(lambda rows, r=round_: r.call(tree_attention, rows), layers, args.repeats)
        sdpa = microseconds(round_.sdpa, layers, args.repeats)
        print(
            f"{queries:7d} {length:7d} {capacity:7d} {floor:7.1f} {ours:6.1f} {sdpa:6.1f} {float(error):7.0e}",
            flush=True,
        )
        if args.sweep:
            sweep(round_, layers, max(5, args.repeats // 3))


if __name__ == "__main__":
    main()
