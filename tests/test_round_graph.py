"""Rounds as steps of fixed shapes: on a CPU the same step runs without a graph around it."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from comparison import assert_trees_spell
from hf_ddtree import (
    DDTreeCandidateGenerator,
    DDTreeConfig,
    attention,
    candidate_generator,
    capture,
    drafter_families,
    release_buffers,
    round_graph,
    shadow,
)
from hf_ddtree.attention import Rows
from hf_ddtree.compat import CACHE_KEY
from hf_ddtree.snapshot import take_snapshot
from scripted import SIZES, prompt_ids, tiny_drafter, tiny_target

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}


def run(model: Any, ids: torch.Tensor, new: int, **options: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(5)
    out = model.generate(ids, max_new_tokens=new, return_dict_in_generate=True, **options)
    return out, torch.get_rng_state()


def assert_same_drafts(stepped: Any, plain: Any) -> None:
    """That two calls drafted the same trees until the text is near its end, where plain ones are less deep."""
    for mine, other in zip(stepped.ddtree_stats.trees[:15], plain.ddtree_stats.trees[:15], strict=True):
        assert mine.root == other.root
        assert torch.equal(mine.tree.token_ids, other.tree.token_ids)
        assert torch.equal(mine.tree.parents, other.tree.parents)
        torch.testing.assert_close(mine.tree.log_probs, other.tree.log_probs, atol=1e-4, rtol=1e-4)


def kinds(model: Any) -> dict[Any, Any]:
    """The kinds of rounds for which graphs are kept, of the drafter that was used last."""
    return model.__dict__["_hf_ddtree_state"].buffers.drafters[-1].kinds


def assert_cleared(model: Any) -> None:
    """That no row of a call is left in its buffers."""
    buffers = model.__dict__["_hf_ddtree_state"].buffers
    for cache in (buffers.cache, *(own.context for own in buffers.drafters)):
        assert not any(bool(layer.keys.any()) or bool(layer.values.any()) for layer in cache.layers)


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("family", ["llama", "qwen2_mixed", "qwen3", "mistral"])
@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", [1, 30])
def test_equal_to_plain(family: str, options: dict[str, Any], prompt: int) -> None:
    model = tiny_target(family)
    drafter = tiny_drafter(model)
    ids = prompt_ids(prompt)
    expected, state = run(model, ids, 40, **options)
    out, after = run(model, ids, 40, assistant_model=drafter, ddtree=DDTreeConfig(budget=9), **options)
    assert out.ddtree_stats.compiled.value == "yes"
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(after, state)


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("family", ["llama", "qwen2_mixed", "mistral"])
@pytest.mark.parametrize(
    ("tree", "window", "causal"),
    [
        ("best_first", 9, None),
        ("chain", 9, None),
        ("static", 9, None),
        ("best_first", 9, False),
        ("best_first", 3, False),
    ],
)
def test_drafts_what_the_plain_loop_drafts(
    family: str, tree: Any, window: int, causal: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_target(family)
    kinds = ["full_attention", "sliding_attention"]
    drafter = tiny_drafter(model, layer_types=kinds, sliding_window=window, causal=causal)
    config = DDTreeConfig(budget=20, tree=tree, record_trees=True)
    call = GREEDY | {"assistant_model": drafter, "ddtree": config}
    out, _ = run(model, prompt_ids(30), 40, **call)
    monkeypatch.undo()
    expected, _ = run(model, prompt_ids(30), 40, **call)
    assert expected.ddtree_stats.launch != out.ddtree_stats.launch
    assert_same_drafts(out, expected)


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("budget", [7, [7, 0, 0, 0, 7, 7, 0, 7], [0, 0, 7]])
def test_no_draft_is_launched_plainly(budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first one nor one after a pause; and they are those of the plain loop."""
    model = tiny_target("qwen2_mixed")
    drafter = tiny_drafter(model, layer_types=["full_attention", "sliding_attention"], sliding_window=9)
    call = GREEDY | {"assistant_model": drafter, "ddtree": DDTreeConfig(budget=budget, record_trees=True)}
    with monkeypatch.context() as patch:
        patch.setattr(capture, "_on_one_gpu", lambda devices: "asked for")
        expected, _ = run(model, prompt_ids(30), 30, **call)

    def fail(*args: Any) -> None:
        raise AssertionError("drafted plainly")

    monkeypatch.setattr(DDTreeCandidateGenerator, "propose", fail)
    out, _ = run(model, prompt_ids(30), 30, **call)
    assert out.ddtree_stats.compiled.value == "yes" and expected.ddtree_stats.launch.reason == "asked for"
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert_same_drafts(out, expected)
    assert out.ddtree_stats.budgets[:15] == expected.ddtree_stats.budgets[:15]


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Steps whose drafts know the text, with the right token first, second or third."""

    def use(text: torch.Tensor) -> None:
        known, at = text[0].tolist(), [0]
        original = round_graph.BlockDraft.hidden_states

        def hidden_states(self: round_graph.BlockDraft, features: Any, new: torch.Tensor) -> torch.Tensor:
            at[0] = int(self.kind.state.position) + 1
            return original(self, features, new)

        def candidates(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
            rows = [list(range(4, 4 + width)) for _ in range(logits.shape[1])]
            for depth, row in enumerate(rows):
                if at[0] + depth < len(known):
                    right, place = known[at[0] + depth], (at[0] + depth) % 3
                    if right in row:  # no token twice, as in any drafter's row
                        row[row.index(right)] = row[place]
                    row[place] = right
            log_probs = torch.log_softmax(-torch.arange(width, dtype=torch.float32), 0)
            return torch.tensor([rows]), log_probs.expand(1, len(rows), width)

        monkeypatch.setattr(round_graph.BlockDraft, "hidden_states", hidden_states)
        monkeypatch.setattr(drafter_families, "best_candidates", candidates)

    return use


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
def test_paths_are_kept_and_buffers_used_again(knowing: Any, options: dict[str, Any]) -> None:
    model = tiny_target("qwen3")
    drafter = tiny_drafter(model)
    texts = [run(model, prompt_ids(prompt), new, **options) for prompt, new in ((30, 60), (7, 100), (200, 40))]
    built: list[Any] = []
    for (expected, state), prompt in zip(texts, (30, 7, 200), strict=True):
        knowing(expected.sequences)
        new = expected.sequences.shape[1] - prompt
        out, after = run(
            model, prompt_ids(prompt), new, assistant_model=drafter,
            ddtree=DDTreeConfig(budget=63, record_trees=True), **options,
        )  # fmt: skip
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(after, state)
        assert out.ddtree_stats.mean_acceptance_length > 2
        assert_trees_spell(out, prompt)
        built.append(list(kinds(model).values()))
    assert built[0][-1] is built[1][-1]  # of whatever length


def test_layers_alike_are_compiled_once(stepped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each size: not for each layer, nor again for another call."""
    monkeypatch.undo()
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    shadow._compiled_forward.cache_clear()
    monkeypatch.setattr(shadow.torch, "compile", functools.partial(torch.compile, backend=counter))
    monkeypatch.setattr(capture, "_on_one_gpu", lambda devices: None)
    monkeypatch.setattr(round_graph.Recorded, "capture", lambda self: None)
    model = tiny_target("qwen3")
    drafter = tiny_drafter(model)
    for budget, graphs in ((9, 2), (9, 2), (20, 3)):  # the target's layer and the drafter's, then the target's again
        ids = prompt_ids(20, seed=budget)
        expected, _ = run(model, ids, 30, **GREEDY)
        out, _ = run(model, ids, 30, assistant_model=drafter, ddtree=DDTreeConfig(budget=budget), **GREEDY)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert counter.frame_count == graphs
    shadow._compiled_forward.cache_clear()
    torch._dynamo.reset()


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
def test_a_capture_that_fails_leaves_the_rounds_to_plain_launches(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def fail(self: round_graph.RoundGraph) -> None:
        tries.append(self.stretches[0].record())  # as far as it came
        raise torch.OutOfMemoryError("no room\nfor details")

    monkeypatch.setattr(round_graph.RoundGraph, "capture", fail)
    monkeypatch.setattr(capture, "_release", lambda device: None)
    model = tiny_target("qwen3")
    drafter = tiny_drafter(model)
    for _ in range(2):
        expected, state = run(model, prompt_ids(20), 30, **options)
        out, after = run(model, prompt_ids(20), 30, assistant_model=drafter, ddtree=True, **options)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(after, state)
        assert out.ddtree_stats.launch.reason == "the capture failed (OutOfMemoryError: no room)"
    assert len(tries) == 1  # the second call knows


@pytest.mark.usefixtures("stepped")
def test_what_cannot_be_compiled_is_captured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: round_graph.RoundGraph) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(round_graph.RoundGraph, "compile", fail)
    monkeypatch.setattr(capture, "_release", lambda device: None)
    model = tiny_target("qwen3")
    expected, state = run(model, prompt_ids(20), 30, **SAMPLING)
    out, after = run(model, prompt_ids(20), 30, assistant_model=tiny_drafter(model), ddtree=True, **SAMPLING)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(after, state)
    assert out.ddtree_stats.compiled == ("no", "RuntimeError: no compiler")
    assert out.ddtree_stats.launch.value == "graph"


