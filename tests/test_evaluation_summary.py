"""What an evaluation's rows say, and how the rows are kept."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation_rows import RowFiles, key_of, read_rows
from evaluation_summary import choose_budget, interval, markdown, summarize

METHODS = ["generate", "ddtree 7", "ddtree 15"]


def row(name: str, prompt: int, method: str, seconds: float, tokens: int = 100, **more: Any) -> dict[str, Any]:
    own = {"set": name, "prompt": prompt, "method": method, "temperature": 0.0, "tokens": tokens, "seconds": seconds}
    return own | {"text": "same", "regret": {"not_best": 1, "most": prompt / 8}} | more


def rounds(lengths: list[int], budget: int) -> dict[str, Any]:
    return {"acceptance_lengths": lengths, "rounds": len(lengths), "budgets": [budget] * len(lengths), "path": "plain"}


def rows_of(count: int) -> list[dict[str, Any]]:
    """On prompts 0, 2, ... 15 nodes are the fastest, on the others 7 are."""
    found = []
    for name in ("a", "b"):
        for prompt in range(count):
            fast, slow = ("ddtree 15", "ddtree 7") if prompt % 2 == 0 else ("ddtree 7", "ddtree 15")
            found.append(row(name, prompt, "generate", 10.0))
            found += [
                row(name, prompt, slow, 5.0, **rounds([4, 4], 7)),
                row(name, prompt, fast, 4.0, **rounds([8], 15)),
            ]
    return found


def test_figures_are_ratios_of_sums_over_the_same_prompts() -> None:
    rows = [
        row("a", 0, "generate", 10.0), row("a", 1, "generate", 30.0),
        row("a", 1, "ddtree 7", 10.0, tokens=50, **rounds([3, 1, 2], 7)),
    ]  # fmt: skip
    summary = summarize(rows, METHODS, "generate")
    (part,) = summary["tables"]
    assert (part["temperature"], part["set"], list(part["methods"])) == (0.0, "a", ["generate", "ddtree 7"])
    tree, plain = part["methods"]["ddtree 7"], part["methods"]["generate"]
    assert plain["tokens/s"]["value"] == 200 / 40
    assert tree["prompts"] == 1 and tree["tokens/s"]["value"] == 5
    assert tree["speedup"]["value"] == pytest.approx(5 / (100 / 30))  # prompt 0 has no partner
    assert tree["tokens per round"]["value"] == 2 and tree["nodes per round"] == 7
    assert tree["regret"] == {"not_best": 1, "share": 1 / 50, "most": 1 / 8}
    assert plain["regret"]["not_best"] == 2 and plain["regret"]["most"] == 1 / 8


def test_an_interval_covers_the_figure_of_most_samples() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for seed in range(100):
        values = np.stack([generator.normal(3, 1, 40), np.ones(40)], axis=1)
        found = interval(values, lambda s: s[0] / s[1], seed)
        assert found["low"] < found["value"] < found["high"]
        assert found["high"] - found["low"] == pytest.approx(2 * 1.96 / math.sqrt(40), rel=0.5)
        covered += found["low"] <= 3 <= found["high"]
    assert 86 <= covered <= 99
    same = [interval(values, lambda s: s[0] / s[1], 5) for _ in range(2)]
    assert same[0] == same[1]


def test_pairs_that_all_have_one_speedup_have_no_interval() -> None:
    """What makes a prompt long makes it long for both."""
    rows = [row("a", i, m, s * (i + 1)) for i in range(9) for m, s in (("generate", 4.0), ("ddtree 7", 2.0))]
    tree = summarize(rows, METHODS, "generate")["tables"][0]["methods"]["ddtree 7"]
    assert tree["speedup"] == pytest.approx({"value": 2, "low": 2, "high": 2})
    assert tree["tokens/s"]["high"] > 1.2 * tree["tokens/s"]["low"]


def test_the_headlines_budget_is_chosen_on_other_prompts() -> None:
    found = choose_budget(rows_of(6), "generate", 0)
    assert found is not None
    assert found["method"] == "ddtree 15"  # the best of the prompts at even places, and not of those reported
    assert found["chosen_on"]["ddtree 15"] == 10 / 4
    assert {name: part["prompts"] for name, part in found["sets"].items()} == {"a": 3, "b": 3, "all prompts": 6}
    assert found["sets"]["all prompts"]["speedup"]["value"] == 10 / 5
    spread = [entry | {"prompt": 2 * entry["prompt"]} for entry in rows_of(6)]  # places count, not indices
    assert choose_budget(spread, "generate", 0) == found
    assert choose_budget([entry for entry in rows_of(6) if entry["method"] != "generate"], "generate", 0) is None
    assert choose_budget(rows_of(1), "generate", 0) is None


def test_a_page_has_every_table_and_what_was_skipped() -> None:
    rows = [*rows_of(4), {**row("b", 9, "generate", 0.0, tokens=0), "error": "turn 1: too long"}]
    summary = summarize(rows, METHODS, "generate")
    assert summary["skipped"] == [{"set": "b", "prompt": 9, "error": "turn 1: too long"}]
    assert [part["methods"]["generate"]["prompts"] for part in summary["tables"]] == [4, 4, 8]
    page = markdown(summary | {"settings": {"target": "T", "drafter": "D"}, "about": {"device": "a GPU"}})
    assert "- device: a GPU" in page
    assert "## Temperature 0: all prompts" in page
    assert re.search(r"\| ddtree 15 \| 8 \| 2\.22 \[2\.\d\d, 2\.\d\d\] \| 22\.2 \[.*\] \| 5\.33 \[.*\] \| 9\.7", page)
    assert "- b 9: turn 1: too long" in page


def test_rows_of_all_processes_are_read_and_merged_once(tmp_path: Path) -> None:
    rows = [row("a", i, "generate", 1.0) for i in range(3)]
    files = [RowFiles(tmp_path, rank, {"seed": 0}) for rank in range(2)]
    with pytest.raises(ValueError, match=r"another process writes to .*rows-1\.jsonl"):
        RowFiles(tmp_path, 1, {"seed": 0})
    files[0].append(rows[2])
    assert files[0].merge(list(map(key_of, rows))) is None
    files[1].append(rows[0])
    files[1].append(rows[1])
    third = RowFiles(tmp_path, 0, {"seed": 0})
    assert third.done == set(map(key_of, rows))
    third.close()
    assert files[1].merge(list(map(key_of, rows))) == rows == read_rows(tmp_path)
    assert not list(tmp_path.glob("rows-*"))
    with pytest.raises(ValueError, match="seed was 0, now 1; dtype was None, now 'float16'"):
        RowFiles(tmp_path, 0, {"seed": 1, "dtype": "float16"})


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    files = RowFiles(tmp_path, 0, {})
    files.append(row("a", 0, "generate", 1.0))
    files.close()
    with (tmp_path / "rows-0.jsonl").open("ab") as file:
        file.write(b'{"set": "a", "prom')
    files = RowFiles(tmp_path, 0, {})
    files.append(row("a", 1, "generate", 1.0))
    files.close()
    assert [entry["prompt"] for entry in read_rows(tmp_path)] == [0, 1]
