"""Trees of rows that differ from prefix to prefix, against lists and a heap that ask for each row by its path."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from hf_ddtree import draft_tree
from hf_ddtree.draft_source import DraftSource, Prefixes, Proposal, add_children
from hf_ddtree.draft_tree import DraftTree, ancestor_matrix, best_first_tree, build_tree, build_tree_by_rows
from test_draft_tree import KINDS, TABLES, Nodes, as_nodes, make_tables

STRANGE = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 3.0, -3.4e38, 0.0, -0.0])
BATCH = 20
TEXT = torch.tensor([[-1, -1, 5, 2], [7, 3, 3, 1]]).repeat(BATCH // 2, 1)


class Guesses(NamedTuple):
    """A proposal with two more children a row, made up from the last tokens of the prefix."""

    proposal: Proposal

    @property
    def depth(self) -> int:
        return self.proposal.depth

    @property
    def candidates(self) -> int:
        return self.proposal.candidates

    def rows(self, depth: int, prefixes: Prefixes) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = depth + (prefixes.token_ids * torch.tensor([1, 3, 5, 7])).sum(dim=2)
        extra_ids = torch.stack([mixed % 11 - 1, mixed % 7], dim=2)
        extra_log_probs = -torch.stack([mixed % 5, mixed % 3], dim=2) / 2
        return add_children(*self.proposal.rows(depth, prefixes), extra_ids, extra_log_probs)


class PlainRows:
    """One tree's rows of a source as lists: of the depth, the text up to the prefix and its last token's place."""

    def __init__(self, source: Proposal | Guesses, row: int):
        self.guesses = isinstance(source, Guesses)
        proposal = source.proposal if isinstance(source, Guesses) else source
        self.ids = proposal.token_ids[row].tolist()
        self.shared = self.clean(proposal.log_probs[row])
        self.by_parent = None if proposal.by_parent is None else self.clean(proposal.by_parent[row])

    @staticmethod
    def clean(log_probs: torch.Tensor) -> np.ndarray:
        return np.minimum(np.nan_to_num(log_probs.float().numpy(), nan=-math.inf, posinf=0, neginf=-math.inf), 0)

    def children(self, depth: int, text: list[int], place: int, score: np.float32) -> list[tuple]:
        """Token, place and score of each child, best first."""
        if depth == len(self.ids):
            return []
        ids, row = self.ids[depth], self.shared[depth]
        if self.by_parent is not None and depth > 0 and place >= 0:
            row = self.by_parent[depth, place]
        places = list(range(len(ids)))
        if self.guesses:
            mixed = depth + text[-4] + 3 * text[-3] + 5 * text[-2] + 7 * text[-1]
            first, second = mixed % 11 - 1, mixed % 7
            extra = [-math.inf if first < 0 or first in ids else -(mixed % 5) / 2]
            extra.append(-math.inf if second in [*ids, first] else -(mixed % 3) / 2)
            ids, places = [*ids, max(first, 0), second], [*places, -1, -1]
            row = np.concatenate([row, np.array(extra, np.float32)])
        with np.errstate(over="ignore"):
            scores = score + row
        assert scores.dtype == np.float32
        return [(ids[c], places[c], scores[c]) for c in np.argsort(-row, kind="stable").tolist()]


def as_node(token: int, parent: int, depth: int, score: np.float32) -> tuple[int, int, int, float]:
    return token, parent, depth if score > -math.inf else 0, float(score)


def heap_tree(rows: PlainRows, text: list[int], budget: int) -> Nodes:
    """Pop the best prefix, push the next child of its parent and its own first one."""
    nodes: Nodes = []
    popped = [0] * (len(rows.ids) + 1)
    heap: list[tuple] = []

    def push(depth: int, rank_in_depth: int, rank: int, parent: int, text: list[int], siblings: list[tuple]) -> None:
        if rank < len(siblings):
            heapq.heappush(heap, (-float(siblings[rank][2]), depth, rank_in_depth, rank, parent, text, siblings))

    push(1, 0, 0, -1, text, rows.children(0, text, -1, np.float32(0)))
    while heap and len(nodes) < budget:
        _, depth, rank_in_depth, rank, parent, text, siblings = heapq.heappop(heap)
        token, place, score = siblings[rank]
        nodes.append(as_node(token, parent, depth, score))
        push(depth, rank_in_depth, rank + 1, parent, text, siblings)
        own = [*text[-3:], token]
        push(depth + 1, popped[depth], 0, len(nodes) - 1, own, rows.children(depth, own, place, score))
        popped[depth] += 1
    return nodes


def shaped_tree(rows: PlainRows, text: list[int], shape: list[tuple[int, ...]]) -> Nodes:
    """The nodes whose ranks from the root on are those of the shape."""
    found = {(): (text, -1, -1, np.float32(0))}  # text, token, place, score
    for path in shape:
        text, _, place, score = found[path[:-1]]
        token, place, score = rows.children(len(path) - 1, text, place, score)[path[-1]]
        found[path] = [*text[-3:], token], token, place, score
    order = sorted(shape, key=lambda path: (-float(found[path][3]), len(path), shape.index(path)))
    return [
        as_node(found[path][1], order.index(path[:-1]) if path[:-1] else -1, len(path), found[path][3])
        for path in order
    ]


def static_shape(depth: int, width: int, budget: int) -> list[tuple[int, ...]]:
    ranks = torch.arange(width).expand(1, depth, width)
    paths: list[tuple[int, ...]] = []
    for rank, parent, *_ in as_nodes(best_first_tree(ranks, math.log(0.7) + ranks * math.log(0.3), budget)):
        paths.append((*paths[parent], rank) if parent >= 0 else (rank,))
    return paths


def make_proposal(seed: int, depth: int, width: int) -> Proposal:
    """Unsorted rows of every kind of table; in the last eight trees some values are no log-probs at all.

    In every other tree the rows hold shares of the probability that differ much from prefix to prefix.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (depth, width + 1, width)
    raw = torch.stack([TABLES[row % len(TABLES)](shape, generator) for row in range(BATCH)])
    raw = raw.gather(-1, torch.rand(raw.shape, generator=generator).argsort(-1))
    raw[::2] -= 8 * torch.rand(raw[::2, ..., :1].shape, generator=generator) ** 2
    share = torch.tensor([0.0] * len(TABLES) + [0.02, 0.05, 0.1, 0.5] * 2)[:, None, None, None]
    drawn = STRANGE[torch.randint(len(STRANGE), raw.shape, generator=generator)]
    raw = torch.where(torch.rand(raw.shape, generator=generator) < share, drawn, raw)
    ids = torch.rand(BATCH, depth, width + 8, generator=generator).argsort(-1)[..., :width]
    return Proposal(ids, raw[:, :, 0], raw[:, :, 1:])


