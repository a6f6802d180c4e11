"""Trees as text, SVG and Graphviz, and tokens as text."""

from __future__ import annotations

import html
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from hf_ddtree.draft_tree import DraftTree
from hf_ddtree.visualize import tree_dot, tree_svg, tree_text
from hf_ddtree.visualize.token_text import cells, clipped, printable, text_pieces, token_text, visible

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


@pytest.mark.parametrize("draw", [tree_text, tree_svg, tree_dot])
@pytest.mark.parametrize("path", [[6], [-1]])
def test_path_outside_the_tree_is_refused(draw: Callable[..., str], path: list[int]) -> None:
    with pytest.raises(ValueError, match="path"):
        draw(TREE, 0, path, TOKENIZER)


@pytest.mark.parametrize("draw", [tree_text, tree_svg, tree_dot])
def test_several_sequences_are_refused(draw: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match="one sequence"):
        draw(DraftTree(*(field.expand(2, -1) for field in TREE)), 0, [], TOKENIZER)


def test_text_has_nothing_that_a_terminal_obeys() -> None:
    tokenizer: Any = SimpleNamespace(decode=lambda ids: "\x1b[31m\x9b\u202e" * len(ids))
    assert tree_text(make_tree([(0, -1, 1, 0.5)]).first(0), 0, [], tokenizer) == r'"\u001b[31m\u009b\u202e"'


SVG = "{http://www.w3.org/2000/svg}"
NASTY = [
    "</text><script>alert(1)</script>",
    '"&lt;\\N',
    "\n\\n\\",
    " \t\0",
    "\u202eabc\ud800",
    "長い" * 20,
    "'&amp;\\",
]


def nodes_of(svg: str) -> list[ElementTree.Element]:
    """The groups of an SVG's nodes, the root first; those of its text that name what was accepted are checked."""
    groups = ElementTree.fromstring(svg).findall(f"{SVG}g")
    for group in groups:
        assert ("accepted" in group.findtext(f"{SVG}title", "")) == ("ddtree-accepted" in group.get("class", ""))
    return groups


def test_svg_shades_by_probability_and_marks_the_accepted_path() -> None:
    svg = tree_svg(TREE.pad(9), 0, [2, 4], TOKENIZER)
    nodes = nodes_of(svg)
    assert [node.findtext(f"{SVG}text") for node in nodes] == ["The", "␣cat", "␣sat", "␣dog", "↵", '␣"a"', "␣ran"]
    rects = [node.find(f"{SVG}rect") for node in nodes]
    assert [float(rect.get("fill-opacity")) for rect in rects] == [0, 0.6, 0.5, 0.3, 0.25, 0.2, 0.1]
    assert [index for index, node in enumerate(nodes) if "ddtree-accepted" in node.get("class")] == [3, 5]
    edges = ElementTree.fromstring(svg).findall(f"{SVG}path")
    assert len(edges) == 6
    assert ["ddtree-accepted" in edge.get("class") for edge in edges] == [False] * 4 + [True] * 2  # on top


def test_svg_nodes_stand_behind_their_parents_and_apart() -> None:
    image = ElementTree.fromstring(tree_svg(TREE, 0, [], TOKENIZER))
    boxes = [{key: float(rect.get(key)) for key in ("x", "y", "width", "height")} for rect in image.iter(f"{SVG}rect")]
    for node, parent in enumerate(TREE.parents[0].tolist(), start=1):
        assert boxes[node]["x"] > boxes[parent + 1]["x"] + boxes[parent + 1]["width"]
        assert boxes[node]["y"] >= boxes[parent + 1]["y"]
    assert [box["y"] for box in boxes[:3]] == [boxes[0]["y"]] * 3  # the most probable chain is a straight line
    places = {(box["x"], box["y"]) for box in boxes}
    assert len(places) == 7
    assert len({box["y"] for box in boxes}) == 3  # one row for each leaf
    for box in boxes:
        assert 0 <= box["x"] <= box["x"] + box["width"] <= float(image.get("width"))
        assert 0 <= box["y"] <= box["y"] + box["height"] <= float(image.get("height"))


def nasty(draw: Callable[..., str], **options: Any) -> str:
    tokenizer: Any = SimpleNamespace(decode=lambda ids: "".join(NASTY[i] for i in ids))
    chain = make_tree([(i, i - 2, i, 0.9**i) for i in range(1, len(NASTY))])
    return draw(chain, 0, [0], tokenizer, **options)


def test_svg_escapes_tokens() -> None:
    nodes = nodes_of(nasty(tree_svg))
    labels = [node.findtext(f"{SVG}text") for node in nodes]
    assert labels[1:5] == [r'"&lt;\N', "↵\\n\\", "␣⇥␀", "[U+202E]abc[U+D800]"[:17] + "…"]
    assert labels[5] == "長い" * 4 + "…"
    assert [node.findtext(f"{SVG}title").split(" · ")[0] for node in nodes] == [visible(text) for text in NASTY]


def test_nodes_left_out_are_said() -> None:
    assert "4 less probable nodes not drawn" in nasty(tree_svg, max_nodes=2)
    assert "4 less probable nodes not drawn" in nasty(tree_dot, max_nodes=2)
    assert len(nodes_of(nasty(tree_svg, max_nodes=2))) == 3
    assert "not drawn" not in nasty(tree_svg) + nasty(tree_dot)


