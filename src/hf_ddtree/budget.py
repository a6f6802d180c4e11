"""How many nodes a round verifies: given, replayed, or a constant that gives way where trees do not pay."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .configuration_ddtree import DDTreeConfig

_JUDGED = 32  # rounds with trees, by whose mean they are judged
_PAUSE = 64  # rounds of single tokens until trees are tried again; twice as many each time
# Tokens that a round with a tree commits, at least, if it pays: on a CPU it takes much longer than a single token.
_LEAST, _LEAST_CPU = 1.25, 2.0


class Budget:
    """
    The same number of nodes in each round.

    Args:
        nodes: Of a tree; 0 for a single token.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    @property
    def nodes(self) -> int:
        """Nodes of the next round's tree; with 0 it is a single token, and nothing is drafted."""
        return self._nodes

    def observe(self, nodes: int, tokens: int) -> None:
        """Take note of a round: `nodes` that were asked for, 0 where it had no tree, and `tokens` committed."""


class ReplayedBudget(Budget):
    """The numbers that another call chose (`ddtree_stats.budgets`), the last of them for all further rounds."""

    def __init__(self, budgets: Sequence[int]) -> None:
        self._left = deque(budgets)

    @property
    def nodes(self) -> int:
        return self._left[0]

    def observe(self, nodes: int, tokens: int) -> None:
        if len(self._left) > 1:
            self._left.popleft()


class AutoBudget(Budget):
    """
    A constant that gives way to single tokens where trees do not pay: a function of what this call's rounds commit.

    Args:
        nodes: Of a tree.
        least: Tokens that the latest rounds with trees have to commit in the mean.
    """

    def __init__(self, nodes: int, least: float) -> None:
        super().__init__(nodes)
        self._least = least
        self._tokens: deque[int] = deque(maxlen=_JUDGED)  # of rounds with trees since the last pause
        self._pause, self._next_pause = 0, _PAUSE

    @property
    def nodes(self) -> int:
        return 0 if self._pause else self._nodes

    def observe(self, nodes: int, tokens: int) -> None:
        if self._pause:
            self._pause -= 1
        elif nodes:
            self._tokens.append(tokens)
            if len(self._tokens) == _JUDGED and sum(self._tokens) < self._least * _JUDGED:
                self._tokens.clear()
                self._pause, self._next_pause = self._next_pause, 2 * self._next_pause


def make_budget(config: DDTreeConfig, target: Any) -> Budget:
    """What `config.budget` asks for on the target's device."""
    if isinstance(config.budget, tuple):
        return ReplayedBudget(config.budget)
    device_type = target.device.type
    nodes = max(config.sizes(device_type))
    # Where shapes may depend on inputs only, or ranks have to run the same rounds, what was accepted decides nothing.
    if config.budget != "auto" or torch.are_deterministic_algorithms_enabled() or _is_shared(target):
        return Budget(nodes)
    return AutoBudget(nodes, _LEAST_CPU if device_type == "cpu" else _LEAST)


def _is_shared(target: Any) -> bool:
    """Whether ranks hold parts of one target, and have to run the same rounds."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return (getattr(target, "tp_size", None) or 1) > 1 or any(isinstance(p, DTensor) for p in target.parameters())
