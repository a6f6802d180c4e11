"""DDTree decoding (arXiv 2604.12989): draft a block, build a tree, verify it, keep what the target chose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, Protocol

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from .acceptance_watch import watch_acceptance
from .budget import make_budget
from .candidate_generator import DDTreeCandidateGenerator
from .capture import find_graph, find_kind, run_prompt, why_not_captured
from .compat import CACHE_KEY, decoder_only_output
from .configuration_ddtree import DDTreeConfig
from .draft_tree import DraftTree
from .launched import LaunchedRound
from .logits_process import commit_next, commit_path
from .our_layers import find_layers, why_not_ours
from .outputs import DDTreeStats, GenerateDDTreeOutput, GenerationRecord, ended
from .prefill import prefill
from .round_graph import RoundGraph
from .state import DecodingState, Path
from .target_state import claim
from .tree_cache import rows_ahead
from .validation import check_batch
from .verifier import Verification, Verifier, input_device


class Round(Protocol):
    """The steps of a round: launched over the models as they are, or recorded as a graph over shadows of them."""

    def draft(self, state: DecodingState, nodes: int) -> DraftTree: ...

    def verify(self, state: DecodingState, tree: DraftTree) -> Verification: ...

    def choose(self, state: DecodingState, tree: DraftTree, verified: Verification) -> Path: ...

    def keep(self, state: DecodingState, path: Path, verified: Verification) -> None: ...


def decode_round(
    steps: Round,
    state: DecodingState,
    nodes: int,
    timed: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> tuple[DraftTree, Path]:
    """One round. A graph is a recording of it.

    Args:
        steps: What its steps run on.
        state: Where decoding stands; moved behind what is kept.
        nodes: Of the tree, besides its root.
        timed: Measures a stage, by its name.

    Returns:
        The tree that was verified, and the path through it that was kept.
    """
    # Draft a block behind the bonus token, and build the tree from its distributions.
    with timed("draft"):
        tree = steps.draft(state, nodes)
    # Verify the tree in one forward.
    with timed("verify"):
        verified = steps.verify(state, tree)
    # Walk from the root by the target's own choice.
    with timed("walk"):
        path = steps.choose(state, tree, verified)
    # Keep the path, drop the rest; its features are the drafter's next context.
    with timed("keep"):
        steps.keep(state, path, verified)
    return tree, path


def ddtree_decoding(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_model: Any,
    config: DDTreeConfig,
    streamer: Any | None = None,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDDTreeOutput:
    """The decoding loop behind `generate(ddtree=...)`, called in place of transformers' `_assisted_decoding`.

    Args:
        model: The target.
        input_ids: `(1, L)`.
        logits_processor, stopping_criteria, generation_config, streamer, synced_gpus, model_kwargs: As `generate`
            prepared them.
        assistant_model: The drafter.
        config: Tree options.

    Returns:
        `(1, L + new)` ids, or a [`GenerateDDTreeOutput`] with `return_dict_in_generate`.
    """
    record = GenerationRecord(input_ids, generation_config, stopping_criteria, streamer)
    do_sample = bool(generation_config.do_sample)
    stats = DDTreeStats()
    users_cache = model_kwargs.get(CACHE_KEY)
    device = input_device(model.get_input_embeddings(), input_ids.device)

    with ended(streamer), claim(model, device) as buffers:
        check_batch(input_ids.shape[0])
        cache, state, own = buffers.cache, buffers.state, buffers.of(assistant_model)
        policy = own.policy(config.tree, model.config.get_text_config(decoder=True), state.device)
        source = DDTreeCandidateGenerator(model, assistant_model, config, record.max_length, own.context, policy)
        with closing(Verifier(model, source.layer_ids, cache, model_kwargs, device)) as verifier:
            launched = LaunchedRound(
                source, verifier, record, logits_processor, do_sample, model_kwargs, users_cache
            )  # fmt: skip
            timed = functools.partial(stats.time, device=device if config.record_times else None)
            why_not = functools.partial(why_not_captured, buffers, launched, synced_gpus)
            # The prompt gives the first bonus token, and its features are the drafter's first context.
            with timed("prefill"):
                ahead = rows_ahead(record.room, source.nodes)
                run_text = functools.partial(run_prompt, buffers, source, why_not)
                outputs, features = prefill(verifier, input_ids, generation_config, model_kwargs, ahead, run_text)
                if users_cache is not None and not verifier.recomputed:
                    source.resume(users_cache, input_ids)
                source.reserve(features.rows + ahead)
                source.take_prompt(features, verifier.prompt_positions, verifier.prompt_mask)
            _, stop = commit_next(outputs.logits[:, -1], record, logits_processor, do_sample)
            record.add_states(outputs, [0], 0, launched.columns, whole=True)
            position = verifier.prompt_positions[:, -1:]
            if launched.rope is not None:
                launched.rope.crossed(record.length - 1, verifier.constants.place(position))
            state.features = own.features_like(source.block_size, source.width, source.device, source.dtype)
            state.begin(record.input_ids, position + 1, record.room)
            policy.begin(record.input_ids)
            del outputs, features

            budget = make_budget(config, model)
            why = None if stop else why_not()
            if why is not None:
                launched.layers = why_not_ours(buffers, launched) or find_layers(buffers, launched)
            kind = None
            while model._has_unfinished_sequences(stop, synced_gpus, device=record.input_ids.device):
                if stop:  # another rank still decodes, and its forwards need ours
                    verifier.idle(state.root, state.position[:, None])
                    continue
                nodes, bonus = budget.nodes, record.last_token
                graph: RoundGraph | str = why or ""
                if not why:
                    source.catch_up(state, drafts=nodes > 0)
                    if kind is None or not kind.fits():
                        kind = None  # outgrown: nothing may hold its graphs while the next are captured
                        kind = find_kind(buffers, launched)
                    graph = kind.ready(nodes) or find_graph(kind, nodes, decode_round, launched, config.execution)
                stats.ran(launched.choices(graph) if isinstance(graph, str) else graph.choices)
                if isinstance(graph, RoundGraph):
                    with timed("round"):
                        tree, path = graph.run(launched)
                        rows, stop = commit_path(path, state, cache, record, graph.kind.noise)
                else:
                    tree, path = decode_round(launched, state, nodes, timed)
                    rows, stop = commit_path(path, state, cache, record, launched.noise)
                nodes = nodes if tree.token_ids.shape[1] else 0
                stats.add_round(nodes, bonus, tree, rows, keep_tree=config.record_trees)
                budget.observe(nodes, len(rows))

        if verifier.recomputed:  # what the caller's cache holds belongs to another text now
            users_cache = DynamicCache(config=verifier.config)
        if users_cache is not None and (record.return_dict or getattr(users_cache, "_is_user_defined", False)):
            cache.export(users_cache)
            source.take_new(state)
            source.leave(users_cache, record.input_ids)

    watch_acceptance(model, assistant_model, stats)
    sequences = record.input_ids.clone()
    if not record.return_dict:
        return sequences
    output: GenerateDDTreeOutput = decoder_only_output(
        GenerateDDTreeOutput,
        users_cache,
        sequences=sequences,
        ddtree_stats=stats,
        **{name: getattr(record, name) for name in ("scores", "logits", "hidden_states", "attentions")},
    )
    return output
