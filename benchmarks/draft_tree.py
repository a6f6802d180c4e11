"""Time of a round's tree on a GPU, plain tensors beside the kernels.

    PYTHONPATH=src python benchmarks/draft_tree.py

Every call is one of many in a CUDA graph, as in a captured round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from hf_ddtree.draft_tree import ancestor_matrix, best_first_tree, node_depths
from hf_ddtree.draft_tree_kernel import ancestors_triton, best_first_tree_triton
from timing import graph_microseconds


def microseconds(run: Callable[[], object], calls: int, repeats: int) -> float:
    """Median time of one call among `calls` in a graph."""
    return graph_microseconds(lambda: [run() for _ in range(calls)], repeats) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 63, 127, 255])
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--calls", type=int, default=20, help="in one graph")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    logits = 3 * torch.randn(args.batch, args.depth, 32000, device="cuda")
    log_probs, token_ids = logits.log_softmax(-1).sort(descending=True, stable=True)
    print("microseconds      tree           ancestors")
    print("budget    tensors  kernel   tensors  kernel", flush=True)
    for budget in args.budgets:
        table = token_ids[..., :budget].contiguous(), log_probs[..., :budget].contiguous()
        tree, ours = best_first_tree(*table, budget), best_first_tree_triton(*table, budget)
        assert all(torch.equal(got, want) for got, want in zip(ours, tree, strict=True))
        nodes = tree.parents, tree.depths
        runs: list[Callable[[], object]] = [
            lambda table=table, budget=budget: best_first_tree(*table, budget),
            lambda table=table, budget=budget: best_first_tree_triton(*table, budget),
            lambda nodes=nodes: node_depths(ancestor_matrix(*nodes)),
            lambda nodes=nodes: ancestors_triton(*nodes),
        ]
        times = [microseconds(run, args.calls, args.repeats) for run in runs]
        print("{:6d} {:10.1f} {:7.1f} {:9.1f} {:7.1f}".format(budget, *times), flush=True)


if __name__ == "__main__":
    main()
