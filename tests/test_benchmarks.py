"""The benchmarks of rounds and speed run, at sizes that say nothing of either."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import plots
import round_cost
import smollm2
import speed
from evaluation_summary import summarize
from hf_ddtree import DFlashConfig, DFlashDraftModel, capture, drafter_families, launched, logits_process


@pytest.mark.usefixtures("stepped")
def test_a_rounds_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = (drafter_families, "best_candidates"), (logits_process, "follow"), (launched, "lazy_walk")
    for module, name in (*replaced, (capture, "_capture")):
        monkeypatch.setattr(module, name, getattr(module, name))  # the script replaces them
    report = tmp_path / "round_cost.json"
    options = ["--budgets", "63", "7", "--contexts", "40", "20", "--accepted", "1", "4", "--rounds", "5"]
    round_cost.main(["--shapes", "tiny", *options, "--json", str(report)])
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) == 10  # the fifth is sampled, the sixth has a penalty
    assert rows[4]["do_sample"] and rows[5]["repetition_penalty"]
    for row in rows:
        assert row["ms"] > 0 and not row["host_ms"] > row["ms"]  # no number where the host walks
        assert row["rounds"] == 5
        assert (row["layers"], row["compiled"], row["launch"].split()[0]) == ("ours", "yes", "graph")
        assert row["captured_again"] == row["compiled_again"] == 0
    assert [round(row["accepted"]) for row in rows[:6]] == [1, 4, 1, 4, 1, 1]
    report.write_text(json.dumps(json.loads(report.read_text()) | {"static_ms": {"768": 9.0}}))
    plots.main([str(tmp_path)])
    assert "reading the weights once" in report.with_suffix(".svg").read_text()


def test_the_speed_of_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = smollm2.load_target()
    config = DFlashConfig.from_target(
        target.config, target_layer_ids=[1, 14], mask_token_id=16, block_size=8, num_hidden_layers=1
    )
    DFlashDraftModel(config).save_pretrained(tmp_path)
    options = ["--sets", "mt_bench", "--prompts", "2", "--new-tokens", "6", "--budgets", "3", "5"]
    report = tmp_path / "speed.json"
    speed.main(["--drafter", str(tmp_path), *options, "--dtype", "float32", "--json", str(report)])
    rows = json.loads(report.read_text())["rows"]
    methods = "generate, native chain, ddtree 3, ddtree 5, one token a round, chain, static tree 3, ddtree auto".split(
        ", "
    )
    assert [row["method"] for row in rows[:8]] == methods
    assert [row["method"] for row in rows[8:]] == [*methods[1:], methods[0]]
    for half in (rows[:8], rows[8:]):
        assert len({row["text"] for row in half}) == 1
        assert all(row["tokens"] == 6 and row["most_regret"] < 1e-3 for row in half)
    assert {row["rounds"] for row in rows if row["method"] == "one token a round"} == {5}
    plots.main([str(tmp_path)])
    assert report.with_suffix(".svg").exists()
    assert "| mt-bench | prompts | speedup | tokens/s | tokens per round |" in capsys.readouterr().out


def evaluation_rows() -> list[dict[str, Any]]:
    """Two sets of five prompts, at two temperatures; trees are twice as fast as compiled `generate`."""
    rows = []
    for temperature in (0.0, 1.0):
        for name, length in (("easy", 4), ("hard", 2)):
            for prompt in range(5):
                shared = {"set": name, "prompt": prompt, "temperature": temperature, "tokens": 9, "text": ""}
                plain = {"rounds": None, "acceptance_lengths": None}
                rows += [
                    shared | plain | {"method": method, "seconds": 2.0} for method in ("generate", "compiled generate")
                ]
                for method in ("ddtree 127", "ddtree 15", "chain", "static tree 63", "ddtree auto"):
                    lengths = [length] * (8 // length)
                    tree = {"method": method, "rounds": len(lengths), "acceptance_lengths": lengths, "seconds": 1.0}
                    rows.append(shared | tree)
                rows.append(shared | plain | {"prompt": 5, "method": "ddtree 15", "error": "the prompt is too long"})
    return rows


def test_plots_of_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps(row) for row in evaluation_rows()]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    methods = list(dict.fromkeys(row["method"] for row in evaluation_rows()))
    summary = summarize(evaluation_rows(), methods, "compiled generate") | {"settings": {"device": "a device"}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    stages = {"chain": {"draft": 1.0, "verify": 2.5, "round": 0.0}, "ddtree 15": {"round": 4.0}}
    rows = [
        {"set": "easy", "prompt": 0, "method": name, "tokens": 9, "seconds": 1.0} for name in ("generate", "chain")
    ]
    about = {"device": "a device", "dtype": "float32", "base": "generate", "rows": rows}
    (tmp_path / "speed_1.json").write_text(json.dumps(about | {"stages": stages}))
    plots.main([str(tmp_path)])
    names = ["speed_1", "speed_1_stages", "budgets_t0", "acceptance_t0", "budgets_t1", "acceptance_t1"]
    assert capsys.readouterr().out.split() == [str(tmp_path / f"{name}.svg") for name in names]
    texts = [re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / f"{name}.svg").read_text()) for name in names]
    methods = ["chain", "static tree 63", "ddtree 15", "ddtree 127", "ddtree auto"]
    assert [text for text in texts[2] if text in methods] == methods * 2
    assert {"easy", "hard", "speedup over compiled generate", "temperature 0, a device"} <= set(texts[2])
    assert {f"{method}: 2.67 on average" for method in methods} <= set(texts[3])
    assert {"draft", "verify", "round"} <= set(texts[1]) and "walk" not in texts[1]
