"""How many nodes a round verifies: learned, replayed, and the same whatever the clock says where that is asked."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch

from hf_ddtree import DDTreeConfig, candidate_generator, capture, compiled, decoding, recorded, tree_cache
from hf_ddtree.budget import Budget, Experience, LearnedBudget, ReplayedBudget, least_cost, promises
from hf_ddtree.compat import CACHE_KEY
from hf_ddtree.draft_tree import DraftTree, ancestor_matrix, best_first_tree, node_depths
from hf_ddtree.logits_process import follow
from hf_ddtree.verifier import Verifier
from scripted import prompt_ids, scripted, tiny_drafter, tiny_target

SIZES = (0, 3, 7, 15, 31, 63)
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}


def flat(nodes: int) -> float:
    """A device that waits for its memory."""
    return 1.0 + 0.002 * nodes + 0.1 * (nodes > 0)


def steep(nodes: int) -> float:
    """A device that pays for each node."""
    return 1.0 + 0.03 * nodes + 0.2 * (nodes > 0)


def rounds_of(drafter: str, seed: int = 0) -> Iterator[tuple[DraftTree, Callable[[int], list[int]]]]:
    """Trees, and the rows that the target accepts of their best n nodes."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = {"useless": 2.0, "fair": 2.0, "nearly perfect": 12.0}[drafter]
    while True:
        logits = sharpness * torch.randn(1, 15, 64, generator=generator).sort(dim=-1, descending=True)[0]
        log_probs = logits.log_softmax(-1)
        truth = torch.multinomial(log_probs[0].exp(), 1, generator=generator)[:, 0]
        if drafter == "useless":  # and sure of itself
            truth = truth + 64
        tree = best_first_tree(torch.arange(64).expand(1, 15, -1), log_probs, 63)

        def accepted(nodes: int, tree: DraftTree = tree, truth: torch.Tensor = truth) -> list[int]:
            tree = tree.first(nodes)
            ancestors = ancestor_matrix(tree.parents, tree.depths)
            depths = node_depths(ancestors)
            choices = torch.nn.functional.pad(truth, (0, 1), value=-1)[None].gather(1, depths)
            rows, _ = follow(choices, tree, ancestors, depths, 16)
            return [row for row in rows[0].tolist() if row >= 0]

        yield tree, accepted


def decode(
    budget: Budget,
    cost: Callable[[int], float],
    drafter: str,
    rounds: int,
    seed: int = 0,
    held_up: Collection[int] = (),
    length: int = 100,
    steps: bool = False,
) -> list[tuple[int, int, float]]:
    """Size, tokens and seconds of simulated rounds, some of which something else holds up.

    With `steps`, a round leaves the next no larger a tree than the budget asks for, as captured ones do.
    """
    result: list[tuple[int, int, float]] = []
    noise = torch.Generator().manual_seed(seed)
    for _, (tree, accepted) in zip(range(rounds), rounds_of(drafter, seed), strict=False):
        drafted = tree.first(budget.next_tree(result[-1][0])) if steps and result else tree
        nodes = budget.cut(drafted)[1] if budget.drafts else 0
        assert nodes <= drafted.token_ids.shape[1]
        rows = accepted(nodes)
        length += len(rows)
        late, jitter = torch.rand(2, generator=noise).tolist()
        seconds = cost(nodes) * (1 + (0.5 if late < 0.1 else 0.0) + 0.02 * jitter)
        budget.observe(nodes, rows, seconds * (4 if len(result) in held_up else 1), length)
        result.append((nodes, len(rows), cost(nodes)))
    return result


def speed(rounds: list[tuple[int, int, float]]) -> float:
    return sum(tokens for _, tokens, _ in rounds) / sum(seconds for *_, seconds in rounds)


