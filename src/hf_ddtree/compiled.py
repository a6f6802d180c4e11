"""A round as a step of fixed shapes, which a CUDA graph replays: verify, walk, keep, draft, next tree.

Steps of several sizes share what a round leaves for the next: each verifies the best nodes of the same tree. A start
drafts the first one. They run on shadows of target and drafter, so that nothing of them touches the models themselves.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from transformers.generation.logits_process import LogitsProcessorList

from .attention import Rows
from .candidate_generator import DDTreeCandidateGenerator, best_candidates, draft_logits, embed_tokens
from .draft_tree import DraftTree, TreeKind, ancestor_matrix, build_tree, node_depths
from .logits_process import Noise, choose, follow
from .recorded import GraphMemory, Recorded, forward, share_rows, unchanged
from .shadow import compile_layers, give_rows, shadow
from .tree_cache import TreeCache
from .verifier import Constants, FeatureTaps, decoder_layers


class Outcome(NamedTuple):
    """A round's result on the host."""

    rows: list[int]  # that chose the committed tokens, root (0) first
    token_ids: list[int]
    tokens: torch.Tensor  # the same first in (1, P), on the device


class Rounds:
    """
    What rounds of all sizes share: the buffers of a target and of a drafter's context, and where decoding stands.

    Args:
        source: The drafter's generator, with the target.
        cache: The target's rows, prefilled.
        processors: Row-wise ones.
        do_sample: Sample, or take the best.
        constants: A call's; those of the calls that follow have the same shapes.
    """

    def __init__(
        self,
        source: DDTreeCandidateGenerator,
        cache: TreeCache,
        processors: LogitsProcessorList,
        do_sample: bool,
        constants: Constants,
    ) -> None:
        # Not the models themselves, which keep this.
        self.target, self.drafter, self.layer_ids = shadow(source.target), shadow(source.drafter), source.layer_ids
        self.cache, self.context, self.processors = cache, source.cache, processors
        self.nodes, self.depth, self.block = source.nodes, source.max_depth, source.block_size
        self.device, self.dtype = source.device, source.dtype
        self.noise = Noise(self.device) if do_sample else None
        self.start: Start | str | None = None  # captured, or why it cannot be
        self.steps: dict[int, Step] = {}  # captured, by size
        self.failed: dict[int, str] = {}  # and what runs instead, where that failed
        self.memory = GraphMemory()
        self._ranges: dict[int, torch.Tensor] = {}

        config = source.target.config.get_text_config(decoder=True)
        self.candidates = max(1, source.candidates)
        self.build_tree, self.find_ancestors = tree_functions(source.config.tree, self.nodes, self.device)
        blank = self.zeros(1, self.depth, self.candidates)
        self.tree = self.build_tree(blank, blank.float(), max(1, self.nodes))
        self.most = min(self.depth, self.tree.token_ids.shape[1]) + 1  # tokens that a round can commit
        self.root, self.position, self.length, self.context_length = (
            self.zeros(*shape) for shape in ((1, 1), (1, 1), (1,), (1,))
        )
        self.last_position = self.zeros(1, 1)
        self.constants = constants.clone()
        self.committed = torch.ones(1, cache.capacity, dtype=torch.bool, device=self.device)
        self.context_committed = torch.ones(1, self.context.capacity, dtype=torch.bool, device=self.device)
        # float64 holds ids exactly, so that all comes in one piece.
        self.result = self.zeros(1, 1 + 2 * self.most, dtype=torch.float64)
        self.features = self.zeros(1, 1, len(self.layer_ids) * config.hidden_size, dtype=source.target.dtype)

    def range(self, end: int) -> torch.Tensor:
        """`(1, end)`, made once."""
        if end not in self._ranges:
            self._ranges[end] = torch.arange(end, device=self.device)[None]
        return self._ranges[end]

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def begin(
        self,
        root: torch.Tensor,
        position: torch.Tensor,
        room: int,
        prompt_mask: torch.Tensor | None,
        constants: Constants,
    ) -> None:
        """Take over from the loop before its first round.

        Args:
            root, position: `(1, 1)`.
            room: Tokens that may still be committed: no node is placed where none of them can be.
            prompt_mask: `(1, slots)` bool, False for padding.
            constants: The call's.
        """
        self.root.copy_(root)
        self.position.copy_(position)
        self.last_position.copy_(position + (room - 1))
        self.length.fill_(self.cache.length)
        self.context_length.fill_(self.context.length)
        self.committed.fill_(True)
        if prompt_mask is not None:
            self.committed[:, : prompt_mask.shape[1]] = prompt_mask
        self.constants.copy_(constants)

    def take_tree(self, tree: DraftTree) -> None:
        """Let the next round verify this tree, or its best nodes."""
        for own, given in zip(self.tree, tree.pad(self.tree.token_ids.shape[1]), strict=True):
            own.copy_(given)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Leave the state, and the generator, as they were before."""
        with unchanged([self.root, self.position, *self.tree, self.length, self.context_length]):
            if self.noise is not None:
                self.noise.begin()
            try:
                yield
            finally:
                if self.noise is not None:
                    self.noise.give_back(0)

    def fits(self) -> bool:
        """Whether the buffers hold another round."""
        tree = self.tree.token_ids.shape[1] + 1
        return (
            self.cache.length + tree <= self.committed.shape[1]  # not the buffers', which may have grown since
            and self.context.length + self.most + self.block <= self.context_committed.shape[1]
        )

    def fetch(self) -> list[float]:
        """The result on the host: the round's one wait for the device."""
        result: list[float] = self.result[0].tolist()
        return result


