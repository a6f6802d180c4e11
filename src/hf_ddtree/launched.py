"""The steps of a round launched one by one over the models' own layers: static rows, a 4D mask, crop on rejection."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.logits_process import LogitsProcessorList

from .candidate_generator import DDTreeCandidateGenerator
from .draft_tree import DraftTree, TreeRows
from .logits_process import Noise, device_walk, lazy_walk, needs_no_host, walks_on_device
from .outputs import Choice, Choices, GenerationRecord, PlainColumns
from .rope import RopeSwitch
from .shadow import ShadowTarget
from .state import DecodingState, Path
from .verifier import Verification, Verifier


class LaunchedRound:
    """
    A round of any size and for any request.

    Args:
        source: The drafter's generator, with the target.
        verifier: The target's forward.
        record: What has been committed.
        processors: The call's prepared processors.
        do_sample: Sample, or take the best.
        model_kwargs: As `generate` prepared them for the prompt.
        users_cache: The caller's.
    """

    def __init__(
        self,
        source: DDTreeCandidateGenerator,
        verifier: Verifier,
        record: GenerationRecord,
        processors: LogitsProcessorList,
        do_sample: bool,
        model_kwargs: dict[str, Any],
        users_cache: Any,
    ) -> None:
        self.source, self.verifier, self.cache = source, verifier, verifier.cache
        rope = RopeSwitch(verifier.config)
        self.rope = None if rope.at is None else rope  # where rotary frequencies change
        self.record, self.processors, self.do_sample = record, processors, do_sample
        self.model_kwargs, self.users_cache = model_kwargs, users_cache
        self.needs_no_host = needs_no_host(verifier.device, record, processors, do_sample)
        self.on_device = walks_on_device(verifier.device, record, processors, do_sample)
        self.noise = Noise(verifier.device) if self.on_device and do_sample else None
        self.plain = False  # whether this round is a plain step
        self.layers: ShadowTarget | str = ""  # ours, or why the model's own run

    def choices(self, reason: str) -> Choices:
        """How its rounds run, which are no graphs for that reason."""
        layers = Choice("model", self.layers or reason) if isinstance(self.layers, str) else Choice("ours")
        return Choices(layers, Choice("no", reason), Choice("operations", reason))

    @functools.cached_property
    def ends(self) -> torch.Tensor:
        """The tokens that end the text, `(E,)`."""
        return torch.tensor(self.record.end_token_ids, dtype=torch.int64, device=self.verifier.device)

    @functools.cached_property
    def columns(self) -> PlainColumns:
        """Those of plain decoding's attentions: the caller's cache, until a model drops that for one of its own."""
        verifier = self.verifier
        cache = DynamicCache(config=verifier.config) if verifier.recomputed else self.users_cache
        return PlainColumns(verifier.layer_windows, cache)

    def draft(self, state: DecodingState, nodes: int) -> DraftTree:
        """The tree behind the root, no deeper than the text may grow; none where a plain step is due."""
        verifier, record, position = self.verifier, self.record, state.position[:, None]
        self.source.take_new(state)
        self.plain = verifier.drops_cache or verifier.plain_only
        depth = min(record.room - 1, verifier.most_nodes)
        if self.rope is not None:
            placed = verifier.constants.place(position)
            self.plain |= self.rope.crossed(record.length, placed)
            depth = min(depth, self.rope.room(record.length, placed))
        depth = 0 if self.plain else depth
        return self.source.draft_tree(state.text, position, depth, nodes).first(verifier.most_nodes)

    def verify(self, state: DecodingState, tree: DraftTree) -> Verification:
        """One forward of the target over the tree."""
        position = state.position[:, None]
        if self.plain:
            verified = self.verifier.plain_step(self.record.input_ids, position, self.model_kwargs)
            del self.columns  # the model may have dropped the caller's cache
            return verified
        layers = None if isinstance(self.layers, str) else self.layers
        token_ids = torch.cat([state.root, tree.token_ids], dim=1)
        return self.verifier.verify(token_ids, position, TreeRows.of(tree), layers)

    def choose(self, state: DecodingState, tree: DraftTree, verified: Verification) -> Path:
        """The path that plain decoding would have taken."""
        if not self.on_device:
            return self.walk(tree, verified)
        logits = verified.logits
        if self.noise is not None:
            self.noise.begin()
        # No more tokens than that can be committed.
        most = max(1, min(self.record.room, logits.shape[1], self.source.max_depth + 1))
        path, finished = device_walk(
            logits, tree, verified.rows, state.room, self.ends, self.processors, self.noise, most
        )
        state.finished.copy_(finished)
        return path

    def walk(self, tree: DraftTree, verified: Verification, most: int = 0) -> Path:
        """The same on the host, where it is committed while it is walked; with room for `most` tokens."""
        path = lazy_walk(verified.logits, tree, self.record, self.processors, self.do_sample, most)
        assert path.on_host is not None
        self.record.add_states(verified.outputs, path.on_host, self.cache.length, self.columns, whole=self.plain)
        return path

    def keep(self, state: DecodingState, path: Path, verified: Verification) -> None:
        """Bring the rows of the path to where they belong, and the state behind it."""
        self.cache.keep(path)
        state.keep(path, verified.features)
        if (policy := self.source.policy).observes:
            policy.observe(path, verified.logits.argmax(dim=-1))
