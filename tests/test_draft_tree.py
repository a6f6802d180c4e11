"""Trees are compared with DDTree's own heap as lists: the same nodes, parents, order and float32 scores."""

import heapq
import itertools
import math

import numpy as np
import pytest
import torch

from hf_ddtree import draft_tree
from hf_ddtree.draft_tree import (
    DraftTree,
    ancestor_matrix,
    best_first_tree,
    build_tree,
    chain_tree,
    expected_tokens,
    node_depths,
    static_tree,
)

KINDS = ("best_first", "chain", "static")
Nodes = list[tuple[int, int, int, float]]  # token, parent, depth, score


@pytest.fixture(autouse=True)
def bounded_plans():
    yield
    draft_tree._make_plan.cache_clear()  # a thousand budgets fill some hundred MB


def heap_tree(token_ids: torch.Tensor, log_probs: torch.Tensor, budget: int) -> Nodes:
    """DDTree's search (arXiv 2604.12989) on a `(D, K)` table: pop the best prefix, push its sibling and its child."""
    rows = log_probs.float().numpy()
    tokens = token_ids.tolist()
    nodes: Nodes = []
    popped = [0] * (len(rows) + 2)

    def push(depth, parent_rank, token_rank, parent, parent_score):
        if depth <= len(rows) and token_rank < len(tokens[0]):
            score = parent_score + rows[depth - 1, token_rank]
            heapq.heappush(heap, (-float(score), depth, parent_rank, token_rank, parent, parent_score, score))

    heap: list[tuple] = []
    push(1, 0, 0, -1, np.float32(0))
    while heap and len(nodes) < budget:
        _, depth, parent_rank, token_rank, parent, parent_score, score = heapq.heappop(heap)
        assert isinstance(score, np.float32)
        nodes.append((tokens[depth - 1][token_rank], parent, depth, float(score)))
        push(depth, parent_rank, token_rank + 1, parent, parent_score)
        push(depth + 1, popped[depth], 0, len(nodes) - 1, score)
        popped[depth] += 1
    return nodes


def sorted_tree(token_ids: torch.Tensor, log_probs: torch.Tensor, budget: int) -> Nodes:
    """The definition itself: all prefixes of one small table in the total order, the first `budget` of them."""
    rows = log_probs.float().numpy()
    levels = [[((), np.float32(0))]]
    for row in rows:
        children = [
            (-float(score + step), above, rank, (*path, rank), score + step)
            for above, (path, score) in enumerate(levels[-1])
            for rank, step in enumerate(row)
        ]
        levels.append([(path, score) for *_, path, score in sorted(children)])
    every = [
        (-float(score), depth, place, path)
        for depth, level in enumerate(levels)
        for place, (path, score) in enumerate(level)
    ]
    best = sorted(every)[1 : budget + 1]
    index = {path: i for i, (*_, path) in enumerate(best)}
    return [
        (int(token_ids[depth - 1, path[-1]]), index.get(path[:-1], -1), depth, -score)
        for score, depth, _, path in best
    ]


def as_nodes(tree: DraftTree, row: int = 0) -> Nodes:
    return list(zip(*(field[row].tolist() for field in tree), strict=True))


def naive_ancestors(parents: list[int], depths: list[int]) -> torch.Tensor:
    seen = torch.eye(len(parents) + 1, dtype=torch.bool)
    for node in range(len(parents)):
        path, at = [], node
        while 0 <= at < len(parents) and depths[at] > 0 and at not in path:
            path.append(at)
            at = parents[at]
        if at == -1 and path:
            seen[node + 1, 0] = True
            seen[node + 1, [k + 1 for k in path]] = True
    return seen


def normal(shape, generator):
    return (2 * torch.randn(shape, generator=generator)).log_softmax(-1)


def peaked(shape, generator):
    return (60 * torch.randn(shape, generator=generator)).log_softmax(-1)  # the best is exactly 0, or nearly


def rounded(shape, generator):
    return (2 * normal(shape, generator)).round() / 2


def all_tied(shape, generator):
    return torch.full(shape, -math.log(shape[-1]))


def all_zero(shape, generator):
    return torch.zeros(shape)


