"""What `generate` returns: the token-by-token record that plain decoding would keep, and the statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig
from transformers.cache_utils import StaticLayer
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .compat import CacheAlias
from .draft_tree import DraftTree

_MIN_ROOM = 256  # tokens by which the id buffer grows at least


class RoundTree(NamedTuple):
    """One round's tree, for those who asked for it (`record_trees`)."""

    root: int  # the bonus token's id
    tree: DraftTree  # on the CPU
    path: list[int]  # accepted nodes, in order


class Choice(NamedTuple):
    """One of the ways in which rounds may run.

    Attributes:
        value: Which.
        reason: Why it is not the fastest, or what is special about it.
    """

    value: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})" if self.reason else self.value


class Choices(NamedTuple):
    """How rounds run: three choices, see [`DDTreeStats`]."""

    layers: Choice
    compiled: Choice
    launch: Choice


_NO_ROUND = Choices(*(Choice(value, "no round was needed") for value in ("model", "no", "operations")))


@dataclass
class DDTreeStats:
    """
    How a call went.

    Attributes:
        acceptance_lengths: Tokens committed in each round, bonus token included (the paper's tau).
        node_counts: Nodes verified in each round, root excluded.
        budgets: The budget of each round, given or chosen; 0 for a round without a draft, as when trees do not pay.
            As another call's `budget` they make the same trees again.
        layers: Whose layers the last round ran, a [`Choice`]: `"model"`, its own with a mask, or `"ours"`, with
            attention over the rows that the cache holds; and why not ours.
        compiled: Whether those were compiled, `"yes"` or `"no"`, and why not.
        launch: How it was launched, by `"operations"`, one after another, or as a CUDA `"graph"`; and why not as one.
        times: Seconds by stage, when asked for (`record_times`): `prefill` (the prompt), then over all rounds `draft`,
            `verify`, `walk` and `keep`, or `round` where they are captured in one graph.
        trees: Each round's tree, when asked for (`record_trees`).
    """

    acceptance_lengths: list[int] = field(default_factory=list)
    node_counts: list[int] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    layers: Choice = _NO_ROUND.layers
    compiled: Choice = _NO_ROUND.compiled
    launch: Choice = _NO_ROUND.launch
    times: dict[str, float] = field(default_factory=dict)
    trees: list[RoundTree] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Target forwards over trees (the prompt's is not counted)."""
        return len(self.acceptance_lengths)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round; 0 when there was none."""
        return sum(self.acceptance_lengths) / self.rounds if self.rounds else 0.0

    def __repr__(self) -> str:
        return (
            f"DDTreeStats(rounds={self.rounds}, mean_acceptance_length={self.mean_acceptance_length:.2f}, "
            f"acceptance_lengths={self.acceptance_lengths}, layers={self.layers}, compiled={self.compiled}, "
            f"launch={self.launch})"
        )

    def ran(self, choices: Choices | None) -> None:
        """Note how a round runs, its `choices`."""
        assert choices is not None
        self.layers, self.compiled, self.launch = choices

    def add_round(
        self, budget: int, root: torch.Tensor, tree: DraftTree, rows: Sequence[int], keep_tree: bool
    ) -> None:
        """Note one round.

        Args:
            budget: Nodes that were asked for.
            root: `(1, 1)`, the bonus token's id.
            tree: What was verified, fields `(1, N)`.
            rows: Those that committed a token: root (0), then accepted nodes + 1.
            keep_tree: Keep a copy of the tree on the CPU.
        """
        self.acceptance_lengths.append(len(rows))
        self.node_counts.append(tree.token_ids.shape[1])
        self.budgets.append(budget)
        if keep_tree:
            on_host = DraftTree(*(field.cpu() for field in tree))
            self.trees.append(RoundTree(int(root), on_host, [row - 1 for row in rows[1:]]))

    @contextmanager
    def time(self, stage: str, device: torch.device | None) -> Iterator[None]:
        """Add the seconds of a stage; without a `device` to wait for, nothing is measured."""
        if device is None:
            yield
            return
        _synchronize(device)
        start = time.perf_counter()
        yield
        _synchronize(device)
        self.times[stage] = self.times.get(stage, 0.0) + time.perf_counter() - start


@dataclass
class GenerateDDTreeOutput(CacheAlias, GenerateDecoderOnlyOutput):
    """
    Output of `generate(ddtree=..., return_dict_in_generate=True)`: [`GenerateDecoderOnlyOutput`] and how it went.

    Args:
        ddtree_stats (`DDTreeStats`): Rounds, acceptance lengths, node counts.

    `sequences` is `(1, L)` int64, prompt included. The cache is readable as `cache` and as `past_key_values`, whatever
    the version calls it.
    """

    ddtree_stats: DDTreeStats | None = None


def longest(generation_config: GenerationConfig, stopping_criteria: StoppingCriteriaList) -> int:
    """Tokens, prompt included, that a call may have at most; a caller's criterion takes the place of the config's."""
    lengths = [criterion.max_length for criterion in stopping_criteria if isinstance(criterion, MaxLengthCriteria)]
    return int(min(lengths, default=generation_config.max_length))


class GenerationRecord:
    """
    Ids, scores, criteria and streamer, one committed token at a time, in the order of transformers' `_sample`.

    Args:
        input_ids: `(1, L)`, the prompt.
        generation_config: The call's prepared config.
        stopping_criteria: The call's prepared criteria.
        streamer: Gets each committed token as a `(1,)` tensor.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        stopping_criteria: StoppingCriteriaList,
        streamer: Any | None,
    ) -> None:
        config = generation_config
        self.criteria = stopping_criteria
        self.streamer = streamer
        self.max_length = longest(config, stopping_criteria)
        self.length = input_ids.shape[1]
        self._buffer = input_ids.long()  # plain decoding's, too, become int64 with the first token
        self.return_dict = bool(config.return_dict_in_generate)

        def kept_if(wanted: bool | None) -> tuple[Any, ...] | None:
            return () if self.return_dict and wanted else None

        self.scores = kept_if(config.output_scores)
        self.logits = kept_if(config.output_logits)
        self.hidden_states = kept_if(config.output_hidden_states)
        self.attentions = kept_if(config.output_attentions)
        self._host_stop = _HostStop.of(stopping_criteria)

    @property
    def input_ids(self) -> torch.Tensor:
        """Prompt and committed tokens, `(1, length)`."""
        return self._buffer[:, : self.length]

    @property
    def last_token(self) -> torch.Tensor:
        """`(1, 1)`."""
        return self._buffer[:, self.length - 1 : self.length]

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self.max_length - self.length

    @property
    def needs_rows(self) -> bool:
        """Whether a committed token needs more of its round than its id."""
        outputs = (self.scores, self.logits, self.hidden_states, self.attentions)
        return self._host_stop is None or any(output is not None for output in outputs)

    @property
    def needs_states(self) -> bool:
        """Whether it needs the states of the layers."""
        return self.hidden_states is not None or self.attentions is not None

    def commit(
        self,
        token: torch.Tensor,
        scores: torch.Tensor | None,
        logits: torch.Tensor | None,
        token_id: int | None = None,
    ) -> bool:
        """Append one token and tell criteria and streamer.

        Args:
            token: `(1,)` int64.
            scores: `(1, V)` float32, processed; may be `None` unless `needs_rows`.
            logits: `(1, V)` float32, as the model gave them; likewise.
            token_id: The same token, where the host has read it.

        Returns:
            Whether generation ends with this token.
        """
        self._reserve(1)
        self._buffer[:, self.length] = token
        self.length += 1
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self._host_stop is not None:
            stop = self._host_stop(self.length, int(token) if token_id is None else token_id)
        else:
            stop = bool(self.criteria(self.input_ids, self.scores).all())
        if self.streamer is not None:
            self.streamer.put(token.cpu())
        return stop

    @property
    def end_token_ids(self) -> list[int]:
        """Those that end the text, as far as stock criteria say."""
        return sorted(self._host_stop.eos) if self._host_stop is not None else []

    def commit_path(self, token_ids: Sequence[int], tokens: torch.Tensor) -> bool:
        """Append the tokens of a path, up to the one that ends generation; not for those who need rows (`needs_rows`).

        What a streamer raises leaves the tokens appended that it was told of.

        Args:
            token_ids: The path's tokens, on the host.
            tokens: The same first in `(1, P)` or more, on the device.

        Returns:
            Whether generation ends with the last that was appended.
        """
        assert self._host_stop is not None
        stop, count = False, 0
        try:
            for count, token_id in enumerate(token_ids, start=1):
                stop = self._host_stop(self.length + count, token_id)
                if self.streamer is not None:
                    self.streamer.put(torch.tensor([token_id]))
                if stop:
                    break
        finally:
            self._reserve(count)
            self._buffer[:, self.length : self.length + count] = tokens[:, :count]
            self.length += count
        return stop

    def _reserve(self, tokens: int) -> None:
        if (missing := self.length + tokens - self._buffer.shape[1]) > 0:
            self._buffer = torch.nn.functional.pad(self._buffer, (0, max(_MIN_ROOM, self.length, missing)))

    def add_states(
        self, outputs: Any, rows: Sequence[int], committed: int, columns: PlainColumns, whole: bool = False
    ) -> None:
        """Keep hidden states and attentions of the rows that gave the committed tokens.

        Args:
            outputs: A forward's output.
            rows: The rows, root (0) first; each is a child of the one before.
            committed: Cache rows before the forward.
            columns: What plain decoding's attentions have.
            whole: Keep the states of all queries, as of a prompt or a plain step.
        """
        if self.hidden_states is not None:
            if whole:
                self.hidden_states += (outputs.hidden_states,)
            else:
                self.hidden_states += tuple(
                    tuple(None if h is None else h[:, r : r + 1] for h in outputs.hidden_states) for r in rows
                )
        if self.attentions is not None:
            if not outputs.attentions:  # attention functions without weights give none
                self.attentions += (outputs.attentions,) * len(rows)
            elif whole:
                self.attentions += (columns.cut(outputs.attentions),)
            else:
                for count, row in enumerate(rows, start=1):
                    # The committed columns, then the path down to this row.
                    path = [*range(committed), *(committed + r for r in rows[:count])]
                    self.attentions += (
                        columns.cut([None if a is None else a[:, :, row : row + 1, path] for a in outputs.attentions]),
                    )


