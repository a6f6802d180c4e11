"""Quantized targets, heads and drafters, and drafters of another precision: the text is within rounding of plain's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BitsAndBytesConfig, DynamicCache, PreTrainedModel

from hf_ddtree import DDTreeConfig, DFlashDraftModel
from hf_ddtree.compat import CACHE_KEY
from scripted import prompt_ids, scripted, tiny_drafter, tiny_target
from test_candidate_generator import a_pair_that_agrees

# What their kernels for a CPU divide by.
SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.2}
NEW, ROWS = 60, 16
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
INT8 = {"load_in_8bit": True}
ALL = {"llm_int8_skip_modules": ["none"]}  # the output head too
QUANTIZED = {"nf4": NF4, "nf4 with its head": NF4 | ALL, "int8": INT8, "int8 with its head": INT8 | ALL}


def quantized(model: PreTrainedModel, path: Path, options: dict[str, Any], device: str = "cpu") -> Any:
    pytest.importorskip("bitsandbytes")
    model.to(torch.bfloat16).save_pretrained(path)
    config = BitsAndBytesConfig(**options)
    return type(model).from_pretrained(path, quantization_config=config, dtype=torch.bfloat16, device_map=device)


@pytest.fixture(scope="module", params=["bfloat16", "float16", *QUANTIZED])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = tiny_target("qwen3", **SIZES)
    if request.param in QUANTIZED:
        return quantized(model, tmp_path_factory.mktemp("target"), QUANTIZED[request.param])
    return model.to(getattr(torch, request.param))


@torch.no_grad()
def steps(model: Any, ids: torch.Tensor, prompt: int, rows: int) -> torch.Tensor:
    """Logits behind the prompt and behind each new token but the last, `(new, V)`, from forwards of `rows` rows."""
    cache = DynamicCache(config=model.config)
    logits = [model(ids[:, :prompt], **{CACHE_KEY: cache}).logits[0, -1:]]
    logits += [model(part, **{CACHE_KEY: cache}).logits[0] for part in ids[:, prompt:-1].split(rows, dim=1)]
    return torch.cat(logits).float()


def assert_regret_is_rounding(model: Any, ids: torch.Tensor, prompt: int) -> None:
    """Each new token is plain decoding's best, but for twice what the number of rows in a forward changes there."""
    one, several = steps(model, ids, prompt, 1), steps(model, ids, prompt, ROWS)
    regret = one.amax(-1) - one.gather(1, ids[0, prompt:, None])[:, 0]
    noise = (one - several).abs().amax(-1)
    assert (regret <= 2 * noise).all(), [(float(r), float(n)) for r, n in zip(regret, noise, strict=True) if r > 2 * n]


def trees(model: Any, drafter: DFlashDraftModel, ids: torch.Tensor, **options: Any) -> Any:
    options = {"ddtree": DDTreeConfig(budget=ROWS - 1), "max_new_tokens": NEW, "do_sample": False} | options
    return model.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_is_the_targets_but_for_rounding(target: Any, dtype: torch.dtype) -> None:
    ids = prompt_ids(20)
    text = target.generate(ids, max_new_tokens=NEW, do_sample=False)
    with scripted(text, 0.9, vocab=256):
        out = trees(target, tiny_drafter(target).to(dtype), ids)
    assert out.sequences.shape == text.shape
    assert_regret_is_rounding(target, out.sequences, ids.shape[1])


def test_the_standard_sees_a_token_of_another_prefix(target: Any) -> None:
    text = target.generate(prompt_ids(20), max_new_tokens=NEW, do_sample=False)
    text[0, 50] = (text[0, 50] + 1) % 256
    with pytest.raises(AssertionError):
        assert_regret_is_rounding(target, text, 20)


# -- the drafter -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, DFlashDraftModel]:
    return a_pair_that_agrees(hidden_size=64, intermediate_size=128)


def acceptance(target: Any, drafter: Any) -> float:
    """Mean over a few prompts; the text is checked on the way."""
    committed, rounds = 0, 0
    for seed in range(3):
        ids = prompt_ids(12, seed, vocab=8)
        out = trees(target, drafter, ids)
        assert_regret_is_rounding(target, out.sequences, 12)
        committed += sum(out.ddtree_stats.acceptance_lengths)
        rounds += out.ddtree_stats.rounds
    return committed / rounds


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "nf4", "int8"])
def test_a_drafter_of_less_precision_accepts_as_much(
    pair: tuple[PreTrainedModel, DFlashDraftModel], kind: str, tmp_path: Path
) -> None:
    target, drafter = copy.deepcopy(pair[0]).to(torch.bfloat16), pair[1]
    full = acceptance(target, drafter)
    assert full > 1.7
    if kind in QUANTIZED:
        less = quantized(copy.deepcopy(drafter), tmp_path, QUANTIZED[kind])
        assert less.fc.weight.dtype in (torch.uint8, torch.int8)
    else:
        less = copy.deepcopy(drafter).to(getattr(torch, kind))
    assert acceptance(target, less) > 0.9 * full


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_drafter_accepts_as_much_of_a_quantized_target(
    pair: tuple[PreTrainedModel, DFlashDraftModel], kind: str, tmp_path: Path
) -> None:
    target = quantized(copy.deepcopy(pair[0]), tmp_path, QUANTIZED[kind])
    assert acceptance(target, pair[1]) > 0.9 * acceptance(pair[0], pair[1])


# -- weights ---------------------------------------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    """Counts new float tensors as large as an output head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() >= self.size:
                self.count += tensor.untyped_storage()._cdata not in before
        return out


@pytest.mark.parametrize("drafter_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["bfloat16", "nf4 with its head", "int8 with its head"])
def test_heads_and_embeddings_are_not_copied(kind: str, drafter_dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_target("qwen3", **SIZES | {"vocab_size": 4096})
    model = quantized(model, tmp_path, QUANTIZED[kind]) if kind in QUANTIZED else model.to(torch.bfloat16)
    drafter = tiny_drafter(model).to(drafter_dtype)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    heads = 0

    def count(*args: Any) -> None:
        nonlocal heads
        heads += 1

    model.lm_head.register_forward_pre_hook(count)
    trees(model, drafter, prompt_ids(20), **options)  # kernels that convert weights do so once
    copies = []
    for call in ({}, {"assistant_model": drafter, "ddtree": DDTreeConfig(budget=ROWS - 1)}):
        heads = 0
        with Copies(4096 * 64) as mode:
            model.generate(prompt_ids(20), **options, **call)
        copies.append((mode.count, heads))
    (plain, plain_heads), (ours, our_heads) = copies
    assert ours * plain_heads <= plain * our_heads  # of a quantized head's own
    assert plain == 0 or kind != "bfloat16"