def one_hot(shape, generator):
    hot = torch.randint(shape[-1], (*shape[:-1], 1), generator=generator)
    return torch.full(shape, -math.inf).scatter(-1, hot, 0.0)


def infinite_tail(shape, generator):
    cut = torch.rand((*shape[:-1], 1), generator=generator) * shape[-1]
    return normal(shape, generator).sort(descending=True).values.masked_fill(torch.arange(shape[-1]) > cut, -math.inf)


def nothing_possible(shape, generator):
    return torch.full(shape, -math.inf)


def bfloat16(shape, generator):
    return normal(shape, generator).bfloat16().float()


def near_flat(shape, generator):
    return (1e-6 * torch.randn(shape, generator=generator)).log_softmax(-1)


def equal_rows(shape, generator):
    return normal((1, shape[-1]), generator).expand(shape).contiguous()


def zero_then_normal(shape, generator):
    log_probs = normal(shape, generator)
    log_probs[::2] = all_zero(log_probs[::2].shape, generator)
    return log_probs


TABLES = (
    normal,
    peaked,
    rounded,
    all_tied,
    all_zero,
    one_hot,
    infinite_tail,
    nothing_possible,
    bfloat16,
    near_flat,
    equal_rows,
    zero_then_normal,
)


def make_tables(seed: int, depth: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One table of each kind, `(kinds, D, V)`, sorted as a drafter sorts them."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.stack([make((depth, vocab), generator) for make in TABLES])
    log_probs, order = raw.sort(dim=-1, descending=True, stable=True)
    shuffled = torch.rand(raw.shape, generator=generator).argsort(-1)
    return shuffled.gather(-1, order), log_probs


def assert_equal_to_heap(token_ids, log_probs, budgets, heaps=None):
    """On all tables at once, as a batch; the heap's first n nodes are its tree of n nodes."""
    heaps = heaps or [heap_tree(*table, max(budgets)) for table in zip(token_ids, log_probs, strict=True)]
    for budget in budgets:
        width = min(budget, token_ids.shape[-1])
        tree = best_first_tree(token_ids[..., :width], log_probs[..., :width], budget)
        for row, nodes in enumerate(heaps):
            assert as_nodes(tree, row) == nodes[:budget], (TABLES[row % len(TABLES)].__name__, budget)


def test_the_heap_pops_prefixes_in_their_total_order():
    for seed, (depth, vocab) in enumerate([(1, 5), (2, 6), (3, 4), (4, 3), (5, 2), (6, 2)]):
        for table in zip(*make_tables(seed, depth, vocab), strict=True):
            everything = sum(vocab**d for d in range(1, depth + 1))
            assert heap_tree(*table, everything) == sorted_tree(*table, everything)


@pytest.mark.parametrize("depth", [1, 2, 7, 15])
def test_a_chain_is_the_best_tree_of_one_candidate_a_depth(depth):
    """So that a kernel for the one serves the other."""
    token_ids, log_probs = make_tables(depth, depth, 9)
    for budget in (1, depth, depth + 5):
        chain, best = (
            chain_tree(token_ids, log_probs, budget),
            best_first_tree(token_ids[..., :1], log_probs[..., :1], budget),
        )
        assert all(torch.equal(a, b) for a, b in zip(chain, best, strict=True))


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 9, 12, 15])
def test_best_first_equals_the_heap_at_every_small_budget(depth):
    for vocab in (1, 2, 3, 7, 64):
        assert_equal_to_heap(*make_tables(depth * 100 + vocab, depth, vocab), range(1, 65))


# Each residue of the budget has its own depth and tables; together they cover 1..1023.
@pytest.mark.parametrize("residue", range(15))
def test_best_first_equals_the_heap_at_every_budget(residue):
    for vocab in (1100, 40):
        assert_equal_to_heap(*make_tables(residue, residue + 1, vocab), range(residue or 15, 1024, 15))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 130))
def test_best_first_equals_the_heap_on_many_tables(seed):
    for depth, vocab in itertools.product((2, 5, 8, 15), (2, 11, 300)):
        assert_equal_to_heap(*make_tables(seed, depth, vocab), range(1 + seed % 3, 300, 3))


