"""Targets that the caller compiled: trees run what lies beneath, and leave the compiled form alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel

from hf_ddtree import DFlashDraftModel
from hf_ddtree.anatomy import decoder_layers
from hf_ddtree.snapshot import take_snapshot
from hf_ddtree.target_state import uncompiled
from scripted import prompt_ids, scripted, tiny_drafter, tiny_target

Compile = Callable[..., Any]
Way = Callable[[Any, Compile], None]

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """A target of a class of its own."""
    model: Any = tiny_target("llama", num_hidden_layers=3)
    model.__class__ = type("OwnLlama", (type(model),), {})
    for layer in model.model.layers:
        layer.__class__ = type("OwnLayer", (type(layer),), {})
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):  # layers differ by their numbers
        yield model
    torch._dynamo.reset()


@pytest.fixture
def drafter(model: PreTrainedModel) -> DFlashDraftModel:
    return tiny_drafter(model)


def forward(model: Any, compile: Compile) -> None:
    model.forward = compile(model.forward)


def in_place(model: Any, compile: Compile) -> None:
    model._compiled_call_impl = compile(model._call_impl)  # what `model.compile()` does


def inner_forward(model: Any, compile: Compile) -> None:
    model.model.forward = compile(model.model.forward)


def inner_module(model: Any, compile: Compile) -> None:
    model.model = compile(model.model)


def each_layer(model: Any, compile: Compile) -> None:
    for layer in model.model.layers:
        layer._compiled_call_impl = compile(layer._call_impl)


def each_layers_forward(model: Any, compile: Compile) -> None:
    for layer in model.model.layers:
        layer.forward = compile(layer.forward)


def modules_in_the_list(model: Any, compile: Compile) -> None:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = compile(layer)


def parts_of_layers(model: Any, compile: Compile) -> None:
    for layer in model.model.layers:
        layer.mlp._compiled_call_impl = compile(layer.mlp._call_impl)


def builtin_module(model: Any, compile: Compile) -> None:
    model.lm_head.forward = compile(model.lm_head.forward)


def class_of_the_model(model: Any, compile: Compile) -> None:
    type(model).forward = compile(type(model).forward)


def class_of_layers(model: Any, compile: Compile) -> None:
    for layer in model.model.layers:
        type(layer).forward = compile(type(layer).forward)


def bound_again(model: Any, compile: Compile) -> None:
    model.forward = MethodType(compile(type(model).forward), model)


def partially(model: Any, compile: Compile) -> None:
    model.forward = functools.partial(compile(type(model).forward), model)


def twice(model: Any, compile: Compile) -> None:
    forward(model, compile)
    each_layer(model, compile)
    inner_forward(model, compile)


def under_a_hook(model: Any, compile: Compile) -> None:
    forward(model.model.layers[1], compile)
    add_hook_to_module(model.model.layers[1], ModelHook())


def over_a_hook(model: Any, compile: Compile) -> None:
    add_hook_to_module(model.model, ModelHook())
    forward(model.model, compile)


WAYS: list[Way] = [
    forward, in_place, inner_forward, inner_module, each_layer, each_layers_forward, modules_in_the_list,
    parts_of_layers, builtin_module, class_of_the_model, class_of_layers, bound_again, partially, twice, under_a_hook,
    over_a_hook,
]  # fmt: skip


@pytest.mark.parametrize(("way", "fullgraph"), [*((way, True) for way in WAYS), (forward, False), (twice, False)])
def test_trees_run_what_lies_beneath(
    way: Way, fullgraph: bool, model: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    """Before the caller has run it, and after: no graph is made, and none is lost."""
    ids = prompt_ids(8)
    expected = model.generate(ids, **GREEDY)
    before = state_of_modules(model)
    counter: Any = CompileCounterWithBackend("eager")
    way(model, functools.partial(torch.compile, backend=counter, fullgraph=fullgraph))
    compiled = state_of_modules(model)
    assert compiled != before or way in (class_of_the_model, class_of_layers)

    def with_trees() -> Any:
        with scripted(expected, 0.9):
            out = model.generate(
                ids, assistant_model=drafter, ddtree={"budget": 7}, return_dict_in_generate=True, **GREEDY
            )
        assert out.sequences.tolist() == expected.tolist()
        assert out.ddtree_stats.mean_acceptance_length > 1.5
        assert state_of_modules(model) == compiled

    with_trees()
    assert counter.frame_count == 0
    assert model.generate(ids, **GREEDY).tolist() == expected.tolist()
    assert (graphs := counter.frame_count) > 0
    with_trees()
    assert model.generate(ids, **GREEDY).tolist() == expected.tolist()
    assert counter.frame_count == graphs
    with torch.compiler.set_stance("fail_on_recompile"):
        assert model.generate(ids, **GREEDY).tolist() == expected.tolist()


def state_of_modules(model: Any) -> list[Any]:
    """All that stands in modules in a place of a forward."""
    names = ("forward", "_compiled_call_impl", "_old_forward")
    return [[id(vars(module).get(name)) for name in names] for module in model.modules()]


@pytest.mark.parametrize("way", WAYS)
def test_an_error_in_a_call_leaves_the_compiled_form(
    way: Way, model: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    class Fault(Exception):
        pass

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise Fault

    way(model, functools.partial(torch.compile, backend="eager"))
    compiled = state_of_modules(model)
    with pytest.raises(Fault):
        model.generate(prompt_ids(8), assistant_model=drafter, ddtree=True, logits_processor=[fail], **GREEDY)
    assert state_of_modules(model) == compiled


@pytest.mark.parametrize("way", WAYS)
def test_what_would_be_captured_is_captured_compiled_or_not(way: Way, model: PreTrainedModel) -> None:
    """A class's own forward is what a shadow runs; what else stands before one, it does not know."""
    launched = {
        inner_module, modules_in_the_list, partially, under_a_hook, over_a_hook, class_of_the_model, class_of_layers
    }  # fmt: skip
    assert not take_snapshot(model).hooked
    way(model, functools.partial(torch.compile, backend="eager"))
    fingerprints = []
    for _ in range(2):
        with uncompiled(model):
            snapshot = take_snapshot(model)
        assert snapshot.hooked == (way in launched)
        fingerprints.append(snapshot.fingerprint)
    assert way in launched or fingerprints[0] == fingerprints[1]


