"""Draw what `round_cost.py` and `speed.py` have measured.

    python benchmarks/plots.py benchmarks/results

For each `round_cost*.json` in the directory: a round's cost by the size of its tree, beside compiled decoding and the
time that reading the weights takes. For each `speed*.json`: each method's speedup and tokens a round, by prompt set.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

matplotlib.use("svg")
pyplot.rcParams |= {"svg.hashsalt": "hf_ddtree", "svg.fonttype": "none"}  # the same file from the same figures


def draw_round_cost(report: dict[str, Any], file: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    greedy = [row for row in report["rows"] if not row["do_sample"]]
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
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


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
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def speed(rows: list[dict[str, Any]]) -> float:
    """Tokens a second."""
    return sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(argv).directory
    for pattern, draw in (("round_cost*.json", draw_round_cost), ("speed*.json", draw_speed)):
        for report in sorted(directory.glob(pattern)):
            draw(json.loads(report.read_text()), report.with_suffix(".svg"))
            print(report.with_suffix(".svg"))


if __name__ == "__main__":
    main()