class BlockDraft:
    """
    The drafter's part of a round: a block behind the new context, and the tree from its distributions.

    Args:
        rounds: Whose root it drafts behind.
        target: With the embedding and the output head.
        most: Rows of new context, at most.
    """

    def __init__(self, rounds: Rounds, target: Any, most: int) -> None:
        self.rounds, self.target, self.most = rounds, target, most
        self.drafter = shadow(rounds.drafter)
        self.token_ids = rounds.zeros(1, rounds.block) + self.drafter.config.mask_token_id
        # Context, of which the first rows count, then the block, which lies right behind those.
        self.column_depths = rounds.range(most + rounds.block).clone()
        self.depths = self.column_depths[:, most:]
        self.no_mask = rounds.zeros(1, 1, 1, 1, dtype=rounds.dtype)  # which layers are told by rows
        # What the layers see, by whether they are causal and by their windows.
        self.visible: dict[tuple[bool, int | None], torch.Tensor] = {}
        for index, (layer, own) in enumerate(zip(self.drafter.layers, rounds.context.layers, strict=True)):
            causal, window = self.drafter.config.layer_is_causal(index), layer.self_attn.sliding_window
            if (causal, window) not in self.visible:
                self.visible[causal, window] = self._visible(causal, window)
            of_layer = Rows(
                own.keys, own.values, rounds.context_length, rounds.context_committed, self.visible[causal, window],
                self.depths, self.column_depths,
                window if causal or window is None else window + 1,  # to both sides, the row itself not counted
            )  # fmt: skip
            give_rows(self, layer, of_layer)

    def _visible(self, causal: bool, window: int | None) -> torch.Tensor:
        """Who sees what in the block; of the context each round says how much there is."""
        places = self.rounds.range(self.rounds.block)
        ahead = places[:, None] - places[:, :, None]
        visible = ahead <= (0 if causal else self.rounds.block if window is None else window)
        return torch.nn.functional.pad(visible, (self.most, 0))

    def compile(self) -> None:
        """Compile the layers."""
        compile_layers(self.drafter.layers, self.rounds.block, join_linears=self.rounds.device.type == "cuda")

    def draft(self, features: torch.Tensor, count: torch.Tensor) -> None:
        """Draft the next block, and build the tree from its distributions.

        Args:
            features: `(1, most, taps * H)`, of which the first `count (1,)` are new context.
        """
        rounds = self.rounds
        hidden = self.hidden_states(features, count)
        candidates = best_candidates(draft_logits(self.target, hidden, self.drafter), rounds.candidates)
        rounds.take_tree(rounds.build_tree(*candidates, rounds.nodes))
        rounds.context_length.add_(count)

    def hidden_states(self, features: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Of the drafted places, `(1, depth, H)`, behind the first `count` of the new context's rows."""
        rounds = self.rounds
        steps, places = (rounds.range(rows) for rows in (self.most, rounds.block))
        for visible in self.visible.values():
            visible[:, :, : self.most] = steps[:, None] < count[:, None, None]
        torch.add(count[:, None], places, out=self.depths)
        self.token_ids[:, :1] = rounds.root
        output = self.drafter(
            noise_embeds=embed_tokens(self.target, self.token_ids, self.drafter).to(rounds.dtype),
            context_hidden_states=features.to(rounds.dtype),
            position_ids=rounds.position + self.column_depths,
            attention_mask=self.no_mask,
        )
        hidden: torch.Tensor = output.last_hidden_state[:, 1 : rounds.depth + 1]
        return hidden


class Start(Recorded):
    """The first tree, behind tokens that no round has drafted from: all of them are context already."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__(rounds.device, rounds.memory)
        self.rounds = rounds
        # As many rows as in steps, so that it is compiled for both.
        self.block_draft = BlockDraft(rounds, rounds.target, rounds.most)
        self.features = rounds.features.new_zeros(1, rounds.most, rounds.features.shape[-1])
        self.none = rounds.zeros(1)

    def compile(self) -> None:
        self.block_draft.compile()

    def touch(self) -> None:
        self.rounds.context.touch(self.block_draft.most + self.rounds.block)

    def restored(self) -> AbstractContextManager[None]:
        return self.rounds.restored()

    @torch.no_grad()
    def round(self) -> None:
        self.block_draft.draft(self.features, self.none)


class Step(Recorded):
    """
    A round of one size.

    Args:
        rounds: What it shares with other sizes.
        nodes: Of the tree that it verifies. With 0 it drafts nothing, and leaves its features to the caller.
    """

    def __init__(self, rounds: Rounds, nodes: int) -> None:
        super().__init__(rounds.device, rounds.memory)
        self.rounds = rounds
        self.nodes = min(nodes, rounds.tree.token_ids.shape[1])
        self.most = min(rounds.depth, self.nodes) + 1  # tokens that it can commit
        self.target = shadow(rounds.target)
        self.taps = FeatureTaps(self.target, rounds.layer_ids)
        # What the layers see of the round.
        rows = self.nodes + 1
        self.visible, self.depths = rounds.zeros(1, rows, rows, dtype=torch.bool), rounds.zeros(1, rows)
        share_rows(self, self.target, rounds.cache, rounds.length, rounds.committed, self.visible, self.depths)
        self.block_draft = BlockDraft(rounds, self.target, self.most) if nodes > 0 else None

    @property
    def drafts(self) -> bool:
        """Whether the round leaves a tree for the next one."""
        return self.block_draft is not None

    def compile(self) -> None:
        compile_layers(decoder_layers(self.target), self.nodes + 1, join_linears=self.device.type == "cuda")
        if self.block_draft is not None:
            self.block_draft.compile()

    def touch(self) -> None:
        self.rounds.cache.touch(self.nodes + 1)
        if self.drafts:
            self.rounds.context.touch(self.most + self.rounds.block)

    def restored(self) -> AbstractContextManager[None]:
        return self.rounds.restored()

    def run(self) -> Outcome:
        """Run a round. The result comes back in the round's one synchronisation."""
        if self.rounds.noise is not None:
            self.rounds.noise.begin()
        self.replay()
        count, *path = self.rounds.fetch()
        tokens = self.rounds.most
        return Outcome(
            rows=[int(row) for row in path[: int(count)]],
            token_ids=[int(token) for token in path[tokens : tokens + int(count)]],
            tokens=self.rounds.result[:, 1 + tokens :],
        )

    def commit(self, count: int) -> None:
        """Count a round's first `count` rows as committed; fewer than it chose end the text."""
        self.rounds.cache.commit(count)
        if self.drafts:
            self.rounds.context.commit(count)
        if self.rounds.noise is not None:
            self.rounds.noise.give_back(count)

    @torch.no_grad()
    def round(self) -> None:
        rounds = self.rounds
        # Verify the tree.
        tree = rounds.tree.first(self.nodes)
        ancestors, depths = rounds.find_ancestors(tree.parents, tree.depths)
        self.visible.copy_(ancestors)
        self.depths.copy_(depths)
        token_ids = torch.cat([rounds.root, tree.token_ids], dim=1)
        positions = torch.minimum(rounds.position + depths, rounds.last_position)
        logits, features = forward(self.target, self.taps, token_ids, positions, rounds.constants)
        # Walk from the root by the target's own choice.
        choices = choose(logits, depths, rounds.root, rounds.processors, rounds.noise, self.most)
        rows, tokens = follow(choices, tree, ancestors, depths, self.most)
        count = (rows >= 0).sum(dim=1)  # (1,)
        # Keep the path.
        if self.most > 1:
            target = rounds.length[:, None] + rounds.range(self.most)
            rounds.cache.move(torch.where(rows >= 0, rounds.length[:, None] + rows, target), target)
        path = features.gather(1, rows.clamp(min=0)[..., None].expand(-1, -1, features.shape[-1]))
        rounds.root.copy_(tokens.gather(1, count[:, None] - 1))
        # Draft the next block, and build the tree from its distributions.
        if self.block_draft is not None:
            self.block_draft.draft(path, count)
        else:
            rounds.features.copy_(path)
        rounds.length.add_(count)
        rounds.position.add_(count[:, None])
        missing = (0, rounds.most - self.most)
        rows, tokens = torch.nn.functional.pad(rows, missing, value=-1), torch.nn.functional.pad(tokens, missing)
        rounds.result.copy_(torch.cat([count[:, None], rows, tokens], dim=1))


def tree_functions(kind: TreeKind, nodes: int, device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How to build a tree from candidates, and to find its ancestors and depths: one launch each where Triton runs.

    A chain is the best tree of one candidate a depth.
    """

    def find_ancestors(parents: torch.Tensor, depths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ancestors = ancestor_matrix(parents, depths)
        return ancestors, node_depths(ancestors)

    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from . import draft_tree_kernel as kernel

        if nodes <= kernel.MAX_BUDGET:
            build = functools.partial(build_tree, kind) if kind == "static" else kernel.best_first_tree_triton
            return build, kernel.ancestors_triton
    return functools.partial(build_tree, kind), find_ancestors
