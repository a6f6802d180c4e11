"""How fast a target and a drafter decode real prompts: stock decoding, chains and trees in one process, alternating.

    python benchmarks/speed.py --prompts 4 --json speed.json

Every prompt is answered greedily by every method, one after another and beginning with another method each time, so
that what else the machine does falls on all of them. A method's speed is all its tokens over all its seconds, prompt
included. Regret says whether a text is the target's own in this dtype: for each token, how far its logit lies below
the best one in one forward over the text; rounding alone makes some of them positive, for plain decoding as well.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import hf_ddtree
from hf_ddtree import DDTreeCandidateGenerator, DDTreeConfig, DFlashDraftModel
from smollm2 import PROMPT_FILES, chat_ids, load_prompts, load_target, load_tokenizer, no_progress_bars
from timing import synchronize


def make_methods(drafter: DFlashDraftModel, budgets: list[int], cuda: bool) -> dict[str, dict[str, Any]]:
    """Arguments of `generate` by the name of the method; the first is what the others are compared with."""
    ours = {"assistant_model": drafter}
    chain = DDTreeConfig(tree="chain", budget=drafter.config.block_size - 1)
    methods: dict[str, dict[str, Any]] = {"generate": {}}
    if cuda:
        methods["compiled generate"] = {"cache_implementation": "static", "max_cache_len": 1024}
    return methods | {
        "one token a round": ours | {"ddtree": DDTreeConfig(execution="plain"), "drafts": False},
        "native chain": ours | {"speculation_type": "dflash"},
        "chain": ours | {"ddtree": chain},
        f"static tree {budgets[0]}": ours | {"ddtree": DDTreeConfig(tree="static", budget=budgets[0])},
        **{f"ddtree {budget}": ours | {"ddtree": DDTreeConfig(budget=budget)} for budget in budgets},
    }


@contextlib.contextmanager
def without_drafts() -> Iterator[None]:
    """Our loop over empty trees: what plain decoding costs in it."""
    original = DDTreeCandidateGenerator.draft_tree
    DDTreeCandidateGenerator.draft_tree = lambda self, root, position, depth: original(self, root, position, 0)
    try:
        yield
    finally:
        DDTreeCandidateGenerator.draft_tree = original


def answer(target: Any, ids: torch.Tensor, new_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """One call: its new ids, seconds, and rounds where they are known."""
    options = dict(options)
    drafts = options.pop("drafts", True)
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "do_sample": False}
    with contextlib.nullcontext() if drafts else without_drafts():
        synchronize()
        start = time.perf_counter()
        out = target.generate(ids, return_dict_in_generate=True, **call, **options)
        synchronize()
        seconds = time.perf_counter() - start
    stats = getattr(out, "ddtree_stats", None)
    return {
        "ids": out.sequences[0, ids.shape[1] :].tolist(),
        "seconds": seconds,
        "rounds": stats.rounds if stats else None,
        "path": stats.path if stats else None,
    }


@torch.no_grad()
def regret(target: Any, ids: torch.Tensor, new_ids: list[int]) -> list[float]:
    """How far each new token's logit lies below the best, in one forward over the text."""
    text = torch.cat([ids, torch.tensor([new_ids], device=ids.device)], dim=1)
    logits = target(text).logits[0, ids.shape[1] - 1 : -1].float()
    chosen = logits.gather(1, text[0, ids.shape[1] :, None])[:, 0]
    return (logits.amax(dim=1) - chosen).tolist()


def summarize(rows: list[dict[str, Any]], base: str) -> dict[str, dict[str, float]]:
    """Figures of each method over some rows."""
    table = {}
    by_method: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_method[row["method"]].append(row)
    speed = {name: sum(len(r["ids"]) for r in own) / sum(r["seconds"] for r in own) for name, own in by_method.items()}
    for name, own in by_method.items():
        rounds = sum(r["rounds"] or 0 for r in own)
        table[name] = {
            "tokens/s": speed[name],
            "speedup": speed[name] / speed[base],
            "tokens a round": sum(len(r["ids"]) - 1 for r in own) / rounds if rounds else float("nan"),
            "not the best": sum(gap > 0 for r in own for gap in r["regret"]) / sum(len(r["ids"]) for r in own),
            "most regret": max(gap for r in own for gap in r["regret"]),
        }
    return table


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
    parser.add_argument("--json", type=Path, help="write every call there")
    arguments = parser.parse_args(argv)

    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), getattr(torch, arguments.dtype)
    target, tokenizer = load_target(dtype).to(device), load_tokenizer()
    with no_progress_bars():
        drafter = DFlashDraftModel.from_pretrained(arguments.drafter, dtype=dtype).to(device)
    methods = make_methods(drafter, arguments.budgets or ([63, 255] if cuda else [15, 63]), cuda)
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads of a CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"SmolLM2-135M-Instruct, {arguments.dtype}, {where}, {versions}, greedy", flush=True)

    warm_up = chat_ids(tokenizer, "Say hello.").to(device)
    for options in methods.values():  # compiles, captures and allocates
        answer(target, warm_up, arguments.new_tokens, options)

    rows: list[dict[str, Any]] = []
    turn = itertools.count()
    for name in arguments.sets:
        prompts = load_prompts(name)
        count = min(arguments.prompts or len(prompts), len(prompts))
        for index in range(count):
            ids = chat_ids(tokenizer, prompts[index * len(prompts) // count]).to(device)
            first = next(turn) % len(methods)
            for method in (*list(methods)[first:], *list(methods)[:first]):
                row = {"set": name, "prompt": index, "method": method}
                row |= answer(target, ids, arguments.new_tokens, methods[method])
                row["regret"] = regret(target, ids, row["ids"])
                rows.append(row)
        print("\n" + markdown(name, summarize([row for row in rows if row["set"] == name], "generate")), flush=True)
    print("\n" + markdown("all prompts", summarize(rows, "generate")))
    if arguments.json:
        about = {"device": where, "machine": platform.machine(), "versions": versions, "dtype": arguments.dtype}
        about |= {"hf_ddtree": hf_ddtree.__version__, "new_tokens": arguments.new_tokens}
        arguments.json.write_text(json.dumps(about | {"rows": rows}))


if __name__ == "__main__":
    main()
