"""One round and its two executors: what they share, what they leave behind, what a round costs in files and waits."""

from __future__ import annotations

import sys
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_ddtree
from hf_ddtree import DDTreeConfig, capture, decoding, launched, round_graph, shadow
from hf_ddtree.compat import CACHE_KEY
from hf_ddtree.outputs import _HostStop
from scripted import prompt_ids, scripted, tiny_drafter, tiny_target

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
PENALTY: dict[str, Any] = SAMPLING | {"repetition_penalty": 1.2}
EXECUTORS = ["launched", "plain", "graph"]


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    if request.param == "graph":
        request.getfixturevalue("stepped")
    elif request.param == "plain":  # as `execution="plain"` has it
        request.getfixturevalue("monkeypatch").setattr(decoding, "find_layers", lambda *_: "asked for")
    return str(request.param)


def run(model: Any, ids: torch.Tensor, new: int, **options: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(5)
    out = model.generate(ids, max_new_tokens=new, return_dict_in_generate=True, **options)
    return out, torch.get_rng_state()


def ran_as(out: Any, executor: str) -> bool:
    stats = out.ddtree_stats
    return (stats.layers.value, stats.launch.value) == {
        "launched": ("ours", "operations"), "plain": ("model", "operations"), "graph": ("ours", "graph"),
    }[executor]  # fmt: skip


# -- layers and rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap", [(0, 3), (1, 2)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_layers_are_paired_with_rows_by_the_layer_that_they_name(
    family: str, swap: tuple[int, int], executor: str
) -> None:
    model = tiny_target(family)
    layers, (a, b) = model.model.layers, swap
    layers[a], layers[b] = layers[b], layers[a]  # each keeps its `layer_idx`
    drafter = tiny_drafter(model)
    drafter.layers[0], drafter.layers[1] = drafter.layers[1], drafter.layers[0]
    for prompt in (1, 30):
        expected, _ = run(model, prompt_ids(prompt), 40, **GREEDY)
        out, _ = run(model, prompt_ids(prompt), 40, assistant_model=drafter, ddtree={"budget": 9}, **GREEDY)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert ran_as(out, executor)


@pytest.mark.usefixtures("stepped")
def test_a_graph_that_differs_from_a_launched_round_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes it differ: here its layers read the rows of others."""
    for module in (round_graph, shadow):
        monkeypatch.setattr(module, "cache_index", lambda layer, place: place ^ 1)
    model = tiny_target("llama")
    expected, state = run(model, prompt_ids(30), 30, **SAMPLING)
    for _ in range(2):
        out, after = run(
            model, prompt_ids(30), 30, assistant_model=tiny_drafter(model), ddtree={"budget": 9}, **SAMPLING
        )
        assert out.ddtree_stats.launch.reason == "a graph's round differs from a launched one"
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(after, state)


# -- where a text stops ----------------------------------------------------------------------------------------------


class Ticking:
    """A clock for `max_time` that runs out when so many tokens have been asked about."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
        self.left = tokens
        original = _HostStop.__call__

        def call(stop: _HostStop, length: int, token_id: int) -> bool:
            self.left -= 1
            return original(stop, length, token_id) or self.left <= 0

        monkeypatch.setattr(_HostStop, "__call__", call)


