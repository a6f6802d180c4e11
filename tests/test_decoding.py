"""`generate(ddtree=...)` writes what plain `generate` writes: ids, random state, cache."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)

from comparison import assert_same
from hf_ddtree import DDTreeConfig, DFlashDraftModel, GenerateDDTreeOutput
from hf_ddtree.compat import CACHE_KEY
from scripted import prompt_ids, scripted, tiny_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("each_layers")

FAMILIES = ("llama", "qwen2", "qwen2_mixed", "qwen3", "mistral", "phi3")
GREEDY: dict[str, Any] = {"do_sample": False}
PENALTY: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.3}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
PURE_SAMPLING: dict[str, Any] = {"do_sample": True, "top_k": 0}


def plain(model: PreTrainedModel, ids: torch.Tensor, new: int, options: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(5)
    out = model.generate(ids, max_new_tokens=new, return_dict_in_generate=True, **options)
    return out, torch.get_rng_state()


def trees(
    model: PreTrainedModel,
    drafter: DFlashDraftModel,
    ids: torch.Tensor,
    new: int,
    options: dict[str, Any],
    config: DDTreeConfig | bool = True,
) -> tuple[GenerateDDTreeOutput, torch.Tensor]:
    torch.manual_seed(5)
    out = model.generate(
        ids, max_new_tokens=new, assistant_model=drafter, ddtree=config, return_dict_in_generate=True, **options
    )
    return out, torch.get_rng_state()


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_target(request.param)


@pytest.mark.parametrize(
    "options", [GREEDY, PENALTY, SAMPLING, PURE_SAMPLING], ids=["greedy", "penalty", "warped", "pure"]
)
@pytest.mark.parametrize(
    ("prompt", "new", "block", "budget", "hit"),
    [
        (1, 30, 4, 1, 0.6),
        (1, 12, 16, 255, 0.9),
        (11, 1, 8, 15, 1.0),
        (11, 40, 8, 7, 0.6),
        (30, 60, 16, 63, 0.8),  # passes the windows of 24 and Phi-3's switch at 64
        (63, 9, 8, 15, 1.0),
        (70, 25, 8, 16, 0.0),
    ],
)
def test_equal_to_plain(
    target: PreTrainedModel, options: dict[str, Any], prompt: int, new: int, block: int, budget: int, hit: float
) -> None:
    ids = prompt_ids(prompt)
    expected, expected_state = plain(target, ids, new, options)
    with scripted(expected.sequences, hit):
        out, state = trees(
            target, tiny_drafter(target, block_size=block), ids, new, options, DDTreeConfig(budget=budget)
        )
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(state, expected_state)
    assert out.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    assert sum(out.ddtree_stats.acceptance_lengths) == new - 1  # the prompt's forward gives one token


@pytest.mark.parametrize(("prompt", "new"), [(600, 30), (3, 200)])
def test_equal_to_plain_on_long_prompts_and_texts(target: PreTrainedModel, prompt: int, new: int) -> None:
    ids = prompt_ids(prompt)
    expected, _ = plain(target, ids, new, GREEDY)
    with scripted(expected.sequences, 0.7):
        drafter = tiny_drafter(target, block_size=16)
        out, _ = trees(target, drafter, ids, new, GREEDY, DDTreeConfig(budget=255))
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert max(out.ddtree_stats.acceptance_lengths) > 4


@pytest.mark.full
@pytest.mark.parametrize("options", [GREEDY, PENALTY, SAMPLING], ids=["greedy", "penalty", "warped"])
@pytest.mark.parametrize("prompt", [1, 17, 150, 600])
@pytest.mark.parametrize("new", [1, 50, 200])
@pytest.mark.parametrize("budget", [1, 15, 255])
def test_equal_to_plain_on_the_grid(
    target: PreTrainedModel, options: dict[str, Any], prompt: int, new: int, budget: int
) -> None:
    ids = prompt_ids(prompt, seed=prompt)
    expected, expected_state = plain(target, ids, new, options)
    for block, hit in ((4, 1.0), (7, 0.5), (16, 0.85), (16, 0.0)):
        with scripted(expected.sequences, hit, seed=new):
            drafter = tiny_drafter(target, block_size=block)
            out, state = trees(target, drafter, ids, new, options, DDTreeConfig(budget=budget))
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(state, expected_state)


@pytest.mark.parametrize("tree", ["best_first", "chain", "static"])
def test_every_kind_of_tree_is_exact(tree: Any) -> None:
    model = tiny_target("qwen3")
    ids = prompt_ids(9)
    expected, _ = plain(model, ids, 50, GREEDY)
    with scripted(expected.sequences, 0.7):
        out, _ = trees(model, tiny_drafter(model), ids, 50, GREEDY, DDTreeConfig(budget=20, tree=tree))
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.ddtree_stats.mean_acceptance_length > 1.5


def test_a_drafter_without_a_script_is_exact() -> None:
    model = tiny_target("llama")
    ids = prompt_ids(20)
    for options in (GREEDY, SAMPLING):
        expected, expected_state = plain(model, ids, 40, options)
        out, state = trees(model, tiny_drafter(model), ids, 40, options)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(state, expected_state)


def test_trees_really_work() -> None:
    """Counted from outside: few forwards, whole blocks, rejection in mid-path, branches that are not the chain."""
    model = tiny_target("qwen3")
    ids = prompt_ids(12)
    new = 120
    expected, _ = plain(model, ids, new, GREEDY)
    calls: list[int] = []
    handle = model.model.register_forward_hook(lambda module, args, output: calls.append(1))
    try:
        with scripted(expected.sequences, 0.75):
            config = DDTreeConfig(budget=31, record_trees=True)
            out, _ = trees(model, tiny_drafter(model, block_size=8), ids, new, GREEDY, config)
    finally:
        handle.remove()
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert len(calls) <= new / 2
    assert len(calls) == out.ddtree_stats.rounds + 1
    lengths = out.ddtree_stats.acceptance_lengths
    assert max(lengths) == 8, "a whole block is never accepted"
    assert any(1 < length < 8 for length in lengths), "no path is left in its middle"
    chains = 0
    for round_ in out.ddtree_stats.trees:
        tree = round_.tree
        siblings_ahead = [
            any(tree.parents[0, i] == tree.parents[0, node] for i in range(node)) for node in round_.path
        ]
        chains += any(siblings_ahead)
    assert chains, "no accepted path leaves the most probable chain"


def test_a_perfect_drafter_needs_one_forward_a_block() -> None:
    model = tiny_target("llama")
    ids = prompt_ids(5)
    expected, _ = plain(model, ids, 65, GREEDY)
    with scripted(expected.sequences, 1.0):
        out, _ = trees(model, tiny_drafter(model, block_size=16), ids, 65, GREEDY, DDTreeConfig(budget=63))
    assert out.ddtree_stats.acceptance_lengths == [16, 16, 16, 16]


def test_nothing_is_drafted_or_written_beyond_the_tokens_allowed() -> None:
    model = tiny_target("llama")
    ids = prompt_ids(5)
    expected, _ = plain(model, ids, 4, GREEDY)
    with scripted(expected.sequences, 1.0):
        out, _ = trees(model, tiny_drafter(model), ids, 4, GREEDY, DDTreeConfig(budget=31, record_trees=True))
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.ddtree_stats.acceptance_lengths == [3]
    assert int(out.ddtree_stats.trees[0].tree.depths.max()) == 2


def test_left_padding_and_given_positions() -> None:
    for family in FAMILIES[:5]:
        model = tiny_target(family)
        ids = prompt_ids(30)
        mask = torch.ones_like(ids)
        mask[:, :7] = 0
        mask[:, 15] = 0  # a hole, as generate infers it from a pad token inside a prompt
        for extra in ({}, {"position_ids": torch.arange(30)[None] + 5}):
            options = GREEDY | {"attention_mask": mask} | extra
            expected, _ = plain(model, ids, 30, options)
            out, _ = trees(model, tiny_drafter(model), ids, 30, options)
            assert out.sequences.tolist() == expected.sequences.tolist()


def conversation(
    model: PreTrainedModel, drafter: DFlashDraftModel, first: int, asked: int, new: int
) -> Iterator[tuple[Any, GenerateDDTreeOutput]]:
    """Three turns with the cache that the last one returned, plainly and with trees: the later two's outputs."""
    expected, _ = plain(model, prompt_ids(12), first, GREEDY)
    out, _ = trees(model, drafter, prompt_ids(12), first, GREEDY)
    for turn in range(2):
        ids = torch.cat([expected.sequences, prompt_ids(asked, seed=turn)], dim=1)
        expected, _ = plain(model, ids, new, GREEDY | {CACHE_KEY: expected[CACHE_KEY]})
        out, _ = trees(model, drafter, ids, new, GREEDY | {CACHE_KEY: out[CACHE_KEY]})
        yield expected, out


