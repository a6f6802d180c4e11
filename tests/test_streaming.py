"""Streamers get plain decoding's puts, the prompt's included, and their end exactly once, whatever happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AsyncTextIteratorStreamer,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from comparison import Puts, generate, generate_with_trees
from hf_ddtree import DFlashDraftModel
from scripted import prompt_ids

IDS = prompt_ids(10)
BASE: dict[str, Any] = {"inputs": IDS, "max_new_tokens": 30}
EMBEDS = torch.randn(1, 10, 48, generator=torch.Generator().manual_seed(3))
TIMEOUT = 60  # seconds; a streamer without an end would be waited for


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True},
        {"max_new_tokens": 1},
        {"inputs": IDS.int()},
        {"inputs_embeds": EMBEDS, "inputs": None},
        {"inputs": None, "bos_token_id": 7},
        {"return_dict_in_generate": True, "output_scores": True},
        {"repetition_penalty": 1.5, "prefill_chunk_size": 4},
    ],
    ids=["greedy", "sampling", "one token", "int32", "embeddings", "no prompt", "outputs", "chunks"],
)
def test_a_streamer_gets_plain_decodings_puts(
    target: PreTrainedModel, drafter: DFlashDraftModel, options: dict[str, Any]
) -> None:
    mine, theirs = Puts(), Puts()
    expected, _ = generate(target, BASE | options | {"streamer": theirs})
    ids = expected if isinstance(expected, torch.Tensor) else expected.sequences
    text = ids[0].tolist() if "inputs_embeds" not in options else [0] * 10 + ids[0].tolist()
    generate_with_trees(target, drafter, BASE | options | {"streamer": mine}, text)
    assert mine.events == theirs.events
    assert mine.events.count("end") == 1
    assert [len(torch.tensor(values).shape) for _, values in mine.events[:-1]] == [2] + [1] * (len(mine.events) - 2)


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_a_text_streamer_prints_what_it_prints_with_plain_decoding(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
    skip_prompt: bool,
) -> None:
    printed = []
    text = generate(target, BASE)[0][0].tolist()
    for run in (generate, lambda model, options: generate_with_trees(model, drafter, options, text)):
        run(target, BASE | {"streamer": TextStreamer(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)})
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(printed[0].split()) == 30 + 10 * (not skip_prompt)


def test_an_iterator_gives_plain_decodings_pieces(
    target: PreTrainedModel, drafter: DFlashDraftModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    def pieces(**more: Any) -> list[str]:
        streamer = TextIteratorStreamer(tokenizer, timeout=TIMEOUT)
        thread = threading.Thread(target=target.generate, kwargs=BASE | more | {"streamer": streamer})
        thread.start()
        got = list(streamer)
        thread.join()
        return got

    plain = pieces()
    assert pieces(assistant_model=drafter, ddtree=True) == plain
    assert len(plain) > 20


def test_an_asynchronous_iterator_gives_plain_decodings_pieces(
    target: PreTrainedModel, drafter: DFlashDraftModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    async def pieces(**more: Any) -> list[str]:
        streamer = AsyncTextIteratorStreamer(tokenizer, timeout=TIMEOUT)
        call = asyncio.to_thread(target.generate, **(BASE | more | {"streamer": streamer}))
        task = asyncio.create_task(call)
        got = [piece async for piece in streamer]
        await task
        return got

    plain = asyncio.run(pieces())
    assert asyncio.run(pieces(assistant_model=drafter, ddtree=True)) == plain
    assert len(plain) > 20


# -- when something raises -------------------------------------------------------------------------------------------


class Fault(Exception):
    pass


class FailsAt:
    """Raises at a call of a given number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls = 0

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.number:
            raise Fault


