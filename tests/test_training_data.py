"""The committed training prompts and what they are made and answered with."""

from __future__ import annotations

import hashlib
import lzma
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from batch_generator import Generator, Request
from hf_ddtree.compat import CACHE_KEY
from smollm2 import HUMANEVAL_PROMPT, chat_ids, load_prompts, load_tokenizer
from training_data import encode_chats, first_repeat, function_head
from training_prompts import SOURCES, OverlapFilter, drop_overlaps, evaluation_texts, read_jsonl
from training_requests import composed_functions

Rows = list[dict[str, str]]

DRAFTER = Path(__file__).parents[1] / "examples" / "smollm2-135m-dflash"


@pytest.fixture(scope="module")
def prompts() -> Rows:
    return read_jsonl(DRAFTER / "prompts.jsonl.xz")


@pytest.fixture(scope="module")
def held_out() -> Rows:
    return read_jsonl(DRAFTER / "held_out.jsonl")


def on_card(name: str) -> str:
    """A value from the model card's table of facts."""
    match = re.search(
        rf"^\| {re.escape(name)} \| `?([^|`]+?)`? \|$", (DRAFTER / "README.md").read_text(), re.MULTILINE
    )
    assert match, f"the card has no row {name!r}"
    return match[1]


def test_no_13_words_or_tokens_of_an_evaluation_prompt_are_in_the_training_prompts(prompts: Rows) -> None:
    overlaps = OverlapFilter(evaluation_texts(), load_tokenizer())([row["prompt"] for row in prompts])
    assert sum(overlaps) == 0


def test_held_out_prompts_are_not_trained_on_and_are_no_evaluation_prompts(prompts: Rows, held_out: Rows) -> None:
    texts = [row["prompt"] for row in held_out]
    assert not {row["prompt"] for row in prompts} & set(texts)
    assert drop_overlaps(held_out, evaluation_texts(), load_tokenizer()) == held_out
    sampled = [row["prompt"] for row in prompts if row["source"] == "sampled"]
    assert sum(OverlapFilter(texts, load_tokenizer())(sampled)) == 0


def test_count_hash_and_seeds_are_those_of_the_card(prompts: Rows, held_out: Rows) -> None:
    listing = lzma.decompress((DRAFTER / "prompts.jsonl.xz").read_bytes())
    assert hashlib.sha256(listing).hexdigest() == on_card("SHA-256 of the list")
    assert f"{len(prompts):,}" == on_card("training prompts")
    assert str(len(held_out)) == on_card("held-out prompts")
    assert on_card("seed of the training data") != on_card("seed of the held-out prompts")


def test_prompts_are_distinct_and_each_has_a_source_with_a_licence(prompts: Rows) -> None:
    assert len({row["prompt"] for row in prompts}) == len(prompts) >= 60_000
    assert {row["source"] for row in prompts} == set(SOURCES)
    card = (DRAFTER / "README.md").read_text()
    for source in SOURCES:
        count = sum(row["source"] == source for row in prompts)
        assert f"| {source} | {count:,} |" in card


def test_the_overlap_filter_finds_runs_of_13_and_not_of_12() -> None:
    text = load_prompts("gsm8k")[3]
    overlaps = OverlapFilter(evaluation_texts(), load_tokenizer())
    twelve, thirteen = (" ".join(text.split()[2 : 2 + count]) for count in (12, 13))
    shouted = re.sub(r"\s+", " -- ", thirteen.upper())
    assert overlaps([f"Yes, {twelve} or so", f"Yes, {thirteen} or so", shouted, "hello"]) == [False, True, True, False]
    # Two halves of a run in neighbouring texts are no run.
    assert overlaps([" ".join(text.split()[2:8]), " ".join(text.split()[8:16])]) == [False, False]
    code = load_prompts("humaneval")[0]
    assert overlaps([code]) == [True]
    assert overlaps([HUMANEVAL_PROMPT.format(prompt="def f():\n    pass")]) == [False]


def test_answers_are_cut_at_the_first_repeated_run() -> None:
    assert first_repeat([1, 2, 3, 4, 1, 2, 3, 9], size=3) == 4
    assert first_repeat([7] * 8, size=3) == 1
    assert first_repeat(list(range(50))) == 50


def test_chats_are_encoded_as_for_evaluation() -> None:
    tokenizer = load_tokenizer()
    texts = [
        *load_prompts("humaneval")[:3],
        *load_prompts("mt_bench")[:3],
        "  two spaces\n\n and a line\n",
        "12 + 3",
        "",
    ]
    assert encode_chats(tokenizer, texts) == [chat_ids(tokenizer, text)[0].tolist() for text in texts]


def test_a_function_head_ends_with_its_docstring() -> None:
    head = 'from typing import List\n\n\ndef f(x: List[int]) -> int:\n    """ Return the largest number in x."""\n'
    assert function_head(f"{head}    return max(x)\n") == head
    assert function_head("def f(x):\n    return x\n") is None


def test_composed_functions_are_python() -> None:
    for _, text in composed_functions(random.Random(5), 200):
        before, after = HUMANEVAL_PROMPT.split("{prompt}")
        compile(text.removeprefix(before).removesuffix(after), "prompt", "exec")


@pytest.mark.parametrize("rows", [1, 3])
def test_the_generator_writes_what_generate_writes(rows: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    texts = [torch.randint(3, 96, (length,)).tolist() for length in (5, 17, 1, 9, 30, 2, 12)]
    expected = []
    for ids in texts:
        options = {"max_new_tokens": 11, "do_sample": False, "eos_token_id": [7, 8], "pad_token_id": 0}
        output = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **options)
        expected.append(output[0, len(ids) :].tolist())
    generator = Generator(model, rows, 48, CACHE_KEY, steps_a_check=4)
    found = dict(generator.generate([Request(ids, 0.0) for ids in texts], 11, [7, 8]))
    assert [found[i] for i in range(len(texts))] == expected
