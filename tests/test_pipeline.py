"""`pipeline("text-generation")` with a drafter: instance or path, default sampling, stop words, threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    pipeline,
)

from hf_ddtree import DFlashDraftModel
from scripted import tiny_drafter, tiny_target


def test_an_instance_and_a_path(
    target: PreTrainedModel, drafter: DFlashDraftModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    drafter.save_pretrained(tmp_path)
    for assistant in (drafter, str(tmp_path)):
        pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=assistant)
        assert isinstance(pipe.assistant_model, DFlashDraftModel)
        for prompt in ("w1 w2 w3", [{"role": "user", "content": "w9 w8"}], ["w5 w6", "w7"]):
            for options in ({"do_sample": False}, {"stop_sequence": "w40"}, {}):  # the default samples
                options = {"max_new_tokens": 20} | options
                torch.manual_seed(1)
                expected = plain(prompt, **options)
                torch.manual_seed(1)
                assert pipe(prompt, ddtree=True, **options) == expected


def test_the_path_of_transformers_own_assistant(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = MuseGlimmerAssistantConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=12, target_layer_ids=[0, 2], mask_token_id=3, block_size=8,
    )  # fmt: skip
    MuseGlimmerAssistantModel(config).save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=str(tmp_path))
    assert type(pipe.assistant_model) is MuseGlimmerAssistantModel
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    assert pipe("w1 w2", ddtree=True, **options) == plain("w1 w2", **options)


def test_ddtree_at_construction(
    target: PreTrainedModel, drafter: DFlashDraftModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    pipe = pipeline(
        "text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter, ddtree={"budget": 5}
    )
    assert pipe("w1 w2", **options) == plain("w1 w2", **options)


def test_a_drafter_with_other_special_tokens_is_accepted(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    drafter = tiny_drafter(target, eos_token_id=[2, 7], bos_token_id=5)
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    assert pipe("w1 w2", ddtree=True, max_new_tokens=3, do_sample=False)


def test_a_drafter_without_ddtree_and_a_batch_are_refused(
    target: PreTrainedModel, drafter: DFlashDraftModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    with pytest.raises(ValueError, match="ddtree=True"):
        pipe("w1 w2", max_new_tokens=3)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    assert pipe("w1 w2", ddtree=False, **options) == plain("w1 w2", **options)
    with pytest.raises(ValueError, match="batch of 2"):
        pipe(["w1 w2", "w3 w4"], max_new_tokens=3, batch_size=2, ddtree=True)


def test_other_assistants_load_as_before(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    assistant = tiny_target("llama", seed=3)
    assistant.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=str(tmp_path))
    assert type(pipe.assistant_model) is type(assistant)


def test_a_thread_with_a_text_streamer(
    target: PreTrainedModel, drafter: DFlashDraftModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=pipe, args=("w1 w2",), kwargs={"ddtree": True, "streamer": streamer} | options)
    thread.start()
    streamed = "".join(streamer)
    thread.join()
    expected = plain("w1 w2", return_full_text=False, **options)[0]["generated_text"]
    assert streamed.split() == expected.split()
