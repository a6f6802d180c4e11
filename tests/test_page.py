"""A generation as a page: what is in it, and what a browser makes of it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from browser import browser
from comparison import generate, generate_with_trees
from hf_ddtree import DDTreeConfig, DDTreeStats, DFlashDraftModel
from hf_ddtree.draft_tree import DraftTree, best_first_tree
from hf_ddtree.outputs import Choice
from hf_ddtree.visualize import generation_html
from scripted import prompt_ids

BAD = "</script><script>document.title = 'ran'</script><img src=x onerror=alert(1)>"
WORDS = ["one", " two", "\n", BAD, ' "quoted" &amp; $title', "\0\x1b\u202e\ud800", "中", "\u2028<!--", "long" * 30, ""]
TOKENIZER: Any = SimpleNamespace(decode=lambda ids: "".join(WORDS[i] for i in ids))


def chain(*token_ids: int) -> DraftTree:
    depths = torch.arange(1, len(token_ids) + 1)[None]
    return DraftTree(torch.tensor([token_ids]).long(), depths - 2, depths, -0.1 * depths)


def record(*rounds: tuple[DraftTree, list[int]]) -> DDTreeStats:
    """Statistics of rounds that begin with token 0."""
    stats = DDTreeStats(launch=Choice("operations", "<b>because</b>"))
    for tree, path in rounds:
        nodes = tree.token_ids.shape[1]
        stats.add_round(nodes, torch.tensor([[0]]), tree, [0, *(node + 1 for node in path)], keep_tree=True)
    return stats


class Parsed(HTMLParser):
    """The page's spans as lists of their tokens' texts, its scripts and its other text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.spans: list[list[str]] = []
        self.scripts: list[str] = []
        self.depth = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag == "span" and self.depth == 0 and "tabindex" in dict(attrs):
            self.spans.append([])
            self.depth = 1
        elif tag == "span" and self.depth:
            self.spans[-1].append("")
            self.depth = 2

    def handle_endtag(self, tag: str) -> None:
        if tag == "span" and self.depth:
            self.depth -= 1

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data
        elif self.depth == 2:
            self.spans[-1][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def nasty_page() -> str:
    """Six rounds: with a branch that is not accepted, without nodes, without text, and with a token for a script."""
    branch = best_first_tree(torch.tensor([[[3, 1], [4, 5]]]), torch.tensor([[[-0.2, -2.0], [-0.3, -3.0]]]), 6)
    paths = [node for node in range(6) if branch.token_ids[0, node] in (3, 4)][:2]
    stats = record(
        (branch.pad(9), paths), (chain(), []), (chain(2, 6), [0]), (chain(9), [0]), (chain(4, 5, 6), [0, 1, 2]),
        (chain(8), []),
    )  # fmt: skip
    new_ids = [0, *(3, 4, 1), *(7,), *(2, 2), *(9, 9), *(4, 5, 6, 3), *(8,)]
    return generation_html([0, 3], new_ids, stats, TOKENIZER, title=f"{BAD} $text")


def test_the_text_stands_round_by_round() -> None:
    page = Parsed(nasty_page())
    assert page.spans == [
        ["one"],
        [BAD, WORDS[4], " two"],
        ["\u2028<!--"],
        ["\n", "\n"],
        ["", ""],
        [WORDS[4], "␀␛[U+202E][U+D800]", "中", BAD],
        ["long" * 30],
    ]
    classes = [attributes["class"] for tag, attributes in page.tags if tag == "span" and "tabindex" in attributes]
    assert classes == ["first", "round c0", "round c1", "round c2", "round c3 silent", "round c0", "round c1"]


def test_tokens_are_no_markup() -> None:
    html = nasty_page()
    page = Parsed(html)
    assert sum(tag == "script" for tag, _ in page.tags) == len(re.findall("<script", html)) == 2
    assert not any(tag in ("img", "b", "link") for tag, _ in page.tags)
    html.encode()  # no half of a surrogate pair


def test_nothing_is_loaded_from_elsewhere() -> None:
    html = nasty_page()
    page = Parsed(html)
    assert not any({"src", "href"} & attributes.keys() for _, attributes in page.tags)
    assert set(re.findall(r"https?://[^\"]*", html)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "default-src 'none'" in html


def test_trees_are_in_the_data() -> None:
    rounds = Parsed(nasty_page()).data["rounds"]
    assert [len(each["ids"]) for each in rounds] == [6, 0, 2, 1, 3, 1]  # no padding
    assert [[each["ids"][node] for node in each["accepted"]] for each in rounds] == [
        [3, 4],
        [],
        [2],
        [9],
        [4, 5, 6],
        [],
    ]
    assert [each["last"] for each in rounds] == [1, 7, 2, 9, 3, 8]


def test_large_trees_are_cut() -> None:
    tree = best_first_tree(torch.arange(8).expand(1, 3, 8), torch.arange(0, -8, -1.0).expand(1, 3, 8), 300)
    last = tree.token_ids.shape[1] - 1
    path = [last]
    while (parent := int(tree.parents[0, path[0]])) >= 0:
        path.insert(0, parent)
    stats = record((tree, path))
    new_ids = [0, *tree.token_ids[0, path].tolist(), 1]
    [drawn] = Parsed(generation_html([], new_ids, stats, TOKENIZER, max_nodes=10)).data["rounds"]
    assert len(drawn["accepted"]) == len(path)
    assert len(drawn["ids"]) + drawn["leftOut"] == last + 1
    assert 10 < len(drawn["ids"]) <= 10 + len(path)


def test_a_generation_without_rounds() -> None:
    page = Parsed(generation_html([0], [1], DDTreeStats(), TOKENIZER))
    assert page.spans == [[" two"]]
    assert page.data["rounds"] == []


def test_missing_trees_and_other_tokens_are_refused() -> None:
    stats = record((chain(1), [0]))
    with pytest.raises(ValueError, match="2 new tokens are not the 3"):
        generation_html([0], [0, 1], stats, TOKENIZER)
    stats.trees.clear()
    with pytest.raises(ValueError, match="record_trees=True"):
        generation_html([0], [0, 1, 1], stats, TOKENIZER)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "temperature": 1.4, "top_k": 0}])
