"""DDTree decoding (arXiv 2604.12989): draft a block, build a tree, verify it, keep what the target chose."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from .candidate_generator import DDTreeCandidateGenerator
from .compat import CACHE_KEY, decoder_only_output
from .configuration_ddtree import DDTreeConfig
from .draft_tree import DraftTree, ancestor_matrix
from .logits_process import commit_next, walk
from .outputs import DDTreeStats, GenerateDDTreeOutput, GenerationRecord, RoundTree
from .target_state import claim
from .tree_cache import TreeCache
from .validation import check_batch, rope_parameters
from .verifier import Verification, Verifier


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
    check_batch(input_ids.shape[0])
    record = GenerationRecord(input_ids, generation_config, stopping_criteria, streamer)
    do_sample = bool(generation_config.do_sample)
    stats = DDTreeStats()
    timed = record.input_ids.device if config.record_times else None
    users_cache = model_kwargs.get(CACHE_KEY)

    with claim(model) as cache:
        source = DDTreeCandidateGenerator(model, assistant_model, config, record.max_length)
        output_kwargs = {k: model_kwargs[k] for k in ("output_hidden_states", "output_attentions") if k in model_kwargs}
        verifier = Verifier(model, source.layer_ids, cache, output_kwargs)
        try:
            if users_cache is not None and users_cache.get_seq_length() > 0:
                cache.load(users_cache)
            cache.reserve(cache.length + prompt_rows(input_ids, model_kwargs) + record.room + source.nodes + 1)

            # The prompt gives the first bonus token, and its features are the drafter's first context.
            with stats.time("prefill", timed):
                outputs, features = verifier.prefill(input_ids, generation_config, model_kwargs)
                positions = model_kwargs["position_ids"][..., -features.shape[1] :]
                append_prompt(source, features, positions, verifier.prompt_mask)
            _, stop = commit_next(outputs.logits[:, -1], record, logits_processor, do_sample)
            record.add_states(outputs, [0], committed=None)
            position = positions[..., -1:] + 1  # of the root: the bonus token
            regime = rope_regime(verifier.config, record.length - 1, position - 1)
            del outputs, features

            while model._has_unfinished_sequences(stop, synced_gpus, device=record.input_ids.device):
                if stop:  # another rank still decodes, and its forwards need ours
                    verifier.verify(record.last_token, position, ancestor_matrix(*no_tree(record)[1:3]))
                    cache.close_tree()
                    continue
                # Draft a block and build the tree from its distributions.
                crossing = regime != (regime := rope_regime(verifier.config, record.length, position))
                crossing = crossing or verifier.drops_cache
                depth = min([record.room - 1, *rope_room(verifier.config, record.length, position)])
                with stats.time("draft", timed):
                    if depth > 0 and not crossing:
                        tree = source.draft_tree(record.last_token, position[..., -1:].view(1, 1), depth)
                    else:
                        tree = no_tree(record)
                # Verify it in one forward.
                with stats.time("verify", timed):
                    ancestors = ancestor_matrix(tree.parents, tree.depths)
                    committed, root = cache.length, record.last_token
                    if crossing:
                        verified = verifier.plain_step(record.input_ids, position, model_kwargs)
                    else:
                        verified = verifier.verify(torch.cat([root, tree.token_ids], dim=1), position, ancestors)
                # Walk from the root by the target's own choice.
                with stats.time("walk", timed):
                    rows, stop = walk(verified.logits, tree, ancestors, record, logits_processor, do_sample)
                    record.add_states(verified.outputs, rows, None if crossing else committed, verifier.layer_windows)
                # Keep the path's rows, drop the rest; its features are the drafter's next context.
                with stats.time("keep", timed):
                    cache.keep(rows)
                    steps = torch.arange(len(rows), device=position.device)
                    source.append(verified.features[:, rows], position + steps)
                position = position + len(rows)
                note_round(stats, config, source.nodes, tree, root, rows)
        finally:
            verifier.close()

        if streamer is not None:
            streamer.end()
        export_cache(cache, users_cache, record.return_dict)

    if not record.return_dict:
        return record.input_ids
    output: GenerateDDTreeOutput = decoder_only_output(
        GenerateDDTreeOutput,
        users_cache,
        sequences=record.input_ids,
        scores=record.scores,
        logits=record.logits,
        hidden_states=record.hidden_states,
        attentions=record.attentions,
        ddtree_stats=stats,
    )
    return output


def prompt_rows(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> int:
    """Cache rows that the prompt may need: embeddings may stand for more tokens than there are ids."""
    embeds = model_kwargs.get("inputs_embeds")
    return int(max(input_ids.shape[1], embeds.shape[1] if embeds is not None else 0))


def append_prompt(
    source: DDTreeCandidateGenerator, features: torch.Tensor, positions: torch.Tensor, prompt_mask: torch.Tensor | None
) -> None:
    """Make the prompt the drafter's context, without its padding."""
    positions = positions if positions.dim() == 2 else positions[0]
    if prompt_mask is not None:
        kept = prompt_mask[0, -features.shape[1] :]
        features, positions = features[:, kept], positions[:, kept]
    source.append(features, positions)


def no_tree(record: GenerationRecord) -> DraftTree:
    """A tree of no nodes: the round verifies the root alone."""
    empty = record.input_ids[:, :0]
    return DraftTree(empty, empty, empty, empty.float())


def rope_regime(config: Any, length: int, position: torch.Tensor) -> tuple[bool, bool]:
    """On which side of `longrope`'s switch the token at `position`, the last of `length` ids, is computed.

    The rotary embedding goes by position, a model that recomputes its cache at the switch (Phi-3) by number of ids.
    """
    switch = rope_switch(config)
    return (length > switch, int(position.max()) >= switch) if switch is not None else (False, False)


def rope_room(config: Any, length: int, position: torch.Tensor) -> list[int]:
    """Depths beyond which nodes behind a root would pass `longrope`'s switch; empty when there is none ahead."""
    switch = rope_switch(config)
    if switch is None:
        return []
    return [room for room in (switch - length, switch - 1 - int(position.max())) if room >= 0]


def rope_switch(config: Any) -> int | None:
    """The position from which `longrope` uses its long factors, or `None`."""
    for rope in rope_parameters(config):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            return int(original or config.max_position_embeddings)
    return None


def note_round(
    stats: DDTreeStats, config: DDTreeConfig, budget: int, tree: DraftTree, root: torch.Tensor, rows: list[int]
) -> None:
    stats.acceptance_lengths.append(len(rows))
    stats.node_counts.append(tree.token_ids.shape[1])
    stats.budgets.append(budget)
    if config.record_trees:
        on_host = DraftTree(*(field.cpu() for field in tree))
        stats.trees.append(RoundTree(int(root), on_host, [row - 1 for row in rows[1:]]))


def export_cache(cache: TreeCache, users_cache: Any, returned: bool) -> None:
    """Bring the cache that the caller gave, or gets back, up to date."""
    if users_cache is not None and (returned or getattr(users_cache, "_is_user_defined", False)):
        cache.export(users_cache)