@pytest.mark.usefixtures("stepped")
def test_a_step_serves_a_turn_that_goes_on_and_leaves_the_drafters_context() -> None:
    model = tiny_target("qwen2_mixed")
    drafter = tiny_drafter(model)
    call = GREEDY | {"assistant_model": drafter, "ddtree": DDTreeConfig(budget=15), "pad_token_id": None}
    first, _ = run(model, prompt_ids(12), 20, **call)
    ids = torch.cat([first.sequences, prompt_ids(6, seed=1)], dim=1)
    whole, _ = run(model, ids, 20, **call)
    second, _ = run(model, ids, 20, **call, **{CACHE_KEY: first[CACHE_KEY]})
    assert second.sequences.tolist() == whole.sequences.tolist()
    assert second.ddtree_stats.acceptance_lengths == whole.ddtree_stats.acceptance_lengths
    assert second[CACHE_KEY].get_seq_length() == second.sequences.shape[1] - 1


@pytest.mark.usefixtures("stepped")
def test_rows_are_forgotten_with_their_step() -> None:
    model = tiny_target("llama")
    gc.collect()
    before = len(attention._ROWS)
    run(model, prompt_ids(5), 9, assistant_model=tiny_drafter(model), ddtree={"budget": 7}, **GREEDY)
    # The target's four layers for prompts and in a round, and the drafter's two.
    assert len(attention._ROWS) == before + 10
    release_buffers(model)
    gc.collect()
    assert len(attention._ROWS) == before


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("change", ["growth", "weights", "release"])
def test_graphs_are_gone_before_the_next_need_their_memory(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the garbage collector, which comes when it likes."""
    alive: list[weakref.ref[Any]] = []
    original = round_graph.RoundKind.__init__

    def init(self: round_graph.RoundKind, *args: Any) -> None:
        assert all(other() is None for other in alive)
        alive.append(weakref.ref(self))
        original(self, *args)

    monkeypatch.setattr(round_graph.RoundKind, "__init__", init)
    model = tiny_target("llama")
    call = GREEDY | {"assistant_model": tiny_drafter(model), "ddtree": {"budget": 7}}
    monkeypatch.setattr("hf_ddtree.tree_cache._MOST_AHEAD", 64)
    gc.disable()
    try:
        run(model, prompt_ids(100), 600 if change == "growth" else 20, **call)
        if change == "weights":
            model.lm_head.weight.data = model.lm_head.weight.data.clone()
            run(model, prompt_ids(100), 20, **call)
        if change == "release":
            release_buffers(model)
            assert alive[0]() is None
        else:
            assert len(alive) > 1
    finally:
        gc.enable()


@pytest.mark.usefixtures("stepped")
def test_weights_that_moved_get_another_step_and_weights_changed_in_place_do_not() -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    call = GREEDY | {"assistant_model": drafter, "ddtree": True}
    run(model, prompt_ids(5), 9, **call)
    steps = kinds(model)
    (first,) = steps.values()
    for change, same in ((lambda p: p.data.mul_(1.1), True), (lambda p: setattr(p, "data", p.data * 1.1), False)):
        for parameter in model.parameters():
            change(parameter)
        expected, _ = run(model, prompt_ids(5), 9, **GREEDY)
        out, _ = run(model, prompt_ids(5), 9, **call)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert [step is first for step in steps.values()] == [same]


def test_attention_that_a_step_does_not_know_is_not_guessed() -> None:
    rows = torch.zeros(1, 2, 3, 4)
    module = torch.nn.Module()
    for argument in ({"dropout": 0.1}, {"position_bias": torch.zeros(3)}):
        with pytest.raises(NotImplementedError, match=next(iter(argument))):
            attention.attend(module, rows, rows, rows, None, position_ids=torch.arange(3), use_cache=False, **argument)


def test_shadows_share_weights_and_nothing_else() -> None:
    model = tiny_target("qwen3")
    model.model.layers[1].register_forward_hook(lambda *_: None)
    twin = shadow.shadow(model)
    assert [p.data_ptr() for p in twin.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert not {id(m) for m in twin.modules()} & {id(m) for m in model.modules()}
    assert not any(m._forward_hooks for m in twin.modules())
    assert twin.config._attn_implementation == attention.ATTENTION
    assert model.config._attn_implementation == "sdpa"
    tied = tiny_target("llama", tie_word_embeddings=True)
    twin = shadow.shadow(tied)
    assert twin.get_output_embeddings().weight is twin.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: None, "a graph gains nothing on a CPU"),
        (lambda model: model.model.layers[0].register_forward_hook(lambda *_: None), "a module has hooks"),
        (lambda model: setattr(model, "forward", functools.partial(model.forward)), "a module has hooks"),
        (
            lambda model: model.config.rope_parameters.update(rope_type="dynamic", factor=2.0),
            "rotary frequencies follow the length",
        ),
    ],
)
def test_why_rounds_are_launched_plainly(change: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target("llama")
    change(model)
    if "CPU" not in reason:
        monkeypatch.setattr(capture, "_on_one_gpu", lambda devices: None)
    out, _ = run(model, prompt_ids(5), 9, assistant_model=tiny_drafter(model), ddtree=True, **GREEDY)
    assert out.ddtree_stats.launch == ("operations", reason)
    asked = DDTreeConfig(execution="plain")
    out, _ = run(model, prompt_ids(5), 9, assistant_model=tiny_drafter(model), ddtree=asked, **GREEDY)
    assert out.ddtree_stats.launch.reason == "asked for"


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize(
    ("prompt", "new", "budget"),
    [(10, 2, 15), (10, 1, 15), (250, 5, 1), (200, 48, 7), (40, 24, 3)],
)
def test_short_calls_and_small_trees_of_deep_blocks(prompt: int, new: int, budget: int) -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model, block_size=16)
    expected, state = run(model, prompt_ids(prompt), new, **SAMPLING)
    call = SAMPLING | {"assistant_model": drafter, "ddtree": DDTreeConfig(budget=budget)}
    out, after = run(model, prompt_ids(prompt), new, **call)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(after, state)


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("prompt", [40, 58])
@pytest.mark.parametrize("fails", [False, True])
def test_no_node_lies_beyond_the_last_position(prompt: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in steps, nor in the plain rounds where a step could not be captured."""

    def fail(self: round_graph.RoundGraph) -> None:
        raise RuntimeError("no graph")

    if fails:
        monkeypatch.setattr(round_graph.RoundGraph, "capture", fail)
        monkeypatch.setattr(capture, "_release", lambda device: None)
    config = GPT2Config(
        vocab_size=211, n_embd=48, n_layer=4, n_head=4, n_positions=64, initializer_range=0.5, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    expected, _ = run(model, prompt_ids(prompt), 64 - prompt, **GREEDY)
    call = GREEDY | {"assistant_model": tiny_drafter(model), "ddtree": {"budget": 7, "tree": "chain"}}
    out, _ = run(model, prompt_ids(prompt), 64 - prompt, **call)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert ("failed" in (out.ddtree_stats.launch.reason or "")) == fails


@pytest.mark.usefixtures("stepped")
def test_a_step_made_in_inference_mode_serves_other_calls() -> None:
    model = tiny_target("llama")
    call = GREEDY | {"assistant_model": tiny_drafter(model), "ddtree": True}
    expected, _ = run(model, prompt_ids(8), 12, **GREEDY)
    with torch.inference_mode():
        inside, _ = run(model, prompt_ids(8), 12, **call)
    outside, _ = run(model, prompt_ids(8), 12, **call)
    assert inside.sequences.tolist() == outside.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.model.layers[1].self_attn, "scaling", 2.0),
        lambda model: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.ReLU()),
    ],
)
def test_what_a_graph_has_baked_in_is_captured_anew_when_it_changes(change: Any) -> None:
    model = tiny_target("llama")
    call = GREEDY | {"assistant_model": tiny_drafter(model), "ddtree": True}
    before, _ = run(model, prompt_ids(8), 20, **call)
    change(model)
    expected, _ = run(model, prompt_ids(8), 20, **GREEDY)
    out, _ = run(model, prompt_ids(8), 20, **call)
    assert out.sequences.tolist() == expected.sequences.tolist() != before.sequences.tolist()


