"""A draft tree as text, to be looked at in a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from .draft_tree import DraftTree


def tree_text(
    tree: DraftTree, root_id: int, path: Sequence[int], tokenizer: PreTrainedTokenizerBase, max_nodes: int = 64
) -> str:
    """Draw a tree, one node a line, with the probability of the prefix that ends in it.

    Children are listed most probable first. A tick marks the nodes that the target accepted.

    Args:
        tree: the tree of one sequence, fields `(1, N)`. Padding nodes are left out.
        root_id: token id of the root.
        path: indices of the accepted nodes.
        tokenizer: makes tokens readable.
        max_nodes: how many nodes to draw at most, best first; accepted ones are drawn whatever their rank. A last line
            says how many were left out.

    Raises:
        ValueError: the tree is one of several sequences, or `path` names a node that the tree does not have.
    """
    if tree.token_ids.shape[0] != 1:
        raise ValueError(f"tree_text draws the tree of one sequence, not of {tree.token_ids.shape[0]}")
    token_ids, parents, depths = (field[0].tolist() for field in (tree.token_ids, tree.parents, tree.depths))
    probabilities = tree.log_probs[0].exp().tolist()
    nodes = [node for node, depth in enumerate(depths) if depth > 0]
    accepted = set(path)
    if unknown := sorted(accepted - set(nodes)):
        raise ValueError(f"path names nodes that the tree does not have: {unknown}")

    # Score order: ancestors of the first max_nodes are among them, and those of an accepted node are accepted.
    drawn = nodes[:max_nodes] + [node for node in nodes[max_nodes:] if node in accepted]
    children: dict[int, list[int]] = {}
    for node in drawn:
        children.setdefault(parents[node], []).append(node)

    def label(token_id: int) -> str:
        return json.dumps(tokenizer.decode([token_id]), ensure_ascii=False)

    lines = [label(root_id)]

    def draw(parent: int, indent: str) -> None:
        siblings = children.get(parent, [])
        for node in siblings:
            last = node == siblings[-1]
            tick = "✓ " if node in accepted else ""
            lines.append(f"{indent}{'└─' if last else '├─'} {tick}{label(token_ids[node])} {probabilities[node]:.2f}")
            draw(node, indent + ("   " if last else "│  "))

    draw(-1, "")
    if left_out := len(nodes) - len(drawn):
        lines.append(f"({left_out} less probable nodes not drawn)")
    return "\n".join(lines)
