"""Would it pay? What each method would gain, from one plain run and a few short calls.

The plain run gives the texts, and `simulation.py` counts along them the rounds of every tree. A few calls of each
method give what its round costs on this device, and what a call costs besides: prompt and first draft. A call takes

    seconds besides + rounds * seconds of a round

and the plain method's likewise, with a token for a round. `"auto"` is not predicted: as long as it finds no reason
to leave trees out, it is one of the fixed budgets.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from evaluation_data import Prompt
from evaluation_methods import ChatPair, Turn, answer, converse
from simulation import Drafts, Text, acceptance_lengths, draft_along

CALLS = 8  # of each method, to measure costs
MARGIN = 1.05  # a speedup below it is within what a prediction may be wrong by
SHORT = 48  # new tokens of a call that measures what a round costs
FEW = 3  # of one that measures what a call costs besides: with less, rounds of trees are of another kind
ADVICE = "give more prompts, or more new tokens, or an idle device"


class Cost(NamedTuple):
    """What one method costs on this device."""

    round: float  # seconds
    besides: float  # seconds of a call, over the plain method's


def predict(
    pair: ChatPair,
    prompts: Sequence[Prompt],
    methods: dict[str, dict[str, Any]],
    base: str,
    temperature: float,
    seed: int,
    new_tokens: int,
    calls: int = CALLS,
) -> dict[str, Any]:
    """Figures of each method of a fixed budget.

    Args:
        pair: The models.
        prompts: To answer.
        methods: Arguments of `generate` by name; `base` is one, and gives the texts.
        base: The plain method.
        temperature: 0 for greedy.
        seed: Of the first prompt, and of each next one the next.
        new_tokens: Of each answer.
        calls: To measure costs, of each method.

    Returns:
        `methods`: by name `tokens per round`, `ms per round`, `tokens/s` and `speedup`; `by budget`: tokens per round
        of best-first trees of 0, 1, 2, ... nodes; `best`: the method with the most speedup; `unmeasured`: methods of
        which too few rounds were seen, or too unlike ones, to tell their cost; `skipped`: prompts that were longer
        than the target.

    Raises:
        ValueError: The same of the plain method, or no answer has more than one token.
    """
    turns, seconds, skipped = [], [], []
    for number, prompt in enumerate(tqdm(prompts, desc=f"{base}, temperature {temperature:g}")):
        answers, error = converse(pair, prompt, new_tokens, methods[base], temperature, seed + number)
        if error:
            skipped.append({"set": prompt.set, "prompt": prompt.index, "error": error})
        for turn in answers:
            turns.append(turn)
            seconds.append(answer(pair.target, turn.prompt, 1, methods[base], temperature)["seconds"])
    if not any(len(turn.ids) > 1 for turn in turns):
        raise ValueError("no answer has more than one token: there is nothing to predict from.")

    configs = {name: options["ddtree"] for name, options in methods.items() if is_predicted(options)}
    largest = max([config.budget for config in configs.values() if config.tree == "best_first"], default=0)
    others = {n: (config.tree, config.budget) for n, config in configs.items() if config.tree != "best_first"}
    texts = [Text(turn.prompt[0].tolist() + turn.ids, turn.prompt.shape[1], new_tokens) for turn in turns]
    drafts = draft_along(pair.target, pair.drafter, texts, max(largest, 1), others, batch=1, roots=32)

    measured = {name: methods[name] for name in (base, *configs)}
    costs = measure_costs(pair, measured, base, turns, temperature, calls)
    unmeasured = [name for name, cost in costs.items() if not cost.round > 0]
    if base in unmeasured:
        raise ValueError(f"what a token of {base} costs could not be told: {ADVICE}.")
    tokens, prompt_seconds = sum(len(turn.ids) for turn in turns), sum(seconds)
    plain = prompt_seconds + (tokens - len(turns)) * costs[base].round
    found = {base: {"ms per round": 1e3 * costs[base].round, "tokens/s": tokens / plain, "speedup": 1.0}}
    for name, config in configs.items():
        if name in unmeasured:
            continue
        lengths = walk(drafts, None if name in others else config.budget, name)
        predicted = prompt_seconds * costs[name].besides + len(lengths) * costs[name].round
        found[name] = {
            "tokens per round": statistics.mean(lengths),
            "ms per round": 1e3 * costs[name].round,
            "tokens/s": tokens / predicted,
            "speedup": plain / predicted,
        }
    by_budget = [statistics.mean(walk(drafts, budget)) for budget in range(largest + 1)]
    best = max(found, key=lambda name: found[name]["speedup"])
    return {
        "temperature": temperature, "base": base, "prompts": len(prompts), "tokens": tokens, "methods": found,
        "best": best, "by budget": by_budget, "unmeasured": unmeasured, "skipped": skipped,
    }  # fmt: skip


def is_predicted(options: dict[str, Any]) -> bool:
    """Whether a method's rounds can be counted: trees of a fixed budget."""
    return "ddtree" in options and isinstance(options["ddtree"].budget, int)


