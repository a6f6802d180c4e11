"""Adapters, compiled models, copies, threads and interruptions leave text and target as plain decoding does."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.overrides import TorchFunctionMode
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_ddtree import DFlashDraftModel, install, release_buffers
from hf_ddtree.verifier import FeatureTaps
from scripted import VOCAB, prompt_ids, scripted, tiny_drafter, tiny_target
from test_inputs import GREEDY, SAMPLING, exact

STATE = "_hf_ddtree_state"


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_target("llama")


@pytest.fixture
def drafter() -> DFlashDraftModel:
    return tiny_drafter(tiny_target("llama"))


@contextlib.contextmanager
def assert_no_forward(model: PreTrainedModel) -> Iterator[None]:
    ran: list[Any] = []
    hook = model.register_forward_pre_hook(lambda *args: ran.append(args))
    yield
    hook.remove()
    assert not ran


def text_of(model: Any, **options: Any) -> list[int]:
    return model.generate(prompt_ids(8), max_new_tokens=30, do_sample=False, **options)[0].tolist()


# -- adapters --------------------------------------------------------------------------------------------------------


def lora(target: PreTrainedModel, seed: int = 0, **options: Any) -> PeftModel:
    """An adapter that changes the text: peft's own start is an adapter that does nothing."""
    options = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]} | options
    model = get_peft_model(target, LoraConfig(task_type="CAUSAL_LM", **options))
    fill(model, "default", seed)
    return model.eval()


def fill(model: PeftModel, adapter: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if adapter in name and ("lora_" in name or "modules_to_save" in name):
            weight.data = torch.randn(weight.shape, generator=generator) * 0.3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"lora_dropout": 0.5},
        {"use_dora": True},
    ],
    ids=["some", "all", "ends", "saved", "dropout", "dora"],
)
def test_a_model_with_lora(target: PreTrainedModel, drafter: DFlashDraftModel, options: dict[str, Any]) -> None:
    base = text_of(target)
    model = lora(target, **options)
    assert exact(model, drafter, prompt_ids(8)).sequences[0].tolist() != base


