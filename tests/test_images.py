"""Targets that see images: with an image in the prompt, trees give what plain `generate` gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import LlamaForCausalLM, PreTrainedModel

from comparison import assert_same, assert_several_tokens_a_round, generate, generate_with_trees
from hf_ddtree import DDTreeConfig, DFlashDraftModel, capture, drafter_families, round_graph
from hf_ddtree.compat import CACHE_KEY
from images import FAMILIES, IMAGE, seeing_prompt, tiny_seeing_target
from scripted import prompt_ids, tiny_drafter, tiny_target

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50}
OUTPUTS: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
NEW = 24

_targets: dict[str, tuple[PreTrainedModel, DFlashDraftModel]] = {}


def pair_of(family: str) -> tuple[PreTrainedModel, DFlashDraftModel]:
    """One target of a family for all tests: what a call leaves in it, the next ones find."""
    if family not in _targets:
        target = tiny_seeing_target(family)
        _targets[family] = target, tiny_drafter(target)
    return _targets[family]


def exact(family: str, config: DDTreeConfig | bool = True, **options: Any) -> Any:
    """Decode plainly and with trees, and compare; the drafter knows the text by the number of a token."""
    target, drafter = pair_of(family)
    options = OUTPUTS | GREEDY | {"max_new_tokens": NEW} | options
    expected, state = generate(target, options)
    mask = options["attention_mask"][0].bool()
    text = torch.cat([options["input_ids"][0, mask], expected.sequences[0, mask.shape[0] :]]).tolist()
    out, after = generate_with_trees(target, drafter, options, text, config=config)
    assert_same(out, expected)
    assert torch.equal(after, state)
    assert_several_tokens_a_round(out.ddtree_stats)
    return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize(("images", "padding"), [(1, 0), (2, 5), (0, 0), (0, 5)])
def test_equal_to_plain(family: str, images: int, padding: int, sampling: dict[str, Any]) -> None:
    prompt = seeing_prompt(family, images, padding=padding)
    out = exact(family, **prompt, **sampling)
    if images:
        prompt["pixel_values"] = -prompt["pixel_values"]
        other, _ = generate(pair_of(family)[0], OUTPUTS | {"max_new_tokens": NEW} | prompt | sampling)
        assert other.sequences.tolist() != out.sequences.tolist(), "the target does not look at its images"


@pytest.mark.parametrize("family", FAMILIES)
def test_options_that_need_more_of_a_forward(family: str) -> None:
    prompt = seeing_prompt(family)
    exact(family, **prompt, output_hidden_states=True)
    out = exact(family, DDTreeConfig(record_trees=True), **prompt, no_repeat_ngram_size=2)
    drafted = [
        token
        for round_tree in out.ddtree_stats.trees
        for token in [round_tree.root, *round_tree.tree.token_ids[0, round_tree.path].tolist()]
    ]
    length = prompt["input_ids"].shape[1]
    assert drafted == out.sequences[0, length : length + len(drafted)].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_chunks(family: str) -> None:
    if Version(transformers.__version__) < Version("5.24"):
        pytest.skip("older versions cut an image apart")
    exact(family, **seeing_prompt(family), prefill_chunk_size=5)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("axes", [3, 4])
def test_positions_on_several_axes_that_the_caller_gives(family: str, axes: int) -> None:
    prompt = seeing_prompt(family)
    given = {name: value for name, value in prompt.items() if name != "pixel_values"}
    positions = pair_of(family)[0].model.get_rope_index(**given)[0]
    numbers = torch.arange(positions.shape[-1]).view(1, 1, -1)
    exact(family, **prompt, position_ids=torch.cat([numbers, positions]) if axes == 4 else positions)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", ["plain", "trees"])
def test_a_turn_after_the_one_with_the_image(family: str, first: str) -> None:
    (plain, _), (trees, _) = turns(family, first, later_image=False)
    assert_several_tokens_a_round(trees.ddtree_stats)
    assert_same(trees, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_image_in_a_later_turn(family: str) -> None:
    (plain, _), (trees, _) = turns(family, "trees", later_image=True)
    assert_several_tokens_a_round(trees.ddtree_stats)
    assert_same(trees, plain)


def turns(family: str, first: str, later_image: bool) -> list[tuple[Any, torch.Tensor]]:
    """Two turns, the second plainly and with trees."""
    target, drafter = pair_of(family)
    options = OUTPUTS | GREEDY | {"max_new_tokens": NEW}
    prompt = seeing_prompt(family)
    later = seeing_prompt(family, images=int(later_image), seed=4)
    results: list[tuple[Any, torch.Tensor]] = []
    for second in ("plain", "trees"):
        known = results[0][0].sequences[0].tolist() if results else []
        call = options | prompt
        if second == first == "trees":
            out, _ = generate_with_trees(target, drafter, call, known)
        else:
            out, _ = generate(target, call)
        ids = torch.cat([out.sequences, later["input_ids"]], dim=1)
        call = options | {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE_KEY: out[CACHE_KEY]}
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in prompt:
                call[name] = (ids == IMAGE).long() if family != "paligemma" else torch.zeros_like(ids)
        if later_image:
            call["pixel_values"] = later["pixel_values"]
            if "image_grid_thw" in prompt:
                call["image_grid_thw"] = later["image_grid_thw"]
                call.pop("mm_token_type_ids")  # with these the target asks for the first image again
        if second == "trees":
            results.append(generate_with_trees(target, drafter, call, known))
        else:
            results.append(generate(target, call))
    return results


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_place_tokens_where_single_ones_are(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_release", lambda device: None)
    target, drafter = pair_of(family)
    hidden_states_of, candidates_of = round_graph.BlockDraft.hidden_states, drafter_families.best_candidates
    text: list[int] = []
    root = 0

    def hidden_states(self: Any, features: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        nonlocal root
        root = int(self.kind.state.position)
        return hidden_states_of(self, features, new)

    def candidates(logits: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, log_probs = candidates_of(logits, number)
        for depth, truth in enumerate(text[root + 1 : root + 4]):
            token_ids[token_ids == truth] = token_ids[0, depth, depth % 2]
            token_ids[0, depth, depth % 2] = truth
        return token_ids, log_probs - 5 * torch.arange(number)

    monkeypatch.setattr(round_graph.BlockDraft, "hidden_states", hidden_states)
    monkeypatch.setattr(drafter_families, "best_candidates", candidates)
    for images, padding, sampling in ((1, 0, GREEDY), (2, 3, SAMPLING), (0, 0, GREEDY)):
        options = seeing_prompt(family, images, padding=padding) | sampling | {"max_new_tokens": NEW}
        options["return_dict_in_generate"] = True
        expected, state = generate(target, options)
        text = expected.sequences[0, padding:].tolist()
        out, after = generate_with_trees(target, drafter, options, text, config=DDTreeConfig(budget=15))
        assert out.ddtree_stats.compiled.value == "yes"
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(after, state)
        assert out.ddtree_stats.mean_acceptance_length > 2.5


# -- what cannot work ------------------------------------------------------------------------------------------------


def fails(target: PreTrainedModel, match: str, **options: Any) -> None:
    forwards: list[int] = []
    counter = target.register_forward_pre_hook(lambda *args: forwards.append(1))
    with pytest.raises(ValueError, match=match):
        target.generate(**options, max_new_tokens=4, assistant_model=tiny_drafter(target), ddtree=True)
    counter.remove()
    assert not forwards


def test_images_seen_by_cross_attention_are_refused_and_text_is_not() -> None:
    exact("mllama", **seeing_prompt("mllama", images=0))
    prompt = seeing_prompt("mllama")
    target, _ = pair_of("mllama")
    fails(target, "cross attention", **prompt)
    prompt.pop("cross_attention_mask")
    fails(target, "cross attention", **prompt)
    out, _ = generate(target, OUTPUTS | prompt | {"max_new_tokens": 4})
    ids = torch.cat([out.sequences, prompt_ids(3)], dim=1)
    fails(target, "cross attention", input_ids=ids, **{CACHE_KEY: out[CACHE_KEY]})


class Shifted(LlamaForCausalLM):
    """Counts positions from 1, as PaliGemma does."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs["position_ids"] = inputs["position_ids"] + 1
        return inputs


class Unplaced(LlamaForCausalLM):
    """Keeps its positions to itself, as Kosmos does."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs.pop("position_ids")
        return inputs


def test_positions_that_are_further_on_by_a_constant() -> None:
    target = Shifted(tiny_target("llama").config).eval()
    options = OUTPUTS | GREEDY | {"inputs": prompt_ids(9), "max_new_tokens": NEW}
    expected, _ = generate(target, options)
    out, _ = generate_with_trees(target, tiny_drafter(target), options, expected.sequences[0].tolist())
    assert_same(out, expected)
    assert_several_tokens_a_round(out.ddtree_stats)


def test_positions_that_a_target_keeps_to_itself_are_refused() -> None:
    fails(Unplaced(tiny_target("llama").config).eval(), "positions of its own", inputs=prompt_ids(4))
