"""Whatever inputs and configs a call is given, it writes what plain `generate` writes; the drafter is a strong one."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hf_ddtree import DDTreeConfig, DFlashDraftModel, GenerateDDTreeOutput
from scripted import VOCAB, prompt_ids, scripted, tiny_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("each_layers")

FAMILIES = ("llama", "qwen2_mixed", "mistral", "phi3")
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50}


def exact(
    model: Any,
    drafter: Any,
    inputs: torch.Tensor | None = None,
    *,
    known: Any = None,
    ddtree: Any = True,
    **options: Any,
) -> GenerateDDTreeOutput:
    """Decode plainly and with trees, and compare.

    Args:
        known: What stands before the new tokens by position, where that is not what stands there in the ids.
        ddtree: `None` leaves it to the model's config.
    """
    options = {"max_new_tokens": 30, "return_dict_in_generate": True} | GREEDY | options
    torch.manual_seed(5)
    expected = model.generate(inputs, **options)
    state = torch.get_rng_state()
    text = expected.sequences[0].tolist()
    if known is not None:
        text = [*known, *text[-options["max_new_tokens"] :]]
    torch.manual_seed(5)
    if ddtree is not None:
        options["ddtree"] = ddtree
    with scripted(text, 0.9):
        out = model.generate(inputs, assistant_model=drafter, **options)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(torch.get_rng_state(), state)
    assert out.ddtree_stats.mean_acceptance_length > 2, "the drafter was not as right as it was told to be"
    return out


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_target(request.param)


@pytest.fixture(scope="module")
def drafter(target: PreTrainedModel) -> DFlashDraftModel:
    return tiny_drafter(target)


@pytest.fixture
def llama() -> PreTrainedModel:
    return tiny_target("llama")


# -- masks and positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("masked", [range(7), range(30), [0, 1, 2, 11, 12, 25]], ids=["some", "most", "holes"])
def test_a_padded_prompt(
    target: PreTrainedModel, drafter: DFlashDraftModel, masked: Any, sampling: dict[str, Any]
) -> None:
    ids = prompt_ids(40)
    mask = torch.ones_like(ids)
    mask[:, list(masked)] = 0
    known = ids[mask.bool()].tolist()
    exact(target, drafter, ids, known=known, attention_mask=mask, **sampling)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_a_mask_of_another_type(llama: PreTrainedModel, dtype: torch.dtype) -> None:
    ids = prompt_ids(12)
    mask = torch.ones_like(ids)
    mask[:, :5] = 0
    exact(llama, tiny_drafter(llama), ids, known=ids[0, 5:].tolist(), attention_mask=mask.to(dtype))


def test_a_prompt_whose_padding_lies_behind_it(llama: PreTrainedModel) -> None:
    ids = prompt_ids(12)
    mask = torch.ones_like(ids)
    mask[:, 9:] = 0
    exact(llama, tiny_drafter(llama), ids, known=[0], attention_mask=mask)  # padding stands at position 0


@pytest.mark.parametrize("positions", [torch.arange(12)[None] + 5, torch.arange(12)[None] * 3], ids=["late", "sparse"])
def test_given_positions(target: PreTrainedModel, drafter: DFlashDraftModel, positions: torch.Tensor) -> None:
    known = [0] * (int(positions.max()) + 1)
    exact(target, drafter, prompt_ids(12), known=known, position_ids=positions)


def test_given_positions_of_a_padded_prompt(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, :4] = 0
    positions = torch.arange(12)[None] + 2
    exact(target, drafter, prompt_ids(12), known=[0] * 14, attention_mask=mask, position_ids=positions)


# -- embeddings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING], ids=["greedy", "sampling"])
def test_a_prompt_of_embeddings(target: PreTrainedModel, drafter: DFlashDraftModel, sampling: dict[str, Any]) -> None:
    embeds = target.get_input_embeddings()(prompt_ids(40)).detach()
    out = exact(target, drafter, known=[0] * 40, inputs_embeds=embeds, **sampling)
    assert out.sequences.shape == (1, 30)


def test_embeddings_that_are_no_tokens(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    torch.manual_seed(3)
    exact(target, drafter, known=[0] * 20, inputs_embeds=torch.randn(1, 20, 48))


def test_embeddings_with_a_mask_and_with_ids(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    ids = prompt_ids(20)
    embeds = target.get_input_embeddings()(ids).detach()
    mask = torch.ones_like(ids)
    mask[:, :6] = 0
    exact(target, drafter, known=[0] * 14, inputs_embeds=embeds, attention_mask=mask)
    exact(target, drafter, known=[0] * 20, inputs_embeds=embeds, input_ids=ids)


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_no_prompt_at_all(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    out = exact(target, drafter)
    assert out.sequences[0, 0] == 1  # the beginning of a text


@pytest.mark.parametrize("prompt", [23, 24, 25, 70])
def test_prompts_around_a_sliding_window_of_24(prompt: int) -> None:
    for family in ("qwen2_mixed", "mistral"):
        model = tiny_target(family)
        exact(model, tiny_drafter(model), prompt_ids(prompt))


@pytest.mark.parametrize("chunk", [1, 7, 40, 64])
def test_a_prompt_in_chunks(target: PreTrainedModel, drafter: DFlashDraftModel, chunk: int) -> None:
    exact(target, drafter, prompt_ids(40), prefill_chunk_size=chunk)


def test_a_padded_prompt_in_chunks(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    ids = prompt_ids(40)
    mask = torch.ones_like(ids)
    mask[:, :9] = 0
    known = ids[0, 9:].tolist()
    exact(target, drafter, ids, known=known, attention_mask=mask, prefill_chunk_size=16)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words of which some begin like others: `w1` may be healed to `w10`."""
    words = ["<pad>", "<s>", "</s>", "<mask>", "<unk>", *(f"w{i}" for i in range(VOCAB - 5))]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.mark.filterwarnings("ignore:The generation config asks for `ddtree`")
