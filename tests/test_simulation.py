"""Rounds that are counted along a text are those that decoding makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_ddtree import DDTreeConfig
from hf_ddtree.draft_tree import best_first_tree, chain_tree
from scripted import prompt_ids, tiny_drafter, tiny_target
from simulation import NOWHERE, Text, acceptance_lengths, draft_along, places_on_path

VOCAB = 7  # so few that trees of a random drafter hold a good part of the text


def test_places_are_those_of_the_path_of_the_text_in_the_tree() -> None:
    token_ids = torch.tensor([[[5, 6], [7, 8], [9, 10]]]).expand(4, -1, -1)
    log_probs = torch.tensor([[[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]]).log().expand(4, -1, -1)
    text = torch.tensor([[5, 7, 9], [5, 8, 9], [6, 7, 9], [5, 7, -1]])
    chain = places_on_path(chain_tree(token_ids, log_probs, 3), text)
    assert (chain != NOWHERE).sum(dim=1).tolist() == [3, 1, 0, 2]
    tree = places_on_path(best_first_tree(token_ids, log_probs, 14), text)
    assert (tree != NOWHERE).sum(dim=1).tolist() == [3, 3, 3, 2]
    for budget in range(1, 15):  # the largest tree holds the smaller ones
        smaller = places_on_path(best_first_tree(token_ids, log_probs, budget), text)
        assert torch.equal(smaller, tree.masked_fill(tree >= budget, NOWHERE))


def test_a_round_commits_what_is_accepted_and_the_bonus_token() -> None:
    assert acceptance_lengths([0, 0, 0, 0]) == [1, 1, 1]
    assert acceptance_lengths([2, 9, 9, 1, 9, 0, 9]) == [3, 2, 1]  # rounds from tokens 0, 3 and 5
    assert acceptance_lengths([15, 0]) == [1]
    assert acceptance_lengths([3]) == []


@pytest.mark.parametrize("sampled", [False, True])
def test_counted_rounds_are_those_of_decoding(sampled: bool) -> None:
    target = tiny_target("llama", vocab_size=VOCAB, initializer_range=0.6)
    drafter = tiny_drafter(target, block_size=6)
    options: dict[str, Any] = {"max_new_tokens": 50, "do_sample": sampled, "return_dict_in_generate": True}
    prompts = [prompt_ids(length, seed=length, vocab=VOCAB) for length in (5, 14, 9)]

    def generate(ids: torch.Tensor, config: DDTreeConfig | None = None) -> Any:
        torch.manual_seed(3)
        return target.generate(ids, **options, **({"assistant_model": drafter, "ddtree": config} if config else {}))

    texts = [Text(generate(ids).sequences[0].tolist(), ids.shape[1], most=50) for ids in prompts]
    others = {"chain": ("chain", 5), "static": ("static", 9)}
    found = draft_along(target, drafter, texts, 24, others, batch=2, roots=16)
    branches = 0
    for ids, text, drafts in zip(prompts, texts, found, strict=True):
        configs = {budget: DDTreeConfig(budget=budget) for budget in (0, 3, 10, 24)}
        for budget, config in configs.items():
            out = generate(ids, config)
            assert out.sequences[0].tolist() == text.ids
            assert acceptance_lengths(drafts.accepted(budget)) == out.ddtree_stats.acceptance_lengths
        for name, (tree, budget) in others.items():
            out = generate(ids, DDTreeConfig(tree=tree, budget=budget))
            assert acceptance_lengths(drafts.others[name]) == out.ddtree_stats.acceptance_lengths
        branches += sum(drafts.accepted(24)) - sum(drafts.others["chain"])
    assert branches > 20  # else this has compared rounds of one token