@pytest.mark.usefixtures("stepped")
def test_rows_of_another_shape_than_the_keys_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a cache keeps what keys are made of."""
    monkeypatch.setattr(capture, "_release", lambda device: None)
    original = round_graph.give_rows
    monkeypatch.setattr(
        round_graph,
        "give_rows",
        lambda owner, layer, own: original(owner, layer, Rows(own.keys[:, :1], own.values)),
    )
    model = tiny_target("llama")
    expected, _ = run(model, prompt_ids(8), 12, **GREEDY)
    out, _ = run(model, prompt_ids(8), 12, assistant_model=tiny_drafter(model), ddtree=True, **GREEDY)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert "other keys or values" in str(out.ddtree_stats.layers.reason)


@pytest.mark.usefixtures("stepped")
def test_rows_that_rounds_wrote_are_cleared() -> None:
    model = tiny_target("llama")
    run(model, prompt_ids(8), 40, assistant_model=tiny_drafter(model), ddtree=True, **GREEDY)
    assert_cleared(model)


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("what", ["streamer", "graph"])
def test_rows_are_cleared_after_what_failed_too(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.puts = 0

        def put(self, value: torch.Tensor) -> None:
            self.puts += 1
            if self.puts == 3:  # behind the prompt and the first token: a round's
                raise KeyError("mine")

        def end(self) -> None:
            pass

    def fail(self: round_graph.Recorded) -> None:
        self.rehearse()
        raise RuntimeError("no graph")

    model = tiny_target("llama")
    call = GREEDY | {"assistant_model": tiny_drafter(model), "ddtree": DDTreeConfig(budget=[0, 7])}
    monkeypatch.setattr(capture, "_release", lambda device: None)
    if what == "streamer":
        with pytest.raises(KeyError, match="mine"):
            run(model, prompt_ids(8), 40, streamer=Streamer(), **(call | {"ddtree": DDTreeConfig(budget=40)}))
    else:
        monkeypatch.setattr(round_graph.RoundGraph, "capture", fail)
        run(model, prompt_ids(8), 3, **call)
    assert_cleared(model)


@pytest.mark.usefixtures("stepped")
def test_other_experts_need_other_graphs() -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, head_dim=16, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2)
    model = Qwen3MoeForCausalLM(config).eval()
    drafter = tiny_drafter(model)
    kept = []
    for implementation in ("grouped_mm", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        expected, _ = run(model, prompt_ids(20), 30, **GREEDY)
        out, _ = run(model, prompt_ids(20), 30, assistant_model=drafter, ddtree={"budget": 7}, **GREEDY)
        assert out.sequences.tolist() == expected.sequences.tolist()
        kept.append(list(kinds(model).values())[-1])
    assert len(set(map(id, kept))) > 1 and kept[0] is not kept[1] is not kept[2]


@pytest.mark.usefixtures("stepped")
def test_calls_of_many_kinds_in_turn_find_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when methods are compared, prompt by prompt."""
    captured = []
    monkeypatch.setattr(round_graph.RoundGraph, "capture", lambda self: captured.append(self.nodes))
    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    kinds = [{"budget": budget} for budget in (3, 5, 7, 0)]
    kinds += [{"budget": 7, "tree": tree} for tree in ("chain", "static")] + [{"budget": 7, "max_depth": 3}]
    for _ in range(3):
        for options in (GREEDY, SAMPLING):
            for kind in kinds:
                run(model, prompt_ids(20), 12, assistant_model=drafter, ddtree=kind, **options)
    assert len(captured) == 2 * len(kinds)