@pytest.mark.parametrize("draw", [tree_svg, tree_dot])
def test_a_tree_without_nodes_is_its_root(draw: Callable[..., str]) -> None:
    empty = TREE.first(0)
    assert draw(empty, 0, [], TOKENIZER) == draw(empty.pad(3), 0, [], TOKENIZER)
    assert "The" in draw(empty, 0, [], TOKENIZER)


def test_dot_escapes_tokens() -> None:
    """As Graphviz reads them: within quotes its own escapes, and HTML's entities."""
    labels = re.findall(r'^  (?:root|n\d+) \[label="((?:[^"\\]|\\.)*)"', nasty(tree_dot), re.M)
    assert [html.unescape(re.sub(r"\\(.)", r"\1", label)) for label in labels] == [visible(text) for text in NASTY]


def test_dot_draws_the_tree() -> None:
    source = tree_dot(TREE, 0, [2, 4], TOKENIZER)
    edges = re.findall(r"^  (\w+) -> (\w+)( \[penwidth)?", source, re.M)
    assert [edge[:2] for edge in edges] == [
        ("root", "n0"), ("n0", "n1"), ("root", "n2"), ("n1", "n3"), ("n2", "n4"), ("n0", "n5"),
    ]  # fmt: skip
    assert [bool(edge[2]) for edge in edges] == [False, False, True, False, True, False]


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_shows_what_tokens_say() -> None:
    out = subprocess.run(["dot", "-Tsvg"], input=nasty(tree_dot), capture_output=True, check=True, encoding="utf-8")
    assert not out.stderr
    texts = [element.text for element in ElementTree.fromstring(out.stdout).iter(f"{SVG}text")]
    assert sorted(text.replace("\xa0", " ") for text in texts) == sorted(visible(text) for text in NASTY)


def byte_level() -> PreTrainedTokenizerFast:
    """A token for each byte, and one for "中" and half of another character."""
    marks = sorted(ByteLevel.alphabet())
    tokens = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("中中")[0][0]
    merged = [tokens[:2], tokens[:3], tokens[3:5], tokens[:5]]
    merges = [(tokens[0], tokens[1]), (tokens[:2], tokens[2]), (tokens[:3], tokens[3:5])]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*marks, *merged]))}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_fallback() -> PreTrainedTokenizerFast:
    """SentencePiece's way, as Llama and Gemma have it."""
    tokens = ["▁", "a", "b", "▁a", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


TEXTS = ["ab a", "中中中 a", "👩\u200d👧 é中", "a" * 9, " a  b", "\n\t<script>"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(make: Callable[[], PreTrainedTokenizerFast], text: str) -> None:
    tokenizer = make()
    mark = " " if make is byte_level else "▁"
    ids = tokenizer(text.replace(" ", mark), add_special_tokens=False).input_ids
    whole = tokenizer.decode(ids)
    assert whole == (text if make is byte_level else text.removeprefix(" "))
    for length in range(len(ids)):
        context, new = ids[:length], ids[length:]
        begun = tokenizer.decode(context)
        if begun.endswith("\ufffd"):
            continue  # a prompt ends with a character
        pieces = text_pieces(context, new, tokenizer)
        assert len(pieces) == len(new)
        assert begun + "".join(pieces) == whole
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_the_last_of_its_tokens() -> None:
    tokenizer = byte_level()
    ids = tokenizer("é👧x").input_ids
    assert text_pieces([], ids, tokenizer) == ["", "é", "", "", "", "👧", "x"]
    assert text_pieces([], ids[:4], tokenizer) == ["", "é", "", "\ufffd"]
    broken = tokenizer("é").input_ids[:1]
    assert "".join(text_pieces([], [*broken * 5, *ids], tokenizer)) == "\ufffd" * 5 + "é👧x"


def test_tokens_keep_their_space_and_tell_their_bytes() -> None:
    tokenizer = byte_fallback()
    texts = [token_text(tokenizer.convert_tokens_to_ids(token), tokenizer) for token in ("▁a", "a", "▁", "<0xE4>")]
    assert texts == [" a", "a", " ", r"\xe4"]
    tokenizer = byte_level()
    assert token_text(len(tokenizer) - 1, tokenizer) == r"中\xe4\xb8"
    assert token_text(tokenizer("ÿ").input_ids[1], tokenizer) == r"\xbf"


def test_marks_stand_for_what_cannot_be_seen() -> None:
    text = "a b\n\t\r\0\x7f\x85\xa0\u200b\u202e\u2028\ud800\uffff中👧"
    marks = "a␣b↵⇥␍␀␡[U+0085][U+00A0][U+200B][U+202E][U+2028][U+D800][U+FFFF]中👧"
    assert visible(text) == marks
    assert printable(text) == "a b\n\t␍␀␡[U+0085]\xa0\u200b[U+202E]\u2028[U+D800][U+FFFF]中👧"
    assert cells("a中e\u0301") == 4
    assert [clipped("中中中", most) for most in (6, 5, 4)] == ["中中中", "中中…", "中…"]