def test_best_first_has_all_prefixes_if_the_budget_allows():
    token_ids, log_probs = make_tables(0, 3, 4)
    for budget in (83, 84, 85, 500):
        assert best_first_tree(token_ids, log_probs, budget).token_ids.shape == (len(TABLES), min(budget, 84))
    assert best_first_tree(token_ids[:, :0], log_probs[:, :0], 5).token_ids.shape == (len(TABLES), 0)


def test_best_first_takes_other_float_types_and_adds_in_float32():
    token_ids, log_probs = make_tables(1, 6, 20)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        tree = best_first_tree(token_ids, log_probs.to(dtype), 50)
        assert tree.log_probs.dtype == torch.float32
        expected = best_first_tree(token_ids, log_probs.to(dtype).float(), 50)
        assert all(torch.equal(got, want) for got, want in zip(tree, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_batch_rows_equal_single_ones(kind):
    token_ids, log_probs = make_tables(2, 8, 30)
    batch = build_tree(kind, token_ids, log_probs, 40)
    for row in range(len(token_ids)):
        assert as_nodes(batch, row) == as_nodes(build_tree(kind, token_ids[[row]], log_probs[[row]], 40))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1, 2, 7, 15, 63, 255])
def test_nodes_are_in_score_order_and_closed_under_parents(kind, budget):
    for depth, vocab in itertools.product((1, 4, 15), (1, 3, 40)):
        token_ids, log_probs = make_tables(depth * 50 + vocab, depth, vocab)
        tree = build_tree(kind, token_ids, log_probs, budget)
        assert [field.dtype for field in tree] == [torch.int64] * 3 + [torch.float32]
        for row in range(len(token_ids)):
            nodes = as_nodes(tree, row)
            assert [(-score, level) for *_, level, score in nodes] == sorted(
                (-score, level) for *_, level, score in nodes
            )
            for node, (token, parent, level, score) in enumerate(nodes):
                assert -1 <= parent < node
                *_, above, prefix = nodes[parent] if parent >= 0 else (0, 0.0)
                assert level == above + 1
                ranks = (token_ids[row, level - 1] == token).nonzero().flatten()
                assert score == float(np.float32(prefix) + log_probs[row, level - 1, ranks].numpy()[0])
            assert len({(parent, token) for token, parent, *_ in nodes}) == len(nodes)


def test_the_best_nodes_are_the_tree_of_a_smaller_budget():
    token_ids, log_probs = make_tables(3, 7, 200)
    for kind in ("best_first", "chain"):
        tree = build_tree(kind, token_ids, log_probs, 200)
        for n in range(1, 200):
            for got, want in zip(tree.first(n), build_tree(kind, token_ids, log_probs, n), strict=True):
                assert torch.equal(got, want)


def test_chain_is_the_first_token_of_each_depth():
    token_ids, log_probs = make_tables(4, 9, 30)
    for budget in (1, 5, 9, 63):
        tree = chain_tree(token_ids, log_probs, budget)
        length = min(budget, 9)
        for row in range(len(token_ids)):
            scores = np.cumsum(log_probs[row, :length, 0].numpy(), dtype=np.float32).tolist()
            expected = zip(
                token_ids[row, :length, 0].tolist(), range(-1, length - 1), range(1, length + 1), scores, strict=True
            )
            assert as_nodes(tree, row) == list(expected)


def rank_paths(tree: DraftTree, token_ids: torch.Tensor, row: int) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent, depth, _ in as_nodes(tree, row):
        rank = token_ids[row, depth - 1].tolist().index(token)
        paths.append(((*paths[parent],) if parent >= 0 else ()) + (rank,))
    return set(paths)