def test_a_returned_cache_continues_the_conversation() -> None:
    """Three turns; pad ids in the text make holes in the inferred mask, as they do for plain decoding."""
    for family in ("qwen3", "qwen2_mixed", "mistral"):
        model = tiny_target(family)
        drafter = tiny_drafter(model)
        for expected, out in conversation(model, drafter, first=30, asked=6, new=20):
            assert out.sequences.tolist() == expected.sequences.tolist()
            assert out.cache.get_seq_length() == out.sequences.shape[1] - 1


class TestTheDraftersContext:
    """It travels with the returned cache: a second turn drafts exactly what one call over the whole text would."""

    def drafts(self, model: PreTrainedModel, drafter: DFlashDraftModel, ids: torch.Tensor, **options: Any) -> Any:
        options = {"pad_token_id": None} | options  # else the next turn masks pad ids in the text
        out, _ = trees(model, drafter, ids, 20, GREEDY | options, DDTreeConfig(budget=15, record_trees=True))
        return out, [round_.tree for round_ in out.ddtree_stats.trees]

    @pytest.fixture
    def turn(self) -> Any:
        model = tiny_target("qwen2_mixed")
        drafter = tiny_drafter(model)
        first, _ = self.drafts(model, drafter, prompt_ids(12))
        ids = torch.cat([first.sequences, prompt_ids(6, seed=1)], dim=1)
        return model, drafter, first, ids

    def same(self, mine: Any, theirs: Any) -> bool:
        return len(mine) == len(theirs) and all(
            torch.equal(a.token_ids, b.token_ids) and torch.allclose(a.log_probs, b.log_probs, atol=1e-4)
            for a, b in zip(mine, theirs, strict=True)
        )

    @pytest.mark.parametrize("copied", [False, True])
    @pytest.mark.parametrize("new_ids_only", [False, True])
    def test_is_that_of_the_whole_text(self, turn: Any, new_ids_only: bool, copied: bool) -> None:
        model, drafter, first, ids = turn
        whole, expected = self.drafts(model, drafter, ids)
        cache = copy.deepcopy(first[CACHE_KEY]) if copied else first[CACHE_KEY]
        options: dict[str, Any] = {CACHE_KEY: cache}
        if new_ids_only:
            options["attention_mask"] = torch.ones_like(ids)
            ids = ids[:, cache.get_seq_length() :]
        second, drafts = self.drafts(model, drafter, ids, **options)
        assert second.sequences[0, -20:].tolist() == whole.sequences[0, -20:].tolist()
        assert self.same(drafts, expected)
        without, _ = self.drafts(model, drafter, turn[3])
        assert without.sequences.tolist() == whole.sequences.tolist()

    def test_serves_a_cache_given_twice(self, turn: Any) -> None:
        model, drafter, first, ids = turn
        _, expected = self.drafts(model, drafter, ids)
        caches = [copy.deepcopy(first[CACHE_KEY]) for _ in range(2)]
        for cache in caches:
            assert self.same(self.drafts(model, drafter, ids, **{CACHE_KEY: cache})[1], expected)

    def test_is_dropped_when_it_does_not_belong(self, turn: Any) -> None:
        model, drafter, first, ids = turn
        _, whole = self.drafts(model, drafter, ids)

        def without(cache: Any) -> Any:
            vars(cache).pop("_hf_ddtree_context", None)
            return cache

        other_text = ids.clone()
        other_text[0, 3] = (other_text[0, 3] + 1) % 200 + 4
        shorter = copy.deepcopy(first[CACHE_KEY])
        pickled = pickle.loads(pickle.dumps(first[CACHE_KEY]))
        expected = self.drafts(model, drafter, ids, **{CACHE_KEY: without(copy.deepcopy(shorter))})[1]
        assert not self.same(expected, whole)
        assert self.same(self.drafts(model, drafter, ids, **{CACHE_KEY: pickled})[1], expected)
        another = copy.deepcopy(drafter)
        assert self.same(self.drafts(model, another, ids, **{CACHE_KEY: copy.deepcopy(shorter)})[1], expected)
        expected = self.drafts(model, drafter, other_text, **{CACHE_KEY: without(copy.deepcopy(shorter))})[1]
        assert self.same(self.drafts(model, drafter, other_text, **{CACHE_KEY: copy.deepcopy(shorter)})[1], expected)

    def test_is_dropped_when_the_cache_was_cut(self) -> None:
        model = tiny_target("llama")
        drafter = tiny_drafter(model)
        first, _ = self.drafts(model, drafter, prompt_ids(12))
        cut = [copy.deepcopy(first[CACHE_KEY]) for _ in range(2)]
        for cache in cut:
            cache.crop(-4)
        vars(cut[0]).pop("_hf_ddtree_context")
        expected = self.drafts(model, drafter, first.sequences, **{CACHE_KEY: cut[0]})[1]
        assert self.same(self.drafts(model, drafter, first.sequences, **{CACHE_KEY: cut[1]})[1], expected)