def make_cases(seed: int) -> list[tuple[Proposal | Guesses, int]]:
    """Ten sources of any size, and a budget for each."""
    generator = np.random.default_rng(seed)
    cases: list[tuple[Proposal | Guesses, int]] = []
    for case in range(10):
        depth, width = int(generator.integers(1, 16)), int(generator.choice([2, 2, 3, 4, 5, 8, 11, 16]))
        proposal = make_proposal(1000 * seed + case, depth, width)
        budget = int(np.exp(generator.uniform(0, math.log(256))))
        cases.append(((proposal._replace(by_parent=None), Guesses(proposal), proposal)[case % 3], budget))
    return cases


def assert_nodes(tree: DraftTree, source: Proposal | Guesses, plain: Callable[[PlainRows, list[int]], Nodes]) -> None:
    for row, text in enumerate(TEXT.tolist()):
        assert as_nodes(tree, row) == plain(PlainRows(source, row), text), row


@pytest.mark.parametrize("seed", range(10))
def test_best_first_equals_the_heap(seed: int) -> None:
    for source, budget in make_cases(seed):
        tree = build_tree_by_rows("best_first", source, TEXT, budget)
        assert_nodes(tree, source, lambda rows, text, budget=budget: heap_tree(rows, text, budget))


@pytest.mark.parametrize(("depth", "width", "budget"), [(15, 16, 255), (15, 2, 255), (3, 16, 254), (1, 16, 40)])
def test_best_first_equals_the_heap_at_the_largest_sizes(depth: int, width: int, budget: int) -> None:
    proposal = make_proposal(depth, depth, width)
    for source in (proposal, Guesses(proposal)):
        tree = build_tree_by_rows("best_first", source, TEXT, budget)
        assert_nodes(tree, source, lambda rows, text: heap_tree(rows, text, budget))


@pytest.mark.parametrize("seed", range(2))
def test_chain_and_static_equal_a_walk(seed: int) -> None:
    for source, budget in make_cases(seed):
        chain = [(0,) * (level + 1) for level in range(min(budget, source.depth))]
        static = static_shape(source.depth, source.candidates + 2 * isinstance(source, Guesses), budget)
        for kind, shape in (("chain", chain), ("static", static)):
            tree = build_tree_by_rows(kind, source, TEXT, budget)
            assert_nodes(tree, source, lambda rows, text, shape=shape: shaped_tree(rows, text, shape))


