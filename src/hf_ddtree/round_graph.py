"""Rounds recorded as CUDA graphs: the steps of a round over shadows of target and drafter, in fixed shapes.

Nothing of them touches the models themselves. Graphs of several sizes share what their kind of call has in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .anatomy import cache_index
from .attention import attending, give_rows
from .draft_tree import DraftTree
from .drafter_families import embed_tokens
from .launched import LaunchedRound
from .logits_process import Noise, device_walk
from .outputs import Choices
from .recorded import GraphMemory, Recorded
from .shadow import ShadowTarget, compile_layers, shadow
from .state import DecodingState, Path, unchanged
from .tree_policy import tree_functions
from .verifier import Verification
from .visibility import Visibility


class RoundKind:
    """
    What graphs of all sizes share that serve calls of one kind, and those graphs.

    Args:
        launched: A call's round; other calls bring processors, token types and as many end tokens like it.
        state: Where decoding stands.
    """

    def __init__(self, launched: LaunchedRound, state: DecodingState) -> None:
        source, ends = launched.source, launched.record.end_token_ids
        # Not the models themselves, which keep this.
        self.target, self.drafter, self.layer_ids = shadow(source.target), shadow(source.drafter), source.layer_ids
        self.cache, self.context, self.state = launched.cache, source.cache, state
        self.processors = launched.processors
        self.nodes, self.depth, self.block = source.nodes, source.max_depth, source.block_size
        self.candidates = max(1, source.candidates)
        self.device, self.dtype = source.device, source.dtype
        self.walks = launched.needs_no_host  # on the device; else the host does, between two graphs
        self.noise = Noise(self.device) if self.walks and launched.do_sample else None
        self.most = min(self.depth, self.nodes) + 1  # tokens that a round can commit
        self.graphs: dict[int, RoundGraph] = {}  # by the number of nodes
        self.failed: dict[int, str] = {}  # and what runs instead, where that failed
        self.memory = GraphMemory()
        self.build_tree, self.find_rows = tree_functions(self.device)
        self.family, self.policy = source.family, source.policy
        self.constants = launched.verifier.constants.clone()
        self.ends, self._ends = self.zeros(len(ends)), [0] * len(ends)
        self.committed = torch.ones(1, self.cache.capacity, dtype=torch.bool, device=self.device)
        self.context_committed = torch.ones(1, self.context.capacity, dtype=torch.bool, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def begin(self, launched: LaunchedRound) -> None:
        """Take over what a call brings: its prompt's padding, its token types, and the tokens that end its text."""
        self.committed.fill_(True)
        if (mask := launched.verifier.prompt_mask) is not None:
            self.committed[:, : mask.shape[1]] = mask
        self.constants.copy_(launched.verifier.constants)
        if self.walks and (ends := launched.record.end_token_ids) != self._ends:
            self.ends.copy_(torch.tensor(ends, dtype=torch.int64))
            self._ends = ends

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Leave the state, and the generator, as they were before."""
        with self.state.restored(), unchanged(self.policy.memory):
            if self.noise is not None:
                self.noise.begin()
            try:
                yield
            finally:
                if self.noise is not None:
                    self.noise.give_back(0)

    def forget_lost(self) -> None:
        """Drop the graphs if they draw from a state that torch's generator has no more."""
        if self.noise is not None and self.noise.is_lost:
            self.graphs.clear()
            self.noise.renew()

    def ready(self, nodes: int) -> RoundGraph | None:
        """The graph of rounds of this size, if there is one."""
        self.forget_lost()
        return self.graphs.get(min(nodes, self.nodes))

    def fits(self) -> bool:
        """Whether the buffers hold another round, and are those that graphs write to: they may have grown since."""
        rows, context_rows = self.committed.shape[1], self.context_committed.shape[1]
        return (
            self.cache.count.host + self.nodes + 1 <= rows == self.cache.capacity
            and self.context.count.host + self.most + self.block <= context_rows == self.context.capacity
        )


