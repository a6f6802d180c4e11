"""The evaluation of a tiny pair: every method on every prompt, whatever stops it in between."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import evaluate
import evaluation_methods
import evaluation_rows
import prediction
from scripted import tiny_drafter, tiny_target, word_tokenizer

METHODS = ["generate", "native chain", "ddtree 3", "one token a round", "chain", "static tree 3", "ddtree auto"]
SETS = {"words": [{"prompt": f"w1 w2 w{i}"} for i in range(4)], "chats": [{"turns": ["w1 w2", "w3"]}] * 2}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments for a random target and drafter, and two files of prompts."""
    directory = tmp_path_factory.mktemp("pair")
    target = tiny_target("llama", max_position_embeddings=128)
    target.save_pretrained(directory / "target")
    word_tokenizer().save_pretrained(directory / "target")
    tiny_drafter(target).save_pretrained(directory / "drafter")
    for name, rows in SETS.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [str(directory / f"{name}.jsonl") for name in SETS]
    models = ["--target", str(directory / "target"), "--drafter", str(directory / "drafter")]
    return [*models, "--data", *data, "--new-tokens", "12", "--budgets", "3", "--dtype", "float32"]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_method_answers_every_prompt(pair: list[str], tmp_path: Path) -> None:
    assert evaluate.main([*pair, "--temperature", "0", "1", "--output", str(tmp_path)]) == 0
    rows = read(tmp_path / "rows.jsonl")
    assert len(rows) == len({evaluation_rows.key_of(row) for row in rows}) == 6 * 2 * len(METHODS)
    assert [row["method"] for row in rows[: len(METHODS)]] == METHODS
    assert [row["method"] for row in rows[len(METHODS) :][: len(METHODS)]] == [*METHODS[1:], METHODS[0]]
    for row in rows:
        turns = 2 if row["set"] == "chats" else 1
        assert (row["turns"], row["tokens"]) == (turns, 12 * turns)
        assert row["seconds"] > 0
        assert ("regret" in row) == (row["temperature"] == 0)
        if row["method"] != "generate":
            assert row["rounds"] == len(row["acceptance_lengths"])
            assert sum(row["acceptance_lengths"]) == row["tokens"] - turns
    plain = {(r["set"], r["prompt"], r["temperature"]): r for r in rows if r["method"] == "generate"}
    for row in rows:
        if row["temperature"] == 0 or row["method"] != "native chain":  # which samples in another way
            assert row["text"] == plain[row["set"], row["prompt"], row["temperature"]]["text"]
    # The second turn's prompt is the whole chat: what was asked, the answer, and what is asked then.
    assert plain["chats", 0, 0.0]["prompt_tokens"] == 2 + (2 + 12 + 1)

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["base"] == "generate"
    assert [(part["temperature"], part["set"]) for part in summary["tables"]] == [
        (temperature, name) for temperature in (0, 1) for name in ("words", "chats", "all prompts")
    ]
    for part in summary["tables"]:
        assert list(part["methods"]) == METHODS
        assert part["methods"]["generate"]["speedup"] == {"value": 1.0, "low": 1.0, "high": 1.0}
        assert part["methods"]["one token a round"]["tokens per round"]["value"] == 1.0
    assert summary["settings"]["attention"] == "sdpa"
    assert "## Temperature 1: chats" in (tmp_path / "summary.md").read_text()


def test_no_warm_up_makes_buffers_outgrow_the_graphs_of_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tiny_drafter(tiny_target("llama"), block_size=16)
    methods = evaluation_methods.make_methods(drafter, [63, 15, 255], True, 1024)
    pair = evaluation_methods.ChatPair(SimpleNamespace(device=torch.device("cuda")), drafter, None)  # type: ignore[arg-type]
    monkeypatch.setattr(evaluation_methods.ChatPair, "encode", lambda *_: torch.zeros(1, 7, dtype=torch.long))
    rows: list[int] = []

    def answer(
        target: Any, ids: torch.Tensor, new: int, options: dict[str, Any], temperature: float
    ) -> dict[str, Any]:
        if "ddtree" in options and ids.shape[1] == 900:
            rows.append(ids.shape[1] + new + max(options["ddtree"].sizes("cuda")))
        return {}

    monkeypatch.setattr(evaluation_methods, "answer", answer)
    evaluation_methods.warm_up(pair, methods, [0.0], longest=900, new_tokens=20)
    assert len(rows) == sum("ddtree" in options for options in methods.values())
    assert rows == sorted(rows, reverse=True)