def test_token_types_reach_every_step() -> None:
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=16, n_layer=4, n_head=2, eos_token_id=None, initializer_range=0.5)
    ).eval()
    ids = prompt_ids(6, vocab=64)
    types = torch.tensor([[1, 2, 3, 9, 9, 40]])
    expected, _ = plain(gpt2, ids, 20, GREEDY | {"token_type_ids": types})
    assert expected.sequences.tolist() != plain(gpt2, ids, 20, GREEDY)[0].sequences.tolist()
    with scripted(expected.sequences, 0.8, vocab=64):
        out, _ = trees(gpt2, tiny_drafter(gpt2), ids, 20, GREEDY | {"token_type_ids": types})
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.ddtree_stats.mean_acceptance_length > 1.5


def test_an_exception_leaves_nothing_behind_and_the_next_call_is_exact() -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    ids = prompt_ids(10)
    expected, _ = plain(model, ids, 30, GREEDY)

    class Failing(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 9:
                raise KeyboardInterrupt
            return scores

    with scripted(expected.sequences, 0.8):
        with pytest.raises(KeyboardInterrupt):
            trees(model, drafter, ids, 30, GREEDY | {"logits_processor": LogitsProcessorList([Failing()])})
        assert not any(module._forward_hooks for module in model.modules())
        out, _ = trees(model, drafter, ids, 30, GREEDY)
    assert out.sequences.tolist() == expected.sequences.tolist()


def test_a_processor_may_generate_with_trees_on_the_same_model() -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    ids = prompt_ids(10)

    class Inner(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            inner = model.generate(ids, max_new_tokens=6, do_sample=False, assistant_model=drafter, ddtree=True)
            return scores - 3 * torch.nn.functional.one_hot(inner[:, -1], scores.shape[-1])

    class InnerPlain(Inner):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            inner = model.generate(ids, max_new_tokens=6, do_sample=False)
            return scores - 3 * torch.nn.functional.one_hot(inner[:, -1], scores.shape[-1])

    expected, _ = plain(model, ids, 15, GREEDY | {"logits_processor": LogitsProcessorList([InnerPlain()])})
    out, _ = trees(model, drafter, ids, 15, GREEDY | {"logits_processor": LogitsProcessorList([Inner()])})
    assert out.sequences.tolist() == expected.sequences.tolist()


def test_broken_draft_logits_cost_speed_not_text() -> None:
    model = tiny_target("llama")
    ids = prompt_ids(10)
    expected, _ = plain(model, ids, 30, GREEDY)
    for value in (float("nan"), float("inf"), float("-inf")):
        drafter = tiny_drafter(model)
        handle = drafter.register_forward_hook(_poison(value))
        out, _ = trees(model, drafter, ids, 30, GREEDY, DDTreeConfig(budget=31))
        handle.remove()
        assert out.sequences.tolist() == expected.sequences.tolist()


def _poison(value: float) -> Any:
    def hook(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state[:, 2:5] = value
        return output

    return hook


def test_small_vocabularies_and_large_budgets() -> None:
    model = tiny_target("llama", vocab_size=11)
    ids = prompt_ids(6, vocab=11)
    drafter = tiny_drafter(model, block_size=4)
    for options in (GREEDY, PURE_SAMPLING):
        expected, state = plain(model, ids, 40, options)
        for budget in (1, 10, 200, 1024):
            out, after = trees(model, drafter, ids, 40, options, DDTreeConfig(budget=budget))
            assert out.sequences.tolist() == expected.sequences.tolist()
            assert torch.equal(after, state)


def test_max_depth_and_statistics() -> None:
    model = tiny_target("llama")
    ids = prompt_ids(6)
    expected, _ = plain(model, ids, 40, GREEDY)
    with scripted(expected.sequences, 1.0):
        config = DDTreeConfig(budget=12, max_depth=3, record_times=True)
        out, _ = trees(model, tiny_drafter(model), ids, 40, GREEDY, config)
    stats = out.ddtree_stats
    assert max(stats.acceptance_lengths) == 4
    assert set(stats.node_counts[:-1]) == {12}
    assert set(stats.budgets) == {12}
    assert stats.rounds == len(stats.acceptance_lengths)
    assert stats.mean_acceptance_length == pytest.approx(39 / stats.rounds)
    assert set(stats.times) == {"prefill", "draft", "verify", "walk", "keep"}
    assert stats.launch.value == "operations"


def test_a_rope_switch_far_into_a_long_text() -> None:
    """Phi-3 recomputes all rows there: more than its first buffers hold."""
    model = tiny_target("phi3", switch=270)
    ids = prompt_ids(250)
    expected, _ = plain(model, ids, 40, GREEDY)
    with scripted(expected.sequences, 0.9):
        out, _ = trees(model, tiny_drafter(model), ids, 40, GREEDY)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert max(out.ddtree_stats.acceptance_lengths) > 4


def test_inference_mode_leaves_buffers_that_other_calls_can_use() -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    with torch.inference_mode():
        first, _ = trees(model, drafter, prompt_ids(8), 6, GREEDY)
    again, _ = trees(model, drafter, prompt_ids(8), 6, GREEDY)
    assert again.sequences.tolist() == first.sequences.tolist()


@pytest.mark.skipif(CACHE_KEY != "cache", reason="this Phi-3 forgets its context beyond the switch")
@pytest.mark.parametrize("switch", [33, 50])
def test_turns_around_a_rope_switch(switch: int) -> None:
    """The turn that passes the switch recomputes all rows: the cache it returns is a new one."""
    model = tiny_target("phi3", switch=switch)
    drafter = tiny_drafter(model)
    for expected, out in conversation(model, drafter, first=20, asked=5, new=15):
        assert out.sequences.tolist() == expected.sequences.tolist()


def test_a_rope_switch_behind_a_prompt_that_ends_in_padding() -> None:
    model = tiny_target("phi3", switch=30)
    ids = prompt_ids(21)
    ids[0, 20] = 0
    options = GREEDY | {"pad_token_id": 0, "eos_token_id": 2}
    expected, _ = plain(model, ids, 30, options)
    out, _ = trees(model, tiny_drafter(model), ids, 30, options)
    assert out.sequences.tolist() == expected.sequences.tolist()


def test_a_cache_of_another_dtype_is_continued() -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        caches = [plain(model, prompt_ids(12), 20, GREEDY)[0] for _ in range(2)]
    ids = torch.cat([caches[0].sequences, prompt_ids(4)], dim=1)
    expected, _ = plain(model, ids, 20, GREEDY | {CACHE_KEY: caches[0][CACHE_KEY]})
    out, _ = trees(model, drafter, ids, 20, GREEDY | {CACHE_KEY: caches[1][CACHE_KEY]})
    assert out.sequences.tolist() == expected.sequences.tolist()


def test_ids_grow_with_the_text_not_with_its_limit() -> None:
    model = tiny_target("llama")
    ids = prompt_ids(8).int()
    text, _ = plain(model, ids, 9, GREEDY)
    options = GREEDY | {"max_length": 10**30, "eos_token_id": int(text.sequences[0, -1]), "pad_token_id": 0}
    expected = model.generate(ids, **options)
    out = model.generate(ids, assistant_model=tiny_drafter(model), ddtree=True, **options)
    assert out.tolist() == expected.tolist()
    assert out.dtype == expected.dtype == torch.int64
    assert out.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


def test_a_drafter_with_dropout_draws_nothing() -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model, attention_dropout=0.3).train()
    expected, state = plain(model, prompt_ids(12), 20, PURE_SAMPLING)
    out, after = trees(model, drafter, prompt_ids(12), 20, PURE_SAMPLING)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(after, state)
    assert drafter.training


def test_a_wider_cache_made_in_inference_mode_serves_later_calls() -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    ids = prompt_ids(12)
    expected, _ = plain(model, ids, 5, GREEDY)
    turn, _ = plain(model.to(torch.bfloat16), ids, 20, GREEDY)
    model.to(torch.float32)
    longer = torch.cat([turn.sequences, prompt_ids(4)], dim=1)
    with torch.inference_mode():
        trees(model, drafter, longer, 5, GREEDY | {CACHE_KEY: turn[CACHE_KEY]})
    out, _ = trees(model, drafter, ids, 5, GREEDY)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert not model.__dict__["_hf_ddtree_state"].busy


def test_arguments_of_the_targets_forward_reach_every_step() -> None:
    class Extra(LlamaForCausalLM):
        def forward(self, *args: Any, bump: float | None = None, position_ids: Any = None, **kwargs: Any) -> Any:
            output = super().forward(*args, position_ids=position_ids, **kwargs)
            if bump is not None:
                output.logits = output.logits + bump * torch.sin(torch.arange(output.logits.shape[-1]).float())
            return output

    llama = tiny_target("llama")
    model = Extra(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    options = GREEDY | {"bump": 8.0}
    expected, _ = plain(model, prompt_ids(12), 20, options)
    assert expected.sequences.tolist() != plain(model, prompt_ids(12), 20, GREEDY)[0].sequences.tolist()
    out, _ = trees(model, tiny_drafter(model), prompt_ids(12), 20, options)
    assert out.sequences.tolist() == expected.sequences.tolist()


def test_an_offloaded_target() -> None:
    from accelerate import cpu_offload

    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    expected, _ = plain(model, prompt_ids(12), 9, GREEDY)
    out, _ = trees(cpu_offload(model, execution_device="cpu"), drafter, prompt_ids(12), 9, GREEDY)
    assert out.sequences.tolist() == expected.sequences.tolist()


def test_a_prefill_that_runs_rows_again_is_followed_by_plain_steps() -> None:
    """Older versions run a whole text in chunks behind the rows that the cache has, and mask by its length."""
    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    first, _ = plain(model, prompt_ids(12), 20, GREEDY)
    for ids, chunk in (
        (torch.cat([first.sequences, prompt_ids(7, seed=4)], dim=1), 4),
        (first.sequences[:, : first[CACHE_KEY].get_seq_length()], None),
    ):
        mine, theirs = (copy.deepcopy(first[CACHE_KEY]) for _ in range(2))
        options = GREEDY | {"prefill_chunk_size": chunk}
        expected, _ = plain(model, ids, 20, options | {CACHE_KEY: theirs})
        out, _ = trees(model, drafter, ids, 20, options | {CACHE_KEY: mine})
        assert out.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.skipif(CACHE_KEY != "cache", reason="this Phi-3 forgets its context beyond the switch")
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("prompt", [60, 70])
def test_a_callers_cache_around_a_rope_switch(kind: Any, prompt: int) -> None:
    """The model drops it there: it holds what came before, and attentions show the new one's columns."""
    model = tiny_target("phi3", switch=64, attn_implementation="eager")
    drafter = tiny_drafter(model)
    options = {"max_cache_len": 90} if kind is StaticCache else {}
    caches = [kind(config=model.config, **options) for _ in range(2)]
    call = GREEDY | {"output_attentions": True}
    expected, _ = plain(model, prompt_ids(prompt), 20, call | {CACHE_KEY: caches[0]})
    out, _ = trees(model, drafter, prompt_ids(prompt), 20, call | {CACHE_KEY: caches[1]})
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert int(caches[1].get_seq_length()) == int(caches[0].get_seq_length())
    assert_same(out.attentions, expected.attentions)


@pytest.mark.parametrize("asked", [[], [1], [1, 3]])
def test_hidden_states_of_some_layers(asked: list[int]) -> None:
    model = tiny_target("llama")
    options = GREEDY | {"output_hidden_states": asked}
    expected, _ = plain(model, prompt_ids(9), 20, options)
    with scripted(expected.sequences, 0.8):
        out, _ = trees(model, tiny_drafter(model), prompt_ids(9), 20, options)
    assert out.sequences.tolist() == expected.sequences.tolist()
    for mine, theirs in zip(out.hidden_states or (), expected.hidden_states or (), strict=True):
        assert [h is None for h in mine] == [h is None for h in theirs]
        assert_same(tuple(h for h in mine if h is not None), tuple(h for h in theirs if h is not None))


def test_a_callers_longer_limit_takes_the_place_of_the_configs() -> None:
    model = tiny_target("llama")
    options = GREEDY | {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(60)])}
    expected, _ = plain(model, prompt_ids(9), 10, options)
    assert expected.sequences.shape[1] == 60
    with scripted(expected.sequences, 0.9):
        out, _ = trees(model, tiny_drafter(model), prompt_ids(9), 10, options)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.ddtree_stats.mean_acceptance_length > 2


def test_parts_of_a_drafter_in_training_draw_nothing_and_stay_as_they_are() -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model, attention_dropout=0.5)
    drafter.layers[0].train()
    modes = [module.training for module in drafter.modules()]
    expected, state = plain(model, prompt_ids(12), 20, PURE_SAMPLING)
    out, after = trees(model, drafter, prompt_ids(12), 20, PURE_SAMPLING)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(after, state)
    assert [module.training for module in drafter.modules()] == modes


def test_no_hook_stays_when_a_call_ends_before_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_ddtree.launched.RopeSwitch", interrupted)
    model = tiny_target("llama")
    with pytest.raises(KeyboardInterrupt):
        trees(model, tiny_drafter(model), prompt_ids(4), 4, GREEDY)
    assert not any(module._forward_hooks for module in model.modules())
