"""How many nodes a round verifies: given, replayed, or a constant that gives way where trees do not pay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_ddtree import (
    DDTreeCandidateGenerator,
    DDTreeConfig,
    candidate_generator,
    capture,
    round_graph,
    tree_cache,
)
from hf_ddtree.budget import AutoBudget, Budget, ReplayedBudget, make_budget
from hf_ddtree.compat import CACHE_KEY
from hf_ddtree.draft_source import Proposal
from hf_ddtree.launched import LaunchedRound
from scripted import VOCAB, prompt_ids, scripted, tiny_drafter, tiny_target

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def distributed() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def spans(budgets: list[int]) -> list[tuple[int, int]]:
    """Numbers of nodes, and for how many rounds in a row."""
    return [(nodes, len(list(group))) for nodes, group in itertools.groupby(budgets)]


def asked_for(budget: Budget, tokens: list[int]) -> list[int]:
    """Nodes of rounds that commit these tokens where they have a tree, and one where they have none."""
    asked = []
    for count in tokens:
        asked.append(nodes := budget.nodes)
        budget.observe(nodes, count if nodes else 1)
    return asked


def test_a_number_is_that_of_each_round() -> None:
    assert asked_for(Budget(7), [1] * 500) == [7] * 500


def test_the_last_number_of_a_replay_is_that_of_all_further_rounds() -> None:
    assert asked_for(ReplayedBudget([3, 0, 63]), [1] * 6) == [3, 0, 63, 63, 63, 63]


def test_auto_gives_way_for_twice_as_many_rounds_each_time() -> None:
    found = spans(asked_for(AutoBudget(63, 1.25), [1] * 576))
    assert found == [(63, 32), (0, 64), (63, 32), (0, 128), (63, 32), (0, 256), (63, 32)]


def test_auto_looks_at_the_latest_rounds_with_trees() -> None:
    assert asked_for(AutoBudget(7, 2.0), [1, 3] * 200) == [7] * 400  # just enough
    # What many good rounds gave is forgotten 32 rounds later, and what poor ones did is after a pause.
    assert spans(asked_for(AutoBudget(7, 2.0), [9] * 100 + [1] * 93 + [2] * 100)) == [(7, 129), (0, 64), (7, 100)]


def test_a_round_that_could_have_no_tree_says_nothing_of_trees() -> None:
    budget = AutoBudget(7, 2.0)
    for _ in range(500):
        budget.observe(0, 1)
        assert budget.nodes == 7


def target_on(device: str, ranks: int | None = None) -> Any:
    return SimpleNamespace(device=torch.device(device), tp_size=ranks, parameters=lambda: iter(()))


def test_what_a_config_asks_for() -> None:
    def made(budget: Any, device: str = "cpu") -> Budget:
        return make_budget(DDTreeConfig(budget=budget), target_on(device))

    assert asked_for(made(15), [1] * 100) == [15] * 100
    assert asked_for(made([3, 0]), [1] * 3) == [3, 0, 0]
    for device, nodes, enough, poor in (
        ("cpu", 7, [2] * 40, [1] * 20),
        ("cuda", 63, [1, 1, 1, 2] * 10, [1] * 20),
        ("mps", 63, [1, 1, 1, 2] * 10, [1] * 20),
    ):
        assert spans(asked_for(made("auto", device), enough)) == [(nodes, 40)]
        assert [of for of, _ in spans(asked_for(made("auto", device), enough + poor))] == [nodes, 0]


@pytest.mark.usefixtures("distributed")
def test_ranks_that_share_a_target_never_give_trees_up() -> None:
    for ranks, nodes in ((2, [7]), (1, [7, 0]), (None, [7, 0])):
        budget = make_budget(DDTreeConfig(), target_on("cpu", ranks))
        assert [of for of, _ in spans(asked_for(budget, [1] * 60))] == nodes


def run(model: Any, ids: torch.Tensor, new: int, **options: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(5)
    out = model.generate(ids, max_new_tokens=new, return_dict_in_generate=True, **options)
    return out, torch.get_rng_state()


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
def test_a_drafter_that_is_never_right_makes_way_for_single_tokens(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_target("llama", num_hidden_layers=3)
    drafter = tiny_drafter(model, block_size=16)
    expected, state = run(model, prompt_ids(20), 300, **options)
    call = options | {"assistant_model": drafter}
    original = DDTreeCandidateGenerator.propose

    def propose(self: Any, root: torch.Tensor, position: torch.Tensor, depth: int, candidates: int) -> Any:
        _, log_probs, _ = original(self, root, position, depth, candidates)
        start = int(position) + 1
        others = expected.sequences[:, start : start + depth, None] + 1 + torch.arange(candidates)
        return Proposal(others % VOCAB, log_probs)

    monkeypatch.setattr(DDTreeCandidateGenerator, "propose", propose)
    for _ in range(2):  # the next call gives the drafter another chance
        out, after = run(model, prompt_ids(20), 300, ddtree=True, **call)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(after, state)
        stats = out.ddtree_stats
        assert set(stats.acceptance_lengths) == {1}
        assert spans(stats.budgets) == [(7, 32), (0, 64), (7, 32), (0, 128), (7, 32), (0, 11)]
        assert stats.node_counts == stats.budgets
    again, after = run(model, prompt_ids(20), 300, ddtree={"budget": stats.budgets}, **call)
    assert again.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(after, state)
    assert again.ddtree_stats.budgets == again.ddtree_stats.node_counts == stats.budgets


def test_a_good_drafter_keeps_its_trees() -> None:
    model = tiny_target("llama")
    expected, _ = run(model, prompt_ids(20), 300, **GREEDY)
    with scripted(expected.sequences, 0.7):
        out, _ = run(model, prompt_ids(20), 300, assistant_model=tiny_drafter(model), ddtree=True, **GREEDY)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.ddtree_stats.rounds > 40 and set(out.ddtree_stats.budgets[:-1]) == {7}


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
def test_another_calls_choices_are_replayed(options: dict[str, Any]) -> None:
    model = tiny_target("qwen3")
    drafter = tiny_drafter(model, block_size=16)
    expected, _ = run(model, prompt_ids(20), 120, **options)

    def stats(budget: Any) -> Any:
        with scripted(expected.sequences, 0.6):
            config = DDTreeConfig(budget=budget)
            out, _ = run(model, prompt_ids(20), 120, assistant_model=drafter, ddtree=config, **options)
        assert out.sequences.tolist() == expected.sequences.tolist()
        return out.ddtree_stats

    chosen = [7, 0, 0, 31, 3, 15, 0, 63, 1] * 30
    first = stats(chosen)
    assert first.budgets[:-1] == chosen[: first.rounds - 1]
    again = stats(first.budgets)
    assert (again.budgets, again.node_counts) == (first.budgets, first.node_counts)
    assert again.acceptance_lengths == first.acceptance_lengths
    auto = stats("auto")
    assert stats(auto.budgets).acceptance_lengths == auto.acceptance_lengths


def test_without_nodes_a_round_gives_one_token() -> None:
    model = tiny_target("llama")
    expected, _ = run(model, prompt_ids(20), 30, **GREEDY)
    out, _ = run(model, prompt_ids(20), 30, assistant_model=tiny_drafter(model), ddtree={"budget": 0}, **GREEDY)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert set(out.ddtree_stats.acceptance_lengths) == {1}
    assert set(out.ddtree_stats.budgets) == set(out.ddtree_stats.node_counts) == {0}


def test_a_long_pause_does_not_pile_up_what_the_drafter_has_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_generator, "_MOST_PENDING", 8)
    model = tiny_target("llama")
    drafter = tiny_drafter(model, sliding_window=9, layer_types=["sliding_attention", "full_attention"])
    trees = []
    for budget in ([0] * 30 + [15], [15]):
        config = DDTreeConfig(budget=budget, record_trees=True)
        out, _ = run(model, prompt_ids(20), 50, assistant_model=drafter, ddtree=config, **GREEDY)
        ends = itertools.accumulate(out.ddtree_stats.acceptance_lengths)
        trees.append(dict(zip(ends, out.ddtree_stats.trees, strict=True)))
    both = [end for end in trees[0] if end > 32 and end in trees[1]][:5]
    assert both
    for end in both:
        assert torch.equal(trees[0][end].tree.token_ids, trees[1][end].tree.token_ids)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_calls_never_give_trees_up() -> None:
    model = tiny_target("llama")
    out, _ = run(model, prompt_ids(20), 60, assistant_model=tiny_drafter(model), ddtree=True, **GREEDY)
    assert set(out.ddtree_stats.budgets[:-1]) == {7}


@pytest.mark.usefixtures("distributed")
def test_processes_that_share_no_target_choose_each_for_itself() -> None:
    model = tiny_target("llama")
    out, _ = run(model, prompt_ids(20), 60, assistant_model=tiny_drafter(model), ddtree=True, **GREEDY)
    assert set(out.ddtree_stats.budgets[:-1]) == {0, 7}


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", ["auto", [0, 7, 0, 0, 31, 3, 0, 15, 63, 0, 1] * 20, 0])
def test_steps_of_several_sizes_share_what_a_round_leaves(options: dict[str, Any], budget: Any) -> None:
    model = tiny_target("qwen2_mixed")
    drafter = tiny_drafter(model, block_size=16)
    config = DDTreeConfig(budget=budget, record_trees=True)
    for prompt, new in ((30, 90), (5, 60)):
        expected, state = run(model, prompt_ids(prompt), new, **options)
        out, after = run(model, prompt_ids(prompt), new, assistant_model=drafter, ddtree=config, **options)
        assert out.ddtree_stats.compiled.value == "yes"
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(after, state)
        # The plain loop drafts the same behind each token.
        replay = DDTreeConfig(budget=out.ddtree_stats.budgets, record_trees=True, execution="plain")
        plain, _ = run(model, prompt_ids(prompt), new, assistant_model=drafter, ddtree=replay, **options)
        assert plain.ddtree_stats.acceptance_lengths == out.ddtree_stats.acceptance_lengths
        deep = new - 16  # near the end the plain loop drafts less deep
        for mine, theirs in list(zip(out.ddtree_stats.trees, plain.ddtree_stats.trees, strict=True))[:deep]:
            assert torch.equal(mine.tree.token_ids, theirs.tree.token_ids)


def kinds(model: Any) -> list[Any]:
    """The kinds of rounds for which graphs are kept, of the drafter that was used last."""
    return list(model.__dict__["_hf_ddtree_state"].buffers.drafters[-1].kinds.values())


@pytest.mark.usefixtures("stepped")
def test_rounds_of_a_size_that_cannot_be_captured_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_release", lambda device: None)

    def fail(self: round_graph.RoundGraph) -> None:
        if self.nodes > 15:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(round_graph.RoundGraph, "capture", fail)
    launched, draft = [], LaunchedRound.draft

    def drafted(self: LaunchedRound, state: Any, nodes: int) -> Any:
        launched.append(nodes)
        return draft(self, state, nodes)

    monkeypatch.setattr(LaunchedRound, "draft", drafted)
    model = tiny_target("llama")
    expected, _ = run(model, prompt_ids(20), 30, **GREEDY)
    config = DDTreeConfig(budget=[1, 2, 3, 31, 5, 6, 7, 8])
    out, _ = run(model, prompt_ids(20), 30, assistant_model=tiny_drafter(model), ddtree=config, **GREEDY)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.ddtree_stats.budgets[:9] == [1, 2, 3, 31, 5, 6, 7, 8, 8]
    assert launched == [31]


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("budget", ["auto", [7] * 32 + [0] * 64 + [7] * 32 + [0] * 128 + [7]], ids=["auto", "list"])
def test_a_pause_whose_step_is_lost_goes_on_in_plain_rounds(budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where buffers were outgrown in it: the tree of before the pause is not verified behind another root."""
    captured = []

    def fail_later(self: round_graph.Recorded) -> None:
        if isinstance(self, round_graph.Stretch) and self.round.nodes == 0:
            captured.append(self)
            if len(captured) > 1:
                raise RuntimeError("no graph")

    monkeypatch.setattr(round_graph.Recorded, "capture", fail_later)
    monkeypatch.setattr(capture, "_release", lambda device: None)
    monkeypatch.setattr(tree_cache, "_MOST_AHEAD", 8)
    model = tiny_target("llama")
    call = GREEDY | {"assistant_model": tiny_drafter(model), "ddtree": {"budget": budget}}
    expected, _ = run(model, prompt_ids(200), 280, **GREEDY)
    out, _ = run(model, prompt_ids(200), 280, **call)
    assert len(captured) > 1
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert [nodes for nodes, _ in spans(out.ddtree_stats.budgets)][:5] == [7, 0, 7, 0, 7]
    context = out[CACHE_KEY].__dict__[candidate_generator._CONTEXT]
    assert sum(features.shape[1] for features in context.features) < 8  # no hole


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize(
    ("padding", "prompt", "new", "block", "budget"),
    [(100, 250, 300, 8, [7] * 5 + [0] * 130 + [7]), (0, 30, 200, 32, [0, 0, 0, 1] * 100)],
)
def test_a_context_that_grows_while_drafting_pauses(
    padding: int, prompt: int, new: int, block: int, budget: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs write to the buffers that it had before."""
    monkeypatch.setattr(tree_cache, "_MOST_AHEAD", 64 if padding else 16)
    monkeypatch.setattr(tree_cache, "_MIN_CAPACITY", 256 if padding else 64)
    model = tiny_target("llama")
    mask = torch.ones(1, prompt, dtype=torch.int64)
    mask[:, :padding] = 0
    options = GREEDY | {"attention_mask": mask}
    expected, _ = run(model, prompt_ids(prompt), new, **options)
    drafter = tiny_drafter(model, block_size=block)
    out, _ = run(model, prompt_ids(prompt), new, assistant_model=drafter, ddtree={"budget": budget}, **options)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.ddtree_stats.compiled.value == "yes"


@pytest.mark.usefixtures("stepped")
def test_steps_are_as_many_as_trees_differ_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    monkeypatch.setattr(round_graph.RoundGraph, "capture", lambda self: steps.append(self.nodes))
    model = tiny_target("llama")
    drafter = tiny_drafter(model, block_size=2)  # trees of as many nodes as the vocabulary has tokens
    budget = list(range(900, 930))
    run(model, prompt_ids(20), 30, assistant_model=drafter, ddtree={"budget": budget}, **GREEDY)
    assert steps == [211]
    drafter = tiny_drafter(model)
    run(model, prompt_ids(20), 30, assistant_model=drafter, ddtree={"budget": list(range(1, 30))}, **GREEDY)
    (kind,) = kinds(model)
    assert len(steps) > 20 and len(kind.graphs) == 16


@pytest.mark.usefixtures("stepped")
def test_graphs_do_not_outlast_the_numeric_modes_that_they_were_captured_in() -> None:
    model = tiny_target("llama")
    call = GREEDY | {"assistant_model": tiny_drafter(model), "ddtree": {"budget": 7}}
    kept = []
    for precision in ("highest", "high", "highest"):
        torch.set_float32_matmul_precision(precision)
        run(model, prompt_ids(20), 10, **call)
        kept.append(kinds(model)[-1])
    assert kept[0] is kept[2] is not kept[1]


def test_choices_are_replayed_over_a_rope_switch() -> None:
    model = tiny_target("phi3", switch=40)
    drafter = tiny_drafter(model)
    first, _ = run(
        model, prompt_ids(30), 40, assistant_model=drafter, ddtree={"budget": [7, 3, 1, 2, 5] * 9}, **GREEDY
    )
    replay = {"budget": first.ddtree_stats.budgets}
    again, _ = run(model, prompt_ids(30), 40, assistant_model=drafter, ddtree=replay, **GREEDY)
    assert again.ddtree_stats.budgets == first.ddtree_stats.budgets
    assert again.ddtree_stats.node_counts == first.ddtree_stats.node_counts


def test_the_context_of_a_drafter_that_was_cast_is_dropped() -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model).double()
    call = GREEDY | {"assistant_model": drafter, "ddtree": {"budget": 7}}
    first, _ = run(model, prompt_ids(12), 10, **call)
    drafter.float()
    ids = torch.cat([first.sequences, prompt_ids(5, seed=1)], dim=1)
    expected, _ = run(model, ids, 10, **GREEDY)
    out, _ = run(model, ids, 10, **call, **{CACHE_KEY: first[CACHE_KEY]})
    assert out.sequences.tolist() == expected.sequences.tolist()
