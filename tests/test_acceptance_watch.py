"""A drafter that gains nothing is named once; one that drafts well never is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import PreTrainedModel

from hf_ddtree import DDTreeStats, DFlashDraftModel
from hf_ddtree.acceptance_watch import Acceptance
from scripted import prompt_ids, scripted, tiny_drafter

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}


def warnings_in(log: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in log.messages if "gains nothing" in message]


def test_a_useless_pair_is_named_once_over_calls(
    target: PreTrainedModel, warnings_of_transformers: pytest.LogCaptureFixture
) -> None:
    model, drafter = copy.deepcopy(target), tiny_drafter(target)
    options = GREEDY | {"assistant_model": drafter, "ddtree": {"budget": 7}, "max_new_tokens": 20}
    text = model.generate(prompt_ids(9), **GREEDY)
    with scripted(text[0] * 0, hit=1):  # sure of what never comes
        model.generate(prompt_ids(9), **options)
        assert warnings_in(warnings_of_transformers) == []
        for _ in range(5):
            model.generate(prompt_ids(9), **options)
        (message,) = warnings_in(warnings_of_transformers)
        for cause in ("another target", "tap layers", "chat template", "thinking", "quantized"):
            assert cause in message
        model.generate(prompt_ids(9), **options | {"assistant_model": copy.deepcopy(drafter)} | {"max_new_tokens": 60})
        assert len(warnings_in(warnings_of_transformers)) == 2, "another drafter, another pair"


@pytest.mark.parametrize("budget", [1, 15, "auto"])
def test_a_pair_that_works_is_never_named(
    budget: Any, target: PreTrainedModel, warnings_of_transformers: pytest.LogCaptureFixture
) -> None:
    model, drafter = copy.deepcopy(target), tiny_drafter(target)
    text = model.generate(prompt_ids(9), **GREEDY | {"max_new_tokens": 120})
    with scripted(text, hit=0.5):
        for _ in range(4):
            model.generate(prompt_ids(9), assistant_model=drafter, ddtree={"budget": budget}, **GREEDY)
    assert warnings_in(warnings_of_transformers) == []


def test_single_tokens_are_no_sign(
    target: PreTrainedModel, drafter: DFlashDraftModel, warnings_of_transformers: pytest.LogCaptureFixture
) -> None:
    model = copy.deepcopy(target)
    for options in ({"max_new_tokens": 80}, {"max_new_tokens": 2}):
        for _ in range(40 if options["max_new_tokens"] == 2 else 1):
            budget = 0 if options["max_new_tokens"] == 80 else 7
            model.generate(
                prompt_ids(9), assistant_model=drafter, ddtree={"budget": budget}, do_sample=False, **options
            )
    assert warnings_in(warnings_of_transformers) == []


def call(lengths: list[int], budgets: list[int] | None = None) -> DDTreeStats:
    return DDTreeStats(acceptance_lengths=lengths, budgets=budgets or [15] * len(lengths))


def test_a_stretch_is_judged_by_itself() -> None:
    acceptance = Acceptance()
    assert not acceptance.add(call([4] * 40))
    assert not acceptance.add(call([1] * 20))
    assert acceptance.add(call([1] * 20)), "what went well before does not hide it"
    assert not acceptance.add(call([1] * 200)), "once"


def test_rounds_without_a_draft_and_a_calls_last_do_not_count() -> None:
    acceptance = Acceptance()
    assert not acceptance.add(call([1] * 200, [0] * 200))
    for _ in range(100):
        assert not acceptance.add(call([1]))
    assert not acceptance.add(call([1] * 28 + [2] * 4 + [1])), "a little is accepted"
    assert acceptance.add(call([1] * 33))
