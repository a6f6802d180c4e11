"""How many nodes a round verifies: given, replayed, or chosen by what rounds cost and what their trees promise.

DDTree (arXiv 2604.12989) gives the number of tokens that the best n nodes of a tree are expected to commit. A round of
n nodes pays by that number over its seconds, and the seconds are learned while decoding.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection, MutableMapping, Sequence
from statistics import median
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .candidate_generator import DDTreeCandidateGenerator
from .configuration_ddtree import first_size
from .draft_tree import DraftTree, expected_tokens

clock = time.perf_counter

_TRIES = 3  # rounds of a size after which its cost is known
_SAMPLES = 8  # the latest rounds of a size, whose lower quartile is its cost: what disturbs a round makes it longer
_FADE = 0.97  # weight of the rounds before, in what is known of a drafter
_PRIOR = 1.0  # expected tokens that the drafter's own word counts for
_CARRIED = 4.0  # expected tokens, and rounds of trees, that earlier calls' experience counts for, at most
_ROUNDS = 4  # of trees, before single tokens are thought of
_LATE = 2.0  # times the cost of its size, that a round counts for at most: one that is held up says nothing of trees
_FORGOTTEN = 128  # rounds without a size, after which its cost is learned anew; twice as many each time
_KEPT = 0.5  # of what trees have shown before a pause, that counts after it
_PAUSE = 64  # tokens until trees are tried again; twice as many each time
CAPTURE_SHARE = 1.0  # of the time spent in rounds, that captures may take
_LATEST = 5  # rounds of any sizes, whose median lateness is the machine's: what else it does slows all alike
_USUAL = 1.1  # times the usual seconds, that are usual still
_LASTING = 32  # rounds, after which an unusual pace is learned as what rounds cost
_HOPE = 0.9  # of what the line through two known sizes says, that a third costs at least
_LEAST_SHARE = 0.5  # of the smallest tree's round, that a round without one takes at least: it reads the same weights


class Budget:
    """
    The same number of nodes in each round.

    Args:
        sizes: Numbers of nodes that a round may have, ascending.
    """

    # Sizes for which a graph was captured, where rounds are graphs.
    ready: Collection[int] | None = None

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)

    @property
    def most(self) -> int:
        """Nodes of the largest tree."""
        return self.sizes[-1]

    @property
    def drafts(self) -> bool:
        """Whether the next round has a tree."""
        return self.most > 0

    def cut(self, tree: DraftTree) -> tuple[DraftTree, int]:
        """The part of a drafted tree that the next round verifies, and its number of nodes."""
        nodes = self.choose(())
        return tree.first(nodes), nodes

    def choose(self, expected: Sequence[float]) -> int:
        """The next round's number of nodes.

        Args:
            expected: Tokens that the best nodes of the tree are expected to commit, for each of `sizes`.
        """
        return self.most

    def next_tree(self, nodes: int) -> int:
        """Nodes of the tree that a round of `nodes` leaves for the next, of which that verifies a part."""
        return self.most

    def observe(self, nodes: int, rows: Sequence[int], seconds: float | None, length: int) -> None:
        """Learn from a round.

        Args:
            nodes: What `choose` gave for it.
            rows: That committed a token: the root (0), then accepted nodes + 1.
            seconds: It took; `None` if it was of another kind than rounds with trees are.
            length: Of the text.
        """

    def note_captured(self, nodes: int, seconds: float | None) -> None:
        """Learn what it took to capture a round of this size; `None` if it cannot be had."""


class ReplayedBudget(Budget):
    """The numbers of nodes that another call chose (`ddtree_stats.budgets`), and the last of them from there on."""

    def __init__(self, budgets: Sequence[int]) -> None:
        super().__init__(sorted(set(budgets)))
        self._budgets = list(budgets)

    @property
    def drafts(self) -> bool:
        return self._budgets[0] > 0

    def choose(self, expected: Sequence[float]) -> int:
        return self._budgets[0]

    def observe(self, nodes: int, rows: Sequence[int], seconds: float | None, length: int) -> None:
        if len(self._budgets) > 1:
            del self._budgets[0]


class Experience:
    """What is known of a target with a drafter: kept between calls, and shared by those that run at a time."""

    def __init__(self, sizes: Sequence[int]) -> None:
        # Seconds of the latest rounds at the usual pace, by the magnitude of the text's length and by size.
        self.seconds: dict[int, dict[int, list[float]]] = {}
        # Of the nodes between a size and the one before: tokens that they were expected to add, and that they did.
        self.expected = [0.0] * len(sizes)
        self.added = [0.0] * len(sizes)
        # Rounds with trees, their tokens, and their seconds at the usual pace; they fade.
        self.shown: tuple[float, ...] = (0.0, 0.0, 0.0)
        self._lateness: list[float] = []  # of the latest rounds: how many times as long as usual they took
        self._unusual = 0  # rounds in a row for which that has been unusual
        self.capturing = self.decoding = 0.0  # seconds of all calls
        self.compiled: set[int] = set()
        self.ruled_out: set[int] = set()
        self.rounds = 0
        self._last = dict.fromkeys(sizes, 0)  # round of each size
        self._patience = dict.fromkeys(sizes, _FORGOTTEN)

    def add(self, magnitude: int, size: int, seconds: float) -> bool:
        """Note a round. True if more than this size's cost has changed by that."""
        self.decoding += seconds
        self.rounds += size > 0  # while drafting pauses, nothing is forgotten
        self._last[size] = self.rounds
        if usual := self._usual(magnitude, size):
            self._lateness = [*self._lateness[1 - _LATEST :], seconds / usual]
        pace = self.pace
        self._unusual = self._unusual + 1 if pace != 1.0 else 0
        samples = self.seconds.setdefault(magnitude, {})
        own = samples.get(size, [])
        if len(own) < _TRIES:
            samples[size] = [*own, seconds / pace]
        elif self._unusual == 0 or self._unusual > _LASTING:
            samples[size] = [*own[1 - _SAMPLES :], seconds]
        old = [s for s, last in self._last.items() if self.rounds - last > self._patience[s]]
        for size_ in old:  # it may have been measured while something held up the device
            self._last[size_], self._patience[size_] = self.rounds, 2 * self._patience[size_]
            for of_size in list(self.seconds.values()):
                of_size.pop(size_, None)
        return bool(old) or len(samples[size]) == _TRIES

    @property
    def pace(self) -> float:
        """How many times as long as usual rounds of all sizes take at present."""
        late = median(self._lateness) if len(self._lateness) == _LATEST else 1.0
        return 1.0 if 1 / _USUAL < late < _USUAL else late

    def _usual(self, magnitude: int, size: int) -> float | None:
        """The median of the latest rounds of a size, at this magnitude or the nearest at which it is known."""
        near = (self.seconds[m].get(size, ()) for m in self._by_distance(magnitude))
        return next((median(samples) for samples in near if len(samples) >= _TRIES), None)

    def _by_distance(self, magnitude: int) -> list[int]:
        """Magnitudes that were seen, the nearest first."""
        return sorted(self.seconds, key=lambda m: (abs(m - magnitude), m))

    def show(self, tokens: int, seconds: float) -> None:
        """Note what a round with a tree gave, and what it took at the usual pace."""
        self.fade(_FADE)
        self.shown = tuple(sum_ + new for sum_, new in zip(self.shown, (1, tokens, seconds), strict=True))

    def fade(self, share: float) -> None:
        """Let what trees have shown count for a share of what it did."""
        self.shown = tuple(share * sum_ for sum_ in self.shown)

    def cost(self, magnitude: int, size: int) -> float | None:
        """Seconds of a round, or `None` if too few were seen."""
        samples = self.seconds.get(magnitude, {}).get(size, ())
        return sorted(samples)[(len(samples) - 1) // 4] if len(samples) >= _TRIES else None

    def costs(self, magnitude: int, sizes: Sequence[int]) -> dict[int, float]:
        """Seconds of a round by size, as seen at this magnitude, else at the nearest; or what it takes at least."""
        seen: dict[int, dict[int, float]] = {}
        for m in self._by_distance(magnitude):
            seen[m] = {size: cost for size in sizes if (cost := self.cost(m, size)) is not None}
        known = seen.pop(magnitude, {})
        costs = dict(known)
        for size in sizes:
            for there in seen.values():
                if size in costs or size not in there:
                    continue
                both = [s for s in known if s in there]
                nearest = min(both, key=lambda s: abs(s - size), default=None)
                costs[size] = there[size] * (1.0 if nearest is None else known[nearest] / there[nearest])
        return {size: costs[size] if size in costs else least_cost(size, costs) for size in sizes}


def least_cost(size: int, known: dict[int, float]) -> float:
    """What a round of a size costs at least, if costs grow with sizes, and by no less for each further node."""
    smaller, larger = sorted(s for s in known if 0 < s < size), sorted(s for s in known if s > size)
    least = 0.0
    if smaller:
        least = known[smaller[-1]]
    elif larger:
        least = known[larger[0]] * ((size + 1) / (larger[0] + 1) if size else _LEAST_SHARE)
    around = [*smaller[-1:], *larger[:1]] if smaller and larger else [*smaller[-2:], *larger[:2]]
    if size and len(around) == 2:
        low, high = around
        slope = (known[high] - known[low]) / (high - low)
        least = max(least, _HOPE * (known[low] + (size - low) * slope))
    return least


class LearnedBudget(Budget):
    """
    The number of nodes that gives the most tokens a second, chosen anew for each tree.

    A size that was not tried costs as little as those known allow: where it might win it is tried, and then it is
    known. So none is tried for ever, and none that cannot win. What trees promise is corrected by what such trees have
    kept. Where trees turn out slower than single tokens, drafting pauses, longer each time.

    Args:
        sizes: Ascending; 0 first, if single tokens are a choice.
        first: The size to begin with.
        experience: Of earlier calls.
        length: Of the text.
        captured: Whether rounds are graphs. Then a new size has to be captured first, and captures may not take longer
            than the decoding so far.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        first: int,
        experience: Experience,
        length: int,
        captured: bool,
    ) -> None:
        super().__init__(sizes)
        self.first = first
        self.experience = experience
        self.ready = () if captured else None
        self._magnitude = length.bit_length()
        self._costs = experience.costs(self._magnitude, self.sizes)
        self._promised: Sequence[float] = ()
        self._pause, self._next_pause = 0, _PAUSE
        self._rounds = 0  # of trees since the last pause
        experience.fade(min(1.0, _CARRIED / max(experience.shown[0], 1.0)))
        for i, expected in enumerate(experience.expected):
            if expected > _CARRIED:
                experience.added[i] *= _CARRIED / expected
                experience.expected[i] = _CARRIED

    @property
    def drafts(self) -> bool:
        return self._pause == 0 and self.most > 0

    def cut(self, tree: DraftTree) -> tuple[DraftTree, int]:
        nodes = self.choose(promises(tree, self.sizes)[0].tolist())
        return tree.first(nodes), nodes

    def choose(self, expected: Sequence[float]) -> int:
        self._promised = expected
        tokens, before, factor, best, most = 1.0, 1.0, 1.0, self.first, 0.0
        for size, promised, foreseen, added in zip(
            self.sizes, expected, self.experience.expected, self.experience.added, strict=True
        ):
            if size and promised <= before:
                break  # the tree has no more nodes
            if foreseen:
                factor = (added + _PRIOR) / (foreseen + _PRIOR)
            tokens += factor * (promised - before)
            before = promised
            cost = self._costs[size]
            if size and cost and tokens / cost > most and self._is_open(size):
                best, most = size, tokens / cost
        return best

    def observe(self, nodes: int, rows: Sequence[int], seconds: float | None, length: int) -> None:
        if seconds is None:
            return
        known, magnitude = self.experience, length.bit_length()
        tried_out = known.cost(self._magnitude, nodes) is None
        if known.add(magnitude, nodes, seconds) or magnitude != self._magnitude:
            self._magnitude, self._costs = magnitude, known.costs(magnitude, self.sizes)
        elif (cost := known.cost(magnitude, nodes)) is not None:
            self._costs[nodes] = cost
        if nodes:
            self._correct(nodes, rows)
        if nodes and not tried_out:
            self._rounds += 1
            seconds /= known.pace
            known.show(len(rows), min(seconds, _LATE * self._costs.get(nodes, 0.0) or seconds))
            if self._rounds >= _ROUNDS and self._single_tokens_win():
                self._rest()
        elif self._pause:
            self._pause -= 1
            if self._pause == 0 and self._rounds:
                # That was to learn what single tokens cost.
                if self._single_tokens_win():
                    self._rest()
                else:
                    self._rounds = 0

    def note_captured(self, nodes: int, seconds: float | None) -> None:
        if seconds is None:
            self.experience.ruled_out.add(nodes)
        else:
            self.experience.capturing += seconds
            self.experience.compiled.add(nodes)

    def next_tree(self, nodes: int) -> int:
        """One size up: a tree takes longer the larger it is, and the best size changes slowly."""
        return self.sizes[min(bisect_right(self.sizes, nodes), len(self.sizes) - 1)]

    def _is_open(self, size: int) -> bool:
        """Whether a round may have this size now."""
        known = self.experience
        if self.ready is None or size in self.ready:
            return True
        if size in known.ruled_out:
            return False
        # To capture one again, as when buffers have grown, is quick.
        return size in known.compiled or known.capturing <= CAPTURE_SHARE * known.decoding

    def _correct(self, nodes: int, rows: Sequence[int]) -> None:
        """Compare what the verified nodes promised with what they gave."""
        known, before = self.experience, 1.0
        for i, (size, promised) in enumerate(zip(self.sizes, self._promised, strict=False)):
            if size > nodes:
                break
            known.expected[i] = _FADE * known.expected[i] + promised - before
            known.added[i] *= _FADE
            before = promised
        for row in rows:
            known.added[bisect_left(self.sizes, row)] += row > 0

    def _single_tokens_win(self) -> bool:
        """Whether they would have been faster, even were the accepted tokens few by chance."""
        rounds, tokens, seconds = self.experience.shown
        tokens += math.sqrt(1.0 + tokens - rounds)
        return self.sizes[0] == 0 and self._is_open(0) and tokens * self._costs[0] < seconds

    def _rest(self) -> None:
        """Draft nothing for a while."""
        if self.experience.cost(self._magnitude, 0) is None:
            self._pause = _TRIES
            return
        self._pause, self._next_pause = self._next_pause, 2 * self._next_pause
        self._rounds = 0
        self.experience.fade(_KEPT)


def promises(tree: DraftTree, sizes: Sequence[int]) -> torch.Tensor:
    """Tokens that the best nodes of trees are expected to commit, for each of `sizes`: `(B, len(sizes))` float32."""
    most, expected = tree.token_ids.shape[1], expected_tokens(tree)
    return torch.stack([expected[:, min(size, most)] for size in sizes], dim=1)  # an index would come from the host


def make_budget(
    source: DDTreeCandidateGenerator,
    experiences: MutableMapping[Any, dict[Any, Experience]],
    *,
    do_sample: bool,
    captured: bool,
    length: int,
) -> Budget:
    """What `source.config.budget` asks for.

    Args:
        source: The drafter's generator, with the target.
        experiences: Those kept of the target, by drafter; one is added where it is missing.
        do_sample: Whether rounds sample.
        captured: Whether rounds are graphs.
        length: Of the text.
    """
    config, most, device = source.config, source.nodes, source.target.device
    if isinstance(config.budget, tuple):
        return ReplayedBudget(config.budget)
    if isinstance(config.budget, int):
        return Budget([config.budget])
    first = min(first_size(device.type), most)
    # What is measured differs from run to run, and from rank to rank.
    if torch.are_deterministic_algorithms_enabled() or _is_shared(source.target):
        return Budget([first])
    sizes = [*(size for size in config.sizes(device.type) if size < most), most]
    key = (
        device, source.target.dtype, source.device, source.dtype, config.tree, source.max_depth, do_sample,
        config.execution if captured else "plain",
    )  # fmt: skip
    experience = experiences.setdefault(source.drafter, {}).setdefault(key, Experience(sizes))
    return LearnedBudget(sizes, first, experience, length, captured)


def _is_shared(target: Any) -> bool:
    """Whether ranks hold parts of one target, and have to run the same rounds."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return (getattr(target, "tp_size", None) or 1) > 1 or any(isinstance(p, DTensor) for p in target.parameters())
