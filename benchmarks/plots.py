"""Draw what `round_cost.py`, `speed.py` and `examples/evaluate.py` have measured.

    python benchmarks/plots.py benchmarks/results

For each `round_cost*.json` in the directory: a round's cost by the size of its tree, beside compiled decoding and the
time that reading the weights takes. For each `speed*.json`: each method's speedup and tokens a round, by prompt set.
For an evaluation's `rows.jsonl`, at each temperature: speedup and tokens a round by budget, with 95% intervals over
draws of the prompts, and how many tokens rounds committed. Where stages were timed: where a round's time goes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot

matplotlib.use("svg")
pyplot.rcParams |= {"svg.hashsalt": "hf_ddtree", "svg.fonttype": "none"}  # the same file from the same figures

Rows = list[dict[str, Any]]
STAGES = {"draft": "tab:blue", "verify": "tab:orange", "walk": "tab:green", "keep": "tab:red", "round": "tab:purple"}


def draw_round_cost(report: dict[str, Any], file: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    greedy = [row for row in report["rows"] if not row["do_sample"] and "repetition_penalty" not in row]
    for context in sorted({row["context"] for row in greedy}):
        worst: dict[int, float] = {}
        for row in greedy:
            if row["context"] == context:
                worst[row["budget"]] = max(worst.get(row["budget"], 0.0), row["ms"])
        budgets = sorted(worst)
        axes.plot(budgets, [worst[budget] for budget in budgets], marker="o", label=f"a round, context {context:,}")
    lines = {f"a token of compiled generate, {int(slots):,} slots": ms for slots, ms in report["static_ms"].items()}
    for (name, ms), color in zip(lines.items(), ("tab:gray", "silver"), strict=False):
        axes.axhline(ms, linestyle="--", color=color, linewidth=1, label=name)
    axes.axhline(report["floor_ms"], linestyle=":", color="black", linewidth=1, label="reading the weights once")
    axes.set(xlabel="nodes of the tree", ylabel="ms", ylim=(0, None), xlim=(0, None))
    axes.set_title(f"{report['device']}, {report['shapes']}, {report['dtype'].removeprefix('torch.')}")
    axes.legend(loc="lower right", fontsize=8)
    save(figure, file)


def draw_speed(report: dict[str, Any], file: Path) -> None:
    rows = report["rows"]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    base = {(row["set"], row["prompt"]): row for row in rows if row["method"] == report["base"]}
    methods = [m for m in dict.fromkeys(row["method"] for row in rows) if m != report["base"]]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 0.36 * len(methods) + 1.6), sharey=True)
    height = 0.8 / len(sets)
    for index, name in enumerate(sets):
        speedups, tokens = [], []
        for method in methods:
            own = [row for row in rows if (row["set"], row["method"]) == (name, method)]
            same = [base[row["set"], row["prompt"]] for row in own]
            speedups.append(speed(own) / speed(same))
            rounds = sum(row.get("rounds") or 0 for row in own)
            tokens.append(sum(row["tokens"] - 1 for row in own) / rounds if rounds else 0.0)
        places = [place + (index - (len(sets) - 1) / 2) * height for place in range(len(methods))]
        left.barh(places, speedups, height, label=name)
        right.barh(places, tokens, height)
    left.axvline(1, color="black", linewidth=0.8)
    left.set(xlabel=f"speedup over {report['base']}", yticks=range(len(methods)), yticklabels=methods)
    left.invert_yaxis()
    right.set(xlabel="tokens a round")
    left.legend()
    figure.suptitle(f"SmolLM2-135M-Instruct, {report['dtype']}, greedy, {report['device']}")
    save(figure, file)


def draw_stages(stages: dict[str, dict[str, float]], title: str, file: Path) -> None:
    """`stages` are each method's milliseconds a round."""
    figure, axes = pyplot.subplots(figsize=(6.4, 0.4 * len(stages) + 1.2))
    left = np.zeros(len(stages))
    for stage, color in STAGES.items():
        ms = np.array([times.get(stage, 0.0) for times in stages.values()])
        if ms.any():
            axes.barh(list(stages), ms, left=left, color=color, label=stage)
            left += ms
    axes.invert_yaxis()
    axes.set(xlabel="ms a round", title=title)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    save(figure, file)


