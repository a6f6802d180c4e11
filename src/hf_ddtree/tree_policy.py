"""What makes a round's tree of a drafter's scores: the paper's search, its rivals, and what is registered besides."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .configuration_ddtree import TREES
from .draft_source import DraftSource, Proposal
from .draft_tree import DraftTree, TreeKind, TreeRows, build_tree, build_tree_by_rows
from .state import Path


class TreeBuilder(Protocol):
    """Builds trees of a kind by the fastest way that the device has."""

    def __call__(self, kind: TreeKind, source: DraftSource, text: torch.Tensor, budget: int) -> DraftTree:
        """Arguments and errors are those of `build_tree_by_rows`."""


class TreePolicy:
    """
    Makes the trees of calls that name it (`DDTreeConfig(tree=...)`, [`register_policy`]).

    One instance serves calls with one target and drafter, one after another. Rounds may be recorded as CUDA graphs,
    and `build` and `observe` with them: operations on tensors of fixed shapes, nothing read on the host, and what
    lasts from round to round in tensors that are changed in place.

    Args:
        config: The target's text config.
        device: Where trees are built.
    """

    candidates: int | None = None  # of a depth that it looks at, at most
    observes = False  # whether `observe` is to be called, for which each node's best token has to be found

    def __init__(self, config: Any, device: torch.device) -> None:
        self.memory: Sequence[torch.Tensor] = ()  # what rounds change: it goes back where one is only rehearsed

    def begin(self, input_ids: torch.Tensor) -> None:
        """A call begins.

        Args:
            input_ids: `(1, L)` int64, the prompt and the first new token.
        """

    def build(self, source: DraftSource, text: torch.Tensor, nodes: int, build_tree: TreeBuilder) -> DraftTree:
        """The tree of a round.

        Args:
            source: The drafter's scores; another source may be put around it.
            text: `(B, 4)` int64, the last committed tokens, the root last; -1 where there are fewer.
            nodes: Of the tree; it is cut, or filled with padding nodes, to so many.
            build_tree: Builds trees of the paper's and other kinds.
        """
        raise NotImplementedError

    def observe(self, committed: Path, best: torch.Tensor) -> None:
        """Take note of a round, if the class says that it `observes`.

        Args:
            committed: What the round has kept.
            best: `(B, N + 1)` int64, the argmax of the target's raw logits at the root and each node that was
                verified, the first ones of the tree built last.
        """


class BestFirst(TreePolicy):
    """DDTree's most probable prefixes."""

    kind: TreeKind = "best_first"

    def build(self, source: DraftSource, text: torch.Tensor, nodes: int, build_tree: TreeBuilder) -> DraftTree:
        return build_tree(self.kind, source, text, nodes)


class Chain(BestFirst):
    """DFlash's most probable continuation."""

    kind = "chain"
    candidates = 1


class Static(BestFirst):
    """A tree of fixed shape."""

    kind = "static"


_POLICIES: dict[str, type[TreePolicy]] = {"best_first": BestFirst, "chain": Chain, "static": Static}


def register_policy(name: str, policy: type[TreePolicy]) -> None:
    """Let calls name a policy of their own, as `DDTreeConfig(tree=name)`; it takes the place of one of that name.

    Args:
        name: Any but those of the policies that come with the library.
        policy: A subclass of [`TreePolicy`].

    Raises:
        ValueError: The name is one of those.
    """
    if name in TREES[:3]:
        raise ValueError(f"The tree {name!r} comes with the library: choose another name.")
    if name not in TREES:
        TREES.append(name)
    _POLICIES[name] = policy


def policy_class(name: str) -> type[TreePolicy]:
    """The policy of that name."""
    return _POLICIES[name]


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
