"""One draft tree as text, as SVG and as a Graphviz graph."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from ..draft_tree import DraftTree
from .token_text import cells, clipped, token_text, visible

STYLE = resources.files(__package__).joinpath("tree.css").read_text(encoding="utf-8")
LABEL_CELLS = 18  # of the longest label
# Pixels: a cell of a label, beside a label, a node, a row, between columns, around the tree.
CELL, INSET, NODE, ROW, GAP, MARGIN = 7.3, 6, 18, 23, 20, 6


class Drawing(NamedTuple):
    """The nodes to draw, in score order, and where: a node stands behind its parent, the best child in its row.

    Attributes:
        root_id: the root's token.
        token_ids, parents, depths: of each node, as in a `DraftTree`.
        probabilities: of the prefix that ends in each node.
        accepted: whether the target took the node.
        rows: the row of each node; the root's is 0.
        left_out: nodes of the tree that are not drawn.
    """

    root_id: int
    token_ids: list[int]
    parents: list[int]
    depths: list[int]
    probabilities: list[float]
    accepted: list[bool]
    rows: list[int]
    left_out: int

    @classmethod
    def of(cls, tree: DraftTree, root_id: int, path: Sequence[int], max_nodes: int) -> Drawing:
        """The `max_nodes` best nodes and the accepted ones; errors are those of `tree_text`."""
        if tree.token_ids.shape[0] != 1:
            raise ValueError(f"a drawing shows the tree of one sequence, not of {tree.token_ids.shape[0]}")
        nodes = [node for node, depth in enumerate(tree.depths[0].tolist()) if depth > 0]
        accepted = set(path)
        if unknown := sorted(accepted - set(nodes)):
            raise ValueError(f"path names nodes that the tree does not have: {unknown}")
        # Score order: ancestors of the first max_nodes are among them, and those of an accepted node are accepted.
        drawn = nodes[:max_nodes] + [node for node in nodes[max_nodes:] if node in accepted]
        token_ids, parents, depths = (
            field[0, drawn].tolist() for field in (tree.token_ids, tree.parents, tree.depths)
        )
        place = {-1: -1} | {node: index for index, node in enumerate(drawn)}
        parents = [place[parent] for parent in parents]
        probabilities = tree.log_probs[0, drawn].exp().tolist()
        took = [node in accepted for node in drawn]
        left_out = len(nodes) - len(drawn)
        return cls(root_id, token_ids, parents, depths, probabilities, took, _rows(parents), left_out)

    def columns(self, widths: Sequence[int]) -> list[int]:
        """Where each depth begins, and where one deeper would; `widths` are those of the root and of each node."""
        depths = [0, *self.depths]
        lefts = [MARGIN]
        for depth in range(max(depths) + 1):
            lefts.append(lefts[-1] + GAP + max(w for w, d in zip(widths, depths, strict=True) if d == depth))
        return lefts


class Label(NamedTuple):
    """A token in a drawing."""

    text: str  # all of it, with marks for what cannot be seen
    clip: str  # what fits a node
    width: int  # of the node, in pixels

    @classmethod
    def of(cls, token_id: int, tokenizer: PreTrainedTokenizerBase) -> Label:
        """Make a token readable."""
        text = visible(token_text(token_id, tokenizer))
        clip = clipped(text, LABEL_CELLS)
        return cls(text, clip, round(cells(clip) * CELL) + 2 * INSET)


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
    drawing = Drawing.of(tree, root_id, path, max_nodes)
    children = _children(drawing.parents)
    lines = [_quoted(token_text(root_id, tokenizer))]

    def draw(parent: int, indent: str) -> None:
        siblings = children.get(parent, [])
        for node in siblings:
            last = node == siblings[-1]
            tick = "✓ " if drawing.accepted[node] else ""
            label = _quoted(token_text(drawing.token_ids[node], tokenizer))
            lines.append(f"{indent}{'└─' if last else '├─'} {tick}{label} {drawing.probabilities[node]:.2f}")
            draw(node, indent + ("   " if last else "│  "))

    draw(-1, "")
    if drawing.left_out:
        lines.append(f"({drawing.left_out} less probable nodes not drawn)")
    return "\n".join(lines)


def tree_svg(
    tree: DraftTree, root_id: int, path: Sequence[int], tokenizer: PreTrainedTokenizerBase, max_nodes: int = 64
) -> str:
    """Draw a tree as an SVG image, from the root at the left; for a page or a file, on a light or a dark ground.

    The shade of a node is the probability of the prefix that ends in it, and accepted nodes have a thick frame. The
    most probable child stands in its parent's row. White space is drawn as a mark, long tokens are clipped; a node's
    title, which a browser shows on hover, has all of it. Arguments and errors are those of `tree_text`.
    """
    drawing = Drawing.of(tree, root_id, path, max_nodes)
    labels = [Label.of(token_id, tokenizer) for token_id in [root_id, *drawing.token_ids]]
    parents = [0, *(parent + 1 for parent in drawing.parents)]
    columns = drawing.columns([label.width for label in labels])
    lefts = [columns[depth] for depth in [0, *drawing.depths]]
    middles = [MARGIN + NODE // 2 + row * ROW for row in [0, *drawing.rows]]

    edges, nodes = [], []
    for node, ((text, clip, width), left, middle) in enumerate(zip(labels, lefts, middles, strict=True)):
        title, marks, shade = "root", "ddtree-root", 0.0
        if node:
            marks = "ddtree-accepted" if drawing.accepted[node - 1] else ""
            shade = drawing.probabilities[node - 1]
            title = f"probability {shade:.3f}" + ", accepted" * drawing.accepted[node - 1]
            parent = parents[node]
            line = f"M{lefts[parent] + labels[parent].width} {middles[parent]}H{left - GAP // 2}V{middle}H{left}"
            edges.append((drawing.accepted[node - 1], f'<path class="ddtree-edge {marks}" d="{line}"/>'))
        nodes.append(
            f'<g class="ddtree-node {marks}"><title>{escape(text)} · {title}</title>'
            f'<rect x="{left}" y="{middle - NODE // 2}" width="{width}" height="{NODE}" rx="4" '
            f'fill-opacity="{shade:.3f}"/>'
            f'<text x="{left + width / 2:g}" y="{middle}">{escape(clip)}</text></g>'
        )
    edges.sort(key=lambda edge: edge[0])  # the accepted path lies above the others
    width = columns[-1] - GAP + MARGIN
    height = max(middles) + NODE // 2 + MARGIN
    if drawing.left_out:
        height += ROW
        note = f"{drawing.left_out} less probable nodes not drawn"
        width = max(width, round(len(note) * CELL) + 2 * MARGIN)
        nodes.append(f'<text class="ddtree-note" x="{MARGIN}" y="{height - ROW // 2}">{note}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ddtree" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img"><style>{STYLE}</style>'
        f"{''.join(edge for _, edge in edges)}{''.join(nodes)}</svg>"
    )


def tree_dot(
    tree: DraftTree, root_id: int, path: Sequence[int], tokenizer: PreTrainedTokenizerBase, max_nodes: int = 64
) -> str:
    """A tree as a graph in Graphviz's language, for `dot -Tsvg`, `-Tpdf` and others.

    The shade of a node is the probability of the prefix that ends in it, which its tooltip tells; accepted nodes and
    the edges to them are bold. Arguments and errors are those of `tree_text`.
    """
    drawing = Drawing.of(tree, root_id, path, max_nodes)

    def label(token_id: int) -> str:
        text = visible(token_text(token_id, tokenizer))
        # Within quotes Graphviz reads HTML's entities as well as its own escapes.
        for char, escaped in (("&", "&amp;"), ("\\", "\\\\"), ('"', '\\"')):
            text = text.replace(char, escaped)
        return f'label="{text}"'

    lines = [
        "digraph {",
        "  graph [rankdir=LR, ordering=out, fontname=monospace]",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname=monospace, height=0.25, margin=0.06]',
        "  edge [arrowhead=none]",
        f"  root [{label(root_id)}]",
    ]
    nodes = zip(drawing.token_ids, drawing.parents, drawing.probabilities, drawing.accepted, strict=True)
    for node, (token_id, parent, probability, accepted) in enumerate(nodes):
        bold = ', penwidth=3, color="#1a7f37"' if accepted else ""
        shade = f'fillcolor="#2f6feb{round(probability * 160):02x}", tooltip="{probability:.3f}"'
        lines.append(f"  n{node} [{label(token_id)}, {shade}{bold}]")
        lines.append(f"  {'root' if parent < 0 else f'n{parent}'} -> n{node} [{bold.removeprefix(', ')}]")
    if drawing.left_out:
        lines.append(f'  label="{drawing.left_out} less probable nodes not drawn"')
    return "\n".join([*lines, "}", ""])


def _children(parents: Sequence[int]) -> dict[int, list[int]]:
    """The children of each node that has any, in score order."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children


def _rows(parents: Sequence[int]) -> list[int]:
    """A row for each node: the first child's is its parent's, each other's the next free one."""
    children, rows, free = _children(parents), [0] * len(parents), 1

    def place(parent: int, row: int) -> None:
        nonlocal free
        for rank, node in enumerate(children.get(parent, [])):
            if rank:
                row, free = free, free + 1
            rows[node] = row
            place(node, row)

    place(-1, 0)
    return rows


def _quoted(text: str) -> str:
    """Between quotes, on one line, nothing in it that a terminal obeys."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in quoted)
