"""The benchmarks of rounds and speed run, at sizes that say nothing of either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import round_cost
import smollm2
import speed
from hf_ddtree import DFlashConfig, DFlashDraftModel, compiled


@pytest.mark.usefixtures("stepped")
def test_a_rounds_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("best_candidates", "follow"):  # the script replaces them
        monkeypatch.setattr(compiled, name, getattr(compiled, name))
    report = tmp_path / "report.json"
    options = ["--budgets", "63", "7", "--contexts", "40", "20", "--accepted", "1", "4", "--rounds", "5"]
    round_cost.main(["--shapes", "tiny", *options, "--json", str(report)])
    rows = json.loads(report.read_text())["rows"]
    assert len(rows) == 9  # the ninth is sampled
    for row in rows:
        assert row["ms"] > row["host_ms"] > 0
        assert row["rounds"] in (5, 6)  # the first tree is not the script's
        assert row["path"] == "compiled, in one CUDA graph"
    assert [round(row["accepted"]) for row in rows[:5]] == [1, 3, 1, 3, 1]


def test_the_speed_of_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = smollm2.load_target()
    config = DFlashConfig.from_target(
        target.config, target_layer_ids=[1, 14], mask_token_id=16, block_size=8, num_hidden_layers=1
    )
    DFlashDraftModel(config).save_pretrained(tmp_path)
    options = ["--sets", "mt_bench", "--prompts", "2", "--new-tokens", "6", "--budgets", "3", "5"]
    report = tmp_path / "report.json"
    speed.main(["--drafter", str(tmp_path), *options, "--dtype", "float32", "--json", str(report)])
    rows = json.loads(report.read_text())["rows"]
    methods = ["generate", "one token a round", "native chain", "chain", "static tree 3", "ddtree 3", "ddtree 5"]
    assert [row["method"] for row in rows[:7]] == methods
    assert [row["method"] for row in rows[7:]] == [*methods[1:], methods[0]]
    for half in (rows[:7], rows[7:]):
        assert len({tuple(row["ids"]) for row in half}) == 1
        assert all(gap < 1e-3 for row in half for gap in row["regret"])
    assert {row["rounds"] for row in rows if row["method"] == "one token a round"} == {5}
    assert "| all prompts | tokens/s | speedup |" in capsys.readouterr().out
