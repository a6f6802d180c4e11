"""Who sees what, by a loop over rows, queries and slots."""

from __future__ import annotations

import pytest
import torch

from hf_ddtree.attention import Rows, tree_attention_reference
from hf_ddtree.verifier import tree_mask
from hf_ddtree.visibility import KINDS, Visibility

SLOTS = 40


def naive(
    kind: str,
    size: int | None,
    lengths: list[int],
    committed: list[list[bool]],
    related: list[list[list[bool]]],
    depths: list[list[int]],
    column_depths: list[list[int]],
) -> torch.Tensor:
    """What is allowed, `(B, Q, S)`."""
    allowed = torch.zeros(len(lengths), len(depths[0]), SLOTS, dtype=torch.bool)
    for b, length in enumerate(lengths):
        padding = committed[b].index(True)
        for q, depth in enumerate(depths[b]):
            for slot in range(length + len(column_depths[b])):
                place, column = slot, slot - length
                seen = committed[b][slot]
                if column >= 0:
                    place, seen = length + column_depths[b][column], related[b][q][column]
                if kind == "sliding_attention" and size is not None:
                    seen = seen and length + depth - place < size
                if kind == "chunked_attention" and size is not None:
                    seen = seen and (length + depth - padding) // size == (place - padding) // size
                allowed[b, q, slot] = seen
    return allowed


@pytest.mark.parametrize("size", [1, 3, 8, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_and_plain_tensors_are_the_naive_ones(kind: str, size: int) -> None:
    torch.manual_seed(size)
    of_layers = None if kind == "full_attention" else size
    for padding, extra in ((0, 0), (0, 3), (7, 0), (14, 3)):  # extra: columns before those of the queries
        lengths = torch.tensor([max(padding, n) for n in (0, 9, 24)])
        committed = torch.ones(3, SLOTS, dtype=torch.bool)
        committed[1, :padding] = False
        committed[2, [padding // 2 + 9, 20]] = False  # in between, too
        column_depths = torch.randint(1, 6, (3, extra + 9)).sort().values
        column_depths[:, 0] = 0
        depths = column_depths[:, extra:]
        related = (torch.rand(3, 9, extra + 9) < 0.6) & (column_depths[:, None] <= depths[:, :, None])
        given = lengths, committed, related, depths, column_depths
        seen = Visibility.of(kind, of_layers, *given)
        expected = naive(kind, of_layers, *(x.tolist() for x in given))
        assert torch.equal(seen.allowed(), expected)
        assert torch.equal(tree_mask(seen, torch.float32)[:, 0] == 0, expected)
        assert torch.equal(attended(seen), expected)
        if not extra:
            default = Visibility.of(kind, of_layers, *given[:-1])
            assert torch.equal(default.allowed(), expected)


def attended(seen: Visibility) -> torch.Tensor:
    """The slots that have a weight in the attention of plain tensors, `(B, Q, S)` bool."""
    batch, queries, columns = seen.visible.shape
    values = torch.eye(SLOTS).expand(batch, 1, -1, -1).clone()  # a value names its slot
    new_values = torch.stack([own[:, n : n + columns] for own, n in zip(values, seen.length.tolist(), strict=True)])
    query, key, keys = (torch.zeros(batch, 1, rows, 2) for rows in (queries, columns, SLOTS))
    output = tree_attention_reference(query, key, new_values, Rows(keys, values), seen, scaling=1.0)
    return output[:, :, 0] > 0
