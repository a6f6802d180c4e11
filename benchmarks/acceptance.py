"""Tokens per round of a target and a drafter, without running rounds.

    python benchmarks/acceptance.py --drafter examples/smollm2-135m-dflash --json acceptance.json

The target answers each prompt once, greedily. Verification is lossless, so every round of speculative decoding would
commit a piece of just this answer: the part of it that lies in the round's tree, and the bonus token. From the
target's features the drafter drafts at every token of the text, and a walk over the answer counts each tree's rounds.

Counted are first answers, up to the end of the turn or to the point where the text begins to repeat itself. A set's
figure is all its tokens over all its rounds; the mean is over the three public sets.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from batch_generator import Generator, Request
from hf_ddtree import DFlashDraftModel
from hf_ddtree.compat import CACHE_KEY
from hf_ddtree.draft_tree import DraftTree, best_first_tree, chain_tree
from smollm2 import PROMPT_FILES, load_prompts, prepare_target
from training_data import encode_chats, first_repeat
from training_prompts import read_jsonl

TREES = {"chain": 0, "15": 15, "63": 63, "255": 255}


class Answer(NamedTuple):
    """A prompt and the target's answer to it, cut where counting ends."""

    ids: list[int]
    start: int  # of the answer


def answer_greedily(
    target: PreTrainedModel, prompts: list[list[int]], new_tokens: int, end: list[int]
) -> list[Answer]:
    """The target's answers, up to the end of the turn or the first repetition."""
    size = max(map(len, prompts)) + new_tokens + 1
    attention = target.config._attn_implementation
    generator = Generator(target, min(len(prompts), 512), size, CACHE_KEY)
    texts = dict(generator.generate([Request(ids, 0.0) for ids in prompts], new_tokens, end))
    target.set_attn_implementation(attention)
    return [Answer(ids + texts[i][: first_repeat(texts[i])], len(ids)) for i, ids in enumerate(prompts)]


