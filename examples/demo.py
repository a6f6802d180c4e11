"""Plain `generate` and `generate(ddtree=True)` side by side, on a small real model: text, speed, and a draft tree.

`make demo` runs this; `make demo ARGS="--budget 8"` passes options on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from hf_ddtree import DDTreeConfig, DFlashDraftModel
from hf_ddtree.outputs import DDTreeStats, RoundTree
from hf_ddtree.visualize import tree_text
from smollm2 import chat_ids, load_target, load_tokenizer, no_progress_bars, prepare_target

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Natalie buys 4 boxes of 12 pencils and gives away a third of them. How many are left?",
    "Explain in a few sentences why the sky is blue.",
    "List the planets of the solar system, with one fact about each.",
)


@dataclass
class Run:
    """One generation: the new ids, how long they took, and what `ddtree_stats` says (None without trees)."""

    ids: list[int]
    seconds: float
    stats: DDTreeStats | None

    @property
    def speed(self) -> float:
        """Tokens per second, prompt processing included."""
        return len(self.ids) / self.seconds


def generate(target: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int, **kwargs: Any) -> Run:
    """Generate greedily from `ids` (1, L) and time it."""
    start = time.perf_counter()
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        **kwargs,
    )
    seconds = time.perf_counter() - start
    return Run(out.sequences[0, ids.shape[1] :].tolist(), seconds, getattr(out, "ddtree_stats", None))


def compare_texts(target: PreTrainedModel, ids: torch.Tensor, plain: Run, tree: Run) -> str:
    """Say whether two runs from the prompt `ids` (1, L) gave the same text and, if not, how close the call was."""
    if plain.ids == tree.ids:
        return "same text"
    part = next(i for i, (a, b) in enumerate(zip(plain.ids, tree.ids, strict=False)) if a != b)
    prefix = torch.cat([ids, torch.tensor([plain.ids[:part]], dtype=ids.dtype)], dim=1)
    with torch.no_grad():
        first, second = target(prefix).logits[0, -1].float().topk(2).values.tolist()
    rounding = torch.finfo(target.dtype).eps * abs(first)
    return (
        f"the texts part at token {part + 1}, where the best two logits differ by {first - second:.2g} "
        f"(one rounding step of {name_of(target.dtype)} is {rounding:.2g})"
    )


def most_telling_round(stats: Sequence[DDTreeStats]) -> RoundTree:
    """The round with the longest accepted path; among equals, one whose path leaves the most probable chain."""

    def rank(entry: RoundTree) -> tuple[int, bool]:
        parents = entry.tree.parents[0].tolist()
        # Siblings are in score order, so the chain takes each node's first child.
        off_chain = any(parents.index(parents[node]) != node for node in entry.path)
        return len(entry.path), off_chain

    return max((entry for each in stats for entry in each.trees), key=rank)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo with command-line arguments `argv` (default: those of the process)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", default=Path(__file__).parent / "smollm2-135m-dflash", help="directory or hub id")
    parser.add_argument("--budget", type=int, default=15, help="nodes of a tree; a CPU likes 8 to 16")
    parser.add_argument("--max-depth", type=int, default=7, help="deepest node of a tree")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, metavar="PROMPT")
    args = parser.parse_args(argv)

    print("Preparing the target (the first time, its file is converted: some 20 seconds) ...", flush=True)
    prepare_target()
    dtype = getattr(torch, args.dtype)
    target, tokenizer = load_target(dtype), load_tokenizer()
    with no_progress_bars():
        drafter = DFlashDraftModel.from_pretrained(args.drafter, dtype=dtype)
    config = DDTreeConfig(budget=args.budget, max_depth=args.max_depth, record_trees=True)
    ddtree: dict[str, Any] = {"assistant_model": drafter, "ddtree": config}

    # The first calls in a process pay for allocations that later ones reuse.
    warm_up = chat_ids(tokenizer, "Say hello.")
    generate(target, warm_up, 8)
    generate(target, warm_up, 8, **ddtree)

    print(
        f"SmolLM2-135M-Instruct in {args.dtype} on {torch.get_num_threads()} CPU threads, greedy. "
        f"Trees of {args.budget} nodes, at most {args.max_depth} deep."
    )
    if dtype != torch.float32:
        print(
            f"Where two logits are within a rounding step of each other, {args.dtype} lets the number of tokens in a "
            "forward decide between them, so some texts part. With `--dtype float32` they are the same."
        )
    runs = [
        show_prompt(target, tokenizer, prompt, f"{number}/{len(args.prompts)}", args.max_new_tokens, ddtree)
        for number, prompt in enumerate(args.prompts, start=1)
    ]
    show_tree(tokenizer, [tree.stats for _, tree in runs if tree.stats is not None])
    show_summary(runs, dtype)


def show_prompt(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    number: str,
    max_new_tokens: int,
    ddtree: dict[str, Any],
) -> tuple[Run, Run]:
    """Answer one prompt plainly and with trees, streaming both texts."""
    ids = chat_ids(tokenizer, prompt)
    runs = []
    print(f"\n{heading(f'[{number}] {prompt}')}")
    for name, kwargs in (("generate", {}), ("generate(ddtree=True)", ddtree)):
        print(heading(f"--- {name} ---"))
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        run = generate(target, ids, max_new_tokens, streamer=streamer, **kwargs)
        print(f"    {len(run.ids)} tokens in {run.seconds:.2f} s: {run.speed:.1f} tokens/s")
        runs.append(run)
    plain, tree = runs
    assert tree.stats is not None
    print(
        f"    speedup {tree.speed / plain.speed:.2f}, {tree.stats.mean_acceptance_length:.2f} tokens per round, "
        f"{compare_texts(target, ids, plain, tree)}"
    )
    return plain, tree


def show_tree(tokenizer: PreTrainedTokenizerBase, stats: Sequence[DDTreeStats]) -> None:
    """Draw the tree of the round that accepted most."""
    entry = most_telling_round(stats)
    print(f"\n{heading(f'Draft tree of the round that accepted most ({len(entry.path)} nodes, ticked)')}")
    print("Behind each token: the probability that the drafter gives to the text up to it.")
    print(tree_text(entry.tree, entry.root, entry.path, tokenizer))


def show_summary(runs: Sequence[tuple[Run, Run]], dtype: torch.dtype) -> None:
    """Print the speeds over all prompts."""
    plain, tree = (
        sum(len(run.ids) for run in side) / sum(run.seconds for run in side) for side in zip(*runs, strict=True)
    )
    lengths = [length for _, run in runs if run.stats is not None for length in run.stats.acceptance_lengths]
    same = sum(one.ids == other.ids for one, other in runs)
    rounded = f" (in float32 all; {name_of(dtype)} rounds)" if same < len(runs) and dtype != torch.float32 else ""
    speedups = sorted(after.speed / before.speed for before, after in runs)
    print(
        f"\n{heading('All prompts:')} generate {plain:.1f} tokens/s, ddtree=True {tree:.1f} tokens/s, "
        f"{sum(lengths) / len(lengths):.2f} tokens per round, same text {same} of {len(runs)}{rounded}, "
        f"{heading(f'speedup {tree / plain:.2f}')} ({speedups[0]:.2f} to {speedups[-1]:.2f})"
    )


def name_of(dtype: torch.dtype) -> str:
    """`"bfloat16"` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def heading(text: str) -> str:
    """Bold on a terminal, unchanged elsewhere."""
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text


if __name__ == "__main__":
    main()