class PlainColumns:
    """
    The columns of plain decoding's attentions: those keys that the caller's kind of cache shows to each forward.

    Args:
        windows: Each decoder layer's sliding window, `None` for full attention.
        cache: The caller's cache.
    """

    def __init__(self, windows: Sequence[int | None], cache: Any) -> None:
        layers = getattr(cache, "layers", ())
        slides = any(layer.is_sliding for layer in layers)  # a `DynamicCache()` without a config does not
        self.windows = [window if slides else None for window in windows]
        self.static = max((layer.max_cache_len for layer in layers if isinstance(layer, StaticLayer)), default=None)

    def cut(self, attentions: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Each layer's attention `(B, heads, Q, all slots)`, with plain decoding's columns."""
        return tuple(
            None if attention is None else self._cut(attention, window)
            for attention, window in zip(attentions, self.windows, strict=True)
        )

    def _cut(self, attention: torch.Tensor, window: int | None) -> torch.Tensor:
        queries, slots = attention.shape[-2:]
        size = self.static if window is None else min(window, self.static or window)
        if window is not None and size is not None and slots - queries >= size:  # full: the oldest rows are gone
            return attention[..., slots - queries - size + 1 :]
        if self.static is not None and size is not None:  # a static layer's empty slots
            return torch.nn.functional.pad(attention, (0, max(size - slots, 0)))
        return attention


@contextmanager
def ended(streamer: Any | None) -> Iterator[None]:
    """End a streamer once, also when something raises: whoever reads from it waits for that."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            with suppress(Exception):  # what went wrong first is what the caller has to see
                streamer.end()
        raise
    if streamer is not None:
        streamer.end()


class _HostStop:
    """The stock criteria as questions to the host: they need the token's id and the length, no tensor."""

    def __init__(self, max_lengths: list[int], eos: set[int], timers: list[MaxTimeCriteria]) -> None:
        self.max_length = min(max_lengths, default=None)
        self.eos = eos
        self.timers = timers

    @classmethod
    def of(cls, criteria: StoppingCriteriaList) -> _HostStop | None:
        """`None` when one of the criteria is not a stock one."""
        max_lengths, eos, timers = [], set(), []
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                max_lengths.append(int(criterion.max_length))
            elif type(criterion) is EosTokenCriteria:
                eos.update(criterion.eos_token_id.tolist())
            elif type(criterion) is MaxTimeCriteria:
                timers.append(criterion)
            else:
                return None
        return cls(max_lengths, eos, timers)

    def __call__(self, length: int, token_id: int) -> bool:
        return (
            (self.max_length is not None and length >= self.max_length)
            or token_id in self.eos
            or any(time.time() - timer.initial_timestamp > timer.max_time for timer in self.timers)
        )


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
