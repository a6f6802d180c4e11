"""The ways to decode that an evaluation compares, and one call of each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_ddtree import DDTreeConfig, DFlashDraftModel, budget

PLAIN = ("generate", "native chain")  # neither captured nor compiled


def make_methods(
    drafter: DFlashDraftModel, budgets: list[int], cuda: bool, max_cache_len: int
) -> dict[str, dict[str, Any]]:
    """Arguments of `generate` by the name of the method.

    Args:
        drafter: The target's.
        budgets: Of the trees; the static tree has the first.
        cuda: Whether the target is on a CUDA GPU: elsewhere nothing is compiled.
        max_cache_len: Of the compiled method, so that no call is compiled anew.
    """
    trees = {f"ddtree {budget}": DDTreeConfig(budget=budget) for budget in budgets} | {
        "one token a round": DDTreeConfig(budget=0),
        "chain": DDTreeConfig(tree="chain", budget=drafter.config.block_size - 1),
        f"static tree {budgets[0]}": DDTreeConfig(tree="static", budget=budgets[0]),
        "ddtree auto": DDTreeConfig(),
    }
    stock: dict[str, dict[str, Any]] = {"generate": {}}
    if cuda:
        stock["compiled generate"] = {"cache_implementation": "static", "max_cache_len": max_cache_len}
    stock["native chain"] = {"assistant_model": drafter, "speculation_type": "dflash"}
    return stock | {name: {"assistant_model": drafter, "ddtree": config} for name, config in trees.items()}


@contextlib.contextmanager
def settling() -> Iterator[None]:
    """Let graphs of other sizes be captured at once, rather than when decoding has paid for them."""
    original, budget.CAPTURE_SHARE = budget.CAPTURE_SHARE, float("inf")
    try:
        yield
    finally:
        budget.CAPTURE_SHARE = original


class Rounds(BaseStreamer):
    """Counts the tokens of each round of stock speculative decoding, which streams what a round gave at once."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.lengths.append(value.numel())

    def end(self) -> None:
        del self.lengths[:2]  # the prompt, and the token that its forward gave


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def answer(
    target: PreTrainedModel, ids: torch.Tensor, new_tokens: int, options: dict[str, Any], temperature: float = 0.0
) -> dict[str, Any]:
    """One call: its new ids and seconds, and what its rounds were.

    Sampling is by temperature alone: a generation config's own warpers are switched off.

    Args:
        target: The model.
        ids: `(1, L)`, the prompt.
        new_tokens: At most.
        options: Of the method.
        temperature: 0 for greedy.

    Returns:
        `ids`, `seconds` (of the whole call, prompt included); of speculative methods `acceptance_lengths` too, and
        of trees `budgets`, `path` and `times`.
    """
    call: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens}
    if temperature:
        call |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    else:
        call |= {"do_sample": False}
    rounds = Rounds() if "speculation_type" in options else None
    synchronize()
    start = time.perf_counter()
    out = target.generate(ids, return_dict_in_generate=True, streamer=rounds, **call, **options)
    synchronize()
    seconds = time.perf_counter() - start
    row = {"ids": out.sequences[0, ids.shape[1] :].tolist(), "seconds": seconds}
    stats = getattr(out, "ddtree_stats", None)
    if stats is not None:
        row |= {"acceptance_lengths": stats.acceptance_lengths, "budgets": stats.budgets}
        row |= {"path": stats.path, "times": stats.times}
    elif rounds is not None:
        row["acceptance_lengths"] = rounds.lengths
    return row


@torch.no_grad()
def regret(target: PreTrainedModel, ids: torch.Tensor, new_ids: list[int]) -> list[float]:
    """How far each new token's logit lies below the best, in one forward over the text.

    Rounding alone makes some of them positive in bfloat16, for plain decoding as well.
    """
    text = torch.cat([ids, torch.tensor([new_ids], device=ids.device)], dim=1)
    logits = target(text, use_cache=False).logits[0, ids.shape[1] - 1 : -1].float()
    chosen = logits.gather(1, text[0, ids.shape[1] :, None])[:, 0]
    return (logits.amax(dim=1) - chosen).tolist()
