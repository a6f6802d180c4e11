"""The examples run as their files say, on the shipped pair with few tokens, and on another by name."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import chat
import pipeline
import quickstart
from pair import Pair, load_pair
from scripted import tiny_drafter, tiny_target, word_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
TEMPLATE = (
    "{% for m in messages %}<s> {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}<s> {% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name a tiny pair."""
    path = tmp_path_factory.mktemp("pair")
    target, tokenizer = tiny_target("qwen3"), word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    target.save_pretrained(path / "target")
    tokenizer.save_pretrained(path / "target")
    tiny_drafter(target).save_pretrained(path / "drafter")
    return ["--target", str(path / "target"), "--drafter", str(path / "drafter")]


def test_quickstart_on_the_shipped_pair(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart.main(["What is 2 + 2?", "--max-new-tokens", "12", "--dtype", "float32"])
    lines = capsys.readouterr().out.splitlines()
    tokens, rounds = map(int, re.search(r"^(\d+) tokens in (\d+) rounds", lines[-3]).groups())  # type: ignore[union-attr]
    assert 1 < rounds < tokens <= 12
    assert lines[-1] == "the same text"


def test_quickstart_on_another_pair(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    quickstart.main(["w5 w6", "--max-new-tokens", "9", *tiny])
    assert "\n9 tokens in 8 rounds" in (out := capsys.readouterr().out)
    assert out.endswith("the same text\n")


def test_one_of_a_pair_is_not_enough(tiny: list[str]) -> None:
    with pytest.raises(ValueError, match="give both"):
        quickstart.main(tiny[:2])


def test_pipeline(tiny: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "TEXTS", ["w7 w8", "w9"])
    pipeline.main(["--max-new-tokens", "8", *tiny])
    answers = [line.split(" -> ")[1] for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == 5
    assert all(0 < len(answer.split()) <= 8 for answer in answers)  # special tokens are left out
    assert answers[2] == answers[-1]  # the first chat with trees and without


def test_structured_output(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xgrammar", reason="no xgrammar: pip install --no-deps -r requirements-data.txt")
    import structured_output

    structured_output.main(["--max-new-tokens", "48", "--dtype", "float32"])
    text, end = capsys.readouterr().out.rsplit("}", 1)
    person = json.loads(text + "}")
    assert list(person) == structured_output.SCHEMA["required"]
    assert person["occupation"] in structured_output.SCHEMA["properties"]["occupation"]["enum"]
    assert float(end.split()[0]) > 1
    assert end.endswith("the same text as without trees\n")


def chat_with(lines: list[str], options: list[str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Type lines into the chat: how many rows of the target's embedding were asked for at a time."""
    rows: list[int] = []

    def load(*arguments: Any) -> Pair:
        loaded = load_pair(*arguments)
        embedding = loaded.target.get_input_embeddings()
        embedding.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[1]))
        return loaded

    monkeypatch.setattr(chat, "load_pair", load)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    chat.main(["--max-new-tokens", "12", *options])
    return rows


def test_a_later_turn_of_the_chat_processes_itself_only(
    tiny: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = " ".join(f"w{i}" for i in range(5, 205))
    rows = chat_with([first, "w5 w6", "", "/reset", "w5 w6", "/quit", "w7"], tiny, monkeypatch)
    # "<s> ... </s> <s>" around 200 words; the last token of the answer and "</s> <s> w5 w6 </s> <s>"; anew.
    assert [count for count in rows if count in (203, 7, 5)] == [203, 7, 5]
    assert max(rows[1:]) < 203 == rows[0]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6  # three answers with a status line each
    pattern = r"\[12 tokens, [\d.]+ tokens/s, [\d.]+ tokens per round\]"
    assert all(re.fullmatch(pattern, line) for line in lines[1::2])


def test_the_chat_answers_as_generate_does(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = load_pair(tiny[1], tiny[3], "float32")
    options = {"max_new_tokens": 12, "do_sample": False}
    talk = chat.Chat(shipped, chat.StatusLine(), options)
    whole: list[int] = []
    for user in ("w5 w6 w7", "w8", "w9 w10"):
        whole = chat.next_turn_ids(shipped.tokenizer, whole, user, talk.turns)
        ids = torch.tensor([whole])
        whole = shipped.target.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
        talk.say(user)
        assert talk.ids == whole


def test_an_interrupt_stops_the_answer_and_keeps_the_chat(
    tiny: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put: Callable[..., None] = chat.Answer.put
    interrupts = iter([True])

    def interrupting(self: chat.Answer, value: torch.Tensor) -> None:
        put(self, value)
        if len(self.ids) == 5 and next(interrupts, False):
            raise KeyboardInterrupt  # as Ctrl-C does; a process in the background may ignore the signal itself

    monkeypatch.setattr(chat.Answer, "put", interrupting)
    rows = chat_with(["w5 w6 w7", "w8"], tiny, monkeypatch)
    out = capsys.readouterr().out
    assert re.search(r"\[stopped after 5 tokens, [\d.]+ tokens/s\]\n", out)
    assert re.search(r"\[12 tokens, [\d.]+ tokens/s, [\d.]+ tokens per round\]\n$", out)
    # "<s> w5 w6 w7 </s> <s>", five tokens, "</s> <s> w8 </s> <s>": all of it again.
    assert 6 + 5 + 5 in rows


def test_the_status_line_is_the_last_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("LINES", "30")
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with chat.StatusLine() as status:
        assert "\033[1;29r" in terminal.getvalue()  # what scrolls
        status.show("x" * 50, final=True)
        assert re.search(r"\033\[30;1H\033\[K\033\[7mx{19}\033\[m", terminal.getvalue())
    assert "\033[r" in terminal.getvalue().rpartition("xxx")[2]


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is plain Python, so that no kernel is needed."""
    cells = [
        cell for cell in json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"] if cell["cell_type"] == "code"
    ]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    sources = ["".join(cell["source"]) for cell in cells]
    assert sources[0].count("NEW = 48") == 1
    sources[0] = sources[0].replace("NEW = 48", "NEW = 16")
    monkeypatch.chdir(EXAMPLES)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell, source in zip(cells, sources, strict=True):
        exec(compile(source, f"tour.ipynb, {cell['id']}", "exec"), names)
    out = capsys.readouterr().out
    assert "same text: True" in out
    assert "└─ ✓ " in out
    assert names["per_round"][0] == 1 < names["per_round"][3] <= names["per_round"][63]
    assert names["rows"][0] < len(names["second"]) - len(names["prompt"])


def test_every_example_is_listed_with_a_command_that_exists() -> None:
    listing = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".ipynb") or path.is_dir():
            assert path.name in listing or path.name == "__pycache__", f"examples/README.md does not name {path.name}"
    for name in re.findall(r"python (examples/\S+\.py)", listing):
        assert (EXAMPLES.parent / name).is_file(), name