class FailingProcessor(FailsAt, LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count()
        return scores


class FailingCriterion(FailsAt, StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.count()
        return torch.tensor([False])


class FailingPut(FailsAt, BaseStreamer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append((value.dtype, value.tolist()))
        self.count()

    def end(self) -> None:
        self.events.append("end")


class FailingForward(FailsAt):
    def __call__(self, module: Any, args: Any) -> None:
        self.count()


Faults = Callable[[], dict[str, Any]]
IN_THE_LOOP: dict[str, Faults] = {
    "processor, first call": lambda: {"logits_processor": [FailingProcessor(1)]},
    "processor, inside a path": lambda: {"logits_processor": [FailingProcessor(6)]},
    "criterion, first call": lambda: {"stopping_criteria": [FailingCriterion(1)]},
    "criterion, inside a path": lambda: {"stopping_criteria": [FailingCriterion(6)]},
    "put of the prompt": lambda: {"streamer": FailingPut(1)},
    "put of the first token": lambda: {"streamer": FailingPut(2)},
    "put inside a path": lambda: {"streamer": FailingPut(7)},
}
BEFORE_THE_LOOP: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 2},
    "two prompts": {"inputs": IDS.repeat(2, 1)},
    "no drafter": {"assistant_model": None},
    "tree options": {"ddtree": {"budget": -1}},
    "no tree options at all": {"ddtree": 0},
    "an array": {"ddtree": torch.tensor([1, 2])},
    "the prompt twice": {"inputs": IDS, "input_ids": IDS},
    "an unknown argument": {"speling": 1},
    "a stop string without a tokenizer": {"stop_strings": "w9"},
    "a length that is full": {"max_new_tokens": None, "max_length": 10},
    "another decoding loop": {"custom_generate": lambda *_, **__: None},
    "an option out of range": {"temperature": -1.0, "do_sample": True},
}


def ends_once(streamer: Any) -> None:
    assert streamer.events.count("end") == 1
    assert streamer.events[-1] == "end"


@pytest.mark.parametrize("fault", IN_THE_LOOP)
def test_a_fault_in_the_loop_ends_the_stream_behind_plain_decodings_puts(
    target: PreTrainedModel, drafter: DFlashDraftModel, fault: str
) -> None:
    text = generate(target, BASE)[0][0].tolist()
    theirs = BASE | {"streamer": Puts()} | IN_THE_LOOP[fault]()
    mine = BASE | {"streamer": Puts()} | IN_THE_LOOP[fault]()
    with pytest.raises(Fault):
        generate(target, theirs)
    with pytest.raises(Fault):
        generate_with_trees(target, drafter, mine, text)
    assert [each for each in mine["streamer"].events if each != "end"] == theirs["streamer"].events
    ends_once(mine["streamer"])


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("whose", ["target", "drafter"])
def test_a_fault_in_a_forward_ends_the_stream(
    target: PreTrainedModel, drafter: DFlashDraftModel, whose: str, number: int
) -> None:
    streamer = Puts()
    handle = {"target": target, "drafter": drafter}[whose].register_forward_pre_hook(FailingForward(number))
    try:
        with pytest.raises(Fault):
            target.generate(**BASE, streamer=streamer, assistant_model=drafter, ddtree=True)
    finally:
        handle.remove()
    ends_once(streamer)


@pytest.mark.parametrize("fault", BEFORE_THE_LOOP)
def test_a_call_that_cannot_begin_ends_the_stream(
    target: PreTrainedModel, drafter: DFlashDraftModel, fault: str
) -> None:
    streamer = Puts()
    options = BASE | {"streamer": streamer, "assistant_model": drafter, "ddtree": True} | BEFORE_THE_LOOP[fault]
    with pytest.raises((ValueError, TypeError)):
        target.generate(**options)
    ends_once(streamer)


def test_a_streamer_that_is_no_keyword_gets_its_end(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    streamer = Puts()
    with pytest.raises(Fault):
        target.generate(IDS, None, [FailingProcessor(2)], None, None, None, drafter, streamer, ddtree=True)
    ends_once(streamer)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interruption_ends_the_stream(
    target: PreTrainedModel, drafter: DFlashDraftModel, kind: type[BaseException]
) -> None:
    class Interrupted(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise kind

    streamer = Puts()
    with pytest.raises(kind):
        target.generate(
            **BASE, streamer=streamer, logits_processor=[Interrupted()], assistant_model=drafter, ddtree=True
        )
    ends_once(streamer)


def test_who_iterates_over_a_stream_is_not_left_waiting_by_an_error(
    target: PreTrainedModel, drafter: DFlashDraftModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            target.generate(
                **BASE,
                streamer=streamer,
                logits_processor=[FailingProcessor(9)],
                assistant_model=drafter,
                ddtree=True,
            )
        except Fault as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    pieces = []
    while not streamer.text_queue.empty():  # an iterator would wait for the end
        pieces.append(streamer.text_queue.get())
    assert errors
    assert pieces[-1] is streamer.stop_signal
    assert len("".join(pieces[:-1]).split()) == 8


def test_a_stream_whose_end_raises_is_ended_once(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    class BadEnd(Puts):
        def end(self) -> None:
            super().end()
            raise Fault

    for more in ({}, {"assistant_model": drafter, "ddtree": True}):
        streamer = BadEnd()
        with pytest.raises(Fault):
            target.generate(**BASE, streamer=streamer, **more)
        ends_once(streamer)


def test_the_first_error_is_the_one_that_is_seen(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    class BadEnd(Puts):
        def end(self) -> None:
            super().end()
            raise RuntimeError("the streamer's own")

    streamer = BadEnd()
    with pytest.raises(BaseException) as caught:  # noqa: PT011 (either may come, the first must be told)
        target.generate(
            **BASE, streamer=streamer, logits_processor=[FailingProcessor(3)], assistant_model=drafter, ddtree=True
        )
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, Fault):
        error = error.__context__
    assert isinstance(error, Fault)
    ends_once(streamer)


def test_plain_calls_are_streamed_as_before(target: PreTrainedModel) -> None:
    streamer = Puts()
    with pytest.raises(Fault):
        target.generate(**BASE, streamer=streamer, logits_processor=[FailingProcessor(3)])
    assert "end" not in streamer.events
