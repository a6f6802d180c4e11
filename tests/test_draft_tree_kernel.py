"""The kernels against plain tensors, bit for bit; test_draft_tree.py compares those with DDTree's heap."""

from __future__ import annotations

import math

import pytest
import torch

from hf_ddtree.draft_source import Proposal
from hf_ddtree.draft_tree import DraftTree, ancestor_matrix, best_first_tree, build_tree_by_rows, node_depths
from interpreter import INTERPRETED, run_interpreted, starts_the_interpreter
from test_draft_source import TEXT, make_proposal
from test_draft_tree import make_tables

kernel = pytest.importorskip("hf_ddtree.draft_tree_kernel")

STRANGE = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 3.0, -3.4e38, 0.0, -0.0, -1e-45])


def strange_tables(seed: int, depth: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are not sorted: shuffled ones, and ones that hold what no drafter should give."""
    generator = torch.Generator().manual_seed(seed)
    token_ids, log_probs = make_tables(seed, depth, vocab)
    shuffled = log_probs.gather(-1, torch.rand(log_probs.shape, generator=generator).argsort(-1))
    share = torch.tensor([0.0, 0.05, 0.5, 1.0]).repeat(3)[:, None, None]
    drawn = STRANGE[torch.randint(len(STRANGE), log_probs.shape, generator=generator)]
    return token_ids, torch.where(torch.rand(log_probs.shape, generator=generator) < share, drawn, shuffled)


def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit, zeros of either sign included."""
    if got.is_floating_point() and want.is_floating_point():
        got, want = got.view(torch.int32), want.view(torch.int32)
    return got.dtype == want.dtype and torch.equal(got.cpu(), want.cpu())


def assert_equal(got: DraftTree, want: DraftTree) -> None:
    for name, ours, theirs in zip(DraftTree._fields, got, want, strict=True):
        assert equal(ours, theirs), name


def tree_by_parent(proposal: Proposal, budget: int) -> DraftTree:
    return build_tree_by_rows("best_first", proposal, TEXT[: len(proposal.token_ids)], budget)


def assert_ancestors_equal(parents: torch.Tensor, depths: torch.Tensor) -> None:
    ancestors = ancestor_matrix(parents, depths)
    got, levels = kernel.ancestors_triton(parents, depths)
    assert equal(got, ancestors)
    assert equal(levels, node_depths(ancestors))


def malformed(nodes: int, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(nodes)
    return [
        (
            torch.randint(low, high, (4, nodes), generator=generator).to(device),
            torch.randint(0, 4, (4, nodes), generator=generator).to(device),
        )
        for low, high in ((-1, nodes), (-4, nodes + 4), (-(2**62), 2**62))
    ]


def test_wrong_arguments_are_named() -> None:
    token_ids, log_probs = make_tables(0, 4, 6)
    for budget in (0, kernel.MAX_BUDGET + 1):
        with pytest.raises(ValueError, match=f"budget must be from 1 to {kernel.MAX_BUDGET}, got {budget}"):
            kernel.best_first_tree_triton(token_ids, log_probs, budget)
    with pytest.raises(ValueError, match=r"must both be \(batch, depth, candidates\)"):
        kernel.best_first_tree_triton(token_ids[:, :2], log_probs, 5)
    with pytest.raises(ValueError, match=r"by_parent must be .* got .* for "):
        kernel.best_first_tree_triton(token_ids, log_probs, 5, log_probs)
    wide = torch.zeros(1, 2, kernel.MAX_TABLE_WIDTH + 1)
    with pytest.raises(ValueError, match=f"by_parent must be .* with up to {kernel.MAX_TABLE_WIDTH} candidates"):
        kernel.best_first_tree_triton(wide.long(), wide, 5, wide[:, :, None].expand(-1, -1, wide.shape[2], -1))


def test_nothing_to_build() -> None:
    token_ids, log_probs = make_tables(0, 4, 6)
    for ids, scores in (
        (token_ids[:0], log_probs[:0]),
        (token_ids[:, :0], log_probs[:, :0]),
        (token_ids[..., :0], log_probs[..., :0]),
    ):
        assert_equal(kernel.best_first_tree_triton(ids, scores, 5), best_first_tree(ids, scores, 5))


interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_kernels_under_the_interpreter")


# Each case takes every so many tables: the interpreter needs a millisecond a node.
@interpreted
@pytest.mark.parametrize(
    ("depth", "vocab", "budget", "every"),
    [
        (1, 1, 1, 1),
        (1, 5, 2, 1),
        (3, 2, 1, 1),
        (3, 3, 63, 5),  # reaches 39
        (31, 1, 40, 5),
        (5, 40, 15, 3),
        (15, 64, 15, 4),
        (15, 64, 63, 6),
        (15, 20, 64, 12),
        (31, 2, 33, 6),
        (4, 80, 80, 12),
        (9, 5, 140, 12),
    ],
)
def test_interpreted_tree(depth: int, vocab: int, budget: int, every: int) -> None:
    for make in (make_tables, strange_tables):
        token_ids, log_probs = make(budget, depth, vocab)
        token_ids, log_probs = token_ids[budget % every :: every], log_probs[budget % every :: every]
        assert_equal(
            kernel.best_first_tree_triton(token_ids, log_probs, budget), best_first_tree(token_ids, log_probs, budget)
        )


@interpreted
@pytest.mark.parametrize(
    ("depth", "width", "budget", "every"),
    [
        (1, 1, 1, 1),
        (1, 9, 4, 2),
        (3, 2, 30, 3),  # reaches 14
        (15, 2, 40, 5),
        (40, 1, 33, 5),
        (12, 3, 5, 1),
        (7, 5, 15, 2),
        (5, 16, 63, 6),
        (3, 64, 20, 4),
        (15, 16, 127, 10),
    ],
)
def test_interpreted_tree_by_parent(depth: int, width: int, budget: int, every: int) -> None:
    given = make_proposal(budget, depth, width)
    proposal = Proposal(*(field[budget % every :: every] for field in given))
    token_ids, log_probs, by_parent = proposal
    tree = kernel.best_first_tree_triton(token_ids, log_probs, budget, by_parent)
    assert_equal(tree, tree_by_parent(proposal, budget))
    # Others' strides and float types.
    by_parent = by_parent.bfloat16().transpose(1, 3).contiguous().transpose(1, 3)
    tree = kernel.best_first_tree_triton(token_ids, log_probs, budget, by_parent)
    assert_equal(tree, tree_by_parent(proposal._replace(by_parent=by_parent), budget))


@interpreted
def test_interpreted_tree_of_other_strides_and_float_types() -> None:
    token_ids, log_probs = make_tables(1, 6, 20)
    token_ids, log_probs = token_ids[::4, :, :9], log_probs[::4, :, :9].bfloat16()
    assert_equal(kernel.best_first_tree_triton(token_ids, log_probs, 20), best_first_tree(token_ids, log_probs, 20))


@interpreted
def test_interpreted_ancestors() -> None:
    for budget in (1, 2, 15, 64):
        tree = best_first_tree(*make_tables(budget, 9, 20), budget).pad(budget + 2)
        assert_ancestors_equal(tree.parents[::6], tree.depths[::6])
    for nodes in (1, 2, 20):
        for parents, depths in malformed(nodes):
            assert_ancestors_equal(parents, depths)
        chain = torch.arange(-1, nodes - 1)[None]
        assert_ancestors_equal(chain, chain + 2)
        assert_ancestors_equal(chain.flip(1), chain + 2)  # a cycle, or one that points at itself
    assert_ancestors_equal(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64))


@starts_the_interpreter
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__, "interpreted")


