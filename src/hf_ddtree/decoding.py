"""DDTree decoding (arXiv 2604.12989): draft a block, build a tree, verify it, keep what the target chose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from .acceptance_watch import watch_acceptance
from .budget import Budget, make_budget
from .candidate_generator import DDTreeCandidateGenerator
from .capture import find_rounds, find_start, find_step, run_prompt, why_not_captured
from .compat import CACHE_KEY, decoder_only_output
from .compiled import Rounds, Step
from .configuration_ddtree import DDTreeConfig
from .draft_tree import DraftTree, ancestor_matrix
from .logits_process import commit_next, walk
from .outputs import DDTreeStats, GenerateDDTreeOutput, GenerationRecord, PlainColumns, ended
from .rope import RopeSwitch
from .target_state import Buffers, claim
from .tree_cache import rows_ahead
from .validation import check_batch
from .verifier import Verifier


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

    with ended(streamer), claim(model) as buffers:
        check_batch(input_ids.shape[0])
        cache, context = buffers.cache, buffers.context_of(assistant_model)
        source = DDTreeCandidateGenerator(model, assistant_model, config, record.max_length, context)
        with closing(Verifier(model, source.layer_ids, cache, model_kwargs, input_ids.device)) as verifier:
            rope = RopeSwitch(verifier.config)
            timed = functools.partial(stats.time, device=verifier.device if config.record_times else None)
            why_not = functools.partial(
                why_not_captured, buffers, source, verifier, rope, record, logits_processor, do_sample, synced_gpus
            )
            call = Call(buffers, source, verifier, rope, record, logits_processor, do_sample, stats, timed)
            # The prompt gives the first bonus token, and its features are the drafter's first context.
            with timed("prefill"):
                ahead = rows_ahead(record.room, source.nodes)
                run_text = functools.partial(run_prompt, buffers, source, why_not)
                outputs, features = verifier.prefill(input_ids, generation_config, model_kwargs, ahead, run_text)
                if users_cache is not None and not verifier.recomputed:
                    source.resume(users_cache, input_ids)
                append_prompt(source, features, verifier.prompt_positions, verifier.prompt_mask)
                source.reserve(ahead)
            columns = plain_columns(verifier, users_cache)
            _, stop = commit_next(outputs.logits[:, -1], record, logits_processor, do_sample)
            record.add_states(outputs, [0], 0, columns, whole=True)
            rope.crossed(record.length - 1, verifier.constants.place(verifier.prompt_positions[:, -1:]))
            position = verifier.prompt_positions[:, -1:] + 1  # the bonus token's, root of the first tree
            del outputs, features
            if not stop:
                reason = why_not()
                budget = make_budget(config, model)
                if reason is None:
                    position, stop = captured_rounds(call, budget, position)
                else:
                    stats.path = f"plain: {reason}"
                if not stop:
                    drafted = draft(call, budget, position)

            while model._has_unfinished_sequences(stop, synced_gpus, device=record.input_ids.device):
                root = record.last_token.to(verifier.device)
                if stop:  # another rank still decodes, and its forwards need ours
                    verifier.idle(root, position)
                    continue
                tree, nodes, plain = drafted
                # Verify the tree in one forward.
                with timed("verify"):
                    ancestors = ancestor_matrix(tree.parents, tree.depths)
                    if plain:
                        verified = verifier.plain_step(record.input_ids, position, model_kwargs)
                        columns = plain_columns(verifier, users_cache)
                    else:
                        verified = verifier.verify(torch.cat([root, tree.token_ids], dim=1), position, ancestors)
                # Walk from the root by the target's own choice.
                with timed("walk"):
                    rows, path, stop = walk(verified.logits, tree, ancestors, record, logits_processor, do_sample)
                    record.add_states(verified.outputs, rows, cache.length, columns, whole=plain)
                # Keep the path, drop the rest; its features are the drafter's next context.
                with timed("keep"):
                    cache.keep(rows, path.to(verifier.device))
                    steps = torch.arange(len(rows), device=position.device)
                    features = verified.features[:, path[0].to(verified.features.device)]
                    source.append(features, position + steps)
                position = position + len(rows)
                stats.add_round(nodes, root, tree, rows, keep_tree=config.record_trees)
                # Draft the next block, and build the tree from its distributions.
                if not stop:
                    budget.observe(nodes, len(rows))
                    drafted = draft(call, budget, position)

        if verifier.recomputed:  # what the caller's cache holds belongs to another text now
            users_cache = DynamicCache(config=verifier.config)
        if users_cache is not None and (record.return_dict or getattr(users_cache, "_is_user_defined", False)):
            cache.export(users_cache)
            source.leave(users_cache, record.input_ids)

    watch_acceptance(model, assistant_model, stats)
    sequences = record.input_ids.clone()
    if not record.return_dict:
        return sequences
    output: GenerateDDTreeOutput = decoder_only_output(
        GenerateDDTreeOutput,
        users_cache,
        sequences=sequences,
        scores=record.scores,
        logits=record.logits,
        hidden_states=record.hidden_states,
        attentions=record.attentions,
        ddtree_stats=stats,
    )
    return output


class Call(NamedTuple):
    """What belongs to one call, whichever way its rounds run."""

    buffers: Buffers
    source: DDTreeCandidateGenerator
    verifier: Verifier
    rope: RopeSwitch
    record: GenerationRecord
    processors: LogitsProcessorList
    do_sample: bool
    stats: DDTreeStats
    timed: Callable[[str], AbstractContextManager[None]]  # a stage, by name


class Drafted(NamedTuple):
    """What the next round verifies."""

    tree: DraftTree
    nodes: int  # that were asked for
    plain: bool  # whether one plain step is due instead; then there are none


def draft(call: Call, budget: Budget, position: torch.Tensor) -> Drafted:
    """The tree behind the bonus token, whose position is given."""
    source, verifier, rope, record = call.source, call.verifier, call.rope, call.record
    with call.timed("draft"):
        placed = verifier.constants.place(position)
        plain = rope.crossed(record.length, placed) or verifier.drops_cache or verifier.plain_only
        depth = min(record.room - 1, rope.room(record.length, placed), verifier.most_nodes)
        depth = 0 if plain or budget.nodes == 0 else depth
        root = record.last_token.to(verifier.device)
        tree = source.draft_tree(root, position, depth).first(verifier.most_nodes)
        nodes = budget.nodes if depth > 0 else 0
        return Drafted(tree.first(nodes), nodes, plain)


def captured_rounds(call: Call, budget: Budget, position: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The rounds of `Step`, until generation ends or a step cannot be had.

    Args:
        position: `(1, 1)`, the bonus token's.

    Returns:
        The position of the last bonus token, and whether generation ended.
    """
    source, verifier, record, stats = call.source, call.verifier, call.record, call.stats
    stop, rounds, tree, nodes, due = False, None, None, 0, True
    root = record.last_token.to(verifier.device)
    if source.nodes:
        source.absorb(root, position)  # so that the context has its buffers
    while not stop:
        if rounds is None or not rounds.fits():
            if rounds is not None:  # outgrown: nothing may hold its graphs while the next are captured
                root, position, tree = root.clone(), position.clone(), DraftTree(*map(torch.clone, rounds.tree))
                rounds = step = None
            rounds = find_rounds(
                call.buffers, source, call.processors, call.do_sample, record.room, verifier.constants
            )
            rounds.begin(root, position, record.room, verifier.prompt_mask, verifier.constants)
            if tree is not None:
                rounds.take_tree(tree)
            root, position = rounds.root, rounds.position
        elif due and budget.nodes > 0:  # the context has grown
            rounds.begin(root, position, record.room, verifier.prompt_mask, verifier.constants)
        if due:
            nodes = first_tree(call, budget, rounds)
        step = find_step(rounds, min(nodes, source.nodes), source.config.execution)
        if not isinstance(step, Step):
            stats.path = step
            break
        stats.path = step.path
        verified = rounds.tree.first(step.nodes)
        if source.config.record_trees:
            verified = DraftTree(*map(torch.clone, verified))
        bonus = record.last_token
        with call.timed("round"):
            outcome = step.run()
        count, stop = record.commit_path(outcome.token_ids, outcome.tokens)
        step.commit(count)
        stats.add_round(nodes, bonus, verified, outcome.rows[:count], keep_tree=source.config.record_trees)
        if not step.drafts:
            source.append(rounds.features.clone(), position - 1)
        if stop:
            break
        budget.observe(nodes, count)
        due = not step.drafts or budget.nodes == 0
        if not due:
            nodes = budget.nodes
        elif budget.nodes > 0:  # again, behind tokens that no round has drafted from
            source.absorb(root, position)
    return position, stop


def first_tree(call: Call, budget: Budget, rounds: Rounds) -> int:
    """Give the next round a tree behind its root, from which no round has drafted. Returns the nodes that it verifies,
    0 while drafting pauses."""
    if budget.nodes > 0 and (start := find_start(rounds, call.source.config.execution)) is not None:
        with call.timed("draft"):
            start.replay()
        return budget.nodes
    tree, nodes, _ = draft(call, budget, rounds.position)
    if nodes:
        rounds.take_tree(tree)
    return nodes


def plain_columns(verifier: Verifier, users_cache: Any) -> PlainColumns:
    """Plain decoding's attentions show the caller's cache, until a model drops that for one of its own."""
    cache = DynamicCache(config=verifier.config) if verifier.recomputed else users_cache
    return PlainColumns(verifier.layer_windows, cache)


def append_prompt(
    source: DDTreeCandidateGenerator, features: torch.Tensor, positions: torch.Tensor, prompt_mask: torch.Tensor | None
) -> None:
    """Make the prompt the drafter's context, without its padding."""
    if prompt_mask is not None:
        kept = prompt_mask[0, -features.shape[1] :]
        features, positions = features[:, kept], positions[:, kept]
    source.append(features, positions)