class BlockDraft:
    """
    The draft of a round: a block behind the context and the last round's features, and the tree of its distributions.

    Args:
        kind: Of the calls that it serves.
        target: With the embedding and the output head.
        nodes: Of the tree.
    """

    def __init__(self, kind: RoundKind, target: Any, nodes: int) -> None:
        self.kind, self.target, self.nodes = kind, target, nodes
        self.drafter = shadow(kind.drafter)
        self.token_ids = kind.zeros(1, kind.block) + self.drafter.config.mask_token_id
        # Context, of which the first rows count, then the block, which lies right behind those.
        self.steps, self.places = (torch.arange(end, device=kind.device)[None] for end in (kind.most, kind.block))
        self.column_depths = torch.arange(kind.most + kind.block, device=kind.device)[None]
        self.depths = self.column_depths[:, kind.most :]
        self.no_mask = kind.zeros(1, 1, 1, 1, dtype=kind.dtype)  # which layers are told otherwise
        # Whether the layers are causal, and their windows.
        self.layer_kinds = [(x.self_attn.is_causal, x.self_attn.sliding_window) for x in self.drafter.layers]
        self.ahead = {of_kind: self._ahead(*of_kind) for of_kind in self.layer_kinds}
        for place, layer in enumerate(self.drafter.layers):
            give_rows(self, layer, kind.context.layers[cache_index(layer, place)])

    def _ahead(self, causal: bool, window: int | None) -> torch.Tensor:
        """What each place sees of the block, but for a window behind it: `(1, block, block)` bool."""
        ahead = self.places[:, None] - self.places[:, :, None]
        return ahead < (1 if causal else self.kind.block if window is None else window)

    def compile(self) -> None:
        compile_layers(self.drafter.layers, self.kind.block, join_linears=self.kind.device.type == "cuda")

    def draft(self, state: DecodingState) -> DraftTree:
        """Make the last round's features context, draft the next block, and build its tree."""
        kind, new = self.kind, state.new.tensor
        hidden = self.hidden_states(state.features[:, : kind.most], new)
        candidates = min(self.nodes, kind.candidates)
        source = kind.family.propose(self.target, self.drafter, hidden, state.text, kind.depth, candidates)
        state.context_length.tensor.add_(new)
        new.zero_()
        return kind.policy.build(source, state.text, self.nodes, kind.build_tree).first(self.nodes).pad(self.nodes)

    def hidden_states(self, features: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Of the block, `(1, block, H)`, behind the context and the first `new (1,)` rows of features."""
        state = self.kind.state
        torch.add(new[:, None], self.places, out=self.depths)
        self.token_ids[:, :1] = state.root
        with attending(self.drafter.layers, self._seen(new)):
            output = self.drafter(
                noise_embeds=embed_tokens(self.target, self.token_ids, self.drafter).to(self.kind.dtype),
                context_hidden_states=features,
                position_ids=(state.position - new)[:, None] + self.column_depths,
                attention_mask=self.no_mask,
            )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _seen(self, new: torch.Tensor) -> list[Visibility]:
        """What each layer sees: of the context's new rows the first `new (1,)`, and the block."""
        length, committed = self.kind.state.context_length.tensor, self.kind.context_committed
        context = (self.steps < new[:, None])[:, None].expand(-1, self.kind.block, -1)
        seen = {}
        for (causal, window), ahead in self.ahead.items():
            visible = torch.cat([context, ahead], dim=-1)
            seen[causal, window] = Visibility.of(
                "sliding_attention", window, length, committed, visible, self.depths, self.column_depths
            )
        return [seen[of_kind] for of_kind in self.layer_kinds]


class RoundSteps:
    """
    The steps of a round of one size over shadows, in fixed shapes.

    Args:
        kind: Of the calls that it serves.
        nodes: Of its tree. With 0 nothing is drafted, and features wait until something is.
    """

    def __init__(self, kind: RoundKind, nodes: int) -> None:
        self.kind, self.cache = kind, kind.cache
        none = kind.zeros(1, 0)
        self.no_tree = DraftTree(none, none, none, none.float())
        self.nodes = nodes
        self.most = min(kind.depth, nodes) + 1  # tokens that it can commit
        self.verified: Verification | None = None  # by the last that was recorded
        self.target = ShadowTarget(kind.target, kind.layer_ids, kind.cache, kind.committed)
        self.block_draft = BlockDraft(kind, self.target.model, nodes) if nodes else None

    def compile(self) -> None:
        self.target.compile(self.nodes + 1)
        if self.block_draft is not None:
            self.block_draft.compile()

    def touch(self) -> None:
        """Note the rows that a round writes."""
        self.cache.touch(self.nodes + 1)
        self.kind.context.touch(self.kind.most + self.kind.block)

    @torch.no_grad()
    def draft(self, state: DecodingState, nodes: int) -> DraftTree:
        """The tree behind the root; without nodes nothing is drafted."""
        return self.no_tree if self.block_draft is None else self.block_draft.draft(state)

    @torch.no_grad()
    def verify(self, state: DecodingState, tree: DraftTree) -> Verification:
        """One forward of the target over the tree."""
        rows = self.kind.find_rows(tree)
        self.cache.open(rows)
        # No node is placed where none of them can be.
        ahead = torch.minimum(rows.depths, state.room[:, None] - 1)
        token_ids = torch.cat([state.root, tree.token_ids], dim=1)
        positions = state.position[:, None] + ahead
        logits, features = self.target.forward(token_ids, positions, rows.ancestors, rows.depths, self.kind.constants)
        self.verified = Verification(logits, features, rows, None)
        return self.verified

    def choose(self, state: DecodingState, tree: DraftTree, verified: Verification) -> Path:
        """The path that plain decoding would have taken."""
        kind = self.kind
        path, finished = device_walk(
            verified.logits, tree, verified.rows, state.room, kind.ends, kind.processors, kind.noise, self.most
        )
        state.finished.copy_(finished)
        return path

    def keep(self, state: DecodingState, path: Path, verified: Verification) -> None:
        """Bring the rows of the path to where they belong, and the state behind it."""
        self.cache.keep(path)
        state.keep(path, verified.features)
        if self.kind.policy.observes:
            self.kind.policy.observe(path, verified.logits.argmax(dim=-1))


class RoundGraph:
    """
    A round of one size as CUDA graphs. Where the device walks, one holds all from the draft to what is kept; where the
    host does, one ends with what the target says of the tree, and another keeps the path.

    Args:
        kind: Of the calls that it serves.
        nodes: Of its tree.
        decode_round: The algorithm.
    """

    def __init__(self, kind: RoundKind, nodes: int, decode_round: Callable[..., tuple[DraftTree, Path]]) -> None:
        self.kind, self.steps, self.decode_round = kind, RoundSteps(kind, nodes), decode_round
        works = [self._round] if kind.walks else [self._draft_and_verify, self._keep]
        self.stretches = [Stretch(self, work) for work in works]
        self.nodes, self.tree = self.steps.nodes, self.steps.no_tree
        self.path = Path.of_packed(kind.zeros(1, 1 + 2 * self.steps.most))
        self.path.length.fill_(1)  # no round keeps less than the root
        self.choices: Choices | None = None  # how it runs, for the statistics

    def _round(self) -> None:
        self.tree, self.path = self.decode_round(self.steps, self.kind.state, self.nodes)

    def _draft_and_verify(self) -> None:
        self.tree = self.steps.draft(self.kind.state, self.nodes)
        self.steps.verify(self.kind.state, self.tree)

    def _keep(self) -> None:
        assert self.steps.verified is not None
        self.steps.cache.open(self.steps.verified.rows)  # which is closed since it was recorded last
        self.steps.keep(self.kind.state, self.path, self.steps.verified)

    def compile(self) -> None:
        """Compile the layers."""
        self.steps.compile()

    def rehearse(self) -> None:
        """Do all that a round does, and leave the state and the generator as they were before."""
        for stretch in self.stretches:
            stretch.rehearse()

    def capture(self) -> None:
        """Record a round."""
        for stretch in self.stretches:
            stretch.capture()

    def run(self, launched: LaunchedRound) -> tuple[DraftTree, Path]:
        """Run a round. Returns the tree that it verified, and the path that it kept.

        Args:
            launched: The call's, which walks where the host does.
        """
        if not self.kind.walks:
            return self.decode_round(WalkedRound(self, launched), self.kind.state, self.nodes)
        if self.kind.noise is not None:
            self.kind.noise.begin()
        self.begin()
        return self.tree, self.path

    def begin(self) -> None:
        """Replay the first stretch, in which the last round's features become context."""
        self.stretches[0].replay()
        if self.nodes:
            self.kind.state.drafted()


class Stretch(Recorded):
    """What a round does without the host.

    Args:
        graph: The round.
        work: What is done.
    """

    def __init__(self, graph: RoundGraph, work: Callable[[], None]) -> None:
        super().__init__(graph.kind.device, graph.kind.memory)
        self.round, self.work = graph, work

    def record(self) -> None:
        self.work()

    def touch(self) -> None:
        self.round.steps.touch()

    def restored(self) -> AbstractContextManager[None]:
        return self.round.kind.restored()


class WalkedRound:
    """The steps of a round whose path the host walks, between two replays.

    Args:
        graph: The round.
        launched: The call's.
    """

    def __init__(self, graph: RoundGraph, launched: LaunchedRound) -> None:
        self.graph, self.launched = graph, launched

    def draft(self, state: DecodingState, nodes: int) -> DraftTree:
        """The tree behind the root; it is verified at once."""
        self.graph.begin()
        return self.graph.tree

    def verify(self, state: DecodingState, tree: DraftTree) -> Verification:
        """What the target says of it."""
        assert self.graph.steps.verified is not None
        return self.graph.steps.verified

    def choose(self, state: DecodingState, tree: DraftTree, verified: Verification) -> Path:
        """The path that plain decoding would have taken, committed while it is walked."""
        return self.launched.walk(tree, verified, self.graph.steps.most)

    def keep(self, state: DecodingState, path: Path, verified: Verification) -> None:
        """Bring the rows of the path to where they belong, and the state behind it."""
        assert self.graph.path.packed is not None and path.packed is not None
        self.graph.path.packed.copy_(path.packed)
        self.graph.stretches[1].replay()
