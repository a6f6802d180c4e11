"""Show how a text came about: a page of the whole generation, or the tree of one round as SVG, Graphviz or text.

    python examples/visualize.py "Explain why the sky is blue." --output sky.html
    python examples/visualize.py "Explain why the sky is blue." --output sky.svg

The name's ending says which: `.html`, `.svg`, `.dot` or `.txt`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_ddtree import DDTreeConfig, DFlashDraftModel
from hf_ddtree.visualize import generation_html, tree_dot, tree_svg, tree_text
from smollm2 import chat_ids, load_target, load_tokenizer, no_progress_bars

TREES = {".svg": tree_svg, ".dot": tree_dot, ".txt": tree_text}


def main(argv: Sequence[str] | None = None) -> None:
    """Draw with command-line arguments `argv` (default: those of the process)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--output", type=Path, default=Path("generation.html"))
    parser.add_argument("--round", type=int, help="of the one tree, from 1 (default: the one that accepted most)")
    parser.add_argument("--drafter", default=Path(__file__).parent / "smollm2-135m-dflash", help="directory or hub id")
    parser.add_argument("--budget", type=int, default=31, help="nodes of a tree")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args(argv)
    suffix = args.output.suffix
    if suffix not in (".html", *TREES):
        parser.error(f"--output ends in {suffix or 'nothing'}, not in .html, {', '.join(TREES)}")

    target, tokenizer = load_target(), load_tokenizer()
    with no_progress_bars():
        drafter = DFlashDraftModel.from_pretrained(args.drafter, dtype=target.dtype)
    ids = chat_ids(tokenizer, args.prompt)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=args.max_new_tokens,
        assistant_model=drafter,
        ddtree=DDTreeConfig(budget=args.budget, record_trees=True),
        return_dict_in_generate=True,
        **sampling,
    )
    stats, new_ids = out.ddtree_stats, out.sequences[0, ids.shape[1] :].tolist()
    if suffix == ".html":
        picture = generation_html(ids[0].tolist(), new_ids, stats, tokenizer, title=args.prompt)
    else:
        if not stats.rounds:
            parser.error("the text ended with the prompt's forward: there was no round")
        if args.round is not None and not 1 <= args.round <= stats.rounds:
            parser.error(f"--round is {args.round}, and there were {stats.rounds}")
        best = max(range(stats.rounds), key=lambda index: stats.acceptance_lengths[index])
        entry = stats.trees[best if args.round is None else args.round - 1]
        picture = TREES[suffix](entry.tree, entry.root, entry.path, tokenizer)
    args.output.write_text(picture, encoding="utf-8")
    print(f"{args.output}: {len(new_ids)} tokens in {stats.rounds} rounds")


if __name__ == "__main__":
    main()
