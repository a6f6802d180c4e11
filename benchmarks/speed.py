"""How fast a target and a drafter decode real prompts: stock decoding, chains and trees in one process, alternating.

    python benchmarks/speed.py --prompts 4 --json speed.json

Every prompt is answered greedily by every method, one after another and beginning with another method each time, so
that what else the machine does falls on all of them. A method's speed is all its tokens over all its seconds, prompt
included. Regret says whether a text is the target's own in this dtype: for each token, how far its logit lies below
the best one in one forward over the text; rounding alone makes some of them positive, for plain decoding as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import platform
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import hf_ddtree
from evaluation_methods import PLAIN, WARM_UP, answer, make_methods, regret, settling
from hf_ddtree import DFlashDraftModel
from smollm2 import PROMPT_FILES, chat_ids, load_prompts, load_target, load_tokenizer, no_progress_bars


def summarize(rows: list[dict[str, Any]], base: str) -> dict[str, dict[str, float]]:
    """Figures of each method; its speedup is over what `base` took for the same prompts."""
    by_method: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_method[row["method"]].append(row)
    base_rows = {(row["set"], row["prompt"]): row for row in by_method[base]}
    table = {}
    for name, own in by_method.items():
        same = [base_rows[row["set"], row["prompt"]] for row in own]
        rounds = sum(len(r.get("acceptance_lengths", ())) for r in own)
        nodes = [nodes for r in own for nodes in r.get("budgets", ())]
        table[name] = {
            "prompts": len(own),
            "tokens/s": speed(own),
            "speedup": speed(own) / speed(same),
            "tokens a round": sum(len(r["ids"]) - 1 for r in own) / rounds if rounds else float("nan"),
            "nodes a round": statistics.mean(nodes) if nodes else float("nan"),
            "not the best, %": 100
            * sum(gap > 0 for r in own for gap in r["regret"])
            / sum(len(r["ids"]) for r in own),
            "most regret": max(gap for r in own for gap in r["regret"]),
        }
    return table


def speed(rows: list[dict[str, Any]]) -> float:
    return sum(len(r["ids"]) for r in rows) / sum(r["seconds"] for r in rows)


def compact(row: dict[str, Any]) -> dict[str, Any]:
    """What is worth keeping of a call."""
    kept = {name: row[name] for name in ("set", "prompt", "method", "seconds")}
    if "acceptance_lengths" in row:
        kept["rounds"] = len(row["acceptance_lengths"])
    if budgets := row.get("budgets"):
        kept["nodes"] = round(statistics.mean(budgets), 2)
    text = hashlib.sha256(str(row["ids"]).encode()).hexdigest()[:8]
    not_best = sum(gap > 0 for gap in row["regret"])
    return kept | {"tokens": len(row["ids"]), "text": text, "not_best": not_best, "most_regret": max(row["regret"])}


def markdown(title: str, table: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(table.values())))
    lines = [f"| {title} | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    lines += [f"| {name} | {' | '.join(f'{row[column]:.3g}' for column in columns)} |" for name, row in table.items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--drafter", default=root / "examples" / "smollm2-135m-dflash", help="directory or hub id")
    parser.add_argument("--sets", nargs="+", choices=PROMPT_FILES, default=list(PROMPT_FILES))
    parser.add_argument("--prompts", type=int, help="of each set, evenly spread; default: all")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", help="default: 15 63 on a CPU, 63 255 on a GPU")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--plain-prompts", type=int, help="of each set, for methods without graphs; default: all")
    parser.add_argument("--methods", nargs="+", help="default: all")
    parser.add_argument("--json", type=Path, help="write every call there")
    arguments = parser.parse_args(argv)

    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), getattr(torch, arguments.dtype)
    target, tokenizer = load_target(dtype).to(device), load_tokenizer()
    with no_progress_bars():
        drafter = DFlashDraftModel.from_pretrained(arguments.drafter, dtype=dtype).to(device)
    methods = make_methods(drafter, arguments.budgets or ([63, 15, 127, 255] if cuda else [15, 7, 31]), cuda, 1024)
    methods = {name: methods[name] for name in arguments.methods or methods}
    base = "compiled generate" if cuda else "generate"
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads of a CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"SmolLM2-135M-Instruct, {arguments.dtype}, {where}, {versions}, greedy", flush=True)

    # Compile, capture, allocate and learn.
    warm_up = [chat_ids(tokenizer, text).to(device) for text in WARM_UP]
    with settling():
        for name, options in methods.items():
            for ids in warm_up if name == "ddtree auto" else warm_up[:1]:
                row = answer(target, ids, arguments.new_tokens, options)
            print(f"{name}: {row.get('path', 'stock')}", flush=True)

    rows: list[dict[str, Any]] = []
    stages: dict[str, dict[str, float]] = {}

    def save() -> None:
        if arguments.json:
            about = {"device": where, "machine": platform.machine(), "versions": versions, "dtype": arguments.dtype}
            about |= {"hf_ddtree": hf_ddtree.__version__, "new_tokens": arguments.new_tokens, "base": base}
            arguments.json.write_text(json.dumps(about | {"stages": stages, "rows": list(map(compact, rows))}))

    turn = itertools.count()
    for name in arguments.sets:
        prompts = load_prompts(name)
        count = min(arguments.prompts or len(prompts), len(prompts))
        plain = min(arguments.plain_prompts or count, count)
        for index in range(count):
            ids = chat_ids(tokenizer, prompts[index * len(prompts) // count]).to(device)
            is_plain = index * plain // count != (index - 1) * plain // count  # evenly spread as well
            due = [method for method in methods if is_plain or not cuda or method not in PLAIN]
            first = next(turn) % len(due)
            regrets: dict[tuple[int, ...], list[float]] = {}
            for method in (*due[first:], *due[:first]):
                row = {"set": name, "prompt": index, "method": method}
                row |= answer(target, ids, arguments.new_tokens, methods[method])
                text = tuple(row["ids"])
                regrets[text] = row["regret"] = regrets.get(text) or regret(target, ids, row["ids"])
                rows.append(row)
        print("\n" + markdown(name, summarize([row for row in rows if row["set"] == name], base)), flush=True)
        save()
    print("\n" + markdown("all prompts", summarize(rows, base)), flush=True)

    for method, options in methods.items():
        if "ddtree" in options:
            timed = options | {"ddtree": dataclasses.replace(options["ddtree"], record_times=True)}
            answers = [answer(target, ids, arguments.new_tokens, timed) for ids in warm_up]
            rounds = sum(len(row["acceptance_lengths"]) for row in answers)
            stages[method] = {
                stage: 1e3 * sum(row["times"].get(stage, 0.0) for row in answers) / rounds
                for stage in ("draft", "verify", "walk", "keep", "round")
            }
    if stages:
        print("\n" + markdown("ms a round, by stage", stages))
    save()


if __name__ == "__main__":
    main()