@pytest.mark.parametrize("config", [{"tree": "best_first"}, {"tree": "chain"}, {"budget": 0}])
def test_pages_of_generations(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    tokenizer: PreTrainedTokenizerFast,
    config: dict[str, Any],
    options: dict[str, Any],
) -> None:
    options = options | {"inputs": prompt_ids(10), "max_new_tokens": 30, "return_dict_in_generate": True}
    expected, _ = generate(target, options)
    text = expected.sequences[0].tolist()
    out, _ = generate_with_trees(
        target, drafter, options, text, config=DDTreeConfig(**({"budget": 15} | config), record_trees=True)
    )
    page = Parsed(generation_html(text[:10], text[10:], out.ddtree_stats, tokenizer))
    assert [len(span) for span in page.spans] == [1, *out.ddtree_stats.acceptance_lengths]
    assert "".join(token for span in page.spans for token in span).split() == tokenizer.decode(text[10:]).split()
    assert len(page.data["rounds"]) == out.ddtree_stats.rounds


def test_a_browser_shows_the_tree_of_the_round_that_is_pointed_at_or_focused(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(nasty_page(), encoding="utf-8")
    labels = "Array.from(document.querySelectorAll('#tree text'), e => e.textContent)"
    with browser() as page:
        page.open(file)
        assert page.value("caption.textContent").startswith("Round 1 of 6: 6 nodes, 2 accepted, then the target's own")

        page.point_at("document.querySelectorAll('.round')[4]")
        assert page.value("caption.textContent").startswith("Round 5 of 6: 3 nodes, 3 accepted")
        assert page.value(labels)[::3] == ["one", "中"]
        assert page.value("document.querySelectorAll('#tree .ddtree-node.ddtree-accepted').length") == 3
        page.point_at("document.querySelectorAll('.round')[3]")  # it adds nothing to the text
        assert page.value("caption.textContent").startswith("Round 4 of 6: 1 nodes, 1 accepted")
        page.point_at("document.querySelectorAll('.round')[1]", click=True)
        assert page.value(labels) == ["one"]
        page.point_at("document.querySelector('.first')")
        assert page.value("document.querySelector('#tree svg')") is None
        page.point_at("document.querySelector('h1')")  # back to the one that was clicked on
        assert page.value("caption.textContent").startswith("Round 2 of 6: no draft")

        page.press("ArrowRight", 39)
        assert page.value("caption.textContent").startswith("Round 3 of 6")
        page.press("Tab", 9)
        assert page.value("caption.textContent").startswith("Round 4 of 6")
        for _ in range(9):
            page.press("ArrowLeft", 37)
        assert page.value("document.activeElement.className") == "first shown"
        assert page.value("caption.textContent").startswith("The first token")

        page.point_at("document.querySelectorAll('.round')[0]")
        titles = page.value("Array.from(document.querySelectorAll('#tree title'), e => e.textContent)")
        assert f"{BAD.replace(' ', '␣')} · probability 0.819, accepted" in titles
        assert page.value("document.title") == f"{BAD} $text"  # no token's script has run
        assert page.value("document.scripts.length") == 2
        assert page.value("document.querySelectorAll('img').length") == 0
        for width in (1200, 320):
            page.call("Emulation.setDeviceMetricsOverride", width=width, height=600, deviceScaleFactor=1, mobile=False)
            assert page.value("[document.documentElement, document.querySelector('main')].every("
                              "e => e.scrollWidth <= e.clientWidth)"), width  # fmt: skip
        assert page.faults == []
