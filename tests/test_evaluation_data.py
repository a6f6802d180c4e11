"""Prompts of an evaluation, from packages, files and a hub that is played."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import evaluation_data
import smollm2
from evaluation_data import Prompt, load_set, load_sets


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_sets_of_packages_have_their_turns() -> None:
    assert [len(load_set(name)) for name in ("humaneval", "mt-bench", "gsm8k")] == [164, 80, 100]
    prompts = load_set("mt_bench")
    assert prompts == load_set("mt-bench")
    assert {(len(prompt.messages), len(prompt.later)) for prompt in prompts} == {(1, 1)}
    assert [prompt.messages[0]["content"] for prompt in prompts] == smollm2.load_prompts("mt_bench")
    assert {prompt.set for prompt in prompts} == {"mt-bench"}


def test_some_prompts_are_spread_over_each_set() -> None:
    found = load_sets(["mt-bench", "gsm8k"], 4)
    assert [prompt[:2] for prompt in found] == [
        *(("mt-bench", i) for i in (0, 20, 40, 60)), *(("gsm8k", i) for i in (0, 25, 50, 75)),
    ]  # fmt: skip
    assert len(load_sets(["gsm8k"], 1000)) == 100


def test_a_file_holds_prompts_turns_and_chats(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    chat = [{"role": "system", "content": "Be brief."}, user("Hi"), {"role": "assistant", "content": "Hi."}, user("?")]
    rows: list[Any] = [
        {"prompt": "a", "id": 3},
        {"turns": ["b", "c", "d"]},
        {"messages": chat},
        {"prompt": ["e", "f"]},
    ]
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    assert load_set(str(path)) == [
        Prompt("mine", 0, [user("a")]),
        Prompt("mine", 1, [user("b")], ["c", "d"]),
        Prompt("mine", 2, chat),
        Prompt("mine", 3, [user("e")], ["f"]),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "?", "answer": "!"}', "got the columns question, answer"),
        ("{}", "got the columns of nothing"),
        ('{"prompt": "a"', "line 2: Expecting"),
        ("[" * 100_000, "line 2: maximum recursion depth"),
        ("[1]", "expected an object"),
        ('{"prompt": 5}', "`prompt` must be a text"),
        ('{"turns": []}', "`turns` a list of texts"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "ends with the user's message"),
        ('{"messages": [{"role": "user", "text": "a"}]}', "list of {role, content}"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2") as error:
        load_set(str(path))
    assert str(path) in str(error.value) and message in str(error.value)


def test_files_and_sets_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no prompts"):
        load_sets([str(tmp_path / "empty.jsonl")])
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.jsonl"):
        load_sets([str(tmp_path / "none.jsonl")])
    with pytest.raises(ValueError, match=r"no set 'mmlu'.*math500.*hub:gsm8k|no set 'mmlu'.*hub:gsm8k.*math500"):
        load_sets(["mmlu"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install datasets.*pass a file \*\.jsonl"):
        load_sets(["math500"])
    with pytest.raises(ModuleNotFoundError, match="--data gsm8k takes it from a package"):
        load_sets(["hub:gsm8k"])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """Rows by path, in place of a hub."""
    rows: dict[str, list[dict[str, Any]]] = {}

    def load_dataset(path: str, name: str | None = None, *, split: str) -> list[dict[str, Any]]:
        if path not in rows:
            raise ConnectionError("no connection")
        assert (name, split) in {(where.config, where.split) for where in evaluation_data.HUB_SETS.values()}
        return rows[path]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return rows


def test_rows_of_a_hub_become_prompts(hub: dict[str, list[dict[str, Any]]]) -> None:
    hub["openai/gsm8k"] = [{"question": "1 + {1}?", "answer": "2"}]
    hub["tatsu-lab/alpaca"] = [{"instruction": "Add.", "input": "1, 2"}, {"instruction": "Sing.", "input": ""}]
    hub["HuggingFaceH4/mt_bench_prompts"] = [{"prompt": ["a", "b"]}]
    (question,) = load_set("hub:gsm8k")
    assert question.set == "hub:gsm8k"
    assert question.messages[0]["content"].startswith("1 + {1}?\n")
    assert question.messages[0]["content"].endswith("\\boxed{}.")
    assert [prompt.messages for prompt in load_set("alpaca")] == [[user("Add.\n\n1, 2")], [user("Sing.")]]
    assert load_set("hub:mt-bench") == [Prompt("hub:mt-bench", 0, [user("a")], ["b"])]


def test_a_hub_that_cannot_be_reached_or_has_other_columns_is_named(hub: dict[str, list[dict[str, Any]]]) -> None:
    with pytest.raises(ValueError, match=r"MATH-500 could not be loaded \(no connection\)"):
        load_set("math500")
    hub["HuggingFaceH4/MATH-500"] = [{"text": "a"}]
    with pytest.raises(ValueError, match="no column problem, only text"):
        load_set("math500")


def test_two_sets_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text('{"prompt": "w1"}\n')
    with pytest.raises(ValueError, match="two sets are called x"):
        load_sets([str(tmp_path / name / "x.jsonl") for name in ("a", "b")])


def test_a_file_may_begin_with_a_mark_and_hold_line_separators(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "w1\u2028w2"}\n', encoding="utf-8-sig")
    assert load_sets([str(tmp_path / "x.jsonl")])[0].messages[0]["content"] == "w1\u2028w2"


@pytest.mark.parametrize("content", [b'{"prompt": "w\xe9"}', b'{"prompt": "\\ud800"}'])
def test_what_is_no_text_is_refused_with_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.jsonl"):
        load_sets([str(tmp_path / "x.jsonl")])
