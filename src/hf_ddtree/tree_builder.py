"""How trees are built from a drafter's scores, and their rows found, by the fastest way that a device has."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from .draft_source import DraftSource, Proposal
from .draft_tree import DraftTree, TreeKind, TreeRows, build_tree, build_tree_by_rows
from .tree_policy import TreeBuilder


def build_tree_of(kind: TreeKind, source: DraftSource, text: torch.Tensor, budget: int) -> DraftTree:
    """`build_tree_by_rows`, which costs less where all prefixes of a depth share one row."""
    if isinstance(source, Proposal) and source.by_parent is None:
        return build_tree(kind, source.token_ids, source.log_probs, budget)
    return build_tree_by_rows(kind, source, text, budget)


def tree_functions(device: torch.device) -> tuple[TreeBuilder, Callable[[DraftTree], TreeRows]]:
    """How to build a tree, and to find its rows: of what a pass has scored, one launch each where Triton runs."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return build_tree_of, TreeRows.of
    from . import draft_tree_kernel as kernel

    def build(kind: TreeKind, source: DraftSource, text: torch.Tensor, budget: int) -> DraftTree:
        if kind == "chain" and isinstance(source, Proposal) and source.by_parent is None:
            # The best tree of one candidate a depth.
            kind, source = "best_first", Proposal(source.token_ids[..., :1], source.log_probs[..., :1])
        if kind != "best_first" or not isinstance(source, Proposal) or budget > kernel.MAX_BUDGET:
            return build_tree_of(kind, source, text, budget)
        tree: DraftTree = kernel.best_first_tree_triton(*source[:2], budget, source.by_parent)
        return tree

    def find_rows(tree: DraftTree) -> TreeRows:
        if tree.token_ids.shape[1] > kernel.MAX_BUDGET:
            return TreeRows.of(tree)
        return TreeRows(*kernel.ancestors_triton(tree.parents, tree.depths), tree.parents)

    return build, find_rows
