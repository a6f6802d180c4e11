"""What the rows of an evaluation say: speedups, tokens a second and a round, with intervals over prompts.

A figure of a method is a ratio of sums over prompts (tokens over seconds, tokens over rounds), a speedup the ratio of
two such, over the same prompts. Its interval holds 95% of what resampled prompts give (bootstrap, percentiles): it
says how much the choice of prompts matters, not how much the machine's speed varies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from evaluation_rows import Row

RESAMPLES = 2000
ALL = "all prompts"
COLUMNS = (
    "prompts", "speedup", "tokens/s", "tokens per round", "nodes per round", "same text, %", "not the best, %",
    "most regret",
)  # fmt: skip


def summarize(rows: Sequence[Row], methods: Sequence[str], base: str, seed: int = 0) -> dict[str, Any]:
    """Tables by temperature and set, and what a budget chosen on other prompts gives.

    Args:
        rows: Of an evaluation.
        methods: In the order that tables have.
        base: The method that speedups are over.
        seed: Of the bootstrap.

    Returns:
        `tables`: a list of `temperature`, `set` and `methods` (figures by method); `headlines`, one a temperature,
        where trees of fixed budgets and the base were run; `skipped`: prompts that were left out, and why.
    """
    good = sorted((row for row in rows if not row.get("error")), key=lambda row: methods.index(row["method"]))
    temperatures = sorted({row["temperature"] for row in good})
    sets = [name for name in dict.fromkeys(row["set"] for row in rows) if any(row["set"] == name for row in good)]
    tables, headlines = [], []
    for temperature in temperatures:
        own = [row for row in good if row["temperature"] == temperature]
        for name in [*sets, ALL] if len(sets) > 1 else sets:
            part = [row for row in own if name in (row["set"], ALL)]
            if part:
                tables.append({"temperature": temperature, "set": name, "methods": table(part, base, seed)})
        if headline := choose_budget(own, base, seed):
            headlines.append({"temperature": temperature} | headline)
    skipped = {(row["set"], row["prompt"]): row["error"] for row in rows if row.get("error")}
    return {
        "base": base,
        "tables": tables,
        "headlines": headlines,
        "skipped": [{"set": name, "prompt": index, "error": error} for (name, index), error in skipped.items()],
    }


def answered_by_all(rows: Sequence[Row], methods: Sequence[str]) -> list[Row]:
    """The rows of prompts, each at one temperature, that have one of each of `methods`; with those of further ones."""
    done: dict[tuple[str, int, float], set[str]] = {}
    for row in rows:
        done.setdefault((row["set"], row["prompt"], row["temperature"]), set()).add(row["method"])
    return [row for row in rows if done[row["set"], row["prompt"], row["temperature"]].issuperset(methods)]


def table(rows: Sequence[Row], base: str, seed: int) -> dict[str, dict[str, Any]]:
    """Figures of each method, over the rows of one temperature."""
    by_method: dict[str, dict[tuple[str, int], Row]] = {}
    for row in rows:
        by_method.setdefault(row["method"], {})[row["set"], row["prompt"]] = row
    base_rows = by_method.get(base, {})
    return {method: figures(own, base_rows, seed) for method, own in by_method.items()}


def figures(own: dict[tuple[str, int], Row], base: dict[tuple[str, int], Row], seed: int) -> dict[str, Any]:
    """One method's; each of `speedup`, `tokens/s` and `tokens per round` with its interval."""
    rows = list(own.values())
    paired = [(row, base[key]) for key, row in own.items() if key in base]
    found: dict[str, Any] = {"prompts": len(rows), "tokens": sum(row["tokens"] for row in rows)}
    if paired:
        sums = columns([(o["tokens"], o["seconds"], b["tokens"], b["seconds"]) for o, b in paired])
        found |= {"speedup": interval(sums, lambda s: s[0] / s[1] / (s[2] / s[3]), seed)}
        found["same text"] = sum(o["text"] == b["text"] for o, b in paired) / len(paired)
    found["tokens/s"] = interval(columns([(r["tokens"], r["seconds"]) for r in rows]), lambda s: s[0] / s[1], seed)
    with_rounds = [row for row in rows if row.get("rounds")]
    if with_rounds:
        sums = columns([(sum(row["acceptance_lengths"]), row["rounds"]) for row in with_rounds])
        found["tokens per round"] = interval(sums, lambda s: s[0] / s[1], seed)
        found["rounds"] = sum(row["rounds"] for row in with_rounds)
        budgets = [budget for row in with_rounds for budget in row.get("budgets", ())]
        found["nodes per round"] = sum(budgets) / len(budgets) if budgets else None
    if paths := Counter(row["path"] for row in rows if row.get("path")):
        found["path"] = paths.most_common(1)[0][0]
    if regrets := [row["regret"] for row in rows if row.get("regret")]:
        not_best = sum(regret["not_best"] for regret in regrets)
        found["regret"] = {"not_best": not_best, "share": not_best / found["tokens"]}
        found["regret"]["most"] = max(regret["most"] for regret in regrets)
    return found


