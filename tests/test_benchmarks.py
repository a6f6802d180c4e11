"""The benchmarks of rounds and speed run, at sizes that say nothing of either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import plots
import round_cost
import smollm2
import speed
from hf_ddtree import DFlashConfig, DFlashDraftModel, capture, compiled


@pytest.mark.usefixtures("stepped")
def test_a_rounds_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((compiled, "best_candidates"), (compiled, "follow"), (capture, "_capture")):
        monkeypatch.setattr(module, name, getattr(module, name))  # the script replaces them
    report = tmp_path / "round_cost.json"
    options = ["--budgets", "63", "7", "--contexts", "40", "20", "--accepted", "1", "4", "--rounds", "5"]
    round_cost.main(["--shapes", "tiny", *options, "--json", str(report)])
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) == 9  # the ninth is sampled
    for row in rows:
        assert row["ms"] > row["host_ms"] > 0
        assert row["rounds"] in (5, 6)  # the first tree is not the script's
        assert row["path"] == "compiled, in one CUDA graph"
        assert row["captured_again"] == row["compiled_again"] == 0
    assert [round(row["accepted"]) for row in rows[:5]] == [1, 3, 1, 3, 1]
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
    assert "| all prompts | prompts | tokens/s | speedup |" in capsys.readouterr().out