@pytest.mark.usefixtures("stepped")
def test_rounds_of_a_compiled_target_are_steps_found_again(model: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    ids = prompt_ids(8)
    expected = model.generate(ids, **GREEDY)
    counter: Any = CompileCounterWithBackend("eager")
    twice(model, functools.partial(torch.compile, backend=counter, fullgraph=True))
    rounds = []
    for _ in range(2):
        out = model.generate(ids, assistant_model=drafter, ddtree=True, return_dict_in_generate=True, **GREEDY)
        assert out.sequences.tolist() == expected.tolist()
        assert out.ddtree_stats.compiled.value == "yes"
        rounds += model.__dict__["_hf_ddtree_state"].buffers.drafters[-1].kinds.values()
    assert len(rounds) == 2 and rounds[0] is rounds[1]
    assert counter.frame_count == 0


def test_other_threads_compile_a_target_as_if_nobody_drafted(
    model: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    """A wrapper that was made elsewhere is no module of the target's: it traces the target while there are taps."""
    ids, texts, errors = prompt_ids(8), [], []
    expected = model.generate(ids, **GREEDY)
    logits = model(ids).logits
    counter: Any = CompileCounterWithBackend("eager")
    wrapper: Any = torch.compile(model, backend=counter, fullgraph=True)
    forward(model, functools.partial(torch.compile, backend="eager", fullgraph=True))

    def run() -> None:
        try:
            with torch.no_grad():
                texts.append(torch.equal(wrapper(ids).logits, logits))
            texts.append(torch.equal(model.generate(ids, **GREEDY), expected))
        except Exception as error:
            errors.append(error)

    def other_thread(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return scores

    with scripted(expected, 0.9):
        out = model.generate(ids, assistant_model=drafter, ddtree=True, logits_processor=[other_thread], **GREEDY)
    assert out.tolist() == expected.tolist()
    assert not errors and len(texts) > 4 and all(texts)
    assert counter.frame_count > 0
    assert torch.equal(wrapper(ids).logits, logits)


@pytest.mark.parametrize("at_once", [2, 5])
def test_calls_at_the_same_time_leave_the_compiled_form(
    at_once: int, model: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    ids = prompt_ids(8)
    expected = model.generate(ids, **GREEDY)
    counter: Any = CompileCounterWithBackend("eager")
    twice(model, functools.partial(torch.compile, backend=counter))
    compiled = state_of_modules(model)
    texts: list[list[int]] = []

    def run(new: int) -> None:
        options = GREEDY | {"max_new_tokens": new}
        texts.append(model.generate(ids, assistant_model=drafter, ddtree=True, **options)[0].tolist())

    threads = [threading.Thread(target=run, args=(4 + i,)) for i in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == at_once and all(text == expected[0, : len(text)].tolist() for text in texts)
    assert counter.frame_count == 0
    assert state_of_modules(model) == compiled


# -- what cannot be put aside -----------------------------------------------------------------------------------------


def closed_over(model: Any, compile: Compile) -> None:
    compiled = compile(model.forward)
    model.forward = lambda *args, **kwargs: compiled(*args, **kwargs)


def closed_over_deeper(model: Any, compile: Compile) -> None:
    closed_over(model.model, compile)
    outer = model.model.forward

    @functools.wraps(outer)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return outer(*args, **kwargs)

    model.model.forward = MethodType(wrapper, model.model)


def by_a_global_name(model: Any, compile: Compile) -> None:
    names = {"compiled": compile(model.forward)}
    exec("def forward(*args, **kwargs): return compiled(*args, **kwargs)", names)
    model.forward = names["forward"]


def as_an_argument(model: Any, compile: Compile) -> None:
    def forward(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    model.forward = functools.partial(forward, compile(model.forward))


def the_class(model: Any, compile: Compile) -> None:
    compile(type(model))


def a_wrapper_in_the_class(model: Any, compile: Compile) -> None:
    compiled = compile(type(model).forward)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled(self, *args, **kwargs)

    type(model).forward = forward


@pytest.mark.parametrize(
    "way", [closed_over, closed_over_deeper, by_a_global_name, as_an_argument, the_class, a_wrapper_in_the_class]
)
def test_a_compiled_forward_within_another_function_is_refused(
    way: Way, model: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    ids, rows = prompt_ids(8), []
    expected = model.generate(ids, **GREEDY)
    counter: Any = CompileCounterWithBackend("eager")
    way(model, functools.partial(torch.compile, backend=counter))
    hook = decoder_layers(model)[0].register_forward_hook(lambda *_: rows.append(1))
    with pytest.raises(ValueError, match=r"^(OwnLlama|LlamaModel) runs a forward that was compiled"):
        model.generate(ids, assistant_model=drafter, ddtree=True, **GREEDY)
    hook.remove()
    assert not rows and not counter.frame_count
    assert model.generate(ids, **GREEDY).tolist() == expected.tolist()
    assert counter.frame_count


def test_other_functions_around_a_forward_are_none_of_compilation(
    model: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    ids = prompt_ids(8)
    expected = model.generate(ids, **GREEDY)
    helper, plain = torch.compile(torch.relu, backend="eager"), model.forward
    calls = []

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(helper(torch.ones(1)))
        return plain(*args, **kwargs)

    model.forward = forward
    assert model.generate(ids, assistant_model=drafter, ddtree=True, **GREEDY).tolist() == expected.tolist()
    assert calls
