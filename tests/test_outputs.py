"""What `generate` returns is what plain decoding returns: fields, shapes, types and values; statistics besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from comparison import assert_same, assert_several_tokens_a_round, assert_trees_spell, generate, generate_with_trees
from hf_ddtree import DDTreeConfig, DFlashDraftModel, GenerateDDTreeOutput
from hf_ddtree.compat import CACHE_KEY
from hf_ddtree.outputs import DDTreeStats
from scripted import prompt_ids, tiny_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("each_layers")

FLAGS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
NEW = 30
PENALTY: dict[str, Any] = {"repetition_penalty": 1.3}
SAMPLING: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 1.4}
LEFT_PADDED = torch.cat([torch.zeros(1, 3), torch.ones(1, 27)], dim=1).long()


def call(length: int, *flags: str, **options: Any) -> dict[str, Any]:
    asked = dict.fromkeys(flags, True)
    return {"inputs": prompt_ids(length), "max_new_tokens": NEW, "return_dict_in_generate": True} | asked | options


def compare(model: PreTrainedModel, make: Callable[[], dict[str, Any]], padding: int = 0) -> tuple[Any, Any]:
    """Both outputs, after they were found the same; `make` gives each call a cache of its own."""
    expected, state = generate(model, make())
    out, after = generate_with_trees(model, tiny_drafter(model), make(), expected.sequences[0, padding:].tolist())
    assert_same(out, expected)
    assert torch.equal(after, state)
    assert_several_tokens_a_round(out.ddtree_stats)
    return out, expected


Caches = dict[str, Callable[[PreTrainedModel], dict[str, Any]]]
CACHES: Caches = {
    "default": lambda model: {},
    "static": lambda model: {"cache_implementation": "static"},
    "dynamic of the user": lambda model: {CACHE_KEY: DynamicCache(config=model.config)},
    "dynamic of the user, all layers full": lambda model: {CACHE_KEY: DynamicCache()},
    "static of the user": lambda model: {CACHE_KEY: StaticCache(model.config, 96)},
}


@pytest.mark.parametrize("options", [PENALTY, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["llama", "qwen2_mixed", "mistral", "phi3"])
def test_outputs_are_plain_decodings(family: str, cache: str, options: dict[str, Any]) -> None:
    """Beyond the windows of 24; Phi-3's switch is not reached."""
    model = tiny_target(family)
    _, expected = compare(model, lambda: call(30, *FLAGS[:3], **options, **CACHES[cache](model)))
    assert len(expected.scores) == len(expected.logits) == len(expected.hidden_states) == NEW


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("family", ["llama", "qwen2_mixed"])
def test_outputs_of_a_prompt_in_chunks_are_plain_decodings(family: str, chunk: int) -> None:
    model = tiny_target(family)
    for mask in ({}, {"attention_mask": LEFT_PADDED}):
        compare(model, lambda mask=mask: call(30, *FLAGS[:3], prefill_chunk_size=chunk, **mask), padding=3 * len(mask))


@pytest.mark.parametrize(
    ("family", "cache"),
    [
        ("llama", "default"),
        ("qwen2_mixed", "default"),
        ("mistral", "default"),
        ("qwen2_mixed", "dynamic of the user"),
        ("llama", "dynamic of the user, all layers full"),
        ("mistral", "dynamic of the user, all layers full"),
        ("qwen2_mixed", "dynamic of the user, all layers full"),
        ("llama", "static"),
        ("qwen2_mixed", "static"),
        ("llama", "static of the user"),
        ("qwen2_mixed", "static of the user"),
    ],
)
@pytest.mark.parametrize("length", [10, 30])
def test_attentions_are_plain_decodings(family: str, cache: str, length: int) -> None:
    model = tiny_target(family, attn_implementation="eager")
    _, expected = compare(model, lambda: call(length, *FLAGS, **CACHES[cache](model)))
    assert len(expected.attentions) == NEW


@pytest.mark.parametrize(
    ("family", "length"),
    [
        ("llama", 30),
        ("mistral", 10),
        ("mistral", 30),
        ("qwen2_mixed", 30),
    ],
)
def test_attentions_of_a_prompt_in_chunks_are_plain_decodings(family: str, length: int) -> None:
    model = tiny_target(family, attn_implementation="eager")
    compare(model, lambda: call(length, *FLAGS, prefill_chunk_size=7))


def test_attentions_of_an_attention_function_without_weights_are_plain_decodings() -> None:
    _, expected = compare(tiny_target("llama", attn_implementation="sdpa"), lambda: call(10, "output_attentions"))
    assert not expected.attentions[0] or expected.attentions[0][0] is None


