"""Each causal LM of transformers is in the committed list, and what the list says holds for a sample (or for all)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import hf_ddtree.verifier
from all_targets import BROKEN, classes, config_classes, examine, examine_all, listed, share
from hf_ddtree.visibility import Visibility

VERSION, TARGETS = listed()
# A family for each thing that a target can have of its own: attention without transformers' interface, windows, chunks
# and counted rows, latent keys, indexers, sinks, shared keys, layers run twice, streams, encoders, and the refusals.
SAMPLE = (
    "llama gpt2 falcon xglm gemma3_text llama4_text deepseek_v3 deepseek_v32 gpt_oss gemma3n_text dory hy_v4 "
    "modernbert-decoder bert doge bloom gpt_neo bart openai-gpt qwen3_next lfm2"
).split()


def examined(family: str) -> Any:
    if family not in classes():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return examine(config_classes()[family])


def test_the_list_names_every_class() -> None:
    assert set(classes().items()) <= {(target.family, target.name) for target in TARGETS}


def test_in_the_list_nothing_is_broken_and_nine_in_ten_text_targets_are_equal() -> None:
    assert not [target for target in TARGETS if target.result == BROKEN]
    equal, text = share(TARGETS)
    assert equal >= 0.9 * text


@pytest.mark.parametrize("family", SAMPLE)
@pytest.mark.usefixtures("each_layers")
def test_a_target_is_as_the_list_says(family: str) -> None:
    target = examined(family)
    if transformers.__version__ == VERSION:
        assert target[:4] in [other[:4] for other in TARGETS]
    assert target.result != BROKEN


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v32"])
def test_a_wrong_mask_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = hf_ddtree.verifier.tree_mask

    def causal(seen: Visibility, dtype: torch.dtype) -> torch.Tensor:
        return original(replace(seen, _masks={}, visible=torch.ones_like(seen.visible).tril()), dtype)

    monkeypatch.setattr(hf_ddtree.verifier, "tree_mask", causal)
    assert examined(family).result == BROKEN


@pytest.mark.full
def test_all_targets_are_as_the_list_says() -> None:
    targets = examine_all()
    assert not [target for target in targets if target.result == BROKEN]
    if transformers.__version__ == VERSION:
        assert [target[:4] for target in targets] == [target[:4] for target in TARGETS]
