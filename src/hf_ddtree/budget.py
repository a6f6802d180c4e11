"""How many nodes a round's tree has: given, replayed, or a constant that gives way where trees do not pay."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .configuration_ddtree import DDTreeConfig

_ROUNDS = 32  # with trees, whose mean decides
_PAUSE = 64  # rounds of single tokens until trees are tried again; twice as many each time
# Tokens a round from which trees pay: a CPU computes each node, a GPU reads the weights anyway.
_LEAST_CPU, _LEAST = 2.0, 1.25


class Budget:
    """
    The same number of nodes in each round.

    Args:
        nodes: Of a tree; 0 for single tokens.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    @property
    def nodes(self) -> int:
        """Nodes of the next round's tree; with 0 nothing is drafted."""
        return self._nodes

    def observe(self, nodes: int, tokens: int) -> None:
        """Learn that a round of `nodes` nodes has committed `tokens` tokens."""


class ReplayedBudget(Budget):
    """The numbers of nodes that another call chose (`ddtree_stats.budgets`), and the last of them from there on."""

    def __init__(self, budgets: Sequence[int]) -> None:
        super().__init__(budgets[0])
        self._next = deque(budgets[1:])

    def observe(self, nodes: int, tokens: int) -> None:
        if self._next:
            self._nodes = self._next.popleft()


class AutoBudget(Budget):
    """
    A constant that gives way to single tokens, for a while, where trees commit too little.

    Args:
        nodes: Of a tree.
        least: Tokens a round from which trees pay.
    """

    def __init__(self, nodes: int, least: float) -> None:
        super().__init__(nodes)
        self._least = least
        self._tokens: deque[int] = deque(maxlen=_ROUNDS)  # of the last rounds with trees
        self._pause, self._next_pause = 0, _PAUSE

    @property
    def nodes(self) -> int:
        return 0 if self._pause else self._nodes

    def observe(self, nodes: int, tokens: int) -> None:
        if self._pause:
            self._pause -= 1
        elif nodes:
            self._tokens.append(tokens)
            if len(self._tokens) == _ROUNDS and sum(self._tokens) < self._least * _ROUNDS:
                self._tokens.clear()
                self._pause, self._next_pause = self._next_pause, 2 * self._next_pause


def make_budget(config: DDTreeConfig, target: Any) -> Budget:
    """What `config.budget` asks for.

    Args:
        config: Tree options.
        target: The model that verifies.
    """
    if isinstance(config.budget, tuple):
        return ReplayedBudget(config.budget)
    if isinstance(config.budget, int):
        return Budget(config.budget)
    device = target.device.type
    nodes = max(config.sizes(device))
    if torch.are_deterministic_algorithms_enabled() or _is_shared(target):
        return Budget(nodes)
    return AutoBudget(nodes, _LEAST_CPU if device == "cpu" else _LEAST)


def _is_shared(target: Any) -> bool:
    """Whether ranks hold parts of one target, and have to run the same rounds."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return (getattr(target, "tp_size", None) or 1) > 1 or any(isinstance(p, DTensor) for p in target.parameters())