def columns(values: list[tuple[float, ...]]) -> np.ndarray:
    """A row a prompt, `(P, C)`."""
    return np.array(values, dtype=np.float64)


def interval(
    values: np.ndarray, figure: Callable[[np.ndarray], np.ndarray], seed: int, resamples: int = RESAMPLES
) -> dict[str, float]:
    """`figure` of the sums of `(P, C)` values over prompts, and its 95% interval."""
    prompts = len(values)
    counts = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)
    low, high = np.percentile(figure((counts @ values).T), [2.5, 97.5])
    return {"value": float(figure(values.sum(axis=0))), "low": float(low), "high": float(high)}


def choose_budget(rows: Sequence[Row], base: str, seed: int) -> dict[str, Any] | None:
    """The budget with the most speedup on every second prompt, and its figures on the others.

    Prompts are counted in each set by itself, in the order of their indices.
    """
    prompts = sorted({(row["set"], row["prompt"]) for row in rows})
    place: dict[tuple[str, int], int] = {}
    for name, index in prompts:
        place[name, index] = sum(other == name for other, _ in place)
    trees = [m for m in dict.fromkeys(row["method"] for row in rows) if is_fixed_tree(m)]
    halves: list[list[Row]] = [[], []]
    for row in rows:
        halves[place[row["set"], row["prompt"]] % 2].append(row)
    choosing = table([row for row in halves[0] if row["method"] in (*trees, base)], base, seed)
    speedups = {m: choosing[m]["speedup"]["value"] for m in trees if "speedup" in choosing.get(m, {})}
    if not speedups:
        return None
    chosen = max(speedups, key=lambda method: speedups[method])
    reported = [row for row in halves[1] if row["method"] in (chosen, base)]
    sets = list(dict.fromkeys(row["set"] for row in reported))
    found = {}
    for name in [*sets, ALL] if len(sets) > 1 else sets:
        part = table([row for row in reported if name in (row["set"], ALL)], base, seed).get(chosen)
        if part and "speedup" in part:
            shown_of = ("prompts", "speedup", "tokens/s", "tokens per round")
            found[name] = {key: part[key] for key in shown_of if key in part}
    return {"method": chosen, "chosen_on": speedups, "sets": found} if found else None


def is_fixed_tree(method: str) -> bool:
    """Whether a method is `ddtree` with a number."""
    return method.startswith("ddtree ") and method.removeprefix("ddtree ").isdigit()


def markdown(summary: dict[str, Any]) -> str:
    """The summary as a page."""
    about, settings = summary["about"], summary["settings"]
    lines = ["# Evaluation", "", f"{settings['target']} with {settings['drafter']}", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [f"- {name}: {value}" for name, value in settings.items() if name not in (*about, "target", "drafter")]
    for headline in summary["headlines"]:
        lines += ["", f"## Temperature {headline['temperature']:g}, the budget chosen on other prompts", ""]
        lines += [f"{headline['method']} was the fastest on one half of the prompts. On the other half:", ""]
        lines += markdown_table("set", headline["sets"])
    for part in summary["tables"]:
        lines += ["", f"## Temperature {part['temperature']:g}: {part['set']}", ""]
        lines += markdown_table("method", part["methods"])
    lines += ["", f"Speedups are over {summary['base']}; in brackets, 95% intervals over prompts (bootstrap)."]
    if summary["skipped"]:
        lines += ["", "Skipped:", ""]
        lines += [f"- {row['set']} {row['prompt']}: {row['error']}" for row in summary["skipped"]]
    return "\n".join(lines) + "\n"


def markdown_table(title: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    """Figures by row, in columns; those that no row has are left out."""
    cells = {name: shown(row) for name, row in rows.items()}
    names = [name for name in COLUMNS if any(name in row for row in cells.values())]
    lines = [f"| {title} | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    lines += [f"| {name} | {' | '.join(row.get(column, '') for column in names)} |" for name, row in cells.items()]
    return lines


def shown(row: dict[str, Any]) -> dict[str, str]:
    """The cells of one row."""
    cells = {"prompts": str(row["prompts"])}
    for name, digits in (("speedup", 2), ("tokens/s", 1), ("tokens per round", 2)):
        if value := row.get(name):
            cells[name] = f"{value['value']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"
    if row.get("nodes per round") is not None:
        cells["nodes per round"] = f"{row['nodes per round']:.1f}"
    if "same text" in row:
        cells["same text, %"] = f"{100 * row['same text']:.0f}"
    if regret := row.get("regret"):
        cells["not the best, %"] = f"{100 * regret['share']:.2f}"
        cells["most regret"] = f"{regret['most']:.3g}"
    return cells
