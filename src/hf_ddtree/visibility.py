"""Who sees what: stock masks, the attention of plain tensors and the kernel all go by it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

KINDS = ("full_attention", "sliding_attention", "chunked_attention")  # of layers, as configs name them


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which rows the queries of a forward see: committed ones, and the forward's own columns behind them."""

    length: torch.Tensor  # (B,) int64, committed rows, at most S - C
    committed: torch.Tensor  # (B, S) bool, False for slots below `length` that hold padding
    first: torch.Tensor | None  # (B, Q) int64, the first slot that a query sees, least for the first query; None: 0
    visible: torch.Tensor  # (B, Q, C) bool, which of the forward's own columns a query sees
    start: int | None = None  # `length`, where the host knows it and all S slots hold numbers: a mask then suffices
    _masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        kind: str,
        size: int | None,
        length: torch.Tensor,
        committed: torch.Tensor,
        visible: torch.Tensor,
        depths: torch.Tensor,
        column_depths: torch.Tensor | None = None,
    ) -> Visibility:
        """What layers of a kind see.

        Args:
            kind: One of `KINDS`. A window ends at the query; chunks are counted from the first row that is no padding.
            size: Of a window or chunk. `None` for attention to everything before.
            length, committed: As above.
            visible: `(B, Q, C)` bool, what a query would see of the forward's own columns without windows or chunks,
                as a node sees its ancestors and itself.
            depths: `(B, Q)`, a query's slot less `length`, as plain decoding would have it; the first is the least.
            column_depths: `(B, C)`, the same of the columns, the queries' own by default.
        """
        if size is None:
            return cls(length, committed, None, visible)
        slots = length[:, None] + depths
        if kind == "chunked_attention":
            padding = committed.byte().argmax(dim=1, keepdim=True)
            first = slots - (slots - padding) % size
        else:
            first = slots - (size - 1)
        column_slots = slots if column_depths is None else length[:, None] + column_depths
        return cls(length, committed, first, visible & (first[:, :, None] <= column_slots[:, None]))

    def allowed(self) -> torch.Tensor:
        """All of it over the slots, the forward's own columns from `length` on: `(B, Q, S)` bool."""
        _, queries, columns = self.visible.shape
        slots = torch.arange(self.committed.shape[1], device=self.length.device)
        allowed = (self.committed & (slots < self.length[:, None]))[:, None].repeat(1, queries, 1)
        if self.first is not None:
            allowed &= self.first[:, :, None] <= slots
        new_slots = self.length[:, None] + slots[:columns]
        return allowed.scatter_(2, new_slots[:, None].expand_as(self.visible), self.visible)

    def mask(self, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """The same as an additive mask, made once for all layers that ask for it.

        Args:
            groups: Query heads of a K/V head whose queries are rows side by side.
            dtype: Of the queries.

        Returns:
            `(B, 1, groups * Q, S)`: 0 where attention is allowed, `finfo.min` elsewhere (eager attention would add a
            bool mask as ones, and -inf makes a row of NaN).
        """
        if (groups, dtype) not in self._masks:
            allowed = self.allowed()
            mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            mask.masked_fill_(~allowed, torch.finfo(dtype).min)
            self._masks[groups, dtype] = mask.repeat(1, groups, 1)[:, None] if groups > 1 else mask[:, None]
        return self._masks[groups, dtype]