@pytest.mark.parametrize("drafter", ["useless", "fair", "nearly perfect"])
@pytest.mark.parametrize("cost", [flat, steep])
@pytest.mark.parametrize("steps", [False, True])
def test_finds_the_best_size_and_stays_there(steps: bool, cost: Callable[[int], float], drafter: str) -> None:
    budget = LearnedBudget(SIZES, 15, Experience(SIZES), 100, captured=False)
    rounds = decode(budget, cost, drafter, 600, steps=steps)[200:]
    fixed = {size: speed(decode(Budget((size,)), cost, drafter, 600)[200:]) for size in SIZES}
    best = max(SIZES, key=lambda size: fixed[size])
    usual, _ = Counter(size for size, *_ in rounds).most_common(1)[0]
    assert abs(SIZES.index(usual) - SIZES.index(best)) <= 1
    assert speed(rounds) >= 0.97 * fixed[best]


@pytest.mark.parametrize("cost", [flat, steep])
def test_no_size_is_tried_for_ever(cost: Callable[[int], float]) -> None:
    experience = Experience(SIZES)
    never = {0, 63} if cost is steep else {0, 3}  # the best
    tried = 0
    for _ in range(5):
        rounds = decode(LearnedBudget(SIZES, 15, experience, 100, captured=False), cost, "nearly perfect", 150)
        tried += sum(size in never for size, *_ in rounds)
    # A size that was not seen for long is learned anew, after twice as many rounds each time.
    assert tried <= 3 * len(never) * (len(experience.seconds) + 3)


@pytest.mark.parametrize("cost", [flat, steep])
@pytest.mark.parametrize("steps", [False, True])
def test_short_answers_to_prompts_of_all_lengths_lose_nothing_by_trying(
    steps: bool, cost: Callable[[int], float]
) -> None:
    """A text of another magnitude is no reason to try all sizes anew, and a size being tried says little of trees."""

    def answer_all(make: Callable[[int], Budget]) -> float:
        rounds = []
        for prompt, length in enumerate((40, 300, 60, 100, 600, 130, 40, 250) * 4):
            drafter = "fair" if prompt % 4 else "nearly perfect"
            slower = 1 + length / 4000
            rounds += decode(
                make(length), lambda n: cost(n) * slower, drafter, 25, prompt, length=length, steps=steps  # noqa: B023
            )  # fmt: skip
        return speed(rounds)

    experience = Experience(SIZES)
    learned = answer_all(lambda length: LearnedBudget(SIZES, 15, experience, length, captured=False))
    assert learned >= 0.97 * max(answer_all(lambda length, size=size: Budget((size,))) for size in SIZES)


def test_a_round_leaves_the_next_a_tree_that_is_one_size_larger() -> None:
    learned = LearnedBudget(SIZES, 15, Experience(SIZES), 100, captured=True)
    assert [learned.next_tree(nodes) for nodes in SIZES] == [3, 7, 15, 31, 63, 63]
    assert [Budget([size]).next_tree(size) for size in SIZES] == list(SIZES)
    assert ReplayedBudget([3, 0, 63]).next_tree(3) == 63


def test_costs_of_untried_sizes() -> None:
    experience = Experience(SIZES)

    def see(magnitude: int, costs: dict[int, float]) -> None:
        for size, cost in costs.items():
            for _ in range(3):
                experience.add(magnitude, size, cost)

    see(7, {15: 20.0, 31: 30.0})
    costs = experience.costs(7, SIZES)
    assert costs[15] == 20 and costs[31] == 30
    assert costs[63] == pytest.approx(0.9 * 50) and costs[7] == pytest.approx(0.9 * 15)
    assert costs[0] == pytest.approx(0.5 * 20)
    # At another length costs are in the same proportion, as far as sizes are known there.
    assert experience.costs(9, (15, 31)) == {15: 20, 31: 30}
    see(9, {15: 40.0})
    assert experience.costs(9, (15, 31)) == {15: 40, 31: 60}
    # A line that falls is noise: rounds of more nodes take no less.
    see(7, {7: 25.0})
    assert least_cost(63, {7: 25.0, 15: 20.0}) == 20