@pytest.mark.parametrize("by_config", [False, True], ids=["asked for", "by config"])
def test_token_healing(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, by_config: bool) -> None:
    ids = tokenizer("w99 w7 w44 w1", return_tensors="pt").input_ids
    options: dict[str, Any] = {"token_healing": True, "tokenizer": tokenizer}
    expected = llama.generate(ids, max_new_tokens=30, do_sample=False, **options)
    assert expected[0, 3] != ids[0, 3], "nothing was healed"
    if by_config:
        llama.generation_config.ddtree = {"budget": 7}
    exact(llama, tiny_drafter(llama), ids, ddtree=None if by_config else True, **options)


def test_token_healing_by_config_warns_of_nothing(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    llama.generation_config.ddtree = True
    options: dict[str, Any] = {"token_healing": True, "tokenizer": tokenizer, "assistant_model": tiny_drafter(llama)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llama.generate(tokenizer("w99 w1", return_tensors="pt").input_ids, max_new_tokens=3, **options)
    assert not [warning for warning in caught if "ddtree" in str(warning.message)]


# -- configs ---------------------------------------------------------------------------------------------------------


def test_a_saved_model_brings_its_trees_along(llama: PreTrainedModel, tmp_path: Path) -> None:
    llama.generation_config.ddtree = DDTreeConfig(budget=9, tree="chain")
    llama.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = prompt_ids(8)
    expected = tiny_target("llama").generate(ids, max_new_tokens=12, do_sample=False)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(ids, assistant_model=tiny_drafter(model), **options)
    assert out.sequences.tolist() == expected.tolist()
    assert out.ddtree_stats.budgets[0] == 9
    again = model.generate(ids, assistant_model=tiny_drafter(model), ddtree={"budget": 4}, **options)
    assert again.sequences.tolist() == expected.tolist()
    assert again.ddtree_stats.budgets[0] == 4


def test_a_calls_false_beats_the_config(llama: PreTrainedModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = llama.generate(prompt_ids(8), **options)
    llama.generation_config.ddtree = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert llama.generate(prompt_ids(8), ddtree=False, **options).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("value", "kind", "match"),
    [
        ({"budget": 10**9}, ValueError, "budget"),
        ({"budget": -1}, ValueError, "budget"),
        ({"budget": 8.0}, TypeError, "budget"),
        ({"budget": None}, TypeError, "budget"),
        ({"budget": [15, "auto"]}, TypeError, "budget"),
        ({"max_depth": 10**9}, ValueError, "max_depth"),
        ({"tree": "__import__"}, ValueError, "tree"),
        ({"tree": ["chain"]}, ValueError, "tree"),
        ({"record_times": 1}, TypeError, "record_times"),
        ({"__class__": 1}, ValueError, "unknown option __class__"),
        ("best_first", TypeError, "ddtree"),
        ([7], TypeError, "ddtree"),
        (1, TypeError, "ddtree"),
    ],
)
def test_values_of_a_published_config_are_checked_like_a_users(
    llama: PreTrainedModel, tmp_path: Path, value: Any, kind: type[Exception], match: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"ddtree": value}))
    llama.generation_config = GenerationConfig.from_pretrained(tmp_path)
    ran: list[Any] = []
    llama.register_forward_pre_hook(lambda *args: ran.append(args))
    with pytest.raises(kind, match=match):
        llama.generate(prompt_ids(8), max_new_tokens=4, assistant_model=tiny_drafter(llama))
    assert not ran


def test_a_config_with_null_or_false_decodes_plainly(llama: PreTrainedModel, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = llama.generate(prompt_ids(8), **options)
    for value in (None, False):
        (tmp_path / "generation_config.json").write_text(json.dumps({"ddtree": value}))
        llama.generation_config = GenerationConfig.from_pretrained(tmp_path)
        assert llama.generate(prompt_ids(8), **options).tolist() == expected.tolist()
