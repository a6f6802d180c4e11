"""Weights that are offloaded or spread over processes: the text is plain decoding's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from accelerate import cpu_offload, disk_offload, dispatch_model
from transformers import AutoModelForCausalLM, PreTrainedModel, pipeline

from hf_ddtree import DFlashDraftModel
from scripted import prompt_ids, scripted, tiny_drafter, tiny_target, word_tokenizer

# As for a GPU that has no room for the middle layers.
MAP = dict.fromkeys("model.norm model.rotary_emb model.embed_tokens model.layers.0 model.layers.3".split(), "cpu")
MAP |= dict.fromkeys(["model.layers.1", "model.layers.2", "lm_head"], "disk")
NO_EMBEDDING = MAP | {"model.embed_tokens": "disk"}

Offload = Callable[[PreTrainedModel, Path], Any]


def reloaded(model: PreTrainedModel, path: Path, device_map: dict[str, str]) -> Any:
    model.save_pretrained(path / "model")
    return AutoModelForCausalLM.from_pretrained(path / "model", device_map=device_map, offload_folder=path / "off")


OFFLOADS: dict[str, Offload] = {
    "all, in memory": lambda model, path: cpu_offload(model, execution_device="cpu"),
    "all, on disk": lambda model, path: disk_offload(model, str(path), execution_device="cpu"),
    "dispatched": lambda model, path: dispatch_model(model, MAP, "cpu", offload_dir=str(path), force_hooks=True),
    "a map": lambda model, path: reloaded(model, path, MAP),
    "a map with its embedding": lambda model, path: reloaded(model, path, NO_EMBEDDING),
    "a map of all": lambda model, path: reloaded(model, path, {"": "disk"}),
}


def hooks(model: Any) -> list[Any]:
    """What runs around each module."""
    return [
        (name, vars(module).get("_hf_hook"), vars(module).get("forward"), list(module._forward_hooks.values()))
        for name, module in model.named_modules()
    ]


def trees(model: Any, drafter: DFlashDraftModel, text: torch.Tensor, **options: Any) -> Any:
    with scripted(text, 0.9):
        return model.generate(
            text[:, :20], max_new_tokens=40, assistant_model=drafter, return_dict_in_generate=True,
            **{"ddtree": True, "do_sample": False} | options,
        )  # fmt: skip


@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
def test_an_offloaded_target(offload: Offload, tmp_path: Path) -> None:
    check_offloaded(tiny_target("llama"), offload, tmp_path)


def test_an_offloaded_target_whose_head_is_its_embedding(tmp_path: Path) -> None:
    check_offloaded(tiny_target("llama", tie_word_embeddings=True), OFFLOADS["a map with its embedding"], tmp_path)


def check_offloaded(model: PreTrainedModel, offload: Offload, path: Path) -> None:
    drafter = tiny_drafter(model)
    text = model.generate(prompt_ids(20), max_new_tokens=40, do_sample=False)
    model = offload(model, path)
    before = hooks(model)
    out = trees(model, drafter, text)
    assert torch.equal(out.sequences, text)
    assert out.ddtree_stats.mean_acceptance_length > 2
    assert out.ddtree_stats.launch.reason == "weights are offloaded"
    assert hooks(model) == before


@pytest.mark.parametrize("offload", [OFFLOADS["all, in memory"], OFFLOADS["all, on disk"]], ids=["memory", "disk"])
@pytest.mark.parametrize("target_too", [False, True])
def test_an_offloaded_drafter(offload: Offload, target_too: bool, tmp_path: Path) -> None:
    model = tiny_target("llama")
    text = model.generate(prompt_ids(20), max_new_tokens=40, do_sample=False)
    expected = model.generate(prompt_ids(20), max_new_tokens=40, assistant_model=tiny_drafter(model), ddtree=True)
    drafter = offload(tiny_drafter(model), tmp_path / "drafter")
    if target_too:
        model = offload(model, tmp_path / "target")
    before = hooks(drafter)
    out = trees(model, drafter, text)
    assert torch.equal(out.sequences, text) and torch.equal(expected, text)
    assert out.ddtree_stats.mean_acceptance_length > 2
    assert hooks(drafter) == before


def test_a_pipeline_loads_a_drafter_for_an_offloaded_target(tmp_path: Path) -> None:
    model = tiny_target("llama")
    tiny_drafter(model).save_pretrained(tmp_path / "drafter")
    options = {"max_new_tokens": 12, "do_sample": False, "return_tensors": True}
    expected = pipeline("text-generation", model=model, tokenizer=word_tokenizer())("w1 w2 w3", **options)
    model = reloaded(model, tmp_path, NO_EMBEDDING)
    path = str(tmp_path / "drafter")
    pipe = pipeline("text-generation", model=model, tokenizer=word_tokenizer(), assistant_model=path)
    assert pipe("w1 w2 w3", ddtree=True, **options) == expected


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this build of torch has no gloo to connect processes with",
)
def test_tensor_parallel_ranks_choose_what_one_process_chooses(tmp_path: Path) -> None:
    for family in ("llama", "qwen3"):
        tiny_target(family, vocab_size=212).save_pretrained(tmp_path / family)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = Path(__file__).with_name("tensor_parallel.py")
    done = subprocess.run(
        [*launcher, worker, tmp_path], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second and len(first) == 4
    for result in first:
        assert result["sharded"] and result["acceptance"] > 2
        assert result["trees"] == result["plain"] == result["one process"]
        assert len(set(result["budgets"])) == 1
