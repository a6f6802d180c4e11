"""Prompts by a graph: on a CPU the same forward runs without a graph around it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_ddtree import capture, prompt, release_buffers
from hf_ddtree.compat import CACHE_KEY
from scripted import prompt_ids, tiny_drafter, tiny_target

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}
pytestmark = pytest.mark.usefixtures("stepped")


class Pair:
    """A target that counts how often its stock path runs a prompt."""

    def __init__(self, family: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.target = tiny_target(family, max_position_embeddings=4096, **options)
        self.drafter = tiny_drafter(self.target)
        self.launched = 0
        original = type(self.target)._prefill

        def prefill(model: Any, *args: Any, **kwargs: Any) -> Any:
            self.launched += 1
            return original(model, *args, **kwargs)

        monkeypatch.setattr(type(self.target), "_prefill", prefill)

    def plain(self, ids: torch.Tensor, **options: Any) -> Any:
        before = self.launched
        out = self.target.generate(ids, **GREEDY | options)
        self.launched = before
        return out

    def trees(self, ids: torch.Tensor, **options: Any) -> tuple[Any, int]:
        """With the number of prompts that the stock path ran."""
        before = self.launched
        call = {"assistant_model": self.drafter, "ddtree": {"budget": 9}}
        out = self.target.generate(ids, **GREEDY | call | options)
        return out, self.launched - before

    @property
    def kept(self) -> Any:
        """What the graph was made for, and the graph; `None` before there is one."""
        return next(iter(self.target.__dict__["_hf_ddtree_state"].buffers.prompts.items()), None)


@pytest.mark.parametrize("family", ["llama", "qwen2_mixed", "qwen3", "mistral"])
def test_texts_of_all_lengths_run_by_one_graph(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(family, monkeypatch)
    longest = prompt_ids(prompt.MOST_TOKENS - 1)
    out, launched = pair.trees(longest)
    assert launched == 1  # to compare
    _, graph = pair.kept
    assert isinstance(graph, prompt.Prompt)
    assert out.sequences.tolist() == pair.plain(longest).sequences.tolist()
    for length in (2, 30, prompt.CHUNK - 1, prompt.CHUNK, prompt.CHUNK + 1, 700):
        ids = prompt_ids(length, seed=length)
        expected = pair.plain(ids)
        for options in ({}, {"attention_mask": torch.ones_like(ids)}, {"output_scores": True}):
            out, launched = pair.trees(ids, **options)
            assert launched == 0
            assert out.sequences.tolist() == expected.sequences.tolist()
        assert pair.kept[1] is graph


def test_the_first_call_answers_as_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: where numbers are coarse, other kernels could give another text."""
    pair = Pair("llama", monkeypatch)
    outputs: list[torch.Tensor] = []
    original = prompt.Prompt.run

    def run(self: prompt.Prompt, *args: torch.Tensor) -> Any:
        result = original(self, *args)
        outputs.append(torch.cat([result[0].flatten(), result[1].flatten()]))
        return result

    monkeypatch.setattr(prompt.Prompt, "run", run)
    for _ in range(3):
        pair.trees(prompt_ids(40))
    assert len(outputs) == 3
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_it_gives_what_the_stock_path_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("llama", monkeypatch)
    ids = prompt_ids(300)
    compared: list[Any] = []
    original = capture.are_alike
    monkeypatch.setattr(capture, "are_alike", lambda *both, **share: compared.append(both) or original(*both, **share))
    out, _ = pair.trees(ids)
    assert len(compared[0][0]) == 1 + 2 * pair.target.config.num_hidden_layers
    torch.testing.assert_close(*compared[0], atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(out[CACHE_KEY].layers, pair.plain(ids)[CACHE_KEY].layers, strict=True):
        torch.testing.assert_close(mine.keys[:, :, :300], theirs.keys[:, :, :300], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values[:, :, :300], theirs.values[:, :, :300], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (1, {}),
        (prompt.MOST_TOKENS + 1, {}),
        (8, {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])}),
        (8, {"output_hidden_states": True}),
        (8, {"ddtree": {"budget": 9, "execution": "plain"}}),
    ],
    ids=["one token", "long", "padded", "states", "plain"],
)
def test_other_prompts_run_through_the_stock_path(
    length: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair("llama", monkeypatch)
    ids = prompt_ids(length)
    plain = {name: value for name, value in options.items() if name != "ddtree"}
    expected = pair.plain(ids, **plain)
    for _ in range(2):
        out, launched = pair.trees(ids, **options)
        assert launched == 1
        assert out.sequences.tolist() == expected.sequences.tolist()


def test_a_second_turn_runs_through_the_stock_path(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("qwen3", monkeypatch)
    first, _ = pair.trees(prompt_ids(20))
    ids = torch.cat([first.sequences, prompt_ids(6, seed=1)], dim=1)
    expected = pair.plain(ids)
    second, launched = pair.trees(ids, **{CACHE_KEY: first[CACHE_KEY]})
    assert launched == 1
    assert second.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("differs", [False, True], ids=["not captured", "another result"])
def test_without_a_graph_that_holds_prompts_are_launched(differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("llama", monkeypatch)
    tries: list[Any] = []
    if differs:
        original = prompt.Prompt.record

        def another(self: prompt.Prompt) -> None:
            original(self)
            tries.append(self.cache.layers[2].values.neg_())

        monkeypatch.setattr(prompt.Prompt, "record", another)
    else:

        def fail(self: prompt.Prompt) -> None:
            tries.append(self)
            raise RuntimeError("no graph")

        monkeypatch.setattr(prompt.Prompt, "capture", fail)
        monkeypatch.setattr(capture, "_release", lambda device: None)
    expected = pair.plain(prompt_ids(20))
    seen = []
    for launches in (2, 1, 1):  # the later calls know
        out, launched = pair.trees(prompt_ids(20))
        assert launched == launches
        assert out.sequences.tolist() == expected.sequences.tolist()
        seen.append(len(tries))
    assert seen[0] == seen[2] > 0


def test_a_graph_is_forgotten_when_rows_or_weights_move(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("llama", monkeypatch)
    pair.trees(prompt_ids(20))
    _, first = pair.kept
    for change in (
        lambda: None,  # the longer text alone makes buffers grow
        lambda: pair.target.model.layers[1].mlp.down_proj.weight.__setattr__(
            "data", pair.target.model.layers[1].mlp.down_proj.weight.data * 1.5
        ),
    ):
        change()
        ids = prompt_ids(900)
        expected = pair.plain(ids)
        out, launched = pair.trees(ids)
        assert launched == 1
        assert out.sequences.tolist() == expected.sequences.tolist()
        _, second = pair.kept
        assert second is not first
        first = second
    pair.trees(prompt_ids(4000))
    assert pair.kept is None  # nor does it hold the smaller buffers
    release_buffers(pair.target)


def test_a_graph_holds_no_smaller_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the next calls cannot use it."""
    pair = Pair("llama", monkeypatch)
    first, _ = pair.trees(prompt_ids(200))
    graph = weakref.ref(pair.kept[1])
    ids = torch.cat([first.sequences, prompt_ids(800, seed=1)], dim=1)
    pair.trees(ids, **{CACHE_KEY: first[CACHE_KEY]})
    assert graph() is None


@pytest.mark.parametrize("earlier", [False, True])
def test_no_token_outside_of_the_text_reaches_it(earlier: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("llama", monkeypatch)
    ids = prompt_ids(20)
    foreign = next(token for token in range(4, 90) if token not in ids) if earlier else 0
    with torch.no_grad():
        pair.target.model.embed_tokens.weight[foreign] = torch.nan
    if earlier:
        pair.trees(torch.cat([ids, torch.full((1, 40), foreign)], dim=1))
    expected = pair.plain(ids, max_new_tokens=2)  # the last round is a plain one
    out, _ = pair.trees(ids, max_new_tokens=2)
    assert isinstance(pair.kept[1], prompt.Prompt) != earlier
    assert out.sequences.tolist() == expected.sequences.tolist()


class Prefix(LlamaForCausalLM):
    """Whose first four tokens see each other, if they come in one prompt."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        length, cache = input_ids.shape[1], kwargs.get(CACHE_KEY)
        if length > 1 and cache is not None and cache.get_seq_length() == 0:
            attention_mask = torch.full((1, 1, length, length), torch.finfo(self.dtype).min).triu(1)
            attention_mask[..., :4, :4] = 0
        return super().forward(input_ids, attention_mask, position_ids, **kwargs)


class ShortSighted(LlamaDecoderLayer):
    """Which sees five tokens of a prompt at a time."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        length, cache = hidden_states.shape[1], kwargs.get(CACHE_KEY)
        if length > 1 and cache is not None and cache.layers[3].get_seq_length() == 0:
            places = torch.arange(length)
            behind = places[:, None] - places
            attention_mask = torch.zeros(1, 1, length, length)
            attention_mask.masked_fill_((behind < 0) | (behind > 4), torch.finfo(hidden_states.dtype).min)
        return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)


@pytest.mark.parametrize("where", ["first rows", "last layer"])
@pytest.mark.parametrize("length", [12, 500])
def test_a_prompt_that_is_seen_in_another_way_is_launched(
    where: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little differs: some rows of many, or a layer behind all taps."""
    pair = Pair("llama", monkeypatch)
    if where == "first rows":
        pair.target.__class__ = Prefix
    else:
        assert max(pair.drafter.config.target_layer_ids) < 3
        pair.target.model.layers[3].__class__ = ShortSighted
    for tokens in (length, 10, 40):
        ids = prompt_ids(tokens, seed=tokens)
        expected = pair.plain(ids)
        out, _ = pair.trees(ids)
        assert out.sequences.tolist() == expected.sequences.tolist()
    assert not isinstance(pair.kept[1], prompt.Prompt)


def test_rounding_is_told_from_another_result() -> None:
    torch.manual_seed(0)
    rows = torch.randn(1, 3, 50, 64)

    def alike(other: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
        return prompt.are_alike([rows.to(dtype)], [other.to(dtype)])

    assert alike(rows * 1.02) and alike(rows * 1.2, torch.bfloat16)
    assert not alike(rows * 1.1) and not alike(rows * 1.4, torch.bfloat16)
    assert not alike(rows * torch.nan)
    one_row = (torch.arange(50) == 7)[:, None]
    assert not alike(rows + one_row * torch.randn(1, 3, 50, 64))
    # A row of which little is left is as exact as what it was computed from.
    rows = torch.where(one_row, 1e-3 * rows, rows)
    assert alike(rows + 1e-3 * one_row)
