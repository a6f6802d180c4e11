from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_ddtree.draft_tree import DraftTree
from hf_ddtree.visualize import tree_text

WORDS = ["The", " cat", " dog", " sat", "\n", ' "a"', " ran"]
TOKENIZER: Any = SimpleNamespace(decode=lambda ids: "".join(WORDS[i] for i in ids))


def make_tree(nodes: list[tuple[int, int, int, float]]) -> DraftTree:
    """A tree from (token, parent, depth, probability of the prefix)."""
    token_ids, parents, depths, probabilities = (torch.tensor([column]) for column in zip(*nodes, strict=True))
    return DraftTree(token_ids, parents, depths, probabilities.log())


TREE = make_tree(
    [
        (1, -1, 1, 0.6),
        (3, 0, 2, 0.5),
        (2, -1, 1, 0.3),
        (4, 1, 3, 0.25),
        (5, 2, 2, 0.2),
        (6, 0, 2, 0.1),
    ]
)


def test_tree_is_drawn_with_probabilities_and_the_accepted_path() -> None:
    assert tree_text(TREE, 0, [2, 4], TOKENIZER) == "\n".join(
        [
            '"The"',
            '├─ " cat" 0.60',
            '│  ├─ " sat" 0.50',
            '│  │  └─ "\\n" 0.25',
            '│  └─ " ran" 0.10',
            '└─ ✓ " dog" 0.30',
            '   └─ ✓ " \\"a\\"" 0.20',
        ]
    )


def test_accepted_nodes_are_drawn_beyond_max_nodes() -> None:
    assert tree_text(TREE, 0, [0, 5], TOKENIZER, max_nodes=2) == "\n".join(
        [
            '"The"',
            '└─ ✓ " cat" 0.60',
            '   ├─ " sat" 0.50',
            '   └─ ✓ " ran" 0.10',
            "(3 less probable nodes not drawn)",
        ]
    )


def test_padding_nodes_are_left_out() -> None:
    assert tree_text(TREE.pad(15), 0, [2, 4], TOKENIZER) == tree_text(TREE, 0, [2, 4], TOKENIZER)
    empty = DraftTree(*(field[:, :0] for field in TREE)).pad(3)
    assert tree_text(empty, 0, [], TOKENIZER) == '"The"'


def test_impossible_nodes_have_probability_zero() -> None:
    tree = TREE._replace(log_probs=torch.full((1, 6), -math.inf))
    assert tree_text(tree, 0, [], TOKENIZER).count("0.00") == 6


@pytest.mark.parametrize("path", [[6], [-1]])
def test_path_outside_the_tree_is_refused(path: list[int]) -> None:
    with pytest.raises(ValueError, match="path"):
        tree_text(TREE, 0, path, TOKENIZER)


def test_several_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="one sequence"):
        tree_text(DraftTree(*(field.expand(2, -1) for field in TREE)), 0, [], TOKENIZER)
