"""Prompts to evaluate on: sets from packages, sets of a model hub, or files of one's own.

| name | where from | prompts |
| --- | --- | --- |
| `humaneval`, `mt-bench`, `gsm8k` | the packages in `requirements-data.txt` | 164, 80 of two turns, a sample of 100 |
| `hub:gsm8k`, `math500`, `mbpp`, `alpaca`, ... (`HUB_SETS`) | a model hub, through `datasets` | all of the split |
| a path that ends in `.jsonl` | one JSON object a line | with `prompt`, `turns` or `messages` |
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from smollm2 import HUMANEVAL_PROMPT, PROMPT_FILES, load_turns

PACKAGE_SETS = {name.replace("_", "-"): name for name in PROMPT_FILES}
CODE = HUMANEVAL_PROMPT.replace("{prompt}", "{}")
MATH = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


class HubSet(NamedTuple):
    """Where a set lies on the hub, and how a row becomes a prompt."""

    path: str
    split: str
    columns: tuple[str, ...]  # that are joined to a prompt; a column may hold a list of turns
    config: str | None = None
    form: str = "{}"


HUB_SETS = {
    "gsm8k": HubSet("openai/gsm8k", "test", ("question",), "main", MATH),
    "math500": HubSet("HuggingFaceH4/MATH-500", "test", ("problem",), form=MATH),
    "aime24": HubSet("HuggingFaceH4/aime_2024", "train", ("problem",), form=MATH),
    "aime25": HubSet("MathArena/aime_2025", "train", ("problem",), form=MATH),
    "humaneval": HubSet("openai/openai_humaneval", "test", ("prompt",), form=CODE),
    "mbpp": HubSet("google-research-datasets/mbpp", "test", ("prompt",), "sanitized"),
    "livecodebench": HubSet("livecodebench/code_generation_lite", "test", ("question_content", "starter_code")),
    "swe-bench-lite": HubSet("princeton-nlp/SWE-bench_Lite", "test", ("problem_statement",)),
    "alpaca": HubSet("tatsu-lab/alpaca", "train", ("instruction", "input")),
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", "train", ("prompt",)),
}


class Prompt(NamedTuple):
    """A chat up to where the assistant answers, and what the user says after that answer and further ones."""

    set: str
    index: int  # in its set
    messages: list[dict[str, str]]
    later: list[str] = []


def load_sets(names: list[str], count: int | None = None) -> list[Prompt]:
    """Prompts of several sets, `count` of each (default: all), evenly spread.

    Raises:
        ValueError: There is no such set, or a file has a line that is no prompt.
        FileNotFoundError: There is no such file, or its package is not installed.
        ModuleNotFoundError: A set of a hub needs `datasets`.
    """
    found = []
    for name in names:
        prompts = load_set(name)
        if not prompts:
            raise ValueError(f"{name} holds no prompts.")
        if any(prompt.set == prompts[0].set for prompt in found):
            raise ValueError(f"two sets are called {prompts[0].set}: rows could not tell them apart. Rename a file.")
        taken = min(count or len(prompts), len(prompts))
        found += [prompts[i * len(prompts) // taken] for i in range(taken)]
    return found


def load_set(name: str) -> list[Prompt]:
    """All prompts of a set, by its name or file."""
    if name.endswith((".jsonl", ".json")) or Path(name).is_file():
        return list(read_prompts(Path(name)))
    short = name.removeprefix("hub:").replace("_", "-")
    if short in PACKAGE_SETS and not name.startswith("hub:"):
        return [to_prompt(short, i, {"turns": turns}) for i, turns in enumerate(load_turns(PACKAGE_SETS[short]))]
    if short in HUB_SETS:
        return list(hub_prompts(short))
    raise ValueError(
        f"there is no set {name!r}. From packages: {', '.join(PACKAGE_SETS)}; through `datasets`: "
        f"{', '.join(key if key not in PACKAGE_SETS else f'hub:{key}' for key in HUB_SETS)}; or a file *.jsonl."
    )


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Prompts of a JSONL file; its name without the ending is the set's."""
    try:
        with located(str(path)):
            text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no file {path}. It should hold one JSON object a line, with `prompt`, `turns` or `messages`."
        ) from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    for index, (number, line) in enumerate(lines):
        with located(f"{path}, line {number}"):
            yield to_prompt(path.stem, index, json.loads(line))


@contextlib.contextmanager
def located(place: str) -> Iterator[None]:
    """Say where a `ValueError`, of JSON as well, or JSON that is nested beyond all measure, comes from."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: {error}") from None


def to_prompt(name: str, index: int, row: Any) -> Prompt:
    """A row with `prompt` (a text), `turns` (the user's texts) or `messages` (a chat that ends with the user's).

    Raises:
        ValueError: It has none of them, or not of that kind.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"expected an object with `prompt`, `turns` or `messages`, got {type(row).__name__}")
    json.dumps(dict(row), ensure_ascii=False, default=str).encode()  # half of a surrogate pair is no text
    if "messages" in row:
        messages = row["messages"]
        if not (
            isinstance(messages, list)
            and messages
            and all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in messages
            )
            and messages[-1]["role"] == "user"
        ):
            raise ValueError("`messages` must be a list of {role, content} that ends with the user's message")
        return Prompt(name, index, [{"role": m["role"], "content": m["content"]} for m in messages])
    turns = row.get("turns", row.get("prompt"))
    turns = [turns] if isinstance(turns, str) else turns
    if turns is None:
        raise ValueError(f"expected `prompt`, `turns` or `messages`, got the columns {', '.join(row) or 'of nothing'}")
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)):
        raise ValueError("`prompt` must be a text, and `turns` a list of texts")
    return Prompt(name, index, [{"role": "user", "content": turns[0]}], turns[1:])


def hub_prompts(name: str) -> Iterator[Prompt]:
    """Prompts of a set on the hub."""
    where = HUB_SETS[name]
    in_package = f"--data {name} takes it from a package"
    other = in_package if name in PACKAGE_SETS else "or pass a file *.jsonl with its prompts"
    try:
        from datasets import load_dataset
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{name} lies on a model hub: `pip install datasets` to load it ({other})."
        ) from None
    try:
        rows = load_dataset(where.path, where.config, split=where.split)
    except Exception as error:  # of many kinds: no connection, no access, another layout
        raise ValueError(f"{where.path} could not be loaded ({error}); {other}.") from error
    for index, row in enumerate(rows):
        if missing := [column for column in where.columns if column not in row]:
            raise ValueError(f"{where.path} has no column {', '.join(missing)}, only {', '.join(row)}.")
        first = row[where.columns[0]]
        text = first if isinstance(first, list) else "\n\n".join(row[c] for c in where.columns if row[c])
        turns = text if isinstance(text, list) else [where.form.format(text)]
        yield to_prompt(f"hub:{name}" if name in PACKAGE_SETS else name, index, {"turns": turns})