class TestOnGPU:
    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs CUDA"),
    ]

    @pytest.mark.parametrize(
        ("depth", "vocab", "budget"),
        [
            (15, 64, 1),
            (2, 1, 2),
            (1, 300, 255),
            (3, 3, 63),
            (15, 1, 63),
            (15, 64, 15),
            (15, 64, 16),
            (15, 64, 63),
            (15, 64, 64),
            (15, 127, 127),
            (15, 255, 255),
            (31, 17, 64),
            (31, 256, 255),
            (7, 600, 511),
            (600, 2, 511),
        ],
    )
    def test_one_graph_serves_every_table(self, depth: int, vocab: int, budget: int) -> None:
        ids, scores = (given.cuda() for given in make_tables(0, depth, vocab))

        def build() -> tuple[DraftTree, torch.Tensor, torch.Tensor]:
            tree = kernel.best_first_tree_triton(ids, scores, budget)
            return tree, *kernel.ancestors_triton(tree.parents, tree.depths)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            build()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tree, ancestors, levels = build()
        for seed in range(3):
            for make in (make_tables, strange_tables):
                token_ids, log_probs = make(seed, depth, vocab)
                ids.copy_(token_ids)
                scores.copy_(log_probs)
                graph.replay()
                expected = best_first_tree(token_ids, log_probs, budget)
                assert_equal(tree, expected)
                seen = ancestor_matrix(expected.parents, expected.depths)
                assert equal(ancestors, seen)
                assert equal(levels, node_depths(seen))

    @pytest.mark.parametrize(
        ("depth", "width", "budget"),
        [(1, 1, 1), (3, 2, 30), (12, 3, 5), (7, 16, 63), (15, 16, 255), (15, 64, 127), (500, 2, 511), (4, 64, 511)],
    )
    def test_one_graph_serves_every_table_by_parent(self, depth: int, width: int, budget: int) -> None:
        given = Proposal(*(field.cuda() for field in make_proposal(0, depth, width)))
        text = TEXT.cuda()

        def build() -> tuple[DraftTree, DraftTree]:
            by_tensors = build_tree_by_rows("best_first", given, text, budget)
            return kernel.best_first_tree_triton(*given[:2], budget, given.by_parent), by_tensors

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            build()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            trees = build()
        for seed in range(3):
            proposal = make_proposal(seed, depth, width)
            for field, fresh in zip(given, proposal, strict=True):
                field.copy_(fresh)
            graph.replay()
            for tree in trees:
                assert_equal(tree, tree_by_parent(proposal, budget))

    @pytest.mark.parametrize("nodes", [1, 2, 15, 63, 64, 255, 600])
    def test_malformed_parents(self, nodes: int) -> None:
        for parents, depths in malformed(nodes, "cuda"):
            assert_ancestors_equal(parents, depths)
        chain = torch.arange(-1, nodes - 1, device="cuda")[None]
        assert_ancestors_equal(chain, chain + 2)
        assert_ancestors_equal(chain.flip(1), chain + 2)

    def test_never_waits_for_the_device(self) -> None:
        token_ids, log_probs = (given.cuda() for given in make_tables(0, 15, 64))
        tree = kernel.best_first_tree_triton(token_ids, log_probs, 63)
        kernel.ancestors_triton(tree.parents, tree.depths)
        torch.cuda.set_sync_debug_mode("error")
        try:
            tree = kernel.best_first_tree_triton(token_ids, log_probs, 63)
            kernel.ancestors_triton(tree.parents, tree.depths)
        finally:
            torch.cuda.set_sync_debug_mode("default")