class Wrapped(torch.nn.Module):
    """Scales what a module returns."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.factor, self.function = inner, -1, torch.relu

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(states)) * self.factor


def transpose(model: Any) -> None:
    weight = model.model.layers[1].self_attn.q_proj.weight
    weight.data = weight.data.t()


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.model.layers[1].mlp, "factor", -2),
        lambda model: setattr(model.model.layers[1].mlp, "function", torch.tanh),
        lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.7),
        transpose,
    ],
    ids=["number", "function", "scaling", "layout"],
)
def test_what_changes_between_calls_is_seen(change: Any) -> None:
    model = tiny_target("llama")
    model.model.layers[1].mlp = Wrapped(model.model.layers[1].mlp)
    drafter = tiny_drafter(model)
    before, _ = run(model, prompt_ids(9), 30, **GREEDY)
    run(model, prompt_ids(9), 30, assistant_model=drafter, ddtree={"budget": 7}, **GREEDY)
    fingerprint = take_snapshot(model).fingerprint
    change(model)
    assert take_snapshot(model).fingerprint != fingerprint
    expected, _ = run(model, prompt_ids(9), 30, **GREEDY)
    assert expected.sequences.tolist() != before.sequences.tolist()
    out, _ = run(model, prompt_ids(9), 30, assistant_model=drafter, ddtree={"budget": 7}, **GREEDY)
    assert out.sequences.tolist() == expected.sequences.tolist()


def test_a_copy_that_does_not_wait_is_no_host_read() -> None:
    with capture._NoHostReads():
        copied = torch.zeros(3).copy_(torch.ones(3), True)
    assert copied.tolist() == [1, 1, 1]


def test_a_call_asked_to_run_plainly_does_not_look_the_target_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(candidate_generator, "take_snapshot", lambda model: seen.append(model) or take_snapshot(model))
    model = tiny_target("llama")
    call = GREEDY | {"assistant_model": tiny_drafter(model), "ddtree": DDTreeConfig(budget=7, execution="plain")}
    for _ in range(2):
        run(model, prompt_ids(8), 12, **call)
    assert model not in seen
