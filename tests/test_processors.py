"""Logits processors see plain decoding's calls: each emitted token's prefix, once, in order, and no other."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from comparison import (
    Puts,
    Recorder,
    StopAt,
    assert_same,
    assert_several_tokens_a_round,
    generate,
    generate_with_trees,
)
from hf_ddtree import DFlashDraftModel
from hf_ddtree.compat import CACHE_KEY
from scripted import VOCAB, prompt_ids

pytestmark = pytest.mark.usefixtures("each_layers")

BASE: dict[str, Any] = {
    "inputs": prompt_ids(10),
    "max_new_tokens": 40,
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
}
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
both_ways = pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampling"])


@both_ways
def test_processors_criteria_and_streamer_are_called_as_by_plain_decoding(
    target: PreTrainedModel, drafter: DFlashDraftModel, options: dict[str, Any]
) -> None:
    class Logged(list[str]):
        """All calls of one run, in order."""

        def watch(self, each: Any, method: str) -> Any:
            original = getattr(type(each), method)

            class Watched(type(each)):  # type: ignore[misc]
                pass

            def call(watched: Any, *args: Any, **kwargs: Any) -> Any:
                self.append(f"{type(each).__name__}.{method}")
                return original(watched, *args, **kwargs)

            setattr(Watched, method, call)
            each.__class__ = Watched
            return each

    def call() -> tuple[dict[str, Any], Logged, Recorder, StopAt, Puts]:
        log = Logged()
        processor, criterion = log.watch(Recorder(), "__call__"), log.watch(StopAt(37), "__call__")
        streamer = log.watch(log.watch(Puts(), "put"), "end")
        passed: dict[str, Any] = {
            "logits_processor": LogitsProcessorList([processor]),
            "stopping_criteria": StoppingCriteriaList([criterion]),
            "streamer": streamer,
        }
        return BASE | options | passed, log, processor, criterion, streamer

    plain_call, plain_log, plain_processor, plain_criterion, plain_streamer = call()
    expected, _ = generate(target, plain_call)
    tree_call, log, processor, criterion, streamer = call()
    out, _ = generate_with_trees(target, drafter, tree_call, expected.sequences[0].tolist())
    assert_same(out, expected)
    assert_several_tokens_a_round(out.ddtree_stats)
    assert log == plain_log
    assert criterion.calls == plain_criterion.calls
    assert streamer.events == plain_streamer.events
    assert processor.prefixes == plain_processor.prefixes
    assert_same(tuple(processor.scores), tuple(plain_processor.scores))
    assert expected.sequences.shape[1] == 37


class InPlace(LogitsProcessor):
    """Writes into the scores it got: plain decoding's raw logits change with them."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, input_ids[0, -3:]] -= 9.0
        return scores


class KeepsReferences(LogitsProcessor):
    """Keeps the ids themselves, and allows no last token of any of them again."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids)
        last = torch.tensor([int(ids[0, -1]) for ids in self.seen])
        return scores.index_fill(1, last, float("-inf"))


class AsksTheTarget(LogitsProcessor):
    """Runs the target itself, with a cache of its own, as guidance does."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache: Any = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        given = {} if self.cache is None else {CACHE_KEY: self.cache}
        output = self.model(input_ids[:, -1:], use_cache=True, **given)
        self.cache = output[CACHE_KEY]
        return scores - 0.3 * output.logits[:, -1]


class Random(LogitsProcessor):
    """Draws from the random state that sampling draws from."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 3.0 * torch.randn(scores.shape)


@both_ways
@pytest.mark.parametrize("kind", [InPlace, KeepsReferences, AsksTheTarget, Random])
def test_a_users_processor_gives_plain_decodings_text(
    target: PreTrainedModel, drafter: DFlashDraftModel, kind: type[LogitsProcessor], options: dict[str, Any]
) -> None:
    def call() -> dict[str, Any]:
        return BASE | options | {"logits_processor": [kind(target) if kind is AsksTheTarget else kind()]}

    expected, state = generate(target, call())
    out, after = generate_with_trees(target, drafter, call(), expected.sequences[0].tolist())
    assert_same(out, expected)
    assert torch.equal(after, state)
    assert_several_tokens_a_round(out.ddtree_stats)
    assert expected.sequences.tolist() != generate(target, BASE | options)[0].sequences.tolist()


def test_a_processor_that_was_used_before_goes_on_counting(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    used, used_with_trees = Recorder(), Recorder()
    texts = []
    for _ in range(2):
        expected, _ = generate(target, BASE | {"logits_processor": [used]})
        text = expected.sequences[0].tolist()
        out, _ = generate_with_trees(target, drafter, BASE | {"logits_processor": [used_with_trees]}, text)
        assert_same(out, expected)
        texts.append(text)
    assert texts[0] != texts[1]


# -- a grammar -------------------------------------------------------------------------------------------------------

EOS = 2
PIECES = [
    "<pad>",
    "<s>",
    "</s>",
    *map(chr, range(32, 127)),
    '{"',
    '":',
    '",',
    '"}',
    '"]',
    "[]",
    "name",
    "size",
    "tags",
]
PIECES += [f"{i:02}" for i in range(VOCAB - len(PIECES))]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}


@both_ways
@pytest.mark.parametrize("seed", range(3))
def test_a_grammar_gives_plain_decodings_json(
    target: PreTrainedModel, drafter: DFlashDraftModel, options: dict[str, Any], seed: int
) -> None:
    """Its state follows each emitted token: a call for a rejected one would break it."""
    xgrammar = pytest.importorskip("xgrammar", reason="no xgrammar: pip install --no-deps -r requirements-data.txt")
    from xgrammar.contrib.hf import LogitsProcessor as GrammarProcessor

    info = xgrammar.TokenizerInfo(PIECES, vocab_type=xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[EOS])
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)

    def call() -> dict[str, Any]:
        ids = prompt_ids(10, seed=seed)
        passed = {"inputs": ids, "max_new_tokens": 120, "eos_token_id": EOS, "pad_token_id": 0}
        return BASE | options | passed | {"logits_processor": [GrammarProcessor(grammar)]}

    expected, state = generate(target, call())
    out, after = generate_with_trees(target, drafter, call(), expected.sequences[0].tolist())
    assert_same(out, expected)
    assert torch.equal(after, state)
    *ids, last = out.sequences[0, 10:].tolist()
    assert last == EOS
    value = json.loads("".join(PIECES[i] for i in ids))
    assert value.keys() == SCHEMA["properties"].keys()
    assert 0 <= value["size"] <= 999 and set(value["tags"]) <= {"red", "green"}
    assert_several_tokens_a_round(out.ddtree_stats)