@torch.no_grad()
def tap_features(target: PreTrainedModel, ids: torch.Tensor, taps: list[int]) -> torch.Tensor:
    """Outputs of the tap layers for texts padded on the right, `(B, T, taps * H)`."""
    outputs = []
    layers = target.get_decoder().layers
    handles = [layers[tap].register_forward_hook(lambda _m, _i, output: outputs.append(output)) for tap in taps]
    try:
        target.get_decoder()(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([output[0] if isinstance(output, tuple) else output for output in outputs], dim=-1)


@torch.no_grad()
def draft(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    ids: torch.Tensor,
    features: torch.Tensor,
    roots: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts of roots `(B, R)`: the `k` best tokens of each later position and their log-probs, `(B * R, D, k)`."""
    batch, length = ids.shape
    size, count = drafter.config.block_size, roots.shape[1]
    offsets = torch.arange(size, device=ids.device)
    tokens = torch.full((batch, count, size), drafter.config.mask_token_id, device=ids.device)
    tokens[:, :, 0] = ids.gather(1, roots)
    # What is known when a block is drafted is what comes before its root; blocks see nothing of each other.
    context = (torch.arange(length, device=ids.device) < roots[:, :, None]).repeat_interleave(size, dim=1)
    block = torch.arange(count * size, device=ids.device) // size
    visible = torch.cat([context, (block[:, None] == block).expand(batch, -1, -1)], dim=2)
    mask = torch.zeros(visible.shape, dtype=features.dtype, device=ids.device)
    mask = mask.masked_fill(~visible, torch.finfo(features.dtype).min)
    positions = torch.arange(length, device=ids.device).expand(batch, -1)
    hidden = drafter(
        noise_embeds=target.get_input_embeddings()(tokens.flatten(1)),
        context_hidden_states=features,
        position_ids=torch.cat([positions, (roots[:, :, None] + offsets).flatten(1)], dim=1),
        attention_mask=mask[:, None],
    ).last_hidden_state
    hidden = hidden.view(batch * count, size, -1)[:, 1:]
    logits = target.get_output_embeddings()(hidden).float()
    best = logits.topk(k, dim=-1)
    return best.indices, best.values - logits.logsumexp(dim=-1, keepdim=True)


def accepted(tree: DraftTree, text: torch.Tensor) -> torch.Tensor:
    """How many tokens of `text` `(N, D)` each tree holds as a path from its root, `(N,)`."""
    node = torch.full((len(text),), -1, device=text.device)
    length = torch.zeros_like(node)
    alive = torch.ones_like(node, dtype=torch.bool)
    for depth in range(1, text.shape[1] + 1):
        hit = (
            (tree.depths == depth) & (tree.parents == node[:, None]) & (tree.token_ids == text[:, depth - 1 :][:, :1])
        )
        alive = alive & hit.any(dim=1)
        node, length = hit.int().argmax(dim=1), length + alive
        node = node.masked_fill(~alive, -2)
    return length


def accepted_at_roots(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    answers: list[Answer],
    taps: list[int],
    texts: int = 8,
    roots: int = 64,
) -> list[dict[str, list[int]]]:
    """For each answer and tree: how many draft tokens would be accepted at each token of the answer as the root."""
    depth, widest = drafter.config.block_size - 1, max(TREES.values())
    device = target.device
    found: list[dict[str, list[int]]] = [{} for _ in answers]
    order = sorted(range(len(answers)), key=lambda i: len(answers[i].ids))
    for at in range(0, len(order), texts):
        group = order[at : at + texts]
        longest = max(len(answers[i].ids) for i in group)
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, i in enumerate(group):
            ids[row, : len(answers[i].ids)] = torch.tensor(answers[i].ids)
        ids = ids.to(device)
        features = tap_features(target, ids, taps).to(drafter.dtype)
        start = torch.tensor([answers[i].start for i in group], device=device)[:, None]
        end = torch.tensor([len(answers[i].ids) for i in group], device=device)[:, None]
        most = int((end - start).max())
        lengths: dict[str, list[torch.Tensor]] = {name: [] for name in TREES}
        for first in range(0, most, roots):
            chunk = (start + torch.arange(first, min(first + roots, most), device=device)).clamp(max=longest - 1)
            tokens, log_probs = draft(target, drafter, ids, features, chunk, widest)
            places = chunk[:, :, None] + torch.arange(1, depth + 1, device=device)
            text = ids.gather(1, places.clamp(max=longest - 1).flatten(1)).view(places.shape)
            text = text.masked_fill(places >= end[:, :, None], -1).flatten(0, 1)
            for name, budget in TREES.items():
                tree = best_first_tree(tokens, log_probs, budget) if budget else chain_tree(tokens, log_probs, depth)
                lengths[name].append(accepted(tree, text).view(chunk.shape))
        for name, parts in lengths.items():
            table = torch.cat(parts, dim=1).tolist()
            for row, i in enumerate(group):
                found[i][name] = table[row][: len(answers[i].ids) - answers[i].start]
    return found


def count_rounds(lengths: list[int]) -> tuple[int, int]:
    """Tokens and rounds of a walk over an answer: each round commits what is accepted and the bonus token.

    The first token comes with the prompt; the last round commits no more than there is.
    """
    place, rounds = 0, 0
    while place < len(lengths) - 1:
        place += lengths[place] + 1
        rounds += 1
    return len(lengths) - 1, rounds


def measure(
    target: PreTrainedModel, drafter: DFlashDraftModel, sets: dict[str, list[Answer]]
) -> dict[str, dict[str, float]]:
    """Tokens per round: a row for each set, a column for each tree."""
    taps = list(drafter.config.target_layer_ids or ())
    table: dict[str, dict[str, float]] = {}
    for name, answers in sets.items():
        answers = [answer for answer in answers if len(answer.ids) - answer.start > 1]
        found = accepted_at_roots(target, drafter, answers, taps)
        table[name] = {}
        for tree in TREES:
            counts = [count_rounds(lengths[tree]) for lengths in found]
            table[name][tree] = sum(tokens for tokens, _ in counts) / sum(rounds for _, rounds in counts)
    public = [name for name in table if name in PROMPT_FILES]
    table["mean of public sets"] = {tree: sum(table[name][tree] for name in public) / len(public) for tree in TREES}
    return table


def markdown(table: dict[str, dict[str, float]]) -> str:
    """The table with two decimals."""
    lines = [f"| prompts | {' | '.join(TREES)} |", "| --- |" + " ---: |" * len(TREES)]
    lines += [f"| {name} | {' | '.join(f'{row[tree]:.2f}' for tree in TREES)} |" for name, row in table.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--target", help="directory or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", nargs="+", default=[str(root / "examples/smollm2-135m-dflash")])
    parser.add_argument("--held-out", type=Path, help="JSON lines with a `prompt` each, counted as a set of its own")
    parser.add_argument("--limit", type=int, help="only so many prompts of each set")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    path = arguments.target or prepare_target()
    tokenizer = AutoTokenizer.from_pretrained(path)
    target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    prompts = {name: load_prompts(name)[: arguments.limit] for name in PROMPT_FILES}
    if arguments.held_out:
        prompts["held out"] = [row["prompt"] for row in read_jsonl(arguments.held_out)][: arguments.limit]
    encoded = encode_chats(tokenizer, [prompt for texts in prompts.values() for prompt in texts])
    started = time.monotonic()
    answers = iter(answer_greedily(target, encoded, arguments.new_tokens, [tokenizer.eos_token_id]))
    sets = {name: [next(answers) for _ in texts] for name, texts in prompts.items()}
    print(f"{len(encoded)} prompts, {dtype} on {device}, answered in {time.monotonic() - started:.1f} s\n")

    results = {}
    for name in arguments.drafter:
        drafter = DFlashDraftModel.from_pretrained(name, dtype=dtype).to(device).eval()
        started = time.monotonic()
        results[name] = measure(target, drafter, sets)
        print(f"{name}: tokens per round ({time.monotonic() - started:.1f} s)\n\n{markdown(results[name])}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
