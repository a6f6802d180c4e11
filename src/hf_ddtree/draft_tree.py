"""Draft trees: from log-probs per depth and a node budget to tokens, parents, depths and the ancestor matrix.

Pure functions of tensors with a leading batch dimension: the shapes of results depend on shapes and on `budget` only,
and nothing is read back to the host. The first call for a shape builds index tables that later calls share: make it
before a CUDA graph capture. Source: DDTree (arXiv 2604.12989); a beam search stands in for its heap and finds the same
nodes in the same order.
"""

import functools
import math
from typing import Literal, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .draft_source import DraftSource, Prefixes

TreeKind = Literal["best_first", "chain", "static"]

# Chance that the target takes the drafter's first token: the prior that the static shape is the best tree of.
_STATIC_TOP1 = 0.7
_NO_SUCH_KIND = "tree kind must be 'best_first', 'chain' or 'static', got {!r}"


class DraftTree(NamedTuple):
    """Trees of a batch, N nodes each; the root (the bonus token) is not one of them.

    Nodes are in score order: score descending, then depth ascending, then the parent's rank in its depth, then the
    token's rank in its row (in a static tree, instead of the last two, the order of the shape). Scores never rise
    along a path, so parents come before children and the best n nodes are the first n.

    Attributes:
        token_ids: `(B, N)` int64.
        parents: `(B, N)` int64, index of the parent node, -1 for the root.
        depths: `(B, N)` int64, 1 for children of the root; 0 marks a padding node, whose other fields mean nothing.
        log_probs: `(B, N)` float32, the node's score: its path's log-probs added up in float32 from the root on.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    log_probs: torch.Tensor

    def first(self, n: int) -> "DraftTree":
        """The best `n` nodes (all, if there are fewer): a tree again."""
        return DraftTree(*(field[:, :n] for field in self))

    def pad(self, n: int) -> "DraftTree":
        """Padding nodes up to `n`: token 0, parent -1, depth 0, log-prob -inf.

        Raises:
            ValueError: the tree has more than `n` nodes.
        """
        missing = n - self.token_ids.shape[1]
        if missing < 0:
            raise ValueError(f"a tree of {self.token_ids.shape[1]} nodes cannot be padded to {n}")
        if missing == 0:
            return self
        fields = zip(self, (0, -1, 0, -math.inf), strict=True)
        return DraftTree(*(torch.nn.functional.pad(field, (0, missing), value=fill) for field, fill in fields))


class TreeRows(NamedTuple):
    """A tree as layers see it: row 0 is the root, row i + 1 is node i.

    Attributes:
        ancestors: `(B, N + 1, N + 1)` bool, see `ancestor_matrix`.
        depths: `(B, N + 1)` int64, see `node_depths`.
        parents: `(B, N)` int64, as in `DraftTree`.
    """

    ancestors: torch.Tensor
    depths: torch.Tensor
    parents: torch.Tensor

    @classmethod
    def of(cls, tree: DraftTree) -> "TreeRows":
        """The rows of a tree and of its root."""
        ancestors = ancestor_matrix(tree.parents, tree.depths)
        return cls(ancestors, node_depths(ancestors), tree.parents)


class _Step(NamedTuple):
    """The children that one depth considers, parent-major, and how many of them stay."""

    parent: torch.Tensor  # (M,), place among the nodes kept at the depth above
    child: torch.Tensor  # (M,), rank of the token
    keep: int


class _Plan(NamedTuple):
    """All of a tree that does not depend on its log-probs.

    A pair is one considered (parent, child), a slot one kept node; both are counted over all depths from the root on,
    which is pair 0 and slot 0.
    """

    steps: list[_Step]
    nodes: int
    parent: torch.Tensor  # (pairs,)
    token: torch.Tensor  # (pairs,), place of its id in what `_in_score_order` is given
    depth: torch.Tensor  # (slots,)
    first_pair: torch.Tensor  # (slots,), where the pairs of this depth begin
    first_parent: torch.Tensor  # (slots,), where the slots of the depth above begin


@functools.cache
def single_row(device: torch.device) -> TreeRows:
    """The root alone."""
    with torch.inference_mode(False):
        none = torch.zeros(1, 0, dtype=torch.int64, device=device)
        return TreeRows.of(DraftTree(none, none, none, none.float()))


def best_first_tree(token_ids: torch.Tensor, log_probs: torch.Tensor, budget: int) -> DraftTree:
    """DDTree: the `budget` most probable prefixes (arXiv 2604.12989), with depths taken as independent.

    A prefix is kept only if fewer than `budget` others come before it, so keeping the best of each depth, extending
    those by the next depth's tokens and taking the best of all depths is exact if `K >= min(budget, V)`. NaN counts as
    -inf, which is a legal score; a log-prob above 0 counts as 0.

    Args:
        token_ids: `(B, D, K)` int64, the candidates of each depth, most probable first.
        log_probs: `(B, D, K)`, their log-probs; float32 inside. Ties are in the order that the caller wants.
        budget: nodes besides the root.

    Returns:
        A tree of N = min(budget, K + K^2 + ... + K^D) nodes.

    Raises:
        ValueError: the shapes differ or are not 3-D, or `budget` is below 1.
    """
    check_table(token_ids, log_probs)
    _check_budget(budget)
    log_probs = clean(log_probs)
    plan = _plan(*log_probs.shape[1:], budget, log_probs.device, search=True, by_rows=False)
    scores = [log_probs.new_zeros(log_probs.shape[0], 1)]
    pairs = [token_ids.new_zeros(log_probs.shape[0], 1)]
    for depth, step in enumerate(plan.steps):
        # Positions are independent in DDTree, so all prefixes of a depth share one row.
        rows = log_probs[:, depth, None].expand(-1, scores[-1].shape[1], -1)
        kept, order = _extend(scores[-1], rows, step, search=True)
        scores.append(kept)
        pairs.append(order)
    return _in_score_order(torch.cat(scores, dim=1), torch.cat(pairs, dim=1) + plan.first_pair, token_ids, plan)


def chain_tree(token_ids: torch.Tensor, log_probs: torch.Tensor, budget: int) -> DraftTree:
    """The most probable token of each depth, as DFlash (arXiv 2602.06036) drafts: N = min(budget, D) nodes.

    Arguments and errors are those of `best_first_tree`.
    """
    return static_tree(token_ids[..., :1], log_probs[..., :1], budget)


def static_tree(token_ids: torch.Tensor, log_probs: torch.Tensor, budget: int) -> DraftTree:
    """A tree whose shape depends on D, K and `budget` only, as in EAGLE (arXiv 2401.15077).

    The shape is the best-first tree of a prior that gives the token of rank r (from 0) the probability
    0.7 * 0.3^r at every depth: geometric in rank and in depth. Its nodes are put in score order.
    Arguments, N and errors are those of `best_first_tree`.
    """
    check_table(token_ids, log_probs)
    _check_budget(budget)
    log_probs = clean(log_probs)
    plan = _plan(*log_probs.shape[1:], budget, log_probs.device, search=False, by_rows=False)
    scores = [log_probs.new_zeros(log_probs.shape[0], 1)]
    for depth, step in enumerate(plan.steps):
        added = log_probs[:, depth].index_select(1, step.child)
        scores.append(scores[-1].index_select(1, step.parent) + added)
    slots = torch.arange(len(plan.depth), device=log_probs.device).expand(log_probs.shape[0], -1)
    return _in_score_order(torch.cat(scores, dim=1), slots, token_ids, plan)


def build_tree(kind: TreeKind, token_ids: torch.Tensor, log_probs: torch.Tensor, budget: int) -> DraftTree:
    """`best_first_tree`, `chain_tree` or `static_tree`, by name.

    Raises:
        ValueError: there is no such kind, or as in `best_first_tree`.
    """
    if kind == "best_first":
        return best_first_tree(token_ids, log_probs, budget)
    if kind == "chain":
        return chain_tree(token_ids, log_probs, budget)
    if kind == "static":
        return static_tree(token_ids, log_probs, budget)
    raise ValueError(_NO_SUCH_KIND.format(kind))


def build_tree_by_rows(kind: TreeKind, source: DraftSource, text: torch.Tensor, budget: int) -> DraftTree:
    """The trees of `build_tree` for a source whose rows may differ from prefix to prefix.

    A token's rank is that in its own row, best first. A best-first tree has the `budget` most probable prefixes, a
    chain the best child of the root, the best child of that and so on, and in a static tree rank r is the r-th best
    child of the node's own parent. NaN counts as -inf, a log-prob above 0 as 0. A node of score -inf is a padding
    node: so a source takes back a child that it does not mean.

    Args:
        kind: "best_first", "chain" or "static".
        source: gives D depths of B rows with C children each.
        text: `(B, 4)` int64, the last four committed tokens, the root last; -1 where there are fewer.
        budget: nodes besides the root.

    Returns:
        A tree of N = min(budget, C + C^2 + ... + C^D) nodes, min(budget, D) in a chain, padding nodes last.

    Raises:
        ValueError: there is no such kind, or `budget` is below 1.
    """
    if kind not in ("best_first", "chain", "static"):
        raise ValueError(_NO_SUCH_KIND.format(kind))
    _check_budget(budget)
    prefixes = Prefixes.root(text)
    token_ids, log_probs = source.rows(0, prefixes)
    width = 1 if kind == "chain" else log_probs.shape[2]
    search = kind == "best_first"
    plan = _plan(source.depth, width, budget, text.device, search=search, by_rows=True)
    scores = [log_probs.new_zeros(len(text), 1, dtype=torch.float32)]
    pairs = [text.new_zeros(len(text), 1)]
    tokens = [text[:, -1:]]
    for depth, step in enumerate(plan.steps):
        if depth > 0:
            token_ids, log_probs = source.rows(depth, prefixes)
        ranked, places = clean(log_probs).sort(dim=2, descending=True, stable=True)
        kept, order = _extend(scores[-1], ranked, step, search)
        scores.append(kept)
        pairs.append(order)
        tokens.append(token_ids.gather(2, places)[:, step.parent, step.child])
        places = places[:, step.parent, step.child].gather(1, order)
        places = torch.where(places < source.candidates, places, -1)
        prefixes = prefixes.extend(step.parent[order], places, tokens[-1].gather(1, order))
    pair_of_slot = torch.cat(pairs, dim=1) + plan.first_pair
    tree = _in_score_order(torch.cat(scores, dim=1), pair_of_slot, torch.cat(tokens, dim=1), plan)
    return tree._replace(depths=tree.depths.masked_fill(tree.log_probs == -math.inf, 0))


def ancestor_matrix(parents: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
    """Which node sees which: itself and its ancestors.

    Of `depths` only the mark of a padding node (0) is read. A node from which `parents` does not lead to the root (a
    padding node, its descendants, an index out of range, a cycle) sees only itself and is seen by none but itself.

    Args:
        parents: `(B, N)` int64, as in `DraftTree`.
        depths: `(B, N)` int64, as in `DraftTree`.

    Returns:
        `(B, N + 1, N + 1)` bool. Index 0 is the root, i + 1 is node i; `[b, q, k]` is true if k is q or one of q's
        ancestors, so that every node but those cut off sees the root.
    """
    batch, nodes = parents.shape
    own = torch.arange(nodes + 1, device=parents.device)
    linked = (depths > 0) & (parents >= -1) & (parents < nodes)
    # Whoever has no parent points at itself: walking up from there stays there, and never meets the root.
    above = torch.cat([own.new_zeros(batch, 1), torch.where(linked, parents + 1, own[1:])], dim=1)
    itself = torch.eye(nodes + 1, dtype=torch.bool, device=parents.device)
    ancestors = itself.expand(batch, -1, -1)
    rows = torch.arange(batch, device=parents.device)[:, None]
    # `above` is the ancestor 1, 2, 4, ... steps up, and no path is longer than `nodes`.
    for _ in range(nodes.bit_length()):
        ancestors = ancestors | ancestors[rows, above]
        above = above.gather(1, above)
    return ancestors & ancestors[:, :, :1] | itself


def node_depths(ancestors: torch.Tensor) -> torch.Tensor:
    """Number of strict ancestors of each node: `(B, N + 1)` int64, 0 for the root and for nodes cut off from it.

    Args:
        ancestors: `(B, N + 1, N + 1)` bool, from `ancestor_matrix`.
    """
    return ancestors.sum(dim=-1) - 1


def expected_tokens(tree: DraftTree) -> torch.Tensor:
    """Tokens that a round with the best n nodes is expected to commit, bonus included, for n = 0..N.

    `(B, N + 1)` float32: one plus the sum of the nodes' probabilities (arXiv 2604.12989).
    """
    return 1 + torch.nn.functional.pad(tree.log_probs.exp().cumsum(dim=1), (1, 0))


def check_table(token_ids: torch.Tensor, log_probs: torch.Tensor) -> None:
    """Raises ValueError unless both are `(B, D, K)`."""
    if token_ids.shape != log_probs.shape or log_probs.dim() != 3:
        raise ValueError(
            "token_ids and log_probs must both be (batch, depth, candidates), "
            f"got {tuple(token_ids.shape)} and {tuple(log_probs.shape)}"
        )


def _check_budget(budget: int) -> None:
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")


def clean(log_probs: torch.Tensor) -> torch.Tensor:
    """The log-probs as trees count them: float32, -inf for NaN, none above 0."""
    # A sort puts NaN first, before its own parent.
    return log_probs.float().nan_to_num(nan=-math.inf, posinf=0.0, neginf=-math.inf).clamp(max=0)


def _extend(scores: torch.Tensor, rows: torch.Tensor, step: _Step, search: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The children of a depth's prefixes that stay: their scores and their pairs, both `(B, keep)`.

    `scores` is `(B, P)`; `rows` is `(B, P, C)`, the log-probs of each prefix's children. A search keeps the best; in a
    shape all pairs stay as they are.
    """
    children = scores.index_select(1, step.parent) + rows[:, step.parent, step.child]
    if not search:
        return children, torch.arange(step.keep, device=scores.device).expand_as(children)
    # Only a stable sort keeps ties in the order of the pairs; `topk` does not.
    children, order = children.sort(dim=1, descending=True, stable=True)
    return children[:, : step.keep], order[:, : step.keep]


