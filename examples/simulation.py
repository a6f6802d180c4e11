"""Rounds of speculative decoding, counted along a text that is there already.

Verification is lossless, so every round commits a piece of just the text that plain decoding gives: the part of it
that lies in the round's tree, and the bonus token. From the target's features the drafter drafts at each token of the
text, and a walk over the text counts the rounds of every tree. A drafter's own sliding window is not applied.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_ddtree import DFlashDraftModel
from hf_ddtree.compat import hidden_states_request, requested_hidden_states
from hf_ddtree.draft_tree import DraftTree, best_first_tree, build_tree
from hf_ddtree.drafter_families import best_candidates, draft_logits, embed_tokens

NOWHERE = 2**31 - 1  # the place of a token that is not in the tree


class Text(NamedTuple):
    """A prompt and the target's answer to it."""

    ids: list[int]
    start: int  # of the answer
    most: int = sys.maxsize  # tokens that the answer could have had: trees grow no deeper than that


class Drafts(NamedTuple):
    """What would be accepted behind each of an answer's R tokens as the root."""

    places: torch.Tensor  # (R, D), each next token's place in the largest best-first tree, or NOWHERE
    others: dict[str, list[int]]  # accepted tokens in trees of other kinds, by their names

    def accepted(self, budget: int) -> list[int]:
        """Accepted tokens in a best-first tree of `budget` nodes: its nodes are the first of the largest one."""
        return (self.places < budget).sum(dim=1).tolist()


@torch.no_grad()
def tap_features(target: PreTrainedModel, ids: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
    """Outputs of the tap layers for texts padded on the right, `(B, T, taps * H)`."""
    outputs = target.base_model(input_ids=ids, use_cache=False, output_hidden_states=hidden_states_request(taps))
    return torch.cat(requested_hidden_states(outputs.hidden_states, taps), dim=-1)


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
        noise_embeds=embed_tokens(target, tokens.flatten(1), drafter).to(drafter.dtype),
        context_hidden_states=features,
        position_ids=torch.cat([positions, (roots[:, :, None] + offsets).flatten(1)], dim=1),
        attention_mask=mask[:, None],
    ).last_hidden_state
    hidden = hidden.view(batch * count, size, -1)[:, 1:]
    return best_candidates(draft_logits(target, hidden, drafter), k)


def places_on_path(tree: DraftTree, text: torch.Tensor) -> torch.Tensor:
    """Where the tokens of `text` `(N, D)` lie in each tree as a path from its root: nodes `(N, D)`, else `NOWHERE`."""
    node = torch.full((len(text),), -1, device=text.device)
    alive = torch.ones_like(node, dtype=torch.bool)
    places = torch.full_like(text, NOWHERE)
    for depth in range(1, text.shape[1] + 1):
        token = text[:, depth - 1 : depth]
        hit = (tree.depths == depth) & (tree.parents == node[:, None]) & (tree.token_ids == token)
        alive = alive & hit.any(dim=1)
        node = hit.int().argmax(dim=1)
        places[:, depth - 1] = node.masked_fill(~alive, NOWHERE)
    return places


def draft_along(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    texts: Sequence[Text],
    largest: int,
    others: dict[str, tuple[str, int]],
    batch: int = 8,
    roots: int = 64,
) -> list[Drafts]:
    """Drafts behind each token of answers.

    Args:
        target, drafter: On one device.
        texts: Each with an answer of one token or more.
        largest: Nodes of the largest best-first tree.
        others: Kind and budget of further trees, by name.
        batch, roots: Texts, and roots of each, in one pass of the drafter.
    """
    taps = tuple(drafter.config.target_layer_ids or ())
    found: list[Drafts] = [Drafts(torch.empty(0), {})] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].ids))
    for at in range(0, len(order), batch):
        group = order[at : at + batch]
        longest = max(len(texts[i].ids) for i in group)
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, i in enumerate(group):
            ids[row, : len(texts[i].ids)] = torch.tensor(texts[i].ids)
        ids = ids.to(target.device)
        features = tap_features(target, ids, taps).to(drafter.dtype)
        start, end, room = (
            torch.tensor(values, device=ids.device)[:, None]
            for values in zip(*((texts[i].start, len(texts[i].ids), texts[i].most) for i in group), strict=True)
        )
        parts: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
        for first in range(0, int((end - start).max()), roots):
            last = min(first + roots, int((end - start).max()))
            chunk = (start + torch.arange(first, last, device=ids.device)).clamp(max=longest - 1)
            tokens, log_probs = draft(target, drafter, ids, features, chunk, max(largest, *_budgets(others)))
            ahead = chunk[:, :, None] + torch.arange(1, tokens.shape[1] + 1, device=ids.device)
            text = ids.gather(1, ahead.clamp(max=longest - 1).flatten(1)).view(ahead.shape)
            text = text.masked_fill(ahead >= end[:, :, None], -1).flatten(0, 1)
            depths = (room - 2 - (chunk - start)).clamp(0, tokens.shape[1]).flatten()
            parts.append(_places(tokens, log_probs, text, depths, largest, others, chunk.shape))
        for row, i in enumerate(group):
            count = len(texts[i].ids) - texts[i].start
            places = torch.cat([part[row] for part, _ in parts])[:count].cpu()
            lengths = {name: torch.cat([part[name][row] for _, part in parts])[:count].tolist() for name in others}
            found[i] = Drafts(places, lengths)
    return found


def _budgets(others: dict[str, tuple[str, int]]) -> list[int]:
    return [budget for _, budget in others.values()] or [1]


def _places(
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    text: torch.Tensor,
    depths: torch.Tensor,
    largest: int,
    others: dict[str, tuple[str, int]],
    shape: torch.Size,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What `Drafts` holds, of the roots `(B, R)` of one pass; `depths` `(B * R,)` is how deep each tree may be."""
    places = torch.full_like(text, NOWHERE)
    lengths = {name: torch.zeros_like(depths) for name in others}
    for depth in depths.unique().tolist():
        rows = depths == depth
        if depth == 0:
            continue
        ids, scores, known = tokens[rows, :depth], log_probs[rows, :depth], text[rows, :depth]
        places[rows, :depth] = places_on_path(best_first_tree(ids, scores, largest), known)
        for name, (kind, budget) in others.items():
            tree = build_tree(kind, ids[..., :budget], scores[..., :budget], budget)
            lengths[name][rows] = (places_on_path(tree, known) != NOWHERE).sum(dim=1)
    return places.view(*shape, -1), {name: length.view(shape) for name, length in lengths.items()}


def acceptance_lengths(accepted: Sequence[int]) -> list[int]:
    """What each round of a walk over an answer commits: what is accepted behind its root, and the bonus token.

    The first token comes with the prompt; the last round commits no more than there is.
    """
    place, lengths = 0, []
    while place < len(accepted) - 1:
        lengths.append(min(accepted[place] + 1, len(accepted) - 1 - place))
        place += lengths[-1]
    return lengths
