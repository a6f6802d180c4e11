"""The positions at which a target's rotary embedding changes its frequencies: no tree may reach across them."""

from __future__ import annotations

import sys
from typing import Any

import torch


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """A target's rope parameters, one dict a set (layer types may have their own)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def has_dynamic_rope(model: Any) -> bool:
    """Whether a model's frequencies follow the length of the text."""
    config = model.config.get_text_config(decoder=True)
    return any(rope.get("rope_type") == "dynamic" for rope in rope_parameters(config))


class RopeSwitch:
    """
    The switch of `longrope` from its short to its long factors, for all positions of a forward at once.

    The rotary embedding goes by position, a model that recomputes its cache at the switch (Phi-3) by number of ids:
    both are watched. Other ropes have no switch.

    Args:
        config: The target's text config.
    """

    def __init__(self, config: Any) -> None:
        self.at: int | None = None
        for rope in rope_parameters(config):
            if rope.get("rope_type") == "longrope":
                original = rope.get("original_max_position_embeddings")
                original = original or getattr(config, "original_max_position_embeddings", None)
                self.at = int(original or config.max_position_embeddings)
        self._side: tuple[bool, bool] | None = None

    def crossed(self, length: int, position: torch.Tensor) -> bool:
        """Whether the token at `position`, last of `length` ids, lies on another side than the last call's token."""
        if self.at is None:
            return False
        before, self._side = self._side, (length > self.at, int(position.max()) >= self.at)
        return before is not None and before != self._side

    def room(self, length: int, position: torch.Tensor) -> int:
        """The depth to which nodes behind a root stay on its side of the switch."""
        if self.at is None:
            return sys.maxsize
        ahead = (self.at - length, self.at - 1 - int(position.max()))
        return min((room for room in ahead if room >= 0), default=sys.maxsize)