def draw_budgets(tables: dict[str, dict[str, Any]], base: str, title: str, file: Path) -> None:
    """Speedup over `base` and tokens a round at one temperature, by method, trees by budget.

    Args:
        tables: Of each set, the figures of each method.
    """
    has_rounds = {name for table in tables.values() for name, row in table.items() if "tokens per round" in row}
    methods = sorted(has_rounds, key=place_of)
    figure, both = pyplot.subplots(1, 2, figsize=(11, 4))
    for index, (name, table) in enumerate(tables.items()):
        shift = 0.1 * (index - (len(tables) - 1) / 2)
        for axes, what in zip(both, ("speedup", "tokens per round"), strict=True):
            for best_first in (True, False):  # a line through the budgets, points for the rest
                points = [
                    (place + shift, row["value"], row["low"], row["high"])
                    for place, method in enumerate(methods)
                    if bool(re.fullmatch(r"ddtree \d+", method)) == best_first
                    and (row := table.get(method, {}).get(what))
                ]
                if points:
                    x, y, low, high = np.array(points).T
                    style: dict[str, Any] = {"fmt": "-o" if best_first else "o", "color": f"C{index}", "capsize": 3}
                    axes.errorbar(x, y, (y - low, high - y), **style, label=name if best_first else None)
    for axes, what in zip(both, (f"speedup over {base}", "tokens a round"), strict=True):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set(ylabel=what, ylim=(0, None), xticks=range(len(methods)))
        axes.set_xticklabels(methods, rotation=30, ha="right")
    both[1].legend()
    figure.suptitle(title)
    save(figure, file)


def draw_acceptance(rows: Rows, title: str, file: Path) -> None:
    """Which share of the rounds committed how many tokens, by method."""
    counts: dict[str, Counter[int]] = {}
    for row in rows:
        counts.setdefault(row["method"], Counter()).update(row.get("acceptance_lengths") or ())
    counts = {method: counts[method] for method in sorted(counts, key=place_of) if len(counts[method]) > 1}
    if not counts:
        return
    most = max(max(count) for count in counts.values())
    figure, axes = pyplot.subplots(figsize=(8, 4))
    width = 0.85 / len(counts)
    for index, (method, count) in enumerate(counts.items()):
        shares = [100 * count[length] / count.total() for length in range(1, most + 1)]
        mean = sum(length * times for length, times in count.items()) / count.total()
        x = np.arange(1, most + 1) + (index - (len(counts) - 1) / 2) * width
        axes.bar(x, shares, width, label=f"{method}: {mean:.2f} on average")
    axes.set(xlabel="tokens committed in a round", ylabel="% of the rounds", xticks=range(1, most + 1), title=title)
    axes.legend(fontsize=8)
    save(figure, file)


def draw_evaluation(directory: Path) -> Iterator[Path]:
    rows = [json.loads(line) for line in (directory / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    for temperature in sorted({row["temperature"] for row in rows}):
        title = f"temperature {temperature:g}, {summary['settings']['device']}"
        tables = {t["set"]: t["methods"] for t in summary["tables"] if t["temperature"] == temperature}
        if len(tables) > 1:
            tables.pop("all prompts", None)
        draw_budgets(tables, summary["base"], title, file := directory / f"budgets_t{temperature:g}.svg")
        yield file
        own = [row for row in rows if row["temperature"] == temperature]
        draw_acceptance(own, title, file := directory / f"acceptance_t{temperature:g}.svg")
        yield file


def place_of(method: str) -> tuple[int, int]:
    """Where a method stands: single tokens, chains, static trees, trees by budget, "auto"."""
    budget = int(match[0]) if (match := re.search(r"\d+", method)) else 0
    kinds = ("one token", "chain", "static", "ddtree")
    kind = next((place for place, kind in enumerate(kinds) if kind in method), len(kinds))
    return kind + (method == "ddtree auto"), budget


def speed(rows: Rows) -> float:
    """Tokens a second."""
    return sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)


def save(figure: Any, file: Path) -> None:
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(argv).directory
    for pattern, draw in (("round_cost*.json", draw_round_cost), ("speed*.json", draw_speed)):
        for report in sorted(directory.glob(pattern)):
            draw(json.loads(report.read_text()), report.with_suffix(".svg"))
            print(report.with_suffix(".svg"))
    for report in sorted(directory.glob("speed*.json")):
        if (speeds := json.loads(report.read_text())).get("stages"):
            file = report.with_name(f"{report.stem}_stages.svg")
            draw_stages(speeds["stages"], speeds["device"], file)
            print(file)
    if (directory / "rows.jsonl").exists():
        for file in draw_evaluation(directory):
            print(file)


if __name__ == "__main__":
    main()
