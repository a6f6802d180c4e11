"""What a drafter is trained on: its target's own answers to many prompts.

    python examples/training_data.py prompts.jsonl data/ --openings openings.jsonl

`training_prompts.py` writes the two inputs; any JSON lines with a `prompt` each will do, such as the list beside the
shipped drafter (it has nothing of the evaluation prompts; see to that in yours). The target continues the openings as
a user would, the results are added to the prompts unless they share 13 words or tokens in a row with an evaluation
prompt, and the target answers: mostly greedily, as the drafter is mostly used, and up to the point where its text
begins to repeat itself.

Any chat model can be the target (`--target`): turns are put in its own chat template, and end with the tokens that its
generation config says. One whose attention the fast generator cannot compute is asked by plain `generate`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from batch_generator import Generator, PlainGenerator, Request, make_generator
from hf_ddtree.compat import CACHE_KEY
from smollm2 import prepare_target
from training_prompts import drop_overlaps, evaluation_texts, read_jsonl, write_jsonl
from turns import Turns, join, read_turns

REPEAT = 20  # tokens in a row that may occur once in an answer


def first_repeat(ids: Sequence[int], size: int = REPEAT) -> int:
    """Where the first run of `size` tokens begins that has occurred before; the length of `ids` if none has.

    Greedy text of a small model ends in loops. What comes after this point is neither trained on nor counted.
    """
    text = np.asarray(ids, dtype=np.int32).tobytes()
    seen = set()
    for start in range(len(ids) - size + 1):
        run = text[4 * start : 4 * (start + size)]
        if run in seen:
            return start
        seen.add(run)
    return len(ids)


class Writer(NamedTuple):
    """A target that writes turns of conversations."""

    generator: Generator | PlainGenerator
    tokenizer: PreTrainedTokenizerBase
    turns: Turns
    stop: list[int]  # the tokens that end a turn

    @classmethod
    def for_target(
        cls, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int, size: int, **template_options: Any
    ) -> Writer:
        """A writer of `rows` texts at a time, of at most `size` tokens; the last as in `read_turns`."""
        turns = read_turns(tokenizer, **template_options)
        return cls(make_generator(target, rows, size, CACHE_KEY), tokenizer, turns, turn_ends(target, tokenizer))


def turn_ends(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a turn: those of the target's generation config, else the tokenizer's.

    Raises:
        ValueError: neither names one.
    """
    ends = target.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    if ends is None:
        raise ValueError("Neither the target's generation config nor its tokenizer says which token ends a turn.")
    return list(ends) if isinstance(ends, list) else [ends]


def sample_prompts(writer: Writer, openings: list[dict[str, str]], seconds: float, seed: int) -> list[dict[str, str]]:
    """Let the target continue `openings` as a user; what does not come to an end, or is no prompt, is dropped."""
    rng = random.Random(seed)
    generator, tokenizer, turns, stop = writer
    texts = [turns.before + row["form"].split("{prompt}")[0] + row["opening"] for row in openings]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    requests = [Request(ids, rng.choice((0.7, 0.85, 1.0))) for ids in encoded]
    found = []
    written = generator.generate(requests, 160, stop, seconds)
    for index, ids in tqdm(written, total=len(requests), desc="user turns", mininterval=5):
        row = openings[index]
        text = row["opening"] + tokenizer.decode(ids, skip_special_tokens=True)
        prompt: str | None
        if "def " in row["opening"]:
            prompt = function_head(text)
        else:
            prompt = text.strip() if ids[-1] in stop and len(ids) > 3 else None
        if prompt is not None and first_repeat(ids) == len(ids):
            found.append({"source": "sampled", "prompt": row["form"].format(prompt=prompt)})
    return found


def function_head(text: str) -> str | None:
    """`text` up to the end of its first docstring, if it has one."""
    match = re.match(r"(?s)(.*?def [^\n]*:\n\s+(\"\"\"|\'\'\').{30,}?\2)", text)
    return f"{match[1]}\n" if match and match[1].count("def ") == 1 else None


