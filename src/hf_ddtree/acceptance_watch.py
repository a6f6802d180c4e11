"""One warning where a target hardly ever accepts what its drafter drafts: nothing else would tell."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

from .outputs import DDTreeStats
from .target_state import state_of

logger = logging.get_logger(__name__)

_ROUNDS = 32  # with a tree, until a judgement
_LEAST = 1.1  # tokens a round; single tokens are 1, and drafters that fit give 2 and more


class Acceptance:
    """What a target accepted of a drafter since the last judgement, over calls."""

    def __init__(self) -> None:
        self.rounds = self.tokens = 0
        self.warned = False

    def add(self, stats: DDTreeStats) -> bool:
        """Note a call. True, once, if nothing much was accepted for a while."""
        # The last round ends where the text does, whatever was drafted.
        for budget, tokens in zip(stats.budgets[:-1], stats.acceptance_lengths[:-1], strict=True):
            self.rounds += budget > 0
            self.tokens += tokens if budget else 0
        if self.warned or self.rounds < _ROUNDS:
            return False
        self.warned = self.tokens < _LEAST * self.rounds
        if not self.warned:
            self.rounds = self.tokens = 0
        return self.warned


def watch_acceptance(model: Any, drafter: Any, stats: DDTreeStats) -> None:
    """Note how a call of a pair went, and warn once where the drafter is of no use."""
    acceptance = state_of(model).acceptances.setdefault(drafter, Acceptance())
    if acceptance.add(stats):
        logger.warning(
            f"The drafter gains nothing: {acceptance.rounds} rounds committed "
            f"{acceptance.tokens / acceptance.rounds:.2f} tokens each, the target's own included. The text is right, "
            "but plain decoding is as fast. Usual causes: the drafter was trained for another target or other tap "
            "layers (`python -m hf_ddtree inspect DRAFTER TARGET` compares them); the prompt does not follow the "
            "target's chat template; thinking is on where the drafter was trained without it, or off; target or "
            "drafter is quantized, or the target's features overflow the drafter's float16."
        )
