"""The ways to decode that an evaluation compares, and one call of each."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from evaluation_data import Prompt
from hf_ddtree import DDTreeConfig, DFlashDraftModel

WARM_UP = [
    "Say hello.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tom has 12 apples and gives a third of them to Anna. How many are left?",
    "List five tips for a good night's sleep.",
]
PLAIN = ("generate", "native chain")  # neither captured nor compiled


def default_budgets(cuda: bool) -> list[int]:
    """Nodes of the trees to compare, the likeliest first."""
    return [63, 15, 127, 255] if cuda else [15, 7, 31]


def default_base(cuda: bool) -> str:
    """The fastest plain decoding that stock `generate` has."""
    return "compiled generate" if cuda else "generate"


class ChatPair(NamedTuple):
    """A target and its drafter on one device, and how they are spoken to."""

    target: PreTrainedModel
    drafter: DFlashDraftModel
    tokenizer: PreTrainedTokenizerBase
    thinking: bool | None = None  # what the chat template is told as `enable_thinking`, if anything

    def encode(self, messages: list[dict[str, str]]) -> torch.Tensor:
        """A chat up to where the assistant answers, `(1, L)`; a model without a chat template gets the texts alone."""
        if not self.tokenizer.chat_template:
            ids = self.tokenizer("\n\n".join(m["content"] for m in messages), return_tensors="pt").input_ids
        else:
            options = {} if self.thinking is None else {"enable_thinking": self.thinking}
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **options
            )["input_ids"]
        return ids.to(self.target.device)

    @property
    def most(self) -> int:
        """Tokens that the target takes."""
        config = self.target.config.get_text_config(decoder=True)
        return getattr(config, "max_position_embeddings", None) or sys.maxsize


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
        row |= {"times": stats.times, "launch": str(stats.launch)}
    elif rounds is not None:
        row["acceptance_lengths"] = rounds.lengths
    return row


class Turn(NamedTuple):
    """One answer."""

    prompt: torch.Tensor  # (1, L)
    found: dict[str, Any]  # of `answer`

    @property
    def ids(self) -> list[int]:
        return self.found["ids"]

    @property
    def seconds(self) -> float:
        return self.found["seconds"]


def converse(
    pair: ChatPair, prompt: Prompt, new_tokens: int, options: dict[str, Any], temperature: float, seed: int
) -> tuple[list[Turn], str | None]:
    """All turns of a prompt, each after the answers before; and why it ended early, if it did.

    Each turn's prompt is the whole chat, with the answers as text.
    """
    messages, later, turns = list(prompt.messages), list(prompt.later), []
    torch.manual_seed(seed)
    while True:
        ids = pair.encode(messages)
        if ids.shape[1] == 0:
            return turns, f"turn {len(turns) + 1}: it has no tokens"
        if ids.shape[1] + new_tokens > pair.most:
            sizes = f"{ids.shape[1]} tokens and {new_tokens} new ones are more than the target's {pair.most}"
            return turns, f"turn {len(turns) + 1}: {sizes}"
        turns.append(Turn(ids, answer(pair.target, ids, new_tokens, options, temperature)))
        if not later:
            return turns, None
        reply = pair.tokenizer.decode(turns[-1].ids, skip_special_tokens=True)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": later.pop(0)}]


def longest_prompt(pair: ChatPair, prompts: list[Prompt], new_tokens: int) -> int:
    """Tokens of the longest chat that will be asked; those that are too long, and will be skipped, do not count."""
    longest = 0
    for prompt in prompts:
        messages = prompt.messages + [{"role": "user", "content": text} for text in prompt.later]
        tokens = pair.encode(messages).shape[1] + len(prompt.later) * (new_tokens + 8)  # answers and their frames
        longest = max(longest, tokens if tokens + new_tokens <= pair.most else 0)
    return longest


def warm_up(
    pair: ChatPair, methods: dict[str, dict[str, Any]], temperatures: Sequence[float], longest: int, new_tokens: int
) -> None:
    """Compile, capture and allocate, on a GPU with texts as long as those to come.

    The largest trees first: where buffers grow, the graphs over them are lost.
    """
    device = pair.target.device.type

    def nodes(name: str) -> int:
        return max(methods[name]["ddtree"].sizes(device)) if "ddtree" in methods[name] else 0

    texts = [pair.encode([{"role": "user", "content": text}]) for text in WARM_UP[:2]]
    if device == "cuda":
        texts = [texts[1].repeat(1, longest // texts[1].shape[1] + 1)[:, : max(longest, 1)], texts[0]]
    for temperature in temperatures:
        for name in sorted(methods, key=nodes, reverse=True):
            for ids in texts:
                row = answer(pair.target, ids, new_tokens, methods[name], temperature)
            tqdm.write(f"temperature {temperature:g}, {name}: {row.get('path', 'stock')}", file=sys.stderr)


@torch.no_grad()
def regret(target: PreTrainedModel, ids: torch.Tensor, new_ids: list[int]) -> list[float]:
    """How far each new token's logit lies below the best, in one forward over the text.

    Rounding alone makes some of them positive in bfloat16, for plain decoding as well.
    """
    text = torch.cat([ids, torch.tensor([new_ids], device=ids.device)], dim=1)
    logits = target(text, use_cache=False).logits[0, ids.shape[1] - 1 : -1].float()
    chosen = logits.gather(1, text[0, ids.shape[1] :, None])[:, 0]
    return (logits.amax(dim=1) - chosen).tolist()
