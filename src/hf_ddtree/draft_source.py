"""What trees are built from: log-probs of a prefix's children, which may differ from prefix to prefix."""

import math
from typing import NamedTuple, Protocol

import torch


class Prefixes(NamedTuple):
    """The P prefixes of a depth, as a source of scores sees them; behind the root alone there is one.

    Attributes:
        places: `(B, P)` int64, the last token's place among the candidates of its depth; -1: none of them (the root,
            an extra child).
        token_ids: `(B, P, 4)` int64, the last four tokens, the prefix's own last; -1 where the text has fewer.
    """

    places: torch.Tensor
    token_ids: torch.Tensor

    @classmethod
    def root(cls, text: torch.Tensor) -> "Prefixes":
        """The root as the only prefix; `text` is `(B, 4)`, the root last."""
        return cls(text.new_full((len(text), 1), -1), text[:, None])

    def extend(self, parents: torch.Tensor, places: torch.Tensor, token_ids: torch.Tensor) -> "Prefixes":
        """The prefixes with one token more: all three are `(B, P')`, `parents` the index of each one's prefix."""
        context = self.token_ids[..., 1:].gather(1, parents[..., None].expand(-1, -1, 3))
        return Prefixes(places, torch.cat([context, token_ids[..., None]], dim=2))


class DraftSource(Protocol):
    """Says how probable each child of each prefix is."""

    @property
    def depth(self) -> int:
        """D, the most tokens behind the root; at least 1."""

    @property
    def candidates(self) -> int:
        """K: the first columns of each row are the candidates of its depth, further ones are extra children."""

    def rows(self, depth: int, prefixes: Prefixes) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and log-probs of the children of `prefixes`, in any order.

        Args:
            depth: that of the prefixes, 0 for the root alone.
            prefixes: P of them, in score order.

        Returns:
            int64 and float, `(B, P, C)` each, with the same C >= K at every depth. A log-prob of -inf takes a child
            back.
        """


class Proposal(NamedTuple):
    """A source that has made all its rows before the search; a prefix has one by its last token alone.

    Attributes:
        token_ids: `(B, D, K)` int64, the candidates of each depth.
        log_probs: `(B, D, K)`, the row of each depth, shared by all prefixes.
        by_parent: `(B, D, K, K)`: instead, `[b, d, u]` is the row of depth d (from 0) behind candidate u of depth
            d - 1; `[:, 0]` is not read. Behind the root and behind extra children the shared row stays.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor
    by_parent: torch.Tensor | None = None

    @property
    def depth(self) -> int:
        return self.token_ids.shape[1]

    @property
    def candidates(self) -> int:
        return self.token_ids.shape[2]

    def rows(self, depth: int, prefixes: Prefixes) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (-1, prefixes.places.shape[1], -1)
        token_ids, log_probs = (field[:, depth, None].expand(shape) for field in self[:2])
        if self.by_parent is None or depth == 0:
            return token_ids, log_probs
        places = prefixes.places[..., None]
        own = self.by_parent[:, depth].gather(1, places.clamp(min=0).expand(-1, -1, self.candidates))
        return token_ids, torch.where(places < 0, log_probs, own)


def add_children(
    token_ids: torch.Tensor, log_probs: torch.Tensor, extra_ids: torch.Tensor, extra_log_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with extra children behind their candidates: ids and log-probs, `(B, P, K + E)`.

    An extra child that its row holds already, among the candidates or the extra ones before it, gets the log-prob
    -inf, and so does a negative id, which becomes 0.

    Args:
        token_ids: `(B, P, K)` int64.
        log_probs: `(B, P, K)`.
        extra_ids: `(B, P, E)` int64.
        extra_log_probs: `(B, P, E)`.
    """
    candidates, extras = token_ids.shape[2], extra_ids.shape[2]
    held = torch.cat([token_ids, extra_ids], dim=2)
    column = torch.arange(candidates + extras, device=held.device)
    before = column < column[candidates:, None]
    void = ((extra_ids[..., None] == held[..., None, :]) & before).any(dim=3) | (extra_ids < 0)
    ids = torch.cat([token_ids, extra_ids.clamp(min=0)], dim=2)
    return ids, torch.cat([log_probs, extra_log_probs.masked_fill(void, -math.inf)], dim=2)