@pytest.mark.parametrize("options", [GREEDY, SAMPLING, PENALTY], ids=["greedy", "sampled", "penalty"])
@pytest.mark.parametrize("stop", range(2, 12))
def test_a_text_that_ends_inside_a_path_can_be_continued(
    stop: int, options: dict[str, Any], executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each place of a path, by what only the host knows; the second turn continues the returned cache."""
    model = tiny_target("qwen2_mixed")
    drafter = tiny_drafter(model)
    whole, _ = run(model, prompt_ids(20), 40, **options)
    call = options | {"assistant_model": drafter, "ddtree": DDTreeConfig(budget=15), "pad_token_id": None}
    torch.manual_seed(5)
    with monkeypatch.context() as patch, scripted(whole.sequences, 1.0):
        Ticking(patch, stop)
        first = model.generate(prompt_ids(20), max_new_tokens=40, return_dict_in_generate=True, **call)
    state = torch.get_rng_state()
    text = whole.sequences[:, : 20 + stop]
    assert first.sequences.tolist() == text.tolist()
    assert first[CACHE_KEY].get_seq_length() == text.shape[1] - 1
    torch.manual_seed(5)
    model.generate(prompt_ids(20), max_new_tokens=stop, **options)
    assert torch.equal(torch.get_rng_state(), state)  # as plain decoding leaves it there

    ids = torch.cat([text, prompt_ids(6, seed=1)], dim=1)
    expected, _ = run(model, ids, 20, **options)
    second, _ = run(model, ids, 20, **call, **{CACHE_KEY: first[CACHE_KEY]})
    assert second.sequences.tolist() == expected.sequences.tolist()
    assert second[CACHE_KEY].get_seq_length() == second.sequences.shape[1] - 1


@pytest.mark.parametrize("options", [GREEDY, SAMPLING, PENALTY], ids=["greedy", "sampled", "penalty"])
def test_a_streamer_that_raises_leaves_the_generator_as_plain_decoding_does(
    options: dict[str, Any], executor: str
) -> None:
    class Streamer:
        def __init__(self, puts: int) -> None:
            self.left, self.tokens = puts, []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()
            self.left -= 1
            if self.left == 0:
                raise KeyError("mine")

        def end(self) -> None:
            pass

    model = tiny_target("qwen3")
    drafter = tiny_drafter(model)
    whole, _ = run(model, prompt_ids(20), 40, **options)
    for puts in range(2, 9):  # the prompt is the first
        seen = []
        for call in (options, options | {"assistant_model": drafter, "ddtree": {"budget": 15}}):
            streamer = Streamer(puts)
            with scripted(whole.sequences, 1.0), pytest.raises(KeyError, match="mine"):
                run(model, prompt_ids(20), 40, streamer=streamer, **call)
            seen.append((streamer.tokens, torch.get_rng_state().tolist()))
        assert seen[0] == seen[1]


# -- what looks at single tokens --------------------------------------------------------------------------------------


class Odd(LogitsProcessor):
    """Looks at the whole text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - 3.0 * (torch.arange(scores.shape[1]) % 5 == int(input_ids.sum()) % 5)


class Enough(StoppingCriteria):
    """Ends the text with the first token that the text has had three times."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, 20:] == input_ids[:, -1:]).sum(dim=1) >= 3


LOOKING: dict[str, dict[str, Any]] = {
    "penalty": GREEDY | {"repetition_penalty": 1.3},
    "sampled penalty": PENALTY,
    "n-grams": SAMPLING | {"no_repeat_ngram_size": 2},
    "scores": SAMPLING | {"output_scores": True, "output_logits": True},
    "grammar": GREEDY | {"prefix_allowed_tokens_fn": lambda batch, ids: range(int(ids[-1]) % 3, 211, 3)},
    "processor": GREEDY | {"logits_processor": LogitsProcessorList([Odd()])},
    "criterion": SAMPLING | {"stopping_criteria": StoppingCriteriaList([Enough()])},
}


@pytest.mark.parametrize("budget", [9, [9, 0, 0, 4, 9, 0] * 12], ids=["trees", "pauses"])
@pytest.mark.parametrize("looking", LOOKING)
def test_what_looks_at_single_tokens_is_walked_by_the_host(looking: str, budget: Any, executor: str) -> None:
    """Beside two graphs, where there are graphs."""
    model, options = tiny_target("qwen2_mixed"), LOOKING[looking]
    drafter = tiny_drafter(model)
    call = options | {"assistant_model": drafter, "ddtree": DDTreeConfig(budget=budget)}
    expected, state = run(model, prompt_ids(20), 60, **options)
    with scripted(expected.sequences, 0.8):
        out, after = run(model, prompt_ids(20), 60, **call)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(after, state)
    assert ran_as(out, executor)
    assert max(out.ddtree_stats.acceptance_lengths) > 2
    for name in ("scores", "logits"):
        mine, theirs = getattr(out, name) or (), getattr(expected, name) or ()
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-3, rtol=0)


@pytest.mark.usefixtures("stepped")
def test_one_kind_of_graphs_serves_all_that_the_host_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors and their values, criteria and outputs are nothing to it."""
    captured: list[str] = []
    monkeypatch.setattr(round_graph.Recorded, "capture", lambda self: captured.append(type(self).__name__))
    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    for options in LOOKING.values():
        run(model, prompt_ids(20), 20, assistant_model=drafter, ddtree={"budget": 9}, **options)
    assert captured == ["Prompt", "Stretch", "Stretch"]


# -- several drafters ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stepped")
def test_graphs_that_draw_from_a_state_that_torch_has_no_more_are_recorded_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture that fails leaves torch's generator with another state, and what was recorded with the one before."""
    recorded: list[int] = []

    def fail_for_seven(self: round_graph.Recorded) -> None:
        if isinstance(self, round_graph.Stretch):
            recorded.append(self.round.nodes)
            if self.round.nodes == 7 or recorded == [15]:  # that one is recorded again without compilation
                raise RuntimeError("no graph")

    monkeypatch.setattr(round_graph.Recorded, "capture", fail_for_seven)
    monkeypatch.setattr(capture, "_release", lambda device: None)
    model = tiny_target("llama")
    budget = [15, 15, 7, 15, 7, 0] * 10
    for options, expected_recordings in ((SAMPLING, [15, 15, 7, 7, 15, 0]), (GREEDY, [15, 15, 7, 7, 0])):
        recorded.clear()
        expected, state = run(model, prompt_ids(20), 40, **options)
        call = options | {
            "assistant_model": tiny_drafter(model),
            "ddtree": {"budget": budget},
        }
        out, after = run(model, prompt_ids(20), 40, **call)
        assert out.sequences.tolist() == expected.sequences.tolist() and torch.equal(after, state)
        assert recorded == expected_recordings


@pytest.mark.usefixtures("stepped")
def test_two_drafters_in_turn_find_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[str] = []
    monkeypatch.setattr(round_graph.Recorded, "capture", lambda self: captured.append(type(self).__name__))
    model = tiny_target("llama")
    drafters = [tiny_drafter(model), tiny_drafter(model, target_layer_ids=[1, 3])]
    expected, _ = run(model, prompt_ids(20), 30, **GREEDY)
    for _ in range(3):
        for drafter in drafters:
            out, _ = run(model, prompt_ids(20), 30, assistant_model=drafter, ddtree={"budget": 9}, **GREEDY)
            assert out.sequences.tolist() == expected.sequences.tolist()
    assert sorted(captured) == ["Prompt", "Prompt", "Stretch", "Stretch"]


@pytest.mark.usefixtures("stepped")
def test_calls_of_other_depths_share_the_features_that_graphs_write_to() -> None:
    model = tiny_target("llama")
    drafter = tiny_drafter(model)
    features = []
    for depth in (3, None, 3, 1):
        config = DDTreeConfig(budget=9, max_depth=depth)
        run(model, prompt_ids(20), 12, assistant_model=drafter, ddtree=config, **GREEDY)
        features.append(model.__dict__["_hf_ddtree_state"].buffers.state.features)
    assert all(other is features[0] for other in features)


# -- what a round costs ----------------------------------------------------------------------------------------------


def test_a_round_enters_few_files(executor: str) -> None:
    model = tiny_target("qwen3")
    call = GREEDY | {"assistant_model": tiny_drafter(model), "ddtree": {"budget": 7}}
    run(model, prompt_ids(20), 20, **call)
    root = FilePath(hf_ddtree.__file__).parent
    rounds, entered = 0, set()

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal rounds
        file = FilePath(frame.f_code.co_filename)
        if event == "call" and root in file.parents:
            rounds += frame.f_code.co_name == "decode_round"
            if rounds == 2:
                entered.add(file.name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        out, _ = run(model, prompt_ids(20), 20, **call)
    finally:
        sys.setprofile(before)
    assert ran_as(out, executor) and rounds > 3
    assert {"decoding.py", "state.py", "tree_cache.py", "logits_process.py"} <= entered
    assert len(entered) <= {"launched": 16, "plain": 14, "graph": 17}[executor], sorted(entered)


class Reads(TorchDispatchMode):
    """Counts what a host reads of tensors, each of which would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []  # a round
        self.recorded = False  # what a graph does is the device's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        if reads and self.counts and not self.recorded:
            self.counts[-1] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("stepped")
@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
def test_a_graphs_round_waits_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target("qwen3")
    call = options | {"assistant_model": tiny_drafter(model), "ddtree": {"budget": 7}}
    run(model, prompt_ids(20), 20, **call)
    reads = Reads()
    tolist, replay = torch.Tensor.tolist, round_graph.Stretch.replay

    def counted(self: torch.Tensor) -> Any:
        if reads.counts:
            reads.counts[-1] += 1
        return tolist(self)

    def replayed(self: round_graph.Stretch) -> None:
        reads.counts.append(0)
        reads.recorded = True
        replay(self)
        reads.recorded = False

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    monkeypatch.setattr(round_graph.Stretch, "replay", replayed)
    with reads:
        out, _ = run(model, prompt_ids(20), 20, **call)
    assert len(reads.counts) == out.ddtree_stats.rounds > 3
    assert reads.counts[:-1] == [1] * (len(reads.counts) - 1)  # behind the last one the call ends


def test_a_lazy_walk_waits_for_the_tree_and_once_a_token(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As stock decoding, whose loop asks after each token whether it was the last."""
    model = tiny_target("qwen3")
    call = GREEDY | {"repetition_penalty": 1.1, "assistant_model": tiny_drafter(model), "ddtree": {"budget": 7}}
    reads, lists = Reads(), [0]
    tolist, lazy_walk = torch.Tensor.tolist, launched.lazy_walk
    counts: list[tuple[int, int]] = []

    def counted(self: torch.Tensor) -> Any:
        lists[0] += 1
        return tolist(self)

    def walk(*args: Any) -> Any:
        lists[0] = 0
        reads.counts.append(0)
        path = lazy_walk(*args)
        counts.append((lists[0], reads.counts.pop() - len(path.on_host)))
        return path

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    monkeypatch.setattr(launched, "lazy_walk", walk)
    with reads:
        out, _ = run(model, prompt_ids(20), 30, **call)
    assert ran_as(out, executor)
    assert len(counts) == out.ddtree_stats.rounds > 3
    assert set(counts) == {(1, 0)}