@pytest.mark.parametrize(("depth", "width", "budget"), [(12, 3, 5), (7, 5, 60), (3, 16, 200)])
def test_the_heap_sees_what_the_pairs_for_equal_rows_miss(
    depth: int, width: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposals = [make_proposal(seed, depth, width) for seed in range(4)]
    right = [build_tree_by_rows("best_first", proposal, TEXT, budget) for proposal in proposals]
    steps = draft_tree._search_steps
    monkeypatch.setattr(draft_tree, "_search_steps", lambda *sizes: steps(*sizes[:-1], False))
    draft_tree._make_plan.cache_clear()
    wrong = [build_tree_by_rows("best_first", proposal, TEXT, budget) for proposal in proposals]
    draft_tree._make_plan.cache_clear()
    missed = 0
    for proposal, tree, other in zip(proposals, right, wrong, strict=True):
        assert_nodes(tree, proposal, lambda rows, text: heap_tree(rows, text, budget))
        missed += sum(as_nodes(tree, row) != as_nodes(other, row) for row in range(BATCH))
    assert missed > 4


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rows_give_the_trees_of_equal_rows(kind: str) -> None:
    text = torch.zeros(len(TABLES), 4, dtype=torch.int64)
    for depth, width, budget in ((1, 1, 1), (4, 3, 200), (15, 16, 63), (7, 40, 15), (15, 2, 255)):
        token_ids, log_probs = make_tables(depth, depth, width)
        want = build_tree(kind, token_ids, log_probs, budget)
        want = want._replace(depths=want.depths.masked_fill(want.log_probs == -math.inf, 0))
        for by_parent in (None, log_probs[:, :, None].expand(-1, -1, width, -1)):
            tree = build_tree_by_rows(kind, Proposal(token_ids, log_probs, by_parent), text, budget)
            for got, expected in zip(tree, want, strict=True):
                assert got.dtype == expected.dtype
                assert torch.equal(got, expected)


def test_impossible_nodes_are_padding() -> None:
    log_probs = torch.tensor([[[-0.5, -math.inf, -1.0]]]).expand(1, 3, 3)
    tree = build_tree_by_rows("best_first", Proposal(torch.arange(9).view(1, 3, 3), log_probs), TEXT[:1], 30)
    assert torch.equal(tree.depths == 0, tree.log_probs == -math.inf)
    assert (tree.depths > 0).sum() == 2 + 4 + 8
    ancestors = ancestor_matrix(tree.parents, tree.depths)
    assert torch.equal(ancestors[:, 15:], torch.eye(31, dtype=torch.bool)[None, 15:])
    assert not ancestors[:, :15, 15:].any()


def test_no_row_is_read_that_no_prefix_has() -> None:
    proposal = make_proposal(3, 5, 4)
    want = build_tree_by_rows("best_first", proposal, TEXT, 30)
    proposal.by_parent[:, 0] = math.nan
    shared = proposal.log_probs.clone()
    shared[:, 1:] = math.nan  # without extra children each prefix but the root has a row of its own
    tree = build_tree_by_rows("best_first", proposal._replace(log_probs=shared), TEXT, 30)
    assert all(torch.equal(got, expected) for got, expected in zip(tree, want, strict=True))


def test_extra_children_are_new_to_their_row() -> None:
    generator = torch.Generator().manual_seed(0)
    for extras in range(4):
        ids = torch.rand(3, 50, 9, generator=generator).argsort(-1)[..., :5]
        extra_ids = torch.randint(-2, 9, (3, 50, extras), generator=generator)
        log_probs, extra_log_probs = torch.rand(3, 50, 5), torch.rand(3, 50, extras)
        got_ids, got = add_children(ids, log_probs, extra_ids, extra_log_probs)
        assert torch.equal(got_ids, torch.cat([ids, extra_ids.clamp(min=0)], 2))
        for tree, prefix in np.ndindex(3, 50):
            held = ids[tree, prefix].tolist()
            want = log_probs[tree, prefix].tolist()
            for token, score in zip(
                extra_ids[tree, prefix].tolist(), extra_log_probs[tree, prefix].tolist(), strict=True
            ):
                want.append(-math.inf if token < 0 or token in held else score)
                held.append(token)
            assert got[tree, prefix].tolist() == want


@pytest.mark.parametrize("kind", KINDS)
def test_trees_compile_without_a_graph_break(kind: str) -> None:
    compiled = torch.compile(build_tree_by_rows, fullgraph=True, dynamic=False, backend="aot_eager")
    proposal = make_proposal(1, 4, 5)
    sources: tuple[DraftSource, ...] = (proposal, Guesses(proposal))
    for source in sources:
        want = build_tree_by_rows(kind, source, TEXT, 15)
        assert all(torch.equal(*pair) for pair in zip(compiled(kind, source, TEXT, 15), want, strict=True))


def test_wrong_arguments_are_named() -> None:
    proposal = make_proposal(0, 2, 2)
    with pytest.raises(ValueError, match="budget must be at least 1, got 0"):
        build_tree_by_rows("chain", proposal, TEXT, 0)
    with pytest.raises(ValueError, match="'best_first', 'chain' or 'static', got 'bushy'"):
        build_tree_by_rows("bushy", proposal, TEXT, 9)
