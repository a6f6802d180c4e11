"""A whole generation as one HTML page."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..outputs import DDTreeStats, RoundTree
from .token_text import printable, text_pieces
from .trees import GAP, MARGIN, NODE, ROW, STYLE, Drawing, Label

_COLOURS = 4  # that rounds take in turn


def generation_html(
    prompt_ids: Sequence[int],
    new_ids: Sequence[int],
    stats: DDTreeStats,
    tokenizer: PreTrainedTokenizerBase,
    *,
    title: str = "Generation",
    max_nodes: int = 64,
) -> str:
    """Show a generation as a page of HTML that needs nothing but itself.

    The tokens of a round share a colour; the last of them, the target's own, is underlined. A round that the pointer
    or the keyboard's focus is on shows its tree; a click keeps it.

    Args:
        prompt_ids: ids of the prompt.
        new_ids: ids of the generated tokens.
        stats: `ddtree_stats` of the call, which had `record_trees=True`.
        tokenizer: makes tokens readable.
        title: the page's title.
        max_nodes: how many nodes of a tree to draw at most, best first, besides the accepted ones.

    Raises:
        ValueError: trees were not recorded, or the new tokens are not those of the rounds.
    """
    prompt_ids, new_ids = list(map(int, prompt_ids)), list(map(int, new_ids))
    if len(stats.trees) != stats.rounds:
        raise ValueError("the statistics have no trees: generate with ddtree=DDTreeConfig(record_trees=True)")
    if len(new_ids) != sum(stats.acceptance_lengths) + 1:
        raise ValueError(
            f"{len(new_ids)} new tokens are not the {sum(stats.acceptance_lengths) + 1} of the prompt's forward and "
            f"{stats.rounds} rounds: pass the ids behind the prompt, sequences[0, prompt_length:]"
        )
    pieces = text_pieces(prompt_ids, new_ids, tokenizer)
    spans = [_span("first", pieces[:1])]
    end = 1
    for index, length in enumerate(stats.acceptance_lengths):
        begin, end = end, end + length
        spans.append(_span(f"round c{index % _COLOURS}", pieces[begin:end]))

    data = json.dumps(_data(new_ids, stats, tokenizer, max_nodes), ensure_ascii=False, separators=(",", ":"))
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_resource("page.html")).substitute(
        title=escape(printable(title)),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=STYLE + _resource("page.css"),
        script=script,
        facts=_facts(stats, len(new_ids)),
        prompt=escape(printable(tokenizer.decode(prompt_ids))),
        text="".join(spans),
        data=data.replace("<", "\\u003c"),  # nothing in it may end the script element
    )


def _facts(stats: DDTreeStats, tokens: int) -> str:
    facts = {
        "rounds": f"{stats.rounds:,}",
        "new tokens": f"{tokens:,}",
        "mean acceptance length": f"{stats.mean_acceptance_length:.2f}",
        "nodes a round": f"{sum(stats.node_counts) / max(stats.rounds, 1):.1f}",
        "layers": str(stats.layers),
        "compiled": str(stats.compiled),
        "launch": str(stats.launch),
    }
    return "".join(f"<div><dt>{name}</dt><dd>{escape(printable(fact))}</dd></div>" for name, fact in facts.items())


def _span(kind: str, pieces: Sequence[str]) -> str:
    """The tokens of a round, which has something to point at also where they add nothing or only a line's end."""
    if not any(pieces):
        kind += " silent"
    tokens = "".join(f"<span>{escape(printable(piece))}</span>" for piece in pieces)
    return f'<span class="{kind}" tabindex="0">{tokens}</span>'.replace("\n", "<i></i>\n")


def _data(
    new_ids: Sequence[int], stats: DDTreeStats, tokenizer: PreTrainedTokenizerBase, max_nodes: int
) -> dict[str, Any]:
    """What the page's script draws trees from: each token's label once, each round's drawing as lists of numbers."""
    labels = {token_id: Label.of(token_id, tokenizer) for token_id in new_ids}

    def drawing(entry: RoundTree, last: int) -> dict[str, Any]:
        tree = Drawing.of(entry.tree, entry.root, entry.path, max_nodes)
        for token_id in tree.token_ids:
            if token_id not in labels:
                labels[token_id] = Label.of(token_id, tokenizer)
        return {
            "root": entry.root,
            "ids": tree.token_ids,
            "parents": tree.parents,
            "depths": tree.depths,
            "rows": tree.rows,
            "shades": [round(1000 * probability) for probability in tree.probabilities],
            "accepted": [node for node, accepted in enumerate(tree.accepted) if accepted],
            "columns": tree.columns([labels[token_id].width for token_id in [entry.root, *tree.token_ids]]),
            "leftOut": tree.left_out,
            "last": last,
        }

    ends, end = [], 0
    for length in stats.acceptance_lengths:
        end += length
        ends.append(end)
    rounds = [drawing(entry, new_ids[end]) for entry, end in zip(stats.trees, ends, strict=True)]
    sizes = {"node": NODE, "row": ROW, "gap": GAP, "margin": MARGIN}
    return {"sizes": sizes, "labels": labels, "rounds": rounds}


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