def test_sampling_from_a_model_with_lora(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    model = lora(target)
    exact(model, drafter, prompt_ids(8), **SAMPLING)
    exact(model.base_model.model, drafter, prompt_ids(8), **SAMPLING)


def test_a_lora_that_is_activated_in_the_prompt_is_refused(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    """It counts the rows to adapt from a forward's end."""
    ids = prompt_ids(8)
    model = lora(target, alora_invocation_tokens=ids[0, 5:7].tolist())
    with assert_no_forward(target), pytest.raises(ValueError, match="activated LoRA"):
        model.generate(inputs=ids, max_new_tokens=4, assistant_model=drafter, ddtree=True)


def test_a_drafter_with_lora(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    adapted = get_peft_model(drafter, LoraConfig(r=4, target_modules=["q_proj"]))
    fill(adapted, "default", seed=0)
    exact(target, adapted.eval(), prompt_ids(8))


def test_adapters_come_and_go(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    ids, base = prompt_ids(8), text_of(target)
    model = lora(target)
    first = exact(model, drafter, ids).sequences[0].tolist()
    with model.disable_adapter():
        assert exact(model, drafter, ids).sequences[0].tolist() == base
    model.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["k_proj", "up_proj"]))
    fill(model, "second", seed=1)
    model.set_adapter("second")
    second = exact(model, drafter, ids).sequences[0].tolist()
    assert len({tuple(text) for text in (base, first, second)}) == 3
    model.set_adapter("default")
    model.merge_adapter()
    exact(model, drafter, ids)
    model.unmerge_adapter()
    exact(model, drafter, ids)
    model.delete_adapter("second")
    merged = model.merge_and_unload()
    assert merged is target
    assert exact(merged, drafter, ids).sequences[0].tolist() == first


def test_an_unloaded_adapter_leaves_the_base(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    base = text_of(target)
    model = lora(target)
    exact(model, drafter, prompt_ids(8))
    assert exact(model.unload(), drafter, prompt_ids(8)).sequences[0].tolist() == base


@pytest.mark.skipif(
    Version(version("peft")) < Version(MIN_PEFT_VERSION), reason=f"transformers asks for peft {MIN_PEFT_VERSION}"
)
def test_an_adapter_added_to_the_model_itself(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    base = text_of(target)
    target.add_adapter(LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    fill(target, "default", seed=0)
    target.eval()
    assert exact(target, drafter, prompt_ids(8)).sequences[0].tolist() != base
    target.disable_adapters()
    assert exact(target, drafter, prompt_ids(8)).sequences[0].tolist() == base


def test_a_copy_of_an_adapted_model(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    model = lora(target)
    text = exact(model, drafter, prompt_ids(8)).sequences.tolist()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert exact(copied, drafter, prompt_ids(8)).sequences.tolist() == text


def test_buffers_are_released_through_an_adapted_model(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    model = lora(target)
    exact(model, drafter, prompt_ids(8))
    assert target.__dict__[STATE].buffers is not None
    release_buffers(model)
    assert target.__dict__[STATE].buffers is None


VIRTUAL = [
    PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
]


@pytest.mark.parametrize("config", VIRTUAL, ids=["prompt tuning", "prefix tuning"])
def test_virtual_tokens_are_refused_before_the_first_forward(
    target: PreTrainedModel, drafter: DFlashDraftModel, config: Any
) -> None:
    model = get_peft_model(target, config).eval()
    with assert_no_forward(target), pytest.raises(ValueError, match="prompt-learning adapter"):
        text_of(model, assistant_model=drafter, ddtree=True)


def test_the_base_of_a_model_with_virtual_tokens(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    text = text_of(target)
    model = get_peft_model(target, VIRTUAL[0]).eval()
    text_of(model)
    assert exact(target, drafter, prompt_ids(8)).sequences[0].tolist() == text


# -- compiled models and copies --------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_wrapper_of_the_target(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    wrapper = torch.compile(target, backend="eager")
    exact(wrapper, drafter, prompt_ids(8))
    exact(target, drafter, prompt_ids(8))
    exact(torch.compile(lora(target), backend="eager"), drafter, prompt_ids(8))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_target_compiled_before_stays_compiled_for_other_calls(
    target: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    text = text_of(target)
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    target.compile(backend=backend)
    for _ in range(2):
        with scripted(text, 0.9):
            assert text_of(target, assistant_model=drafter, ddtree=True) == text
        assert not graphs
    target(prompt_ids(8))
    assert graphs


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_drafter(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    exact(target, torch.compile(drafter, backend="eager"), prompt_ids(8))
    drafter.compile(backend="eager")
    exact(target, drafter, prompt_ids(8))


def test_a_model_that_was_never_used_is_as_without_us(target: PreTrainedModel) -> None:
    install()
    for model in (target, copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert not [name for name in model.__dict__ if "ddtree" in name]
        assert text_of(model) == text_of(target)
    assert b"ddtree" not in pickle.dumps(target)


def test_a_used_model_pickles_as_one_that_was_not(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    """Its pickle can be read where the package is not installed."""
    exact(target, drafter, prompt_ids(8))
    assert b"hf_ddtree." not in pickle.dumps(target)  # no name of a module


# -- threads and pipelines -------------------------------------------------------------------------------------------


def test_twenty_threads_on_one_pair(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    """Prompts, budgets and processors of their own, and plain calls among them."""
    calls: list[dict[str, Any]] = [
        {
            "inputs": prompt_ids(5 + 7 * i, seed=i),
            "max_new_tokens": 10 + i,
            "do_sample": False,
            "repetition_penalty": 1.0 + 0.2 * (i % 3),
        }
        for i in range(20)
    ]
    expected = [target.generate(**call).tolist() for call in calls]
    results: list[Any] = [None] * 20
    start = threading.Barrier(20)

    def call(index: int) -> None:
        trees = {"assistant_model": drafter, "ddtree": {"budget": 1 + 3 * index}} if index % 5 else {}
        start.wait()
        results[index] = target.generate(**calls[index], **trees).tolist()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(20)]
    with scripted(expected[19][0], 0.9):  # right for one of them, wrong for the others
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == expected
    assert_idle(target, drafter)


def test_a_pipeline_of_an_adapted_model(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    model = lora(target)
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=drafter)
    for options in ({"do_sample": False}, {}):
        torch.manual_seed(1)
        expected = plain("w5 w6 w7", max_new_tokens=20, **options)
        torch.manual_seed(1)
        assert pipe("w5 w6 w7", max_new_tokens=20, ddtree=True, **options) == expected


# -- training mode ---------------------------------------------------------------------------------------------------


def test_a_target_in_training_without_dropout(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    target.train()
    for sampling in (GREEDY, SAMPLING):
        exact(target, drafter, prompt_ids(8), **sampling)
    assert target.training


def test_a_target_whose_adapter_is_in_training_with_dropout(
    target: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    model = lora(target, lora_dropout=0.5).train()
    with assert_no_forward(target), pytest.raises(ValueError, match="dropout"):
        text_of(model, assistant_model=drafter, ddtree=True)
    exact(model.eval(), drafter, prompt_ids(8))


def test_gradient_checkpointing_waits_for_training(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    target.gradient_checkpointing_enable()
    exact(target, drafter, prompt_ids(8))


# -- interruptions ---------------------------------------------------------------------------------------------------


def assert_idle(target: PreTrainedModel, drafter: Any) -> None:
    """Nothing of a call is left on the pair."""
    for model in (target, drafter):
        for module in model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
        assert not model.training
    assert target.config._attn_implementation == "sdpa"
    assert target._compiled_call_impl is None
    state = target.__dict__[STATE]
    assert not state.lock.locked() and not state.busy and state.uncompiled == 0
    if state.buffers is not None:  # buffers need not outlive an exception
        for cache in (state.buffers.cache, *(own.context for own in state.buffers.drafters)):
            assert cache.length == 0 and cache.slots is None
            assert not any(bool(layer.keys.any()) for layer in cache.layers if layer.is_initialized)
    assert FeatureTaps._current.get() is None


class Failure:
    """Raises at its n-th call, whatever it is called as."""

    def __init__(self, error: BaseException, at: int) -> None:
        self.error, self.left = error, at

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return args[-1] if args else None


class FailingProcessor(Failure, LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return super().__call__(scores)


class FailingCriterion(Failure, StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().__call__(torch.zeros(1, dtype=torch.bool))


class FailingStreamer(Failure):
    put = Failure.__call__

    def end(self) -> None:
        pass


def fail_in(where: str, target: PreTrainedModel, drafter: DFlashDraftModel, error: BaseException, at: int) -> Any:
    """The options, and the hook to remove, with which a call fails."""
    if where == "processor":
        return {"logits_processor": LogitsProcessorList([FailingProcessor(error, at)])}, None
    if where == "criterion":
        return {"stopping_criteria": StoppingCriteriaList([FailingCriterion(error, at)])}, None
    if where == "streamer":
        return {"streamer": FailingStreamer(error, at)}, None
    module: Any = {"layer": target.model.layers[1], "head": target.lm_head, "drafter": drafter.layers[0]}[where]
    return {}, module.register_forward_pre_hook(Failure(error, at))


@pytest.mark.parametrize("at", [1, 2, 6])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["processor", "criterion", "streamer", "layer", "head", "drafter"])
def test_an_interrupted_call_leaves_nothing_behind(
    target: PreTrainedModel, drafter: DFlashDraftModel, where: str, error: type[BaseException], at: int
) -> None:
    ids = prompt_ids(8)
    text = exact(target, drafter, ids).sequences
    assert_idle(target, drafter)
    options, hook = fail_in(where, target, drafter, error("interrupted"), at)
    with pytest.raises(error, match="interrupted"), scripted(text, 0.6):
        text_of(target, assistant_model=drafter, ddtree=True, **options)
    if hook is not None:
        hook.remove()
    assert_idle(target, drafter)
    assert exact(target, drafter, ids).sequences.tolist() == text.tolist()


class FailingOperation(TorchFunctionMode):
    """Raises in the n-th torch operation; with n = 0 it only counts."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "where",
    ["decoding", "cleaning up"],
)
def test_an_interruption_in_any_operation(target: PreTrainedModel, drafter: DFlashDraftModel, where: str) -> None:
    text = text_of(target)

    def call(mode: contextlib.AbstractContextManager[Any]) -> list[int]:
        with scripted(text, 0.6), mode:
            return text_of(target, assistant_model=drafter, ddtree={"budget": 15})

    for counting in (FailingOperation(), FailingOperation()):  # the first call makes the buffers as well
        assert call(counting) == text
    last = counting.count - 20  # a call's last operations clear its rows
    points = range(1, last, last // 25) if where == "decoding" else range(last, counting.count)
    for at in points:
        # The operation may be one that ends `no_grad`, and torch stays without gradients then.
        with torch.set_grad_enabled(True), pytest.raises(KeyboardInterrupt):
            call(FailingOperation(at))
        assert call(contextlib.nullcontext()) == text
        assert_idle(target, drafter)


def test_a_cancelled_stream(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    """The reader goes away, and the writer's own check ends the call."""
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)})))
    cancelled = threading.Event()
    text = text_of(target)

    class Cancelled(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            cancelled.wait(timeout=60)
            return torch.ones(1, dtype=torch.bool)

    streamer = TextIteratorStreamer(words, timeout=60)
    options = {"streamer": streamer, "stopping_criteria": StoppingCriteriaList([Cancelled()])}
    results: list[list[int]] = []

    def write() -> None:
        results.append(text_of(target, assistant_model=drafter, ddtree=True, **options))

    with scripted(text, 0.9):
        thread = threading.Thread(target=write)
        thread.start()
        next(streamer)
        cancelled.set()
        thread.join()
    assert results == [text[:9]]
    assert_idle(target, drafter)
    exact(target, drafter, prompt_ids(8))


@pytest.mark.parametrize("where", ["processor", "layer"])
def test_a_reader_of_the_stream_is_told_of_an_interruption(
    target: PreTrainedModel, drafter: DFlashDraftModel, where: str
) -> None:
    """A reader in another thread would wait for ever."""
    ends: list[None] = []

    class Reader:
        def put(self, value: torch.Tensor) -> None:
            pass

        def end(self) -> None:
            ends.append(None)

    options, _ = fail_in(where, target, drafter, RuntimeError("interrupted"), at=3)
    with pytest.raises(RuntimeError, match="interrupted"):
        text_of(target, assistant_model=drafter, ddtree=True, streamer=Reader(), **options)
    assert ends == [None]


def test_prompts_of_other_lengths_find_the_buffers(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    exact(target, drafter, prompt_ids(8))
    cache = target.__dict__[STATE].buffers.cache
    before = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    for length in (1, 64, 65, 150, 30):
        exact(target, drafter, prompt_ids(length))
        assert target.__dict__[STATE].buffers.cache is cache
        assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == before
