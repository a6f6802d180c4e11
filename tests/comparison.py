"""One call of `generate`, plainly and with trees, compared field by field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, LogitsProcessor, PreTrainedModel, StoppingCriteria

from hf_ddtree import DDTreeConfig, DDTreeStats, DFlashDraftModel
from hf_ddtree.compat import CACHE_KEY
from scripted import scripted

FIELDS = ("sequences", "scores", "logits", "hidden_states", "attentions", CACHE_KEY)


def generate(model: PreTrainedModel, options: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """`generate` from a fixed random state: what it returns, and the state it leaves."""
    model.__dict__.pop("_previous_max_cache_length", None)  # static caches grow with those of earlier calls
    torch.manual_seed(5)
    return model.generate(**options), torch.get_rng_state()


FIXED = DDTreeConfig(budget=15)


def generate_with_trees(
    model: PreTrainedModel,
    drafter: DFlashDraftModel,
    options: dict[str, Any],
    text: Sequence[int],
    hit: float = 0.9,
    config: DDTreeConfig | bool = FIXED,
) -> tuple[Any, torch.Tensor]:
    """The same with a drafter that knows most of `text`: ids by position, as plain decoding gave them.

    Rounds do not depend on time, unless `config` says so.
    """
    with scripted(text, hit):
        return generate(model, options | {"assistant_model": drafter, "ddtree": config})


def assert_same(mine: Any, theirs: Any, name: str = "output") -> None:
    """The same structure, shapes and dtypes, the same ids, and values but for rounding."""
    if hasattr(theirs, "sequences"):
        assert hasattr(mine, "sequences"), name
        for field in FIELDS:
            assert_same(getattr(mine, field), getattr(theirs, field), field)
    elif isinstance(theirs, Cache):
        assert mine.get_seq_length() == theirs.get_seq_length(), name
        assert type(mine) is type(theirs), name
        for layer, (a, b) in enumerate(zip(mine.layers, theirs.layers, strict=True)):
            assert type(a) is type(b), f"{name}, layer {layer}"
            assert_same((a.keys, a.values), (b.keys, b.values), f"{name}, layer {layer}")
    elif isinstance(theirs, tuple):
        assert isinstance(mine, tuple), name
        assert len(mine) == len(theirs), name
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(a, b, f"{name}[{index}]")
    elif isinstance(theirs, torch.Tensor):
        assert isinstance(mine, torch.Tensor), name
        tolerance = 1e-3 if theirs.is_floating_point() else 0
        if (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype) and torch.allclose(
            mine, theirs, atol=tolerance, rtol=tolerance
        ):
            return  # much faster than the call that explains a difference
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance, msg=lambda text: f"{name}: {text}")
    else:
        assert mine == theirs, name


def assert_trees_spell(out: Any, prompt: int) -> None:
    """The recorded roots and paths are the text behind a prompt of that many tokens."""
    ids, stats, at = out.sequences[0, prompt:].tolist(), out.ddtree_stats, 0
    assert len(stats.trees) == stats.rounds
    for (root, tree, path), length in zip(stats.trees, stats.acceptance_lengths, strict=True):
        assert root == ids[at]
        assert tree.token_ids[0, path].tolist() == ids[at + 1 : at + length]
        assert tree.parents[0, path].tolist() == [-1, *path][: len(path)]
        at += length
    assert at == len(ids) - 1


def is_same(mine: Any, theirs: Any) -> bool:
    try:
        assert_same(mine, theirs)
    except AssertionError:
        return False
    return True


def assert_several_tokens_a_round(stats: DDTreeStats) -> None:
    """Else an option was compared where trees did nothing; a text of few tokens can prove no more."""
    if sum(stats.acceptance_lengths) > 5:
        assert stats.mean_acceptance_length > 1.5


class Recorder(LogitsProcessor):
    """Keeps every call's prefix and scores; each of its calls forbids another third of the vocabulary."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.prefixes.append(input_ids[0].tolist())
        self.scores.append(scores.clone())
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 3 == len(self.scores) % 3, float("-inf"))


class StopAt(StoppingCriteria):
    """Ends the text at a length, and keeps the ids of every call."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append(input_ids[0].tolist())
        return torch.full((1,), input_ids.shape[1] >= self.length)


class Puts:
    """A streamer that keeps what it gets, shapes included."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append((value.dtype, value.tolist()))

    def end(self) -> None:
        self.events.append("end")
