"""Where drafts come from: a DFlash drafter as transformers' `CandidateGenerator` and as the source of trees."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.modeling_outputs import ModelOutput

from . import compat
from .configuration_ddtree import MAX_BUDGET, DDTreeConfig
from .draft_source import DraftSource
from .draft_tree import DraftTree
from .drafter_families import embed_tokens, family_of
from .logits_scaling import multiplies
from .snapshot import Snapshot, take_snapshot
from .state import DecodingState
from .tree_cache import DraftCache
from .tree_policy import TreePolicy, build_tree_of, policy_class
from .verifier import Features, input_device

_MOST_CONTEXT = 2048  # tokens that one drafter pass makes context: its own tensors stay small beside the prompt's
_MOST_PENDING = 512  # tokens that may wait for the next draft to become context
_CONTEXT = "_hf_ddtree_context"  # on a cache that `generate` returned


class DDTreeCandidateGenerator(CandidateGenerator):
    """
    Drafts trees with a DFlash drafter.

    In `generate(ddtree=True)` it drafts each round's tree. It is a `CandidateGenerator` as well:
    `get_candidates` proposes the most probable chain and no logits, so that stock `_assisted_decoding` accepts a token
    only where it selects that very token, which keeps sampling exact.

    Args:
        target: The model that verifies; its embedding and output head are the drafter's.
        drafter: A [`DFlashDraftModel`], or a DFlash assistant of transformers with the same forward. It drafts
            in evaluation mode, since dropout would draw from the generator that sampling uses.
        config: Tree options.
        max_length: Longest sequence, prompt included; `get_candidates` drafts nothing beyond it.
        cache: Where the drafter's context goes, empty; one of its own by default.
        policy: What makes the trees; by default a new one of the kind that `config` names.

    Raises:
        ValueError: `drafter` is of no family that is known.
    """

    requires_model_outputs = True

    def __init__(
        self,
        target: Any,
        drafter: Any,
        config: DDTreeConfig,
        max_length: int,
        cache: DraftCache | None = None,
        policy: TreePolicy | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.config = config
        self.max_length = max_length
        target_device = input_device(target.get_input_embeddings(), torch.device("cpu"))
        self.device, self.dtype = input_device(drafter, target_device), drafter.dtype
        self.layer_ids = tuple(drafter.config.target_layer_ids)
        self.width = len(self.layer_ids) * drafter.config.hidden_size  # of a token's features
        self.block_size = drafter.config.block_size
        text_config = target.config.get_text_config(decoder=True)
        if (family := family_of(drafter)) is None:
            raise ValueError(f"{type(drafter).__name__} is no drafter that `ddtree` knows.")
        self.family = family
        self.policy = policy or policy_class(config.tree)(text_config, target_device)
        self.max_depth = min(family.most_depth(drafter.config), config.max_depth or MAX_BUDGET)
        width = self.policy.candidates or text_config.vocab_size
        largest = sum(width**depth for depth in range(1, self.max_depth + 1))
        self.nodes = min(max(config.sizes(target.device.type)), largest)  # of a tree
        self.candidates = min(self.nodes, width)  # of each depth
        self.model_kwargs_overrides = {"output_hidden_states": compat.hidden_states_request(self.layer_ids)}
        self.cache = DraftCache.for_config(drafter.config) if cache is None else cache
        multiplies(target)  # asked for the first time, and not in a capture
        self._features: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []

    def append(self, features: torch.Tensor, positions: torch.Tensor) -> None:
        """Add newly committed tokens to the context, from the next draft on.

        Args:
            features: `(B, P, taps * H)`, the tap layers' outputs; any device and dtype.
            positions: `(B, P)` int64.
        """
        self._features.append(features.to(self.device, self.dtype))
        self._positions.append(positions.to(self.device))

    @functools.cached_property
    def target_snapshot(self) -> Snapshot:
        """What the target is made of in this call."""
        return take_snapshot(self.target)

    @functools.cached_property
    def drafter_snapshot(self) -> Snapshot:
        """What the drafter is made of in this call."""
        return take_snapshot(self.drafter)

    @property
    def pending(self) -> int:
        """Tokens that the next draft makes context."""
        return sum(features.shape[1] for features in self._features)

    def reserve(self, ahead: int) -> None:
        """Make room in the context for `ahead` tokens behind those that are pending, and for two blocks."""
        self.cache.reserve(self.cache.length + self.pending + ahead + 2 * self.block_size)

    def propose(self, text: torch.Tensor, position: torch.Tensor, depth: int, candidates: int) -> DraftSource:
        """Draft one block in one pass of the drafter (DFlash, arXiv 2602.06036).

        Args:
            text: `(B, 4)` int64, the last committed tokens, the bonus token last; -1 where there are fewer.
            position: `(B, 1)` int64, the bonus token's.
            depth: D, tokens to draft; at most the block size minus one.
            candidates: K, tokens of each depth.

        Returns:
            A source of depth D, where `text` is; of a DFlash drafter a [`Proposal`], best candidates first.
        """
        hidden = self._draft(text[:, -1:], position)
        return self.family.propose(self.target, self.drafter, hidden, text, depth, candidates)

    def draft_tree(
        self, text: torch.Tensor, position: torch.Tensor, depth: int, nodes: int | None = None
    ) -> DraftTree:
        """The tree of one round behind the last token of `text (B, 4)` at `position (B, 1)`, at most `depth` deep.

        At depth 0, or with 0 nodes, nothing is drafted.
        """
        root = text[:, -1:]
        nodes = self.nodes if nodes is None else min(nodes, self.nodes)
        depth = min(depth, self.max_depth, nodes)
        if depth < 1:
            if self.pending >= _MOST_PENDING:
                self._draft(root, position)
            return DraftTree(root[:, 1:], root[:, 1:], root[:, 1:], root[:, 1:].float())
        source = self.propose(text, position, depth, min(nodes, self.candidates))
        return self.policy.build(source, text, nodes, build_tree_of).first(nodes)

    def take_prompt(self, features: Features, positions: torch.Tensor, prompt_mask: torch.Tensor | None) -> None:
        """Make a prompt the context, without its padding.

        Args:
            features: Of the prompt's rows.
            positions: `(1, rows)`.
            prompt_mask: `(1, slots)` bool, False for padding.
        """
        start = 0
        for part in features:
            rows = slice(start, start := start + part.shape[1])
            places = positions[:, rows]
            if prompt_mask is not None:
                kept = prompt_mask[0, -features.rows :][rows]
                part, places = part[:, kept.to(part.device)], places[:, kept]
            self.append(part, places)
            if self.extends:
                self.absorb()

    @property
    def extends(self) -> bool:
        """Whether rows can become context without a draft: hooks may move tensors or weights around a forward."""
        return self.nodes > 0 and type(self.drafter) is self.family.model_class and not self.drafter_snapshot.hooked

    def absorb(self) -> None:
        """Make what is pending part of the context, ahead of the next draft (`extends`)."""
        if self._features:
            for rows, places in self._take_pending():
                self.drafter.extend(rows, places, self.cache)
            self.cache.settle()

    def take_new(self, state: DecodingState) -> None:
        """Take over the features that the last round has left, for the next draft.

        Args:
            state: Where decoding stands.
        """
        if new := state.new.host:
            steps = torch.arange(new, device=state.position.device)
            self.append(state.features[:, :new].clone(), (state.position - new)[:, None] + steps)
            state.new.set(0)

    def catch_up(self, state: DecodingState, drafts: bool) -> None:
        """Bring the context up to date ahead of a graph, which makes only the last round's features context.

        Args:
            state: Where decoding stands.
            drafts: Whether the graph does so; else they wait, as long as they are few.
        """
        if not drafts or self.pending:
            self.take_new(state)
            if drafts or self.pending >= _MOST_PENDING:
                self.absorb()

    def _draft(self, root: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Append what is pending to the context, denoise one block `(B, block, H)`: one drafter pass, or, behind a
        long prompt, several of which the last one counts."""
        block = root.new_full((root.shape[0], self.block_size), self.drafter.config.mask_token_id)
        block[:, :1] = root
        block_positions = position.to(self.device) + torch.arange(self.block_size, device=self.device)
        noise_embeds = embed_tokens(self.target, block, self.drafter).to(self.device, self.dtype)
        if not self._features:  # all is context already
            self.append(noise_embeds.new_empty(root.shape[0], 0, self.width), block_positions[:, :0])
        with _evaluating(self.drafter):
            for rows, places in self._take_pending():
                self.cache.set_previous_accepted_tokens(rows.shape[1])
                outputs = self.drafter(
                    noise_embeds=noise_embeds,
                    context_hidden_states=rows,
                    position_ids=torch.cat([places, block_positions], dim=1),
                    attention_mask=None,
                    **{compat.CACHE_KEY: self.cache},
                )
                self.cache.crop(-self.block_size)
                self.cache.settle()
        hidden: torch.Tensor = outputs.last_hidden_state
        return hidden

    def _take_pending(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Features and positions of what is pending, so many rows at a time as one pass takes; then nothing is.

        Makes room in the context for these rows and a block.
        """
        self.cache.reserve(self.cache.length + self.pending + self.block_size)
        features, positions = (x[0] if len(x) == 1 else torch.cat(x, dim=1) for x in (self._features, self._positions))
        self._features, self._positions = [], []
        return zip(features.split(_MOST_CONTEXT, dim=1), positions.split(_MOST_CONTEXT, dim=1), strict=True)

    def leave(self, cache: Any, input_ids: torch.Tensor) -> None:
        """Let the context travel with the target's cache, for a later call that continues it.

        Args:
            cache: What the caller gets back.
            input_ids: `(1, L)`, of the whole text.
        """
        length = int(cache.get_seq_length())
        digest = _digest(input_ids, length) if input_ids.shape[1] == length + 1 else None
        rows = DraftCache.for_config(self.drafter.config)
        rows.load(self.cache)  # the buffers serve the next call
        cache.__dict__[_CONTEXT] = DraftContext(
            self.drafter, rows, self._features, self._positions, (self.device, self.dtype), length, digest
        )

    def resume(self, cache: Any, input_ids: torch.Tensor) -> None:
        """Take up the context that came with the target's cache, if it is this drafter's and of this very text.

        Args:
            cache: The caller's, with the rows of earlier turns.
            input_ids: `(1, L)`, of the whole text or of the new turn only.
        """
        context = cache.__dict__.get(_CONTEXT)
        if context is None or context.drafter() is not self.drafter:
            return
        if (context.place, context.length) != ((self.device, self.dtype), int(cache.get_seq_length())):
            return
        whole_text = input_ids.shape[1] > context.length
        if whole_text and context.digest is not None and context.digest != _digest(input_ids, context.length):
            return
        self.cache.load(context.cache)
        self._features = list(context.features)
        self._positions = list(context.positions)

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.LongTensor, None]:
        """The most probable chain behind `input_ids (1, L)`, for stock `_assisted_decoding`.

        Args:
            input_ids: `(1, L)` int64, the whole text.
            model_kwargs: As the caller gives them to the target; `position_ids` is read.
            model_outputs: Of the target's last forward, with the hidden states that `model_kwargs_overrides` asks for.
            is_first_iteration: Whether the target has not run yet; then there is nothing to draft from.
            n_last_matches: Drafted tokens that the target has just accepted.

        Returns:
            `(1, L + depth)` ids, and `None`: without logits the caller compares tokens, whatever it samples.
        """
        if is_first_iteration:
            return input_ids, None  # no features yet: the caller runs the prompt first
        assert model_kwargs is not None and model_outputs is not None
        states = compat.requested_hidden_states(model_outputs.hidden_states, self.layer_ids)
        rows = int(n_last_matches) + 1 if self.cache.length else states[0].shape[1]
        features = torch.cat([state[:, :rows].to(self.device) for state in states], dim=-1)
        positions = model_kwargs["position_ids"]
        self.append(features, positions[:, -rows - 1 : -1])
        depth = min(self.max_depth, self.nodes, self.max_length - input_ids.shape[1] - 1)
        if depth < 1:
            return input_ids, None
        text = input_ids[:, -4:]
        chain = build_tree_of("chain", self.propose(text, positions[:, -1:], depth, candidates=1), text, depth)
        return torch.cat([input_ids, chain.token_ids], dim=1), None  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to learn from a round: `input_ids`, `scores` and `num_matches` are not looked at."""


class DraftContext:
    """
    A drafter's context on its way from one call to the next, on the cache that `generate` returned. Copies of the
    cache share it, since nobody writes to it; pickles leave it behind.

    Args:
        drafter: Whose context it is.
        cache: The rows of what the drafter has seen.
        features, positions: What it has not seen yet: `(1, P, taps * H)` and `(1, P)` of each step.
        place: The drafter's device and dtype.
        length: Rows of the target's cache that it belongs to.
        digest: Hash of their ids, `None` where the ids were not all known.
    """

    def __init__(
        self,
        drafter: Any,
        cache: DraftCache,
        features: list[torch.Tensor],
        positions: list[torch.Tensor],
        place: tuple[torch.device, torch.dtype],
        length: int,
        digest: bytes | None,
    ) -> None:
        self.drafter = weakref.ref(drafter)
        self.cache = cache
        self.features = features
        self.positions = positions
        self.place = place
        self.length = length
        self.digest = digest

    def __deepcopy__(self, memo: Any) -> DraftContext:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _digest(input_ids: torch.Tensor, length: int) -> bytes:
    return hashlib.blake2b(input_ids[:, :length].long().cpu().numpy().tobytes(), digest_size=16).digest()


@contextmanager
def _evaluating(drafter: Any) -> Iterator[None]:
    """Evaluation mode for one forward; what was in training is in training again after it."""
    training = [module for module in drafter.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