@pytest.mark.parametrize("flag", FLAGS)
def test_only_what_was_asked_for_is_returned(flag: str) -> None:
    model = tiny_target("llama", attn_implementation="eager")
    out, expected = compare(model, lambda: call(10, flag))
    assert [each for each in FLAGS if getattr(out, each.removeprefix("output_")) is not None] == [flag]
    assert list(out.keys()) == [*expected.keys(), "ddtree_stats"]


def test_without_a_dict_the_same_flags_return_ids(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    options = call(10, *FLAGS[:3], return_dict_in_generate=False)
    expected, _ = generate(target, options)
    out, _ = generate_with_trees(target, drafter, options, expected[0].tolist())
    assert type(out) is torch.Tensor
    assert_same(out, expected)
    assert out.is_contiguous()


def test_the_output_is_transformers_own_and_has_statistics(target: PreTrainedModel) -> None:
    out, expected = compare(target, lambda: call(10, *FLAGS[:2]))
    assert isinstance(out, GenerateDecoderOnlyOutput) and isinstance(out, GenerateDDTreeOutput)
    assert isinstance(out.ddtree_stats, DDTreeStats)
    assert out.cache is out[CACHE_KEY]
    assert_same(out[0], expected[0])
    assert len(out.to_tuple()) == len(expected.to_tuple()) + 1
    assert not any(tensor.requires_grad for tensor in (*out.scores, *out.logits))
    assert {tensor.dtype for tensor in (*out.scores, *out.logits)} == {torch.float32}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("options", [PENALTY, SAMPLING], ids=["greedy", "sampling"])
def test_transition_scores_are_plain_decodings(
    target: PreTrainedModel, options: dict[str, Any], normalize: bool
) -> None:
    out, expected = compare(target, lambda: call(10, "output_scores", **options))
    mine, theirs = (
        target.compute_transition_scores(each.sequences, each.scores, normalize_logits=normalize)
        for each in (out, expected)
    )
    assert mine.shape == (1, NEW)
    assert_same(mine, theirs)


def test_a_users_cache_gets_the_rows_also_when_ids_are_returned(
    target: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    for make in (lambda: DynamicCache(config=target.config), lambda: StaticCache(target.config, 64)):
        mine, theirs = make(), make()
        options = call(10, return_dict_in_generate=False)
        expected, _ = generate(target, options | {CACHE_KEY: theirs})
        generate_with_trees(target, drafter, options | {CACHE_KEY: mine}, expected[0].tolist())
        assert_same(mine, theirs)
        assert theirs.get_seq_length() == 10 + NEW - 1


@pytest.mark.parametrize("family", ["llama", "qwen2_mixed", "mistral"])
def test_plain_decoding_goes_on_from_a_returned_cache(family: str) -> None:
    model = tiny_target(family)
    out, expected = compare(model, lambda: call(10))
    ids = torch.cat([expected.sequences, prompt_ids(5, seed=3)], dim=1)
    again = [generate(model, call(10, inputs=ids, **{CACHE_KEY: each[CACHE_KEY]}))[0] for each in (out, expected)]
    assert_same(*again)


def test_trees_and_times_are_recorded_for_those_who_ask(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    expected, _ = generate(target, call(10))
    config = DDTreeConfig(record_trees=True, record_times=True)
    text = expected.sequences[0].tolist()
    stats = generate_with_trees(target, drafter, call(10), text, config=config)[0].ddtree_stats
    assert len(stats.trees) == stats.rounds == len(stats.node_counts) == len(stats.budgets)
    assert [len(each.path) + 1 for each in stats.trees] == stats.acceptance_lengths
    assert sum(stats.acceptance_lengths) == NEW - 1
    assert stats.times.keys() == {"prefill", "draft", "verify", "walk", "keep"}


@pytest.mark.parametrize("tree", ["best_first", "chain", "static"])
@pytest.mark.parametrize("options", [{}, SAMPLING, PENALTY], ids=["greedy", "sampling", "by the host"])
def test_recorded_trees_spell_the_text(
    target: PreTrainedModel, drafter: DFlashDraftModel, tree: Any, options: dict[str, Any]
) -> None:
    """Up to an end within a path, too."""
    config = DDTreeConfig(budget=15, tree=tree, record_trees=True)
    expected, _ = generate(target, call(10, **options))
    out, _ = generate_with_trees(
        target, drafter, call(10, **options, eos_token_id=expected.sequences[0, -3].item()),
        expected.sequences[0].tolist(), hit=1.0, config=config,
    )  # fmt: skip
    assert out.ddtree_stats.mean_acceptance_length > 2
    assert_trees_spell(out, 10)