@pytest.mark.parametrize(("depth", "vocab", "budget"), [(1, 9, 4), (5, 2, 31), (7, 40, 15), (15, 64, 63), (3, 3, 500)])
def test_static_shape_is_the_best_tree_of_its_prior(depth, vocab, budget):
    ranks = torch.arange(vocab).expand(1, depth, vocab)
    prior = math.log(0.7) + ranks * math.log(0.3)
    shape = rank_paths(best_first_tree(ranks, prior, budget), ranks, 0)
    assert len(shape) == min(budget, sum(vocab**d for d in range(1, depth + 1)))
    token_ids, log_probs = make_tables(5, depth, vocab)
    tree = static_tree(token_ids, log_probs, budget)
    for row in range(len(token_ids)):
        assert rank_paths(tree, token_ids, row) == shape


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_log_probs_still_give_a_tree(kind):
    generator = torch.Generator().manual_seed(6)
    token_ids, log_probs = make_tables(6, 8, 20)
    strange = torch.tensor([math.nan, math.inf, -math.inf, 3.0, -3.4e38, 0.0, -0.0])
    for share in (0.05, 0.5, 1.0):
        drawn = strange[torch.randint(len(strange), log_probs.shape, generator=generator)]
        table = torch.where(torch.rand(log_probs.shape, generator=generator) < share, drawn, log_probs)
        tree = build_tree(kind, token_ids, table, 30)
        assert not tree.log_probs.isnan().any()
        assert tree.log_probs.max() <= 0
        assert (tree.parents < torch.arange(tree.parents.shape[1])).all()
        assert (tree.log_probs[:, 1:] <= tree.log_probs[:, :-1]).all()
        assert torch.equal(node_depths(ancestor_matrix(tree.parents, tree.depths))[:, 1:], tree.depths)


def test_nan_counts_as_impossible():
    token_ids, log_probs = make_tables(7, 6, 12)
    log_probs[:, 3, 5:] = math.nan
    tree = best_first_tree(token_ids, log_probs, 60)
    expected = best_first_tree(token_ids, log_probs.nan_to_num(nan=-math.inf, neginf=-math.inf), 60)
    assert all(torch.equal(got, want) for got, want in zip(tree, expected, strict=True))


def test_build_tree_names_the_kinds():
    token_ids, log_probs = make_tables(8, 4, 6)
    for kind, build in zip(KINDS, (best_first_tree, chain_tree, static_tree), strict=True):
        for got, want in zip(build_tree(kind, token_ids, log_probs, 9), build(token_ids, log_probs, 9), strict=True):
            assert torch.equal(got, want)
    with pytest.raises(ValueError, match="'best_first', 'chain' or 'static', got 'bushy'"):
        build_tree("bushy", token_ids, log_probs, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_are_named(kind):
    token_ids, log_probs = make_tables(9, 4, 6)
    with pytest.raises(ValueError, match="budget must be at least 1, got 0"):
        build_tree(kind, token_ids, log_probs, 0)
    with pytest.raises(ValueError, match=r"must both be \(batch, depth, candidates\)"):
        build_tree(kind, token_ids[0], log_probs[0], 5)
    with pytest.raises(ValueError, match=r"must both be \(batch, depth, candidates\)"):
        build_tree(kind, token_ids[:, :2], log_probs, 5)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 15, 16, 63, 200])
def test_ancestors_and_depths_equal_a_walk_to_the_root(budget):
    for kind in KINDS:
        tree = build_tree(kind, *make_tables(10 + budget, 9, 50), budget)
        ancestors = ancestor_matrix(tree.parents, tree.depths)
        assert torch.equal(node_depths(ancestors)[:, 1:], tree.depths)
        assert not node_depths(ancestors)[:, 0].any()
        for row in range(len(ancestors)):
            assert torch.equal(ancestors[row], naive_ancestors(tree.parents[row].tolist(), tree.depths[row].tolist()))


def test_a_chain_of_any_length_has_all_its_ancestors():
    for length in range(1, 70):
        parents = torch.arange(-1, length - 1)[None]
        assert torch.equal(ancestor_matrix(parents, parents + 2)[0], torch.ones(length + 1, length + 1).tril().bool())


