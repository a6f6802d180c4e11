"""Tokens per round of a target and a drafter, without running rounds.

    python benchmarks/acceptance.py --drafter examples/smollm2-135m-dflash --json acceptance.json

The target answers each prompt once, greedily, and `examples/simulation.py` counts each tree's rounds along the answer.

Counted are first answers, up to the end of the turn or to the point where the text begins to repeat itself. A set's
figure is all its tokens over all its rounds; the mean is over the three public sets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from batch_generator import Generator, Request
from hf_ddtree import DFlashDraftModel
from hf_ddtree.compat import CACHE_KEY
from simulation import Text, acceptance_lengths, draft_along
from smollm2 import PROMPT_FILES, load_prompts, prepare_target
from training_data import encode_chats, first_repeat
from training_prompts import read_jsonl

TREES = {"chain": 0, "15": 15, "63": 63, "255": 255}


def answer_greedily(target: PreTrainedModel, prompts: list[list[int]], new_tokens: int, end: list[int]) -> list[Text]:
    """The target's answers, up to the end of the turn or the first repetition."""
    size = max(map(len, prompts)) + new_tokens + 1
    attention = target.config._attn_implementation
    generator = Generator(target, min(len(prompts), 512), size, CACHE_KEY)
    texts = dict(generator.generate([Request(ids, 0.0) for ids in prompts], new_tokens, end))
    target.set_attn_implementation(attention)
    return [Text(ids + texts[i][: first_repeat(texts[i])], len(ids)) for i, ids in enumerate(prompts)]


def measure(
    target: PreTrainedModel, drafter: DFlashDraftModel, sets: dict[str, list[Text]]
) -> dict[str, dict[str, float]]:
    """Tokens per round: a row for each set, a column for each tree."""
    table: dict[str, dict[str, float]] = {}
    for name, answers in sets.items():
        answers = [answer for answer in answers if len(answer.ids) - answer.start > 1]
        chain = {"chain": ("chain", drafter.config.block_size - 1)}
        drafts = draft_along(target, drafter, answers, max(TREES.values()), chain)
        table[name] = {}
        for tree, budget in TREES.items():
            accepted = [each.accepted(budget) if budget else each.others["chain"] for each in drafts]
            table[name][tree] = statistics.mean(length for each in accepted for length in acceptance_lengths(each))
    public = [name for name in table if name in PROMPT_FILES]
    table["mean of public sets"] = {tree: sum(table[name][tree] for name in public) / len(public) for tree in TREES}
    return table


def markdown(table: dict[str, dict[str, float]]) -> str:
    """The table with two decimals."""
    lines = [f"| prompts | {' | '.join(TREES)} |", "| --- |" + " ---: |" * len(TREES)]
    lines += [f"| {name} | {' | '.join(f'{row[tree]:.2f}' for tree in TREES)} |" for name, row in table.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--target", help="directory or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", nargs="+", default=[str(root / "examples/smollm2-135m-dflash")])
    parser.add_argument("--held-out", type=Path, help="JSON lines with a `prompt` each, counted as a set of its own")
    parser.add_argument("--limit", type=int, help="only so many prompts of each set")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    path = arguments.target or prepare_target()
    tokenizer = AutoTokenizer.from_pretrained(path)
    target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    prompts = {name: load_prompts(name)[: arguments.limit] for name in PROMPT_FILES}
    if arguments.held_out:
        prompts["held out"] = [row["prompt"] for row in read_jsonl(arguments.held_out)][: arguments.limit]
    encoded = encode_chats(tokenizer, [prompt for texts in prompts.values() for prompt in texts])
    started = time.monotonic()
    answers = iter(answer_greedily(target, encoded, arguments.new_tokens, [tokenizer.eos_token_id]))
    sets = {name: [next(answers) for _ in texts] for name, texts in prompts.items()}
    print(f"{len(encoded)} prompts, {dtype} on {device}, answered in {time.monotonic() - started:.1f} s\n")

    results = {}
    for name in arguments.drafter:
        drafter = DFlashDraftModel.from_pretrained(name, dtype=dtype).to(device).eval()
        started = time.monotonic()
        results[name] = measure(target, drafter, sets)
        print(f"{name}: tokens per round ({time.monotonic() - started:.1f} s)\n\n{markdown(results[name])}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