@pytest.mark.parametrize("start", [0, 3, 8])
@pytest.mark.parametrize(("cost", "drafter"), [(flat, "nearly perfect"), (steep, "fair"), (flat, "useless")])
def test_what_held_up_the_first_rounds_is_forgotten(cost: Callable[[int], float], drafter: str, start: int) -> None:
    experience = Experience(SIZES)
    budget = LearnedBudget(SIZES, 15, experience, 100, captured=False)
    decode(budget, cost, drafter, 500, held_up=range(start, start + 10))
    rounds = decode(LearnedBudget(SIZES, 15, experience, 100, captured=False), cost, drafter, 300)[100:]
    best = max(speed(decode(Budget((size,)), cost, drafter, 300)[100:]) for size in SIZES)
    assert speed(rounds) >= 0.95 * best


@pytest.mark.parametrize("drafter", ["fair", "nearly perfect"])
@pytest.mark.parametrize("cost", [flat, steep])
def test_what_slows_all_rounds_for_a_while_changes_no_choice(cost: Callable[[int], float], drafter: str) -> None:
    """As other programs do on the same machine."""
    slow = [number for number in range(100, 800) if number % 100 < 30]
    rounds = decode(LearnedBudget(SIZES, 15, Experience(SIZES), 100, captured=False), cost, drafter, 800, held_up=slow)
    best = max(speed(decode(Budget((size,)), cost, drafter, 800)[100:]) for size in SIZES)
    assert speed(rounds[100:]) >= 0.95 * best


def test_a_machine_that_stays_slower_has_other_costs() -> None:
    experience = Experience(SIZES)
    for _ in range(20):
        experience.add(7, 15, 10.0)
    for _ in range(20):
        experience.add(7, 15, 30.0)
    assert experience.cost(7, 15) == 10 and experience.pace == 3
    for _ in range(30):
        experience.add(7, 15, 30.0)
    assert experience.cost(7, 15) == 30 and experience.pace == 1


def test_few_poor_rounds_do_not_end_drafting_where_earlier_calls_gained() -> None:
    experience = Experience(SIZES)
    decode(LearnedBudget(SIZES, 15, experience, 100, captured=False), flat, "nearly perfect", 300)
    budget = LearnedBudget(SIZES, 15, experience, 100, captured=False)
    trees, lasted = rounds_of("useless"), 0
    while budget.drafts:
        nodes = budget.cut(next(trees)[0])[1]
        budget.observe(nodes, [0], flat(nodes), 100)
        lasted += 1
    assert 20 <= lasted <= 50


def test_one_round_that_is_held_up_does_not_end_drafting() -> None:
    budget = LearnedBudget(SIZES, 15, Experience(SIZES), 100, captured=False)
    for number, (tree, accepted) in enumerate(itertools.islice(rounds_of("nearly perfect"), 100)):
        assert budget.drafts
        nodes = budget.cut(tree)[1]
        budget.observe(nodes, accepted(nodes), 200 * flat(nodes) if number == 50 else flat(nodes), 100)


def test_drafting_pauses_longer_each_time() -> None:
    budget = LearnedBudget(SIZES, 15, Experience(SIZES), 100, captured=False)
    sizes = [size for size, *_ in decode(budget, flat, "useless", 1000)]
    first, *pauses = [len(list(group)) for size, group in itertools.groupby(sizes) if size == 0]
    assert first == 3  # what single tokens cost
    assert pauses[0] >= 64 and all(b > 1.5 * a for a, b in itertools.pairwise(pauses[:-1]))
    assert sizes[0] == 15  # a new call gives the drafter another chance
    assert sum(size > 0 for size in sizes) < 60


