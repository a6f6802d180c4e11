"""A chat in the terminal, with trees: streamed answers, and a status line with tokens/s and tokens per round.

    python examples/chat.py

Each turn goes on from the cache that `generate` returned, so earlier turns are not processed again; the drafter's
context travels with it. `/reset` begins a new conversation, `/quit` (or the end of the input) leaves. Ctrl-C stops an
answer; what it has said stays, and the next turn processes the conversation once more.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import TextStreamer

from hf_ddtree.compat import CACHE_KEY
from pair import Pair, add_pair_options, load_pair
from turns import next_turn_ids, read_turns


class StatusLine:
    """The last line of a terminal: everything else scrolls above it. Elsewhere, a line after each answer."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()
        self.shown_at = 0.0

    def __enter__(self) -> StatusLine:
        if self.live:
            rows = shutil.get_terminal_size().lines
            # A line of room, then scrolling above the last line only; setting that moves the cursor, so it is kept.
            print(f"\n\033[A\0337\033[1;{rows - 1}r\0338", end="", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            print(f"\0337\033[r\033[{shutil.get_terminal_size().lines};1H\033[K\0338", end="", flush=True)

    def show(self, text: str, final: bool = False) -> None:
        now = time.perf_counter()
        if self.live and (final or now - self.shown_at > 0.1):
            size = shutil.get_terminal_size()
            text = text[: size.columns - 1]
            print(f"\0337\033[{size.lines};1H\033[K\033[7m{text}\033[m\0338", end="", flush=True)
            self.shown_at = now
        elif final and not self.live:
            print(f"[{text}]", flush=True)


class Answer(TextStreamer):
    """Prints an answer while it is written, and keeps its ids."""

    def __init__(self, pair: Pair, status: StatusLine) -> None:
        super().__init__(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.ids: list[int] = []
        self.status = status
        self.start = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.ids += value.flatten().tolist()
            self.status.show(self.speed())
        super().put(value)

    def speed(self) -> str:
        return f"{len(self.ids)} tokens, {len(self.ids) / (time.perf_counter() - self.start):.1f} tokens/s"


class Chat:
    """A conversation: its ids, and the cache of all but the last of them."""

    def __init__(self, pair: Pair, status: StatusLine, options: dict[str, Any]) -> None:
        self.pair, self.status, self.options = pair, status, options
        self.turns = read_turns(pair.tokenizer)
        self.reset()

    def reset(self) -> None:
        self.ids: list[int] = []
        self.cache: Any = None

    def say(self, user: str) -> None:
        """Answer one user turn."""
        target, tokenizer, drafter = self.pair
        self.ids = next_turn_ids(tokenizer, self.ids, user, self.turns)
        ids = torch.tensor([self.ids], device=target.device)
        answer = Answer(self.pair, self.status)
        try:
            out = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=answer,
                assistant_model=drafter,
                ddtree=True,
                return_dict_in_generate=True,
                **self.options,
                **{CACHE_KEY: self.cache},
            )
        except KeyboardInterrupt:
            # The cache may be anywhere between the last turn and here.
            self.ids, self.cache = self.ids + answer.ids, None
            print()
            self.status.show(f"stopped after {answer.speed()}", final=True)
            return
        self.ids, self.cache = out.sequences[0].tolist(), out.cache
        stats = out.ddtree_stats
        self.status.show(f"{answer.speed()}, {stats.mean_acceptance_length:.2f} tokens per round", final=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", type=int, default=512, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    add_pair_options(parser)
    args = parser.parse_args(argv)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    pair = load_pair(args.target, args.drafter, args.dtype)
    with StatusLine() as status:
        chat = Chat(pair, status, {"max_new_tokens": args.max_new_tokens, **sampling})
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                break
            if line == "/quit":
                break
            if line == "/reset":
                chat.reset()
            elif line:
                chat.say(line)


if __name__ == "__main__":
    main()
