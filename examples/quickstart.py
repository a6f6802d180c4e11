"""The shortest complete program: one prompt answered with trees, how that went, and plain `generate` beside it.

    python examples/quickstart.py "Why is the sky blue?"

Both runs are timed as they come: the first calls of a process also pay for what later ones reuse.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch

from pair import add_pair_options, load_pair


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="Write a Python function that reverses a string.")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    add_pair_options(parser)
    args = parser.parse_args(argv)
    model, tokenizer, drafter = load_pair(args.target, args.drafter, args.dtype)

    chat = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    inputs = inputs.to(model.device)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "return_dict_in_generate": True}

    start = time.perf_counter()
    out = model.generate(**inputs, **options, assistant_model=drafter, ddtree=True)
    middle = time.perf_counter()
    plain = model.generate(**inputs, **options)
    end = time.perf_counter()

    prompt_length = inputs["input_ids"].shape[1]
    tokens = out.sequences.shape[1] - prompt_length
    print(tokenizer.decode(out.sequences[0, prompt_length:], skip_special_tokens=True))
    stats = out.ddtree_stats
    print(f"\n{tokens} tokens in {stats.rounds} rounds, {stats.mean_acceptance_length:.2f} tokens per round")
    print(f"with trees {middle - start:.2f} s, plain generate {end - middle:.2f} s")
    print(
        "the same text" if torch.equal(out.sequences, plain.sequences) else "another text: rounding decided a near-tie"
    )


if __name__ == "__main__":
    main()