def test_a_graph_is_captured_only_where_that_takes_no_longer_than_decoding_has() -> None:
    experience = Experience(SIZES)
    budget = LearnedBudget(SIZES, 15, experience, 100, captured=True)
    ready: list[int] = []
    budget.ready = ready
    spent = 0.0
    for tree, accepted in itertools.islice(rounds_of("fair"), 400):
        nodes = budget.cut(tree)[1]
        if nodes not in ready:
            assert not ready or experience.capturing <= experience.decoding
            ready.append(nodes)
            spent += 50.0
            budget.note_captured(nodes, 50.0)
        budget.observe(nodes, accepted(nodes), flat(nodes), 100)
    assert len(ready) > 2
    # Where buffers have grown, what was compiled may be captured again.
    experience.capturing = float("inf")
    longer = LearnedBudget(SIZES, 15, experience, 1000, captured=True)
    longer.ready = [15]
    chosen = set()
    for tree, accepted in itertools.islice(rounds_of("fair"), 100):
        chosen.add(nodes := longer.cut(tree)[1])
        longer.observe(nodes, accepted(nodes), flat(nodes), 1000)
    assert chosen - {15} and chosen <= set(ready)
    # What cannot be captured is no longer asked for.
    for size in SIZES[1:-1]:
        budget.note_captured(size, None)
    budget.ready = [63]
    assert {budget.cut(tree)[1] for tree, _ in itertools.islice(rounds_of("fair"), 50)} == {63}


def test_promises_count_the_root_and_end_with_the_tree() -> None:
    tree, _ = next(rounds_of("fair"))
    expected = promises(tree.first(20), SIZES)[0].tolist()
    assert expected[0] == 1
    assert expected == sorted(expected)
    assert expected[-1] == expected[-2] == pytest.approx(1 + float(tree.first(20).log_probs.exp().sum()))