# A run of which each process waits behind its third row.
ENDLESS = """
import threading
import evaluate, evaluation_rows

append, rows = evaluation_rows.RowFiles.append, []

def append_and_wait(self, row):
    append(self, row)
    rows.append(row)
    if len(rows) == 3:
        threading.Event().wait()

evaluation_rows.RowFiles.append = append_and_wait
evaluate.main()
"""


def test_a_killed_run_goes_on_with_another_number_of_processes(pair: list[str], tmp_path: Path) -> None:
    output = tmp_path / "run"
    examples = Path(evaluate.__file__).parent
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    arguments = [*pair, "--temperature", "0", "1", "--new-tokens", "40", "--output", str(output)]
    arguments += ["--methods", *(methods := ["generate", "ddtree 3", "one token a round"])]
    # What `accelerate launch` runs on several GPUs; on a CPU it asks for MPI.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    path = os.pathsep.join([str(examples), str(examples.parent / "src")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    process = psutil.Popen([*launch, str(script), *arguments], env=environment)

    def lines() -> list[int]:
        return [path.read_bytes().count(b"\n") for path in output.glob("rows-*.jsonl")]

    try:
        while lines() != [3, 3]:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        family = [process, *process.children(recursive=True)] if process.is_running() else []
        for member in family:
            member.kill()
        psutil.wait_procs(family)
    parts = sorted(output.glob("rows-*.jsonl"))
    assert len(parts) == 2
    before = {path: path.read_bytes() for path in parts}
    with parts[0].open("ab") as file:
        file.write(b'{"set": "words", "pro')  # as a kill may leave it
    done = [line for content in before.values() for line in content.splitlines()]

    assert evaluate.main(arguments) == 0
    rows = (output / "rows.jsonl").read_bytes().splitlines()
    assert len(rows) == 6 * 2 * len(methods) > len(done)
    assert set(done) < set(rows)  # nothing was done again
    assert len({evaluation_rows.key_of(json.loads(row)) for row in rows}) == len(rows)
    assert not list(output.glob("rows-*.jsonl"))


