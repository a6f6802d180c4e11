"""Fixtures that several files share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from hf_ddtree import DFlashDraftModel, capture, decoding, round_graph
from scripted import tiny_drafter, tiny_target, word_tokenizer


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Workers share few cores, and threads that wait for each other are slow there."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def drafter(target: PreTrainedModel) -> DFlashDraftModel:
    return tiny_drafter(target)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer()


@pytest.fixture
def warnings_of_transformers(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What transformers logs as a warning or worse."""
    propagates = logging.getLogger("transformers").propagate
    transformers_logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        yield caplog
    logging.getLogger("transformers").propagate = propagates


@pytest.fixture(params=["ours", "the model's"])
def each_layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds over our layers, where they can be, and over the model's own, as `execution="plain"` has them."""
    if request.param != "ours":
        monkeypatch.setattr(decoding, "find_layers", lambda *_: "asked for")


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on a CPU, neither compiled nor captured."""
    monkeypatch.setattr(capture, "_on_one_gpu", lambda devices: None)
    monkeypatch.setattr(round_graph.Recorded, "capture", lambda self: None)
    monkeypatch.setattr(round_graph.RoundGraph, "compile", lambda self: None)