class Conversations:
    """Token ids of conversations, with the places of the assistant's turns."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.answers: list[list[tuple[int, int]]] = []  # start and end of each answer

    def add(self, prompt: list[int], answer: list[int]) -> int:
        self.ids.append(prompt + answer)
        self.answers.append([(len(prompt), len(prompt) + len(answer))])
        return len(self.ids) - 1

    def extend(self, index: int, prompt: list[int], answer: list[int]) -> None:
        """Go on with a turn; `prompt` is the whole text before the answer."""
        self.ids[index] = prompt + answer
        self.answers[index].append((len(prompt), len(prompt) + len(answer)))

    def save(self, path: Path) -> None:
        """Write `ids`, `lengths` of the conversations, and `answer`: for each token of an answer where the answer
        ends, 0 for other tokens."""
        ends = [np.zeros(len(ids), dtype=smallest(len(ids))) for ids in self.ids]
        for end, spans in zip(ends, self.answers, strict=True):
            for first, last in spans:
                end[first:last] = last
        np.savez(
            path,
            ids=np.concatenate([np.asarray(ids, dtype=smallest(max(ids))) for ids in self.ids]),
            answer=np.concatenate(ends),
            lengths=np.asarray([len(ids) for ids in self.ids], dtype=np.int32),
        )


def smallest(value: int) -> type[np.unsignedinteger]:
    """The type of integer that holds `value`: vocabularies may be larger than 16 bits."""
    return np.uint16 if value < 2**16 else np.uint32


def encode_chats(
    tokenizer: PreTrainedTokenizerBase, prompts: list[str], turns: Turns | None = None
) -> list[list[int]]:
    """What `chat_ids` gives for each prompt, all at once."""
    turns = turns or read_turns(tokenizer)
    return tokenizer([turns.before + text + turns.answer for text in prompts], add_special_tokens=False)["input_ids"]


def answer_prompts(
    writer: Writer,
    prompts: list[str],
    seconds: float,
    seed: int,
    new_tokens: int = 256,
    sampled: float = 0.15,
    second_turns: float = 0.05,
) -> Conversations:
    """Let the target answer: greedily, but for a part `sampled` of the rows; some get a second turn."""
    rng = random.Random(seed)
    start = time.monotonic()
    generator, tokenizer, turns, stop = writer
    most = generator.size - new_tokens - 1
    encoded = encode_chats(tokenizer, prompts, turns)
    requests = [
        Request(ids, rng.choice((0.7, 1.0)) if rng.random() < sampled else 0.0) for ids in encoded if len(ids) <= most
    ]
    conversations = Conversations()
    again = []
    texts = generator.generate(requests, new_tokens, stop, seconds * (1 - 2 * second_turns))
    for index, answer in tqdm(texts, total=len(requests), desc="answers", mininterval=5):
        kept = answer[: first_repeat(answer)]
        if len(kept) < 2:
            continue
        row = conversations.add(requests[index].ids, kept)
        if kept[-1] in stop and len(conversations.ids[row]) < most - 80 and rng.random() < 2 * second_turns:
            again.append(row)

    # A turn that was written has its end already; the template's texts between turns begin with one.
    between, next_answer = tokenizer([turns.between, turns.next_answer], add_special_tokens=False)["input_ids"]
    requests = [Request(join(conversations.ids[row], between), 0.9) for row in again]
    left = seconds - (time.monotonic() - start)
    users = dict(generator.generate(requests, 64, stop, left / 2))
    users = {number: turn for number, turn in users.items() if turn[-1] in stop}
    numbers = sorted(users)
    requests = [Request(join(requests[number].ids + users[number], next_answer), 0.0) for number in numbers]
    left = seconds - (time.monotonic() - start)
    for number, answer in generator.generate(requests, new_tokens, stop, left):
        # A second answer often repeats the first: only what is new counts.
        first = conversations.ids[again[numbers[number]]]
        kept = answer[: max(0, first_repeat(first + answer) - len(first))]
        if len(kept) >= 2:
            conversations.extend(again[numbers[number]], requests[number].ids, kept)
    return conversations


def read_prompts(path: Path, *columns: str) -> list[dict[str, str]]:
    """Rows of a JSON lines file that all have `columns`, by default a `prompt`.

    Raises:
        ValueError: one does not.
    """
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        if missing := [name for name in columns or ("prompt",) if not isinstance(row.get(name), str)]:
            raise ValueError(f"{path}, row {number}: no text in {missing[0]!r}; its columns are {sorted(row)}.")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, help="JSON lines with a `prompt` each")
    parser.add_argument("out", type=Path, help="directory for prompts.jsonl, held_out.jsonl and conversations.npz")
    parser.add_argument("--openings", type=Path, help="openings of training_prompts.py, for the target to continue")
    parser.add_argument("--target", help="directory or hub id of a chat model; default: SmolLM2-135M-Instruct")
    parser.add_argument(
        "--template-options", type=json.loads, default={}, help="of the chat template: '{\"enable_thinking\": false}'"
    )
    parser.add_argument("--rows", type=int, default=4096, help="texts generated at a time")
    parser.add_argument("--new-tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--size", type=int, default=512, help="most tokens of a conversation")
    parser.add_argument("--limit", type=int, help="use only so many prompts and openings")
    parser.add_argument("--prompt-seconds", type=float, default=60, help="time for sampling user turns")
    parser.add_argument("--answer-seconds", type=float, default=240, help="time for answers")
    parser.add_argument("--held-out", type=Path, help="prompts to keep out; default: made from the last 150 openings")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    if not 0 < arguments.new_tokens < arguments.size - 1:
        parser.error("--new-tokens must leave room for a prompt within --size")
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)

    name = arguments.target or prepare_target()
    tokenizer = AutoTokenizer.from_pretrained(name)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
    writer = Writer.for_target(target, tokenizer, arguments.rows, arguments.size, **arguments.template_options)
    openings = read_prompts(arguments.openings, "opening", "form") if arguments.openings else []
    if arguments.held_out:
        held_out = read_prompts(arguments.held_out)
    else:
        held_out = sample_prompts(writer, openings[-150:], 600, arguments.seed + 1)
        held_out = drop_overlaps(held_out, evaluation_texts(), tokenizer)
    write_jsonl(arguments.out / "held_out.jsonl", held_out)
    prompts = read_prompts(arguments.prompts)[: arguments.limit]
    sampled = sample_prompts(writer, openings[:-150][: arguments.limit], arguments.prompt_seconds, arguments.seed)
    reserved = evaluation_texts() + [row["prompt"] for row in held_out]
    sampled = drop_overlaps(sampled, reserved, tokenizer, known=prompts)
    prompts += sampled
    write_jsonl(arguments.out / "prompts.jsonl", prompts)

    texts = [row["prompt"] for row in prompts]
    random.Random(arguments.seed).shuffle(texts)
    conversations = answer_prompts(writer, texts, arguments.answer_seconds, arguments.seed, arguments.new_tokens)
    if not conversations.ids:
        raise SystemExit(
            f"No answers: of {len(prompts)} prompts, none of at most {arguments.size - arguments.new_tokens - 1} "
            "tokens was answered in the time given (--size, --answer-seconds)."
        )
    conversations.save(arguments.out / "conversations.npz")
    tokens = sum(end - start for spans in conversations.answers for start, end in spans)
    print(f"{len(prompts)} prompts, {len(sampled)} of them sampled")
    print(f"{len(conversations.ids)} conversations, {tokens} answer tokens")


if __name__ == "__main__":
    main()
