"""Where plain decoding ends a text, trees end it: inside an accepted path, with nothing emitted after it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

from comparison import Puts, Recorder, StopAt, assert_same, generate, generate_with_trees
from hf_ddtree import DFlashDraftModel
from hf_ddtree.compat import CACHE_KEY
from scripted import WORDS, prompt_ids, tiny_target

pytestmark = pytest.mark.usefixtures("each_layers")

PROMPT = 10
IDS = prompt_ids(PROMPT)
BASE: dict[str, Any] = {
    "inputs": IDS,
    "max_new_tokens": 40,
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
PLACES = [0, 1, 2, 4, 8, 9, 12]  # a perfect drafter's rounds end at 0, 8, 16


class EndsWith(StoppingCriteria):
    """Ends the text behind given ids."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([input_ids[0, -len(self.ids) :].tolist() == self.ids])


class Score(StoppingCriteria):
    """Ends the text when the best score of the last token is a given one."""

    def __init__(self, best: float) -> None:
        self.best = best
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.lengths.append(len(scores))
        return torch.tensor([abs(float(scores[-1].max()) - self.best) < 1e-3])


Stop = Callable[[list[int], Any, int], dict[str, Any]]

# Each ends a text behind its new token number `place`.
STOPS: dict[str, Stop] = {
    "eos": lambda new, out, place: {"eos_token_id": new[place]},
    "one of several eos": lambda new, out, place: {"eos_token_id": [2, new[place], 3], "pad_token_id": 0},
    "stop string": lambda new, out, place: {"stop_strings": WORDS[new[place]]},
    "stop string of two tokens": lambda new, out, place: {
        "stop_strings": ["w999", " ".join(WORDS[token] for token in new[max(place - 1, 0) : place + 1])]
    },
    "max_new_tokens": lambda new, out, place: {"max_new_tokens": place + 1},
    "max_length": lambda new, out, place: {"max_new_tokens": None, "max_length": PROMPT + place + 1},
    "criterion on length": lambda new, out, place: {"stopping_criteria": [StopAt(PROMPT + place + 1)]},
    "criterion on ids": lambda new, out, place: {
        "stopping_criteria": StoppingCriteriaList([EndsWith(new[max(place - 2, 0) : place + 1])])
    },
    "criterion on scores": lambda new, out, place: {"stopping_criteria": [Score(float(out.scores[place].max()))]},
    "two criteria": lambda new, out, place: {
        "stopping_criteria": StoppingCriteriaList([StopAt(PROMPT + place + 3), EndsWith([new[place]])]),
        "eos_token_id": 2,
    },
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """Attentions are compared as well."""
    return tiny_target("llama", attn_implementation="eager")


@pytest.fixture(scope="module")
def unstopped(target: PreTrainedModel) -> Any:
    """A text in which no token comes twice: each can end it."""
    return generate(target, BASE | {"no_repeat_ngram_size": 1})[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stop", STOPS)
def test_a_text_ends_where_plain_decoding_ends_it(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    tokenizer: PreTrainedTokenizerFast,
    unstopped: Any,
    stop: str,
    place: int,
) -> None:
    new = unstopped.sequences[0, PROMPT:].tolist()

    def call(streamer: Puts) -> dict[str, Any]:
        passed = {"no_repeat_ngram_size": 1, "tokenizer": tokenizer, "streamer": streamer}
        return BASE | passed | STOPS[stop](new, unstopped, place)

    plain_streamer, streamer = Puts(), Puts()
    expected, _ = generate(target, call(plain_streamer))
    assert expected.sequences.shape[1] == PROMPT + place + 1
    out, _ = generate_with_trees(target, drafter, call(streamer), unstopped.sequences[0].tolist(), hit=1.0)
    assert_same(out, expected)
    assert streamer.events == plain_streamer.events
    assert out.ddtree_stats.acceptance_lengths == [length for length in (min(place, 8), place - 8) if length > 0]


@pytest.mark.parametrize(
    ("options", "new"),
    [
        (lambda: {"max_time": 5.5}, 6),
        (lambda: {"stopping_criteria": [MaxTimeCriteria(11.5)]}, 12),
        (lambda: {"max_time": 9.5, "stopping_criteria": [EndsWith([2])]}, 10),
    ],
)
def test_max_time_is_asked_after_every_token(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    monkeypatch: pytest.MonkeyPatch,
    options: Callable[[], dict[str, Any]],
    new: int,
) -> None:
    """A clock that goes on by one when it is read ends the text inside an accepted path."""
    text = generate(target, BASE)[0].sequences[0].tolist()

    def call() -> dict[str, Any]:
        ticks = itertools.count()
        monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
        return BASE | options()

    expected, _ = generate(target, call())
    out, _ = generate_with_trees(target, drafter, call(), text, hit=1.0)
    assert_same(out, expected)
    assert expected.sequences.shape[1] == PROMPT + new


def test_no_time_is_left_for_anything_but_the_first_token(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    out, _ = generate_with_trees(target, drafter, BASE | {"max_time": 0.0}, [0] * 50)
    assert out.sequences.shape[1] == PROMPT + 1
    assert out.ddtree_stats.rounds == 0


def test_neither_processors_nor_criteria_are_called_behind_the_end(
    target: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    def call() -> tuple[dict[str, Any], Recorder, StopAt]:
        processor, criterion = Recorder(), StopAt(PROMPT + 14)
        return BASE | {"logits_processor": [processor], "stopping_criteria": [criterion]}, processor, criterion

    plain_call, plain_processor, plain_criterion = call()
    expected, _ = generate(target, plain_call)
    for hit in (1.0, 0.7):
        tree_call, processor, criterion = call()
        out, _ = generate_with_trees(
            target, drafter, tree_call, [*expected.sequences[0].tolist(), *range(20, 40)], hit
        )
        assert_same(out, expected)
        assert processor.prefixes == plain_processor.prefixes
        assert criterion.calls == plain_criterion.calls
        assert len(criterion.calls) == 14


@pytest.mark.parametrize("scores_are_kept", [True, False])
def test_criteria_get_the_scores_that_plain_decoding_gives_them(
    target: PreTrainedModel, drafter: DFlashDraftModel, scores_are_kept: bool
) -> None:
    class Keeps(StoppingCriteria):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.calls.append(scores)
            return torch.tensor([False])

    mine, theirs = Keeps(), Keeps()
    options = BASE | {"output_scores": scores_are_kept, "max_new_tokens": 12}
    expected, _ = generate(target, options | {"stopping_criteria": [theirs]})
    text = expected.sequences[0].tolist()
    generate_with_trees(target, drafter, options | {"stopping_criteria": [mine]}, text)
    assert len(mine.calls) == 12
    assert_same(tuple(mine.calls), tuple(theirs.calls))


def test_an_end_inside_a_path_leaves_a_cache_for_the_next_turn(
    target: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    text = generate(target, BASE)[0].sequences[0].tolist()
    first = BASE | {"eos_token_id": text[PROMPT + 4], "pad_token_id": 0}
    expected, _ = generate(target, first)
    out, _ = generate_with_trees(target, drafter, first, text, hit=1.0)
    ids = torch.cat([expected.sequences, prompt_ids(5, seed=2)], dim=1)
    assert ids.shape[1] < len(text)
    again, _ = generate(target, BASE | {"inputs": ids, CACHE_KEY: expected[CACHE_KEY]})
    mine, _ = generate_with_trees(
        target, drafter, BASE | {"inputs": ids, CACHE_KEY: out[CACHE_KEY]}, again.sequences[0].tolist()
    )
    assert_same(mine, again)


def test_the_default_length_is_plain_decodings(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    options = BASE | {"max_new_tokens": None}
    expected, _ = generate(target, options)
    out, _ = generate_with_trees(target, drafter, options, expected.sequences[0].tolist())
    assert_same(out, expected)


def test_a_prompt_that_fills_the_length_raises_what_plain_decoding_raises(
    target: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    options = BASE | {"max_new_tokens": None, "max_length": PROMPT}
    errors = []
    for more in ({}, {"assistant_model": drafter, "ddtree": True}):
        with pytest.raises(ValueError, match="max_length") as caught:
            target.generate(**options, **more)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
