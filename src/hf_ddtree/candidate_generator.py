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
from .configuration_ddtree import DDTreeConfig
from .draft_tree import DraftTree, build_tree
from .logits_scaling import multiplies
from .modeling_dflash import DFlashDraftModel
from .snapshot import Snapshot, take_snapshot
from .state import DecodingState
from .tree_cache import DraftCache
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
    """

    requires_model_outputs = True

    def __init__(
        self, target: Any, drafter: Any, config: DDTreeConfig, max_length: int, cache: DraftCache | None = None
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
        self.max_depth = min(self.block_size - 1, config.max_depth or self.block_size - 1)
        width = 1 if config.tree == "chain" else target.config.get_text_config(decoder=True).vocab_size
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

    def propose(
        self, root: torch.Tensor, position: torch.Tensor, depth: int, candidates: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft one block in one pass of the drafter (DFlash, arXiv 2602.06036).

        Args:
            root: `(B, 1)` int64, the bonus token.
            position: `(B, 1)` int64, its position.
            depth: D, tokens to draft; at most the block size minus one.
            candidates: K, tokens of each depth.

        Returns:
            Ids `(B, D, K)` int64 and their log-probs `(B, D, K)` float32, best first, where `root` is.
        """
        hidden = self._draft(root, position)[:, 1 : depth + 1]
        token_ids, log_probs = best_candidates(draft_logits(self.target, hidden, self.drafter), candidates)
        return token_ids.to(root.device), log_probs.to(root.device)

    def draft_tree(
        self, root: torch.Tensor, position: torch.Tensor, depth: int, nodes: int | None = None
    ) -> DraftTree:
        """The tree of one round behind `root (B, 1)` at `position (B, 1)`, at most `depth` deep.

        At depth 0, or with 0 nodes, nothing is drafted.
        """
        nodes = self.nodes if nodes is None else min(nodes, self.nodes)
        depth = min(depth, self.max_depth, nodes)
        if depth < 1:
            if self.pending >= _MOST_PENDING:
                self._draft(root, position)
            return DraftTree(root[:, 1:], root[:, 1:], root[:, 1:], root[:, 1:].float())
        token_ids, log_probs = self.propose(root, position, depth, min(nodes, self.candidates))
        return build_tree(self.config.tree, token_ids, log_probs, nodes)

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
        return self.nodes > 0 and type(self.drafter) is DFlashDraftModel and not self.drafter_snapshot.hooked

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
        token_ids, _ = self.propose(input_ids[:, -1:], positions[:, -1:], depth, candidates=1)
        return torch.cat([input_ids, token_ids[:, :, 0]], dim=1), None  # type: ignore[return-value]

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


def embed_tokens(target: Any, token_ids: torch.Tensor, drafter: Any = None) -> torch.Tensor:
    """The target's input embedding `(B, L, H)`, without the norm that some embeddings carry (as DFlash is trained).

    A drafter may state the factor of the embedding's rows; else it is the target's own.
    """
    embedding = target.get_input_embeddings()
    token_ids = token_ids.to(input_device(embedding, token_ids.device))
    scale = getattr(getattr(drafter, "config", None), "input_embedding_scale", None)
    if scale is None and getattr(embedding, "embed_norm", None) is None:
        embeds: torch.Tensor = embedding(token_ids)
        return embeds
    rows = torch.nn.functional.embedding(token_ids, embedding.weight)
    return rows if scale is None else rows * scale


def best_candidates(logits: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens of draft logits `(B, D, V)` and their log-probs in float32, `(B, D, K)` each.

    NaN and -inf come last, +inf first: a broken draft costs speed, never text.
    """
    logits = torch.nan_to_num(
        logits.float(), nan=float("-inf"), posinf=torch.finfo(torch.float32).max, neginf=float("-inf")
    )
    best, token_ids = logits.topk(min(candidates, logits.shape[-1]), dim=-1)
    return token_ids, best - logits.logsumexp(-1, keepdim=True)


def draft_logits(target: Any, hidden: torch.Tensor, drafter: Any = None) -> torch.Tensor:
    """Logits `(B, L, V)` of final states `(B, L, H)`: the target's head, then its scale or soft cap.

    A drafter may state scale and cap itself, and the tokens that it drafts at all.
    """
    head = target.get_output_embeddings()
    logits: torch.Tensor = head(hidden.to(input_device(head, hidden.device), target.dtype))
    own = getattr(drafter, "config", None)
    multiplier, cap = getattr(own, "output_multiplier", None), getattr(own, "final_logit_softcapping", None)
    if multiplier is None and cap is None:
        config = target.config.get_text_config(decoder=True)
        multiplier = getattr(config, "logit_scale", None)  # Cohere
        if multiplier is None:
            multiplier = getattr(config, "output_multiplier", None)  # Muse Glimmer
        if (scaling := getattr(config, "logits_scaling", None)) is not None:
            logits = logits * scaling if multiplies(target) else logits / scaling
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    if multiplier is not None:
        logits = logits * multiplier
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    if (drafted := getattr(drafter, "t2d", None)) is not None:
        logits = logits.masked_fill(~drafted.to(logits.device), float("-inf"))
    return logits