def run(model: Any, ids: torch.Tensor, new: int, **options: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(5)
    out = model.generate(ids, max_new_tokens=new, return_dict_in_generate=True, **options)
    return out, torch.get_rng_state()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[int], float]]:
    """A clock that goes on with each forward over a tree, by what is put into the list."""
    now, cost = [0.0], [flat]
    original = Verifier.verify

    def verify(self: Verifier, token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        now[0] += cost[0](token_ids.shape[1] - 1)
        return original(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(Verifier, "verify", verify)
    monkeypatch.setattr(decoding, "clock", lambda: now[0])
    return cost


@pytest.mark.parametrize("useful", [False, True])
@pytest.mark.parametrize(("cost", "options"), [(flat, GREEDY), (steep, GREEDY), (steep, SAMPLING)])
def test_learned_in_generate(clock: Any, cost: Any, options: dict[str, Any], useful: bool) -> None:
    clock[0] = cost
    model = tiny_target("llama", num_hidden_layers=3)
    drafter = tiny_drafter(model, block_size=16)  # drafts nonsense
    expected, state = run(model, prompt_ids(20), 300, **options)
    with scripted(expected.sequences, 0.97) if useful else contextlib.nullcontext():
        for _ in range(2):
            out, after = run(model, prompt_ids(20), 300, assistant_model=drafter, ddtree=True, **options)
            assert out.sequences.tolist() == expected.sequences.tolist()
            assert torch.equal(after, state)
        budgets = Counter(out.ddtree_stats.budgets)
        assert set(budgets) <= set(SIZES)
        usual = budgets.most_common(1)[0][0]
        assert usual in (7, 15, 31) if useful else usual == 0
        # A good drafter is used, a useless one costs little.
        seconds = sum(cost(nodes) for nodes in out.ddtree_stats.node_counts)
        assert seconds < 300 * (0.4 if useful else 1.1)


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
    learned = stats("auto")
    assert stats(learned.budgets).acceptance_lengths == learned.acceptance_lengths


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


def test_where_results_must_not_depend_on_time_the_budget_is_fixed() -> None:
    model = tiny_target("llama")
    torch.use_deterministic_algorithms(True)
    try:
        out, _ = run(model, prompt_ids(20), 60, assistant_model=tiny_drafter(model), ddtree=True, **GREEDY)
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(out.ddtree_stats.budgets[:-1]) == {15}


def test_processes_that_share_no_target_learn_each_for_itself() -> None:
    model = tiny_target("llama")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        out, _ = run(model, prompt_ids(20), 60, assistant_model=tiny_drafter(model), ddtree=True, **GREEDY)
    finally:
        torch.distributed.destroy_process_group()
    assert set(out.ddtree_stats.budgets[:-1]) > {15}


def test_what_was_learned_stays_with_the_pair(clock: Any) -> None:
    clock[0] = steep
    model = tiny_target("llama")
    drafter = tiny_drafter(model, block_size=16)
    call = GREEDY | {"assistant_model": drafter, "ddtree": True}
    expected, _ = run(model, prompt_ids(20), 200, **GREEDY)
    with scripted(expected.sequences, 0.6):
        first, _ = run(model, prompt_ids(20), 200, **call)
        second, _ = run(model, prompt_ids(20), 200, **call)
        other, _ = run(copy.deepcopy(model), prompt_ids(20), 200, **call)
    assert first.ddtree_stats.budgets[:3] == other.ddtree_stats.budgets[:3] == [15] * 3
    experiences = model.__dict__["_hf_ddtree_state"].experiences
    (experience,) = experiences[drafter].values()
    trees = [sum(nodes > 0 for nodes in out.ddtree_stats.budgets[:-1]) for out in (first, second)]  # the last: unseen
    assert experience.rounds == sum(trees)
    assert len(experiences) == 1
    del drafter, call
    gc.collect()
    assert len(experiences) == 0


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", ["auto", [0, 7, 0, 0, 31, 3, 0, 15, 63, 0, 1] * 20, 0])
def test_steps_of_several_sizes_share_what_a_round_leaves(
    options: dict[str, Any], budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_ddtree.budget.CAPTURE_SHARE", float("inf"))
    model = tiny_target("qwen2_mixed")
    drafter = tiny_drafter(model, block_size=16)
    config = DDTreeConfig(budget=budget, record_trees=True)
    for prompt, new in ((30, 90), (5, 60)):
        expected, state = run(model, prompt_ids(prompt), new, **options)
        out, after = run(model, prompt_ids(prompt), new, assistant_model=drafter, ddtree=config, **options)
        assert out.ddtree_stats.path.startswith("compiled")
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(after, state)
        # The plain loop drafts the same behind each token.
        replay = DDTreeConfig(budget=out.ddtree_stats.budgets, record_trees=True, execution="plain")
        plain, _ = run(model, prompt_ids(prompt), new, assistant_model=drafter, ddtree=replay, **options)
        assert plain.ddtree_stats.acceptance_lengths == out.ddtree_stats.acceptance_lengths
        deep = new - 16  # near the end the plain loop drafts less deep
        for mine, theirs in list(zip(out.ddtree_stats.trees, plain.ddtree_stats.trees, strict=True))[:deep]:
            assert torch.equal(mine.tree.token_ids, theirs.tree.token_ids)


@pytest.mark.usefixtures("stepped")
def test_a_size_that_cannot_be_captured_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_ddtree.budget.CAPTURE_SHARE", float("inf"))
    monkeypatch.setattr(capture, "_release", lambda device: None)

    def fail(self: compiled.Step) -> None:
        if self.nodes > 15:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(compiled.Step, "capture", fail)
    model = tiny_target("llama")
    expected, _ = run(model, prompt_ids(20), 100, **GREEDY)
    out, _ = run(model, prompt_ids(20), 100, assistant_model=tiny_drafter(model), ddtree=True, **GREEDY)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.ddtree_stats.path.startswith("compiled")
    assert max(out.ddtree_stats.budgets) <= 15
    # A list goes on where a size failed, in plain rounds.
    config = DDTreeConfig(budget=[1, 2, 3, 31, 5, 6, 7, 8])
    out, _ = run(model, prompt_ids(20), 30, assistant_model=tiny_drafter(model), ddtree=config, **GREEDY)
    assert out.sequences.tolist() == expected.sequences[:, :50].tolist()
    assert out.ddtree_stats.budgets[:9] == [1, 2, 3, 31, 5, 6, 7, 8, 8]


@pytest.mark.usefixtures("stepped")
def test_a_pause_whose_step_is_lost_goes_on_in_plain_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where buffers were outgrown in it: the tree of before the pause is not verified behind another root."""
    now, captured = [0.0], []

    def slow_trees(self: compiled.Step) -> Any:
        now[0] += 20 if self.drafts else 1
        return original(self)

    def fail_later(self: recorded.Recorded) -> None:
        if isinstance(self, compiled.Step) and not self.drafts:
            captured.append(self)
            if len(captured) > 1:
                raise RuntimeError("no graph")

    original = compiled.Step.run
    monkeypatch.setattr(compiled.Step, "run", slow_trees)
    monkeypatch.setattr(recorded.Recorded, "capture", fail_later)
    monkeypatch.setattr(capture, "_release", lambda device: None)
    monkeypatch.setattr(decoding, "clock", lambda: now[0])
    monkeypatch.setattr(tree_cache, "_MOST_AHEAD", 8)
    model = tiny_target("llama")
    expected, _ = run(model, prompt_ids(200), 300, **GREEDY)
    out, _ = run(model, prompt_ids(200), 300, assistant_model=tiny_drafter(model), ddtree=True, **GREEDY)
    assert len(captured) > 1
    assert out.sequences.tolist() == expected.sequences.tolist()
    context = out[CACHE_KEY].__dict__[candidate_generator._CONTEXT]
    assert sum(features.shape[1] for features in context.features) < 8  # no hole


@pytest.mark.usefixtures("stepped")
def test_time_that_failed_captures_take_is_no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def fail(self: compiled.Step) -> None:
        now[0] += 1
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(decoding, "clock", lambda: now[0])
    monkeypatch.setattr(capture, "_release", lambda device: None)
    monkeypatch.setattr(compiled.Step, "capture", fail)
    model, seen = tiny_target("llama"), []
    original = LearnedBudget.observe
    monkeypatch.setattr(LearnedBudget, "observe", lambda self, *args: (seen.append(args[2]), original(self, *args)))
    run(model, prompt_ids(20), 10, assistant_model=tiny_drafter(model), ddtree=True, **GREEDY)
    assert now[0] > 0 and max(seen) == 0


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
    assert out.ddtree_stats.path.startswith("compiled")


@pytest.mark.usefixtures("stepped")
def test_steps_are_as_many_as_trees_differ_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    monkeypatch.setattr(compiled.Step, "capture", lambda self: steps.append(self.nodes))
    model = tiny_target("llama")
    drafter = tiny_drafter(model, block_size=2)  # trees of as many nodes as the vocabulary has tokens
    budget = list(range(900, 930))
    run(model, prompt_ids(20), 30, assistant_model=drafter, ddtree={"budget": budget}, **GREEDY)
    assert steps == [211]
    drafter = tiny_drafter(model)
    run(model, prompt_ids(20), 30, assistant_model=drafter, ddtree={"budget": list(range(1, 30))}, **GREEDY)
    (rounds,) = model.__dict__["_hf_ddtree_state"].buffers.rounds.values()
    assert len(steps) > 20 and len(rounds.steps) == 16


@pytest.mark.usefixtures("stepped")
def test_graphs_do_not_outlast_the_numeric_modes_that_they_were_captured_in() -> None:
    model = tiny_target("llama")
    call = GREEDY | {"assistant_model": tiny_drafter(model), "ddtree": {"budget": 7}}
    kept = []
    for precision in ("highest", "high", "highest"):
        torch.set_float32_matmul_precision(precision)
        run(model, prompt_ids(20), 10, **call)
        kept.append(list(model.__dict__["_hf_ddtree_state"].buffers.rounds.values())[-1])
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
