"""Targets whose layers have something of their own, beyond the prompt and options of the list of all targets."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig, BertLMHeadModel, GPTNeoConfig, GPTNeoForCausalLM, PreTrainedModel

from all_targets import config_classes, tiny_config, tiny_model
from hf_ddtree import capture
from hf_ddtree.compat import CACHE_KEY
from scripted import SIZES, prompt_ids, scripted, tiny_drafter

pytestmark = pytest.mark.usefixtures("each_layers")

NEW = 30
# Chunks and counted rows, indexers, an indexer for several layers, one beside windows, shared keys, layers run twice.
OWN = "llama4_text deepseek_v32 hy_v4 dots3_note_text gemma3n_text dory".split()


def model_of(family: str, **overrides: Any) -> PreTrainedModel:
    if family not in config_classes():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return tiny_model(tiny_config(config_classes()[family], **overrides))


def decode(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    options = {"do_sample": False, "no_repeat_ngram_size": 1, "suppress_tokens": [0], "max_new_tokens": NEW} | options
    return model.generate(ids, return_dict_in_generate=True, **options)


def decode_with_trees(model: PreTrainedModel, ids: torch.Tensor, text: torch.Tensor, **options: Any) -> Any:
    with scripted(text, hit=0.7):
        return decode(model, ids, assistant_model=tiny_drafter(model), ddtree=True, **options)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("family", OWN)
def test_a_padded_prompt(family: str, eager: bool) -> None:
    model = model_of(family)
    if eager:
        model.set_attn_implementation("eager")
    ids, padding = prompt_ids(21), 5
    mask = torch.ones_like(ids)
    ids[:, :padding], mask[:, :padding] = 0, 0
    expected = decode(model, ids, attention_mask=mask).sequences
    out = decode_with_trees(model, ids, expected[:, padding:], attention_mask=mask)
    assert out.sequences.tolist() == expected.tolist()
    assert out.ddtree_stats.mean_acceptance_length > 1.3


@pytest.mark.parametrize("family", OWN)
def test_a_returned_cache_is_continued(family: str) -> None:
    model = model_of(family)
    first = decode(model, prompt_ids(21))
    out = decode_with_trees(model, prompt_ids(21), first.sequences)
    assert out.sequences.tolist() == first.sequences.tolist()
    ids = torch.cat([first.sequences, prompt_ids(9, seed=1)], dim=1)
    expected = decode(model, ids, **{CACHE_KEY: first[CACHE_KEY]}).sequences
    once_more = decode_with_trees(model, ids, expected, **{CACHE_KEY: out[CACHE_KEY]})
    assert once_more.sequences.tolist() == expected.tolist()
    afresh = decode(model, torch.cat([expected, prompt_ids(4)], dim=1), **{CACHE_KEY: once_more[CACHE_KEY]})
    assert afresh.sequences.tolist() == decode(model, torch.cat([expected, prompt_ids(4)], dim=1)).sequences.tolist()


@pytest.mark.parametrize("period", [8, 34])
def test_rows_that_are_counted_in_place_of_positions(period: int) -> None:
    """Llama 4 scales queries by their row in a forward, which in a tree is not their depth."""
    model = model_of("llama4_text", floor_scale=period, attn_scale=1.0, attention_chunk_size=64)
    expected = decode(model, prompt_ids(30), output_logits=True)
    out = decode_with_trees(model, prompt_ids(30), expected.sequences, output_logits=True)
    assert out.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.cat(out.logits), torch.cat(expected.logits), atol=1e-3, rtol=0)
    assert out.ddtree_stats.mean_acceptance_length > 1.3


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("gpt_oss", "$"),
        ("gemma3_text", "$"),
        ("llama4_text", "attention goes by the number of a row"),
        ("deepseek_v32", "layers of the kind (indexed|deepseek_sparse)_attention"),
        ("gemma3n_text", "(layers have no keys of their own|the capture failed)"),
        ("deepseek_v3", "the capture failed .*attention over other keys or values than the cache keeps"),
        ("diffllama", "the capture failed .*layers with attention of their own"),
        ("falcon", "the capture failed .*layers with attention of their own"),
        ("doge", "the capture failed .*attention that makes a mask of its own"),
        ("dory", "the capture failed"),
    ],
)
def test_a_step_takes_no_target_whose_attention_it_does_not_run(
    family: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_release", lambda device: None)
    model = model_of(family)
    options = {"no_repeat_ngram_size": None, "suppress_tokens": None}  # else single tokens have to be looked at
    expected = decode(model, prompt_ids(21), **options).sequences
    out = decode(model, prompt_ids(21), assistant_model=tiny_drafter(model), ddtree=True, **options)
    assert out.sequences.tolist() == expected.tolist()
    assert re.match(path, out.ddtree_stats.launch.reason or ""), out.ddtree_stats


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("padding", [0, 5])
def test_chunks_in_a_graph(padding: int) -> None:
    model = model_of("llama4_text", attn_temperature_tuning=False, attention_chunk_size=8)
    ids = prompt_ids(21)
    options = {"no_repeat_ngram_size": None, "suppress_tokens": None, "attention_mask": torch.ones_like(ids)}
    ids[:, :padding], options["attention_mask"][:, :padding] = 0, 0
    expected = decode(model, ids, **options).sequences
    out = decode_with_trees(model, ids, expected[:, padding:], **options)
    assert out.sequences.tolist() == expected.tolist()
    assert out.ddtree_stats.compiled.value == "yes" and out.ddtree_stats.mean_acceptance_length > 1.3


def fails(model: PreTrainedModel, match: str) -> None:
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda *args: forwards.append(1))
    with pytest.raises(ValueError, match=match):
        decode(model, prompt_ids(4), assistant_model=tiny_drafter(model), ddtree=True)
    assert not forwards


def test_a_target_that_keeps_a_mask_of_its_own_is_refused() -> None:
    config = GPTNeoConfig(vocab_size=211, hidden_size=48, num_layers=4, num_heads=4, attention_types=[[["local"], 4]])
    fails(GPTNeoForCausalLM(config).eval(), "makes its attention masks itself")


def test_a_target_that_sees_later_tokens_is_refused() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    fails(BertLMHeadModel(BertConfig(**sizes)).eval(), "its attention is not causal .*is_decoder=True")


@pytest.mark.parametrize("family", ["lfm2", "lfm3", "falcon_h1"])
def test_layers_with_a_convolution_are_refused_as_recurrent(family: str) -> None:
    fails(model_of(family), "recurrent layers")
