"""How fast the pair of `examples/` decodes, and what each stage of a round takes.

    python benchmarks/speed.py --prompts 4 --json speed.json

A small `examples/evaluate.py`: first turns, greedy, one process, not resumed; its tables and calls are the same. To
these it adds the stages of rounds, from calls that wait for the device after each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import hf_ddtree
from evaluate import make_tasks, run_task
from evaluation_data import load_sets
from evaluation_methods import (
    WARM_UP,
    ChatPair,
    answer,
    default_base,
    default_budgets,
    longest_prompt,
    make_methods,
    warm_up,
)
from evaluation_summary import markdown_table, summarize
from pair import DRAFTER, load_pair
from smollm2 import PROMPT_FILES, prepare_target

STAGES = ("draft", "verify", "walk", "keep", "round")


def measure_stages(pair: ChatPair, methods: dict[str, dict[str, Any]], new_tokens: int) -> dict[str, dict[str, float]]:
    """Milliseconds a round, of each method with trees."""
    prompts = [pair.encode([{"role": "user", "content": text}]) for text in WARM_UP]
    stages = {}
    for method, options in methods.items():
        if "ddtree" in options:
            timed = options | {"ddtree": dataclasses.replace(options["ddtree"], record_times=True)}
            answers = [answer(pair.target, ids, new_tokens, timed) for ids in prompts]
            rounds = sum(len(row["acceptance_lengths"]) for row in answers)
            stages[method] = {
                stage: 1e3 * sum(row["times"].get(stage, 0.0) for row in answers) / rounds for stage in STAGES
            }
    return stages


def compact(row: dict[str, Any]) -> dict[str, Any]:
    """What is worth keeping of a call."""
    kept = {
        name: row[name] for name in ("set", "prompt", "method", "seconds", "rounds", "tokens", "text") if name in row
    }
    if budgets := row.get("budgets"):
        kept["nodes"] = round(statistics.mean(budgets), 2)
    return kept | {"not_best": row["regret"]["not_best"], "most_regret": row["regret"]["most"]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default=str(DRAFTER), help="directory or hub id")
    parser.add_argument("--sets", nargs="+", choices=PROMPT_FILES, default=list(PROMPT_FILES))
    parser.add_argument("--prompts", type=int, help="of each set, evenly spread; default: all")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", help="default: 15 7 31 on a CPU, 63 15 127 255 on a GPU")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--plain-prompts", type=int, help="of each set, for methods without graphs; default: all")
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--json", type=Path, help="write every call there")
    arguments = parser.parse_args(argv)

    cuda = torch.cuda.is_available()
    target, tokenizer, drafter = load_pair(str(prepare_target()), arguments.drafter, arguments.dtype)
    pair = ChatPair(target, drafter, tokenizer)
    budgets = arguments.budgets or default_budgets(cuda)
    methods = make_methods(pair.drafter, budgets, cuda, 1024)
    methods = {name: methods[name] for name in arguments.methods or methods}
    base = default_base(cuda)
    about = {
        "device": torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads of a CPU",
        "machine": platform.machine(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "dtype": arguments.dtype,
        "hf_ddtree": hf_ddtree.__version__,
        "new_tokens": arguments.new_tokens,
        "base": base,
    }
    print(
        "SmolLM2-135M-Instruct, greedy:", *(f"{name} {value}" for name, value in about.items()), sep="\n", flush=True
    )

    prompts = [prompt._replace(later=[]) for prompt in load_sets(arguments.sets, arguments.prompts)]
    longest = longest_prompt(pair, prompts, arguments.new_tokens)
    warm_up(pair, methods, [0.0], longest, arguments.new_tokens)
    rows: list[dict[str, Any]] = []

    def save(stages: dict[str, dict[str, float]]) -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(about | {"stages": stages, "rows": list(map(compact, rows))}))

    for group in make_tasks(prompts, list(methods), [0.0], 0, arguments.plain_prompts if cuda else None):
        regrets: dict[tuple[int, ...], list[float]] = {}
        rows += [run_task(pair, task, methods[task.method], arguments.new_tokens, regrets) for task in group]
        save({})
    for part in summarize(rows, list(methods), base)["tables"]:
        print("", *markdown_table(part["set"], part["methods"]), sep="\n", flush=True)
    save(stages := measure_stages(pair, methods, arguments.new_tokens))
    if stages:
        print(f"\n| ms a round | {' | '.join(STAGES)} |\n| --- |{' ---: |' * len(STAGES)}")
        for method, row in stages.items():
            print(f"| {method} | {' | '.join(f'{row[stage]:.3g}' for stage in STAGES)} |")


if __name__ == "__main__":
    main()
