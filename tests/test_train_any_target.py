"""Training a drafter for targets unlike the shipped one: from prompts to trees, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import train_drafter
import training_data
from batch_generator import Generator, PlainGenerator, Request, UnsupportedTarget, make_generator
from hf_ddtree import DDTreeCandidateGenerator, DDTreeConfig, DFlashDraftModel
from hf_ddtree.compat import CACHE_KEY
from scripted import SIZES, VOCAB, WORDS, prompt_ids, show_all, tiny_drafter, tiny_target, word_tokenizer
from smollm2 import chat_ids, load_tokenizer
from train_drafter import Batch, BlockLoss, TapFeatures, choose_mask_token, default_taps
from training_data import Conversations, turn_ends
from turns import next_turn_ids, read_turns

WINDOW = 8
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}w1 {{ 'w2' if m['role'] == 'user' else 'w3' }} {{ m['content'] | trim }} "
    "w4 {% endfor %}{% if add_generation_prompt %}w1 w3 {% endif %}"
)
END = WORDS.index("w4")


def any_target(family: str) -> PreTrainedModel:
    if family == "qwen3":
        return tiny_target("qwen3", vocab_size=VOCAB + 5)
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": WINDOW}
    torch.manual_seed(0)
    if family == "gemma2":
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, attn_logit_softcapping=5.0, final_logit_softcapping=20.0))
    else:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"] * 2
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=kinds))
    show_all(model)
    return model.eval()


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_from_prompts_to_trees(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, tokenizer = any_target(family), chat_tokenizer()
    target.generation_config.eos_token_id = [END, 2]
    if family == "gemma3":
        tokenizer.mask_token = "<mask>"
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    words = [" ".join(f"w{int(i)}" for i in prompt_ids(5 + seed % 7, seed=seed, vocab=150)[0]) for seed in range(24)]
    prompts.write_text("".join(json.dumps({"source": "test", "prompt": text}) + "\n" for text in words))
    options = ["--target", str(tmp_path / "target")]
    data, out = tmp_path / "data", tmp_path / "drafter"
    sizes = ["--rows", "8", "--size", "64", "--new-tokens", "24"]
    training_data.main([str(prompts), str(data), *options, *sizes])
    assert ("which is slower" in capsys.readouterr().out) == (family == "gemma3")

    sizes = ["--layers", "1", "--block-size", "4", "--steps", "6", "--rows", "2", "--row-length", "64"]
    train_drafter.main([str(data / "conversations.npz"), str(out), *options, *sizes, "--anchors", "4"])
    drafter = DFlashDraftModel.from_pretrained(out, dtype=torch.float32)
    assert drafter.config.mask_token_id == (VOCAB if family == "qwen3" else WORDS.index("<mask>"))
    assert drafter.config.target_layer_ids == default_taps(target.config.num_hidden_layers)
    ids = prompt_ids(12)
    call: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    expected = target.generate(ids, **call)
    assert torch.equal(target.generate(ids, assistant_model=drafter, ddtree=True, **call), expected)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3"])
def test_training_sees_what_drafting_sees(family: str) -> None:
    """Two conversations in one row, the second longer than the window: the loss at an anchor by the drafting code."""
    target = any_target(family)
    drafter = tiny_drafter(target, block_size=4)
    first, second = prompt_ids(5, seed=1), prompt_ids(22, seed=2)
    ids = torch.cat([first, second], dim=1)
    document = torch.tensor([[0] * 5 + [1] * 22])
    position = torch.cat([torch.arange(5), torch.arange(22)])[None]
    batch = Batch(ids, document, position, torch.where(document == 1, 27, 0))
    anchor = 5 + 17
    features = TapFeatures(target, drafter.config.target_layer_ids)(batch)
    with torch.no_grad():
        loss = BlockLoss(drafter, target, decay=2.0)(features, batch, torch.tensor([[anchor]]))

        generator = DDTreeCandidateGenerator(target, drafter, DDTreeConfig(budget=8), max_length=64)
        states = target(second, output_hidden_states=True).hidden_states
        alone = torch.cat([states[tap + 1] for tap in drafter.config.target_layer_ids], dim=-1)
        generator.append(alone[:, :17], torch.arange(17)[None])
        tokens, log_probs, _ = generator.propose(second[:, 17:18], torch.tensor([[17]]), 3, VOCAB + 5)
    losses = [-log_probs[0, k][tokens[0, k] == second[0, 18 + k]].item() for k in range(3)]
    weights = np.exp(-np.arange(3) / 2.0)
    torch.testing.assert_close(features[:, 5:], alone, rtol=1e-3, atol=1e-3)
    assert loss.item() == pytest.approx(np.dot(losses, weights) / weights.sum(), rel=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_windows_and_soft_caps_are_left_to_generate(family: str) -> None:
    target = any_target(family)
    attention = target.config._attn_implementation
    with pytest.raises(UnsupportedTarget, match=r"Gemma\dForCausalLM gives other logits"):
        Generator(target, 2, 40, CACHE_KEY)
    assert target.config._attn_implementation == attention
    generator = make_generator(target, 2, 40, CACHE_KEY)
    assert isinstance(generator, PlainGenerator)
    prompts = [prompt_ids(length, seed=length)[0].tolist() for length in (12, 3, 9)]
    stop = [7, 8, 9, 10, 11]
    found = dict(generator.generate([Request(ids, 0.0) for ids in prompts], 11, stop))
    for number, ids in enumerate(prompts):
        expected = target.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=11, do_sample=False,
            eos_token_id=stop, pad_token_id=0,
        )  # fmt: skip
        assert found[number] == expected[0, len(ids) :].tolist()
    sampled = dict(generator.generate([Request(ids, 1.0) for ids in prompts], 5, stop))
    assert {number: len(text) <= 5 for number, text in sampled.items()} == {0: True, 1: True, 2: True}


def test_a_window_as_long_as_the_texts_is_none() -> None:
    target = tiny_target("mistral")  # a window of 24
    assert isinstance(make_generator(target, 2, 24, CACHE_KEY), Generator)
    assert isinstance(make_generator(tiny_target("mistral"), 2, 48, CACHE_KEY), PlainGenerator)


def test_the_pieces_of_a_template_are_those_of_the_whole() -> None:
    for tokenizer in (load_tokenizer(), chat_tokenizer()):
        turns = read_turns(tokenizer)
        chat = [{"role": "user", "content": "w5 w6"}]
        ids = next_turn_ids(tokenizer, [], "w5 w6", turns)
        assert ids == chat_ids(tokenizer, "w5 w6")[0].tolist()
        answer = tokenizer("w7 w8", add_special_tokens=False)["input_ids"]
        ended = tokenizer(turns.between, add_special_tokens=False)["input_ids"][:1]
        chat += [{"role": "assistant", "content": "w7 w8"}, {"role": "user", "content": "w9"}]
        whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        # With and without the token that ends the answer.
        assert next_turn_ids(tokenizer, ids + answer + ended, "w9", turns) == whole
        assert next_turn_ids(tokenizer, ids + answer, "w9", turns) == whole


def test_a_template_that_loses_turns_is_refused() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="does not put each turn's text once"):
        read_turns(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        read_turns(tokenizer)


def test_the_mask_token_is_one_that_is_never_emitted() -> None:
    tokenizer = chat_tokenizer()
    assert choose_mask_token(tokenizer, VOCAB + 2) == VOCAB
    tokenizer.mask_token = "<mask>"
    assert choose_mask_token(tokenizer, VOCAB + 2) == WORDS.index("<mask>")
    words = {"a": 0, "<unk>": 1, "<|reserved_special_token_0|>": 2, "<unused3>": 3}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")))
    assert choose_mask_token(tokenizer, 4) == 2
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "reserved": 1}, unk_token="a")))
    with pytest.raises(ValueError, match="--mask-token-id"):
        choose_mask_token(tokenizer, 2)


def test_ends_of_turns_are_the_targets() -> None:
    target, tokenizer = any_target("qwen3"), chat_tokenizer()
    target.generation_config.eos_token_id = None
    assert turn_ends(target, tokenizer) == [2]
    target.generation_config.eos_token_id = [5, 6]
    assert turn_ends(target, tokenizer) == [5, 6]
    target.generation_config.eos_token_id, tokenizer.eos_token = None, None
    with pytest.raises(ValueError, match="which token ends a turn"):
        turn_ends(target, tokenizer)


def test_ids_beyond_16_bits_are_kept(tmp_path: Path) -> None:
    conversations = Conversations()
    conversations.add([1, 2], [151_000, 3])
    conversations.save(tmp_path / "c.npz")
    batch = train_drafter.load_conversations(tmp_path / "c.npz", 8, torch.device("cpu"))
    assert batch.ids[0, :4].tolist() == [1, 2, 151_000, 3]


def test_a_target_that_trees_refuse_is_named_before_training(tmp_path: Path) -> None:
    target = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=4, n_head=2))
    recipe = train_drafter.Recipe(layers=1, block_size=4, mask_token_id=3)
    with pytest.raises(ValueError, match="takes no `position_ids`"):
        train_drafter.train(target, tmp_path / "none.npz", tmp_path, recipe)


def test_prompts_without_the_column_are_named(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl, row 2: no text in 'prompt'; its columns are \['question'\]"):
        training_data.read_prompts(tmp_path / "p.jsonl")
