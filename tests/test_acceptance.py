"""The acceptance benchmark counts what rounds would commit."""

from __future__ import annotations

import torch

import acceptance
from hf_ddtree.draft_tree import best_first_tree, chain_tree


def test_accepted_is_the_longest_path_of_the_text_in_the_tree() -> None:
    token_ids = torch.tensor([[[5, 6], [7, 8], [9, 10]]]).expand(4, -1, -1)
    log_probs = torch.tensor([[[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]]).log().expand(4, -1, -1)
    text = torch.tensor([[5, 7, 9], [5, 8, 9], [6, 7, 9], [5, 7, -1]])
    assert acceptance.accepted(chain_tree(token_ids, log_probs, 3), text).tolist() == [3, 1, 0, 2]
    assert acceptance.accepted(best_first_tree(token_ids, log_probs, 4), text).tolist() == [3, 1, 0, 2]
    assert acceptance.accepted(best_first_tree(token_ids, log_probs, 14), text).tolist() == [3, 3, 3, 2]


def test_a_round_commits_what_is_accepted_and_the_bonus_token() -> None:
    assert acceptance.count_rounds([0, 0, 0, 0]) == (3, 3)
    assert acceptance.count_rounds([2, 9, 9, 1, 9, 0, 9]) == (6, 3)  # rounds from tokens 0, 3 and 5
    assert acceptance.count_rounds([15, 0]) == (1, 1)
    assert acceptance.count_rounds([3]) == (0, 0)


def test_the_mean_is_over_the_public_sets() -> None:
    row = {"chain": 1.0, "15": 2.0, "63": 3.005, "255": 4.0}
    assert "| held out | 1.00 | 2.00 | 3.00 | 4.00 |" in acceptance.markdown({"held out": row})
