"""`pipeline("text-generation")` with trees: prompts as text and as chats, several at a time.

python examples/pipeline.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from transformers import pipeline

from pair import add_pair_options, load_pair

TEXTS = ["The capital of France is", "def fibonacci(n):"]
CHATS = [
    [{"role": "user", "content": "Name three planets."}],
    [{"role": "user", "content": "What is 12 times 12?"}],
]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=32)
    add_pair_options(parser)
    args = parser.parse_args(argv)
    model, tokenizer, drafter = load_pair(args.target, args.drafter, args.dtype)

    # `ddtree` here holds for all calls; a call's own `ddtree=` goes before it.
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=drafter, ddtree=True)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    # A list is answered prompt by prompt: trees decode one sequence at a time, so leave `batch_size` out.
    for prompt, (answer,) in zip(TEXTS, pipe(TEXTS, return_full_text=False, **options), strict=True):
        print(f"{prompt!r} -> {answer['generated_text']!r}")
    for chat, (answer,) in zip(CHATS, pipe(CHATS, **options), strict=True):
        print(f"{chat[-1]['content']!r} -> {answer['generated_text'][-1]['content']!r}")
    (answer,) = pipe(CHATS[0], ddtree=False, **options)
    print(f"the first without trees -> {answer['generated_text'][-1]['content']!r}")


if __name__ == "__main__":
    main()