def test_what_is_done_is_not_done_again(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*pair, "--methods", "generate", "ddtree 3", "--prompts", "2", "--output", str(tmp_path)]
    assert evaluate.main(arguments) == 0
    monkeypatch.setattr(evaluation_methods, "answer", lambda *_: pytest.fail("was done before"))
    assert evaluate.main([*arguments, "--base", "ddtree 3"]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["base"] == "ddtree 3"
    assert evaluate.main(["--summarize", "--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["about"] == {"rows": "8"}
    capsys.readouterr()
    assert evaluate.main([*arguments, "--seed", "1"]) == 2
    assert "other settings (seed was 0, now 1)" in capsys.readouterr().err


def test_a_stopped_run_is_summarized(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["generate", "chain", "ddtree 3"]
    append, rows = evaluation_rows.RowFiles.append, tmp_path / "rows-0.jsonl"

    def stopping(files: evaluation_rows.RowFiles, row: evaluation_rows.Row) -> None:
        append(files, row)
        if len(files.done) == 2 * len(methods) + 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(evaluation_rows.RowFiles, "append", stopping)
    assert evaluate.main([*pair, "--methods", *methods, "--output", str(tmp_path)]) == 130
    before = rows.read_text()
    capsys.readouterr()
    summarize = ["--summarize", "--output", str(tmp_path)]
    assert evaluate.main(summarize) == 0
    assert "of a run that has not ended" in capsys.readouterr().out
    table = json.loads((tmp_path / "summary.json").read_text())["tables"][-1]["methods"]
    assert {name: row["prompts"] for name, row in table.items()} == dict.fromkeys(methods, 2)
    assert rows.read_text() == before

    assert evaluate.main([*summarize, "--base", "ddtree 7"]) == 2
    assert "the method ddtree 7 was not run" in capsys.readouterr().err
    assert evaluate.main(["--summarize", "--output", str(tmp_path / "none")]) == 2
    assert "none/settings.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(KeyboardInterrupt(), 130, "Stopped."), (OSError(28, "No space left on device"), 1, "No space left on device")],
)
def test_rows_outlast_what_stops_a_run(
    pair: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    arguments = [*pair, "--methods", "generate", "--output", str(tmp_path)]
    file = tmp_path / "rows-0.jsonl"
    sync = os.fsync

    def failing(descriptor: int) -> None:
        if file.exists() and file.read_bytes().count(b"\n") == 3:
            os.truncate(file, file.stat().st_size - 5)  # the third row is torn
            raise error
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        assert evaluate.main(arguments) == code
    said = capsys.readouterr().err
    assert message in said
    assert "the same command goes on" in said
    kept = file.read_text().splitlines()[:-1]
    assert len(kept) == 2
    assert evaluate.main(arguments) == 0
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert len(rows) == 6
    assert set(kept) < set(rows)


def test_a_directory_that_cannot_be_written_is_named(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert evaluate.main([*pair, "--output", str(tmp_path / "file" / "run")]) == 1
    assert f"{tmp_path / 'file' / 'run'} cannot be written" in capsys.readouterr().err


def test_a_prompt_longer_than_the_target_is_skipped(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "mixed.jsonl"
    prompts = [{"prompt": "w1 " * 117}, {"prompt": "w1 w2"}, {"turns": ["w1 " * 60, "w1 " * 60]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    arguments = [*pair, "--methods", "generate", "chain", "--output", str(tmp_path / "run")]
    assert evaluate.main([*arguments, "--data", str(data)]) == 0
    rows = read(tmp_path / "run" / "rows.jsonl")
    assert [row.get("error", "")[:6] for row in rows] == ["turn 1", "turn 1", "", "", "turn 2", "turn 2"]
    assert rows[0]["error"] == "turn 1: 117 tokens and 12 new ones are more than the target's 128"
    assert "skipped mixed 0: turn 1: 117 tokens" in capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(skipped["set"], skipped["prompt"]) for skipped in summary["skipped"]] == [("mixed", 0), ("mixed", 2)]
    assert summary["tables"][0]["methods"]["chain"]["prompts"] == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--methods", "ddtree 4"], "no method ddtree 4 here; there are generate, native chain, ddtree 3"),
        (["--data", "missing.jsonl"], "there is no file missing.jsonl"),
        (["--data", "mmlu"], "there is no set 'mmlu'"),
        (["--target", "no/such/directory"], "no/such/directory"),
        (["--base", "compiled generate"], "no method compiled generate here"),
        (["--simulate", "--base", "chain"], "begins with plain decoding, and chain is not that"),
    ],
)
def test_bad_input_is_said(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], message: str
) -> None:
    assert evaluate.main([*pair, *wrong, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_slow_methods_get_evenly_spread_prompts() -> None:
    prompts = [evaluate.Prompt("a", i, []) for i in range(10)] + [evaluate.Prompt("b", i, []) for i in range(2)]
    groups = evaluate.make_tasks(prompts, ["generate", "chain"], [0.0, 1.0], 7, plain_prompts=5)
    plain = sorted(task.prompt[:2] for group in groups[:12] for task in group if task.method == "generate")
    assert plain == [*(("a", i) for i in (0, 2, 4, 6, 8)), ("b", 0), ("b", 1)]
    assert [len({task.seed for group in groups[i::12] for task in group}) for i in range(12)] == [1] * 12
    assert len({task.prompt.set for group in groups[:4] for task in group}) > 1  # side by side
    assert sum(task.method == "chain" for group in groups for task in group) == 24


def test_what_could_not_be_measured_is_not_predicted(
    pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when other work holds up the shorter of two calls."""
    arguments = [*pair, "--methods", "generate", "chain", "ddtree 3", "--output", str(tmp_path), "--simulate"]
    seconds = {"generate": 0.1, "chain": -0.7, "ddtree 3": float("nan")}

    def measure_costs(pair: Any, methods: dict[str, Any], *args: Any) -> dict[str, prediction.Cost]:
        return {name: prediction.Cost(seconds[name], 1.0) for name in methods}

    monkeypatch.setattr(prediction, "measure_costs", measure_costs)
    assert evaluate.main(arguments) == 0
    found = json.loads((tmp_path / "prediction.json").read_text())["predictions"][0]
    assert list(found["methods"]) == ["generate"]
    assert sorted(found["unmeasured"]) == ["chain", "ddtree 3"]
    said = capsys.readouterr().out
    assert "None would pay" in said and "could not be told of" in said
    seconds["generate"] = -0.1
    assert evaluate.main(arguments) == 2
    assert "what a token of generate costs could not be told" in capsys.readouterr().err


def test_a_prediction_counts_the_rounds_of_real_runs(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path_factory.mktemp("small_vocabulary")  # trees of a random drafter hold a good part of the text
    target = tiny_target("llama", vocab_size=7, initializer_range=0.6, max_position_embeddings=128)
    target.save_pretrained(directory / "target")
    word_tokenizer(7).save_pretrained(directory / "target")
    tiny_drafter(target).save_pretrained(directory / "drafter")
    rows = [*({"prompt": f"w1 w2 w{i}"} for i in range(3)), {"turns": ["w1", "w3 w4"]}, {"prompt": "w1 " * 117}]
    (directory / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--target", str(directory / "target"), "--drafter", str(directory / "drafter"), "--dtype", "float32"]
    arguments += ["--data", str(directory / "words.jsonl"), "--new-tokens", "20", "--budgets", "20"]
    arguments += ["--methods", "generate", "ddtree 20", "chain", "static tree 20", "ddtree auto"]
    arguments += ["--temperature", "0", "1", "--output", str(tmp_path)]
    assert evaluate.main([*arguments, "--simulate"]) == 0
    assert " would pay: " in capsys.readouterr().out
    assert evaluate.main(arguments) == 0
    greedy = read(tmp_path / "rows.jsonl")
    mean = next(row for row in greedy if row["method"] == "chain")["acceptance_lengths"]
    assert f"{statistics.mean(mean):.2f} tokens per round" in capsys.readouterr().err
    predictions = json.loads((tmp_path / "prediction.json").read_text())["predictions"]
    real = [t["methods"] for t in json.loads((tmp_path / "summary.json").read_text())["tables"]]
    for predicted, measured in zip(predictions, real, strict=True):
        assert set(predicted["methods"]) == set(measured) - {"ddtree auto"}
        for name, row in predicted["methods"].items():
            assert row["ms per round"] > 0 and row["speedup"] > 0
            if name != "generate":
                assert row["tokens per round"] == pytest.approx(measured[name]["tokens per round"]["value"])
        lengths = predicted["by budget"]
        assert len(lengths) == 21
        assert lengths[0] == 1 and lengths[20] == predicted["methods"]["ddtree 20"]["tokens per round"]
        assert lengths[20] > 1.25
        assert [row["prompt"] for row in predicted["skipped"]] == [4]


def test_a_first_draft_is_no_part_of_a_rounds_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only calls with more than one new token have one."""

    def answer(
        target: Any, ids: torch.Tensor, new: int, options: dict[str, Any], temperature: float
    ) -> dict[str, Any]:
        if not options:
            return {"ids": [1] * new, "seconds": 0.10 + 0.03 * (new - 1)}
        if ids.shape[1] == 2:  # an answer that ends early shows no cost of a round
            new = 2
        lengths = [min(4, new - 1 - done) for done in range(0, new - 1, 4)]
        return {
            "ids": [1] * new,
            "acceptance_lengths": lengths,
            "seconds": 0.10 + (0.05 if new > 1 else 0) + 0.02 * len(lengths),
        }

    monkeypatch.setattr(prediction, "answer", answer)
    turns = [evaluation_methods.Turn(torch.zeros(1, length), {"ids": [1] * 60}) for length in (2, 3, 2, 3)]
    pair = evaluation_methods.ChatPair(None, None, None)  # type: ignore[arg-type]
    costs = prediction.measure_costs(pair, {"generate": {}, "trees": {"ddtree": {}}}, "generate", turns, 0.0, 4)
    assert costs["generate"] == pytest.approx((0.03, 1.0))
    assert costs["trees"] == pytest.approx((0.02, 1.5))


def test_an_edited_file_is_another_run_and_a_blank_prompt_is_skipped(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "own.jsonl", tmp_path / "run"
    data.write_text('{"prompt": " "}\n{"prompt": "w1 w2"}\n')
    arguments = [*pair, "--data", str(data), "--methods", "generate", "--output", str(output)]
    assert evaluate.main([*arguments, "--temperature", "0", "0"]) == 0
    rows = read(output / "rows.jsonl")
    assert [row.get("error") for row in rows] == ["turn 1: it has no tokens", None]
    data.write_text('{"prompt": " "}\n{"prompt": "w1 w3"}\n')
    assert evaluate.main(arguments) == 2
    assert "rows of other settings (hash of the prompts was" in capsys.readouterr().err
    assert read(output / "rows.jsonl") == rows
    (output / "settings.json").write_text("")
    assert evaluate.main(arguments) == 2
    assert "settings.json is damaged" in capsys.readouterr().err