def test_padding_nodes_see_only_themselves_and_are_seen_by_nobody():
    tree = best_first_tree(*make_tables(11, 5, 10), 11)
    padded = tree.pad(16)
    for field, fill in zip(padded, (0, -1, 0, -math.inf), strict=True):
        assert field.shape == (len(TABLES), 16)
        assert (field[:, 11:] == fill).all()
    for got, want in zip(padded.first(11), tree, strict=True):
        assert torch.equal(got, want)
        assert got.dtype == want.dtype
    ancestors = ancestor_matrix(padded.parents, padded.depths)
    assert torch.equal(ancestors[:, :12, :12], ancestor_matrix(tree.parents, tree.depths))
    assert not ancestors[:, :12, 12:].any()
    assert torch.equal(ancestors[:, 12:], torch.eye(17, dtype=torch.bool)[12:].expand(len(TABLES), -1, -1))
    assert not node_depths(ancestors)[:, 12:].any()
    assert all(torch.equal(got, want) for got, want in zip(tree.pad(11), tree, strict=True))
    with pytest.raises(ValueError, match="11 nodes cannot be padded to 10"):
        tree.pad(10)


def test_malformed_parents_cut_nodes_off_and_nothing_else():
    generator = torch.Generator().manual_seed(12)
    for nodes in (1, 2, 5, 15, 40):
        for low, high in ((-1, nodes), (-4, nodes + 4), (-(2**62), 2**62)):
            parents = torch.randint(low, high, (20, nodes), generator=generator)
            depths = torch.randint(0, 4, (20, nodes), generator=generator)
            ancestors = ancestor_matrix(parents, depths)
            for row in range(len(parents)):
                assert torch.equal(ancestors[row], naive_ancestors(parents[row].tolist(), depths[row].tolist()))
            # No two nodes see each other: there are no cycles.
            both = ancestors & ancestors.transpose(1, 2)
            assert torch.equal(both, torch.eye(nodes + 1, dtype=torch.bool).expand_as(both))
            # A depth is one more than the parent's, for all that the root is an ancestor of.
            levels = node_depths(ancestors)
            above = levels.gather(1, (parents + 1).clamp(0, nodes))
            assert torch.where(ancestors[:, 1:, 0], levels[:, 1:] == above + 1, levels[:, 1:] == 0).all()


def test_expected_tokens_is_one_plus_the_probabilities_of_the_best_nodes():
    tree = best_first_tree(*make_tables(13, 6, 20), 31).pad(47)
    expected = expected_tokens(tree)
    assert expected.shape == (len(TABLES), 48)
    assert expected.dtype == torch.float32
    probabilities = tree.log_probs.double().exp().numpy()
    for n in range(48):
        np.testing.assert_allclose(expected[:, n], 1 + probabilities[:, :n].sum(1), rtol=1e-6)
    chain = torch.full((1, 4, 1), math.log(0.5))
    assert torch.allclose(
        expected_tokens(chain_tree(torch.zeros_like(chain).long(), chain, 4)),
        torch.tensor([[1.0, 1.5, 1.75, 1.875, 1.9375]]),
    )


def test_the_index_tables_serve_inference_mode_and_autograd_alike():
    token_ids, log_probs = make_tables(14, 4, 8)
    with torch.inference_mode():
        best_first_tree(token_ids, log_probs, 12)
    log_probs = log_probs[:1].requires_grad_()
    best_first_tree(token_ids[:1], log_probs, 12).log_probs.exp().sum().backward()
    assert log_probs.grad is not None


def round_of(kind, token_ids, log_probs):
    tree = build_tree(kind, token_ids, log_probs, 15).pad(31)
    ancestors = ancestor_matrix(tree.parents, tree.depths)
    return *tree, ancestors, node_depths(ancestors), expected_tokens(tree)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_compile_without_a_graph_break(kind):
    table = make_tables(15, 5, 15)
    compiled = torch.compile(round_of, fullgraph=True, dynamic=False, backend="aot_eager")
    for got, want in zip(compiled(kind, *table), round_of(kind, *table), strict=True):
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_cuda_graph_gives_the_trees_of_the_cpu(kind):
    tables = [make_tables(seed, 15, 64) for seed in range(16, 20)]
    inputs = [tensor.cuda() for tensor in tables[0]]
    round_of(kind, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = round_of(kind, *inputs)
    for table in tables:
        for static, fresh in zip(inputs, table, strict=True):
            static.copy_(fresh)
        graph.replay()
        for got, want in zip(outputs[:-1], round_of(kind, *table)[:-1], strict=True):
            assert torch.equal(got.cpu(), want)