def _in_score_order(scores: torch.Tensor, pairs: torch.Tensor, token_ids: torch.Tensor, plan: _Plan) -> DraftTree:
    """The best nodes of all slots. `scores` and `pairs` are `(B, slots)`, depth by depth.

    `token_ids` is `(B, D, K)` for equal rows, and `(B, pairs)` for rows that differ.
    """
    scores, slots = scores.sort(dim=1, descending=True, stable=True)
    # The root comes first: no score is above its 0, and no slot is before it.
    scores, slots = scores[:, 1 : plan.nodes + 1], slots[:, 1 : plan.nodes + 1]
    nodes = torch.arange(plan.nodes, device=slots.device).expand_as(slots)
    node_of_slot = pairs.new_full(pairs.shape, -1).scatter(1, slots, nodes)
    pairs = pairs.gather(1, slots)
    return DraftTree(
        token_ids=token_ids.flatten(1).gather(1, plan.token[pairs]),
        parents=node_of_slot.gather(1, plan.first_parent[slots] + plan.parent[pairs]),
        depths=plan.depth[slots],
        log_probs=scores,
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _plan(depth: int, width: int, budget: int, device: torch.device, search: bool, by_rows: bool) -> _Plan:
    return _make_plan(depth, width, budget, device, search, by_rows)


# Never evicted: captured CUDA graphs read the tables at their address.
@functools.cache
def _make_plan(depth: int, width: int, budget: int, device: torch.device, search: bool, by_rows: bool) -> _Plan:
    # Outside inference mode, so that the tables also serve callers that are not in it; and unseen by whoever watches a
    # round for copies, since no later one makes them.
    with _disable_current_modes(), torch.inference_mode(False), torch.device("cpu"):
        steps = _search_steps(depth, width, budget, by_rows) if search else _static_steps(depth, width, budget)
        root = torch.zeros(1, dtype=torch.int64)
        pairs = [1, *(len(step.parent) for step in steps)]
        slots = [1, *(step.keep for step in steps)]
        pair_starts = torch.tensor([0, *pairs[:-1]]).cumsum(0)
        slot_starts = torch.tensor([0, 0, *slots[:-1]]).cumsum(0)[:-1]
        repeats = torch.tensor(slots)
        in_depth = [step.child + level * width for level, step in enumerate(steps)]
        return _Plan(
            steps=[_Step(step.parent.to(device), step.child.to(device), step.keep) for step in steps],
            nodes=min(budget, sum(slots) - 1),
            parent=torch.cat([root, *(step.parent for step in steps)]).to(device),
            token=(torch.arange(sum(pairs)) if by_rows else torch.cat([root, *in_depth])).to(device),
            depth=torch.arange(len(slots)).repeat_interleave(repeats).to(device),
            first_pair=pair_starts.repeat_interleave(repeats).to(device),
            first_parent=slot_starts.repeat_interleave(repeats).to(device),
        )


def _search_steps(depth: int, width: int, budget: int, by_rows: bool) -> list[_Step]:
    """The pairs that can be among the best `budget` nodes, for the search with one row per depth or per prefix.

    Counted from 1, child r of prefix i at depth d comes after the r - 1 children of that prefix before it, after those
    i prefixes and after a node of each depth further up, and these r - 1 + i + d - 2 nodes must be fewer than the
    budget. In equal rows it also comes after the children up to r of the prefixes before i: i r - 1 + i + d - 2 nodes.
    Float32 addition is monotone, so this holds for rounded sums as well.
    """
    steps: list[_Step] = []
    prefixes = 1
    for room in range(budget, max(budget - depth, 0), -1):  # what one node at each depth above leaves of the budget
        i = torch.arange(1, prefixes + 1)
        children = (room + 1 - i if by_rows else (room + 1) // i - 1).clamp(max=width)
        parent = torch.arange(prefixes).repeat_interleave(children)
        child = torch.arange(len(parent)) - (children.cumsum(0) - children)[parent]
        prefixes = min(len(parent), room)
        steps.append(_Step(parent, child, prefixes))
    return steps


def _static_steps(depth: int, width: int, budget: int) -> list[_Step]:
    prior = math.log(_STATIC_TOP1) + math.log(1 - _STATIC_TOP1) * torch.arange(width, dtype=torch.float32)
    ranks = torch.arange(width).expand(1, depth, width)
    shape = best_first_tree(ranks, prior.expand(1, depth, width), budget)
    ranks, parents, depths = shape.token_ids[0], shape.parents[0], shape.depths[0]
    steps: list[_Step] = []
    place = torch.zeros(len(ranks) + 1, dtype=torch.int64)  # of each node in its depth; the root's is 0, as first
    for level in depths.unique().tolist():
        nodes = (depths == level).nonzero()[:, 0]
        place[nodes + 1] = torch.arange(len(nodes))
        steps.append(_Step(place[parents[nodes] + 1], ranks[nodes], len(nodes)))
    return steps
