"""A short prompt's forward in chunks of one shape, which a CUDA graph replays.

Launched operation by operation, a forward takes as long as several rounds, however short the prompt is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .recorded import GraphMemory, Recorded
from .shadow import ShadowTarget
from .state import unchanged
from .tree_cache import TreeCache

CHUNK = 256  # rows
MOST_TOKENS = 1024  # more take longer in chunks than in one forward

# Of a row, at most, and in units of its type's precision: SmolLM2's differ by up to 19 of these in bfloat16.
_ROUNDING, _ROUNDING_STEPS = 0.05, 32


class Prompt(Recorded):
    """
    Rows of a prompt behind those in the cache, each of which sees itself and what comes before.

    Args:
        target: The model.
        layer_ids: Tap layers.
        cache: Where the rows go; its buffers are there already.
        device: The target's.
    """

    def __init__(self, target: Any, layer_ids: Sequence[int], cache: TreeCache, device: torch.device) -> None:
        super().__init__(device, GraphMemory())
        self.cache = cache
        counted = torch.arange(CHUNK, device=device)[None]
        self.token_ids, self.positions = torch.zeros_like(counted), torch.zeros_like(counted)
        self.last = counted.new_zeros(1)  # of the new rows
        committed = torch.ones(1, cache.capacity, dtype=torch.bool, device=device)
        self.depths, self.visible = counted, counted[:, :, None] >= counted[:, None]
        self.target = ShadowTarget(target, layer_ids, cache, committed)
        width = len(self.target.taps.layer_ids) * target.config.get_text_config(decoder=True).hidden_size
        self.features = torch.zeros(1, CHUNK, width, dtype=target.dtype, device=device)
        self.logits: torch.Tensor | None = None  # (1, 1, V), of the last new row

    def touch(self) -> None:
        self.cache.touch(CHUNK)

    def restored(self) -> AbstractContextManager[None]:
        # The cache is empty, so that these are the rows that are written.
        return unchanged([rows[:, :, :CHUNK] for layer in self.cache.layers for rows in (layer.keys, layer.values)])

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a prompt, and commit its rows.

        Args:
            token_ids, positions: `(1, L)`.

        Returns:
            Logits of the last token, `(1, 1, V)`, and features, `(1, L, taps * H)`.
        """
        features = []
        for ids, places in zip(token_ids.split(CHUNK, dim=1), positions.split(CHUNK, dim=1), strict=True):
            count = ids.shape[1]
            # The rows behind the text are its last token's: no other token's NaN may lie in the cache.
            self.token_ids[:, :count], self.token_ids[:, count:] = ids, ids[:, -1:]
            self.positions[:, :count], self.positions[:, count:] = places, places[:, -1:]
            self.last.fill_(count - 1)
            self.replay()
            self.cache.count.set(self.cache.length + count)
            features.append(self.features[:, :count].clone())
        assert self.logits is not None
        return self.logits.clone(), torch.cat(features, dim=1)

    def compile(self) -> None:
        raise NotImplementedError  # for one forward a call that would not pay

    @torch.no_grad()
    def record(self) -> None:
        logits, features = self.target.forward(self.token_ids, self.positions, self.visible, self.depths)
        self.features.copy_(features)
        if self.logits is None:
            self.logits = torch.zeros_like(logits[:, :1])
        self.logits.copy_(logits.index_select(1, self.last))


def are_alike(tensors: Iterable[torch.Tensor], others: Iterable[torch.Tensor], share: float = 1.0) -> bool:
    """Whether two forwards differ by rounding only, in a share of the rows of each tensor `(1, heads, L, D)`.

    A row's difference is over its length, or over the usual length where the row is a short one.
    """
    for mine, theirs in zip(tensors, others, strict=True):
        difference, length = (
            torch.linalg.vector_norm(x.float(), dim=(0, 1, 3)) for x in (mine - theirs, theirs)
        )  # (L,)
        most = max(_ROUNDING, _ROUNDING_STEPS * torch.finfo(mine.dtype).eps)
        alike = difference <= most * torch.maximum(length, length.median())
        if float(alike.float().mean()) < share:
            return False
    return True