def walk(drafts: Sequence[Drafts], budget: int | None, name: str = "") -> list[int]:
    """Acceptance lengths over all answers, of a best-first tree of `budget` nodes or of the tree called `name`."""
    accepted = (each.others[name] if budget is None else each.accepted(budget) for each in drafts)
    return [length for each in accepted for length in acceptance_lengths(each)]


def measure_costs(
    pair: ChatPair,
    methods: dict[str, dict[str, Any]],
    base: str,
    turns: Sequence[Turn],
    temperature: float,
    calls: int,
) -> dict[str, Cost]:
    """What methods cost, from calls for evenly spread turns; each is made once with few new tokens and once with more.

    Each call is set beside the plain method's for the same turn, which ran shortly before or after it, so that a
    machine that is busy for a while slows both. A cost is the plain method's median times the median of such ratios.
    """
    long = [turn for turn in turns if len(turn.ids) > min(SHORT, max(len(t.ids) for t in turns)) // 2]
    chosen = [long[i * len(long) // min(calls, len(long))] for i in range(min(calls, len(long)))]
    rounds: dict[str, list[float]] = {name: [] for name in methods}
    besides: dict[str, list[float]] = {name: [] for name in methods}
    for number, turn in enumerate(tqdm(chosen, desc="costs of rounds")):
        order = list(methods)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            points = []
            for new in (1 if name == base else FEW, min(SHORT, len(turn.ids))):
                torch.manual_seed(number)
                found = answer(pair.target, turn.prompt, new, methods[name], temperature)
                count = len(found["acceptance_lengths"]) if "acceptance_lengths" in found else len(found["ids"]) - 1
                points.append((count, found["seconds"]))
            (few, start), (more, end) = points
            rounds[name].append((end - start) / (more - few) if more > few else math.nan)
            besides[name].append(start - few * rounds[name][-1] if few else start)

    def over_plain(seconds: dict[str, list[float]], name: str) -> float:
        ratios = [own / plain for own, plain in zip(seconds[name], seconds[base], strict=True)]
        return statistics.median([ratio for ratio in ratios if not math.isnan(ratio)] or [math.nan])

    plain = statistics.median([seconds for seconds in rounds[base] if not math.isnan(seconds)] or [math.nan])
    return {name: Cost(plain * over_plain(rounds, name), over_plain(besides, name)) for name in methods}


def markdown(predictions: Sequence[dict[str, Any]]) -> str:
    """Tables of predictions, and whether it would pay."""
    lines = []
    for each in predictions:
        base, best = each["base"], each["best"]
        lines += [f"## Temperature {each['temperature']:g}, {each['prompts']} prompts, predicted", ""]
        lines += ["| method | tokens per round | ms per round | tokens/s | speedup |", "| --- |" + " ---: |" * 4]
        for name, row in each["methods"].items():
            length = f"{row['tokens per round']:.2f}" if "tokens per round" in row else ""
            cells = [name, length, *(f"{row[column]:.2f}" for column in ("ms per round", "tokens/s", "speedup"))]
            lines.append(f"| {' | '.join(cells)} |")
        gain = each["methods"][best]["speedup"]
        verdict = f"{best} would pay: {gain:.2f} times the speed of {base}."
        if gain <= MARGIN:  # perhaps the plain method is the fastest itself
            verdict = f"None would pay: the most is {gain:.2f} times the speed of {base}."
        if each["unmeasured"]:
            verdict += f" What rounds cost could not be told of {', '.join(each['unmeasured'])}: {ADVICE}."
        lines += ["", verdict, ""]
    return "\n".join(lines)
