"""Where two dtypes meet: drafter and target of different ones, and quantized heads, drafters and targets."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from hf_ddtree import DFlashDraftModel
from scripted import prompt_ids
from test_candidate_generator import a_pair_that_agrees

NEW = 60
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, DFlashDraftModel]:
    # Widths that 4-bit kernels on CPUs take.
    return a_pair_that_agrees(hidden_size=64, intermediate_size=128, num_key_value_heads=4)


def regret(model: PreTrainedModel, text: torch.Tensor, prompt: int) -> float:
    """How far below its best token, at most, the target itself puts a token of a text."""
    with torch.no_grad():
        logits = model(text).logits[0, prompt - 1 : -1].float()
    chosen = logits.gather(1, text[0, prompt:, None])[:, 0]
    return float((logits.amax(-1) - chosen).max())


def mean_acceptance(model: PreTrainedModel, drafter: DFlashDraftModel, least_gap: float) -> float:
    """Tokens a round over some texts, each of which has to be the target's own within rounding."""
    rounds = tokens = 0
    for seed, length in enumerate((2, 6, 30)):
        ids = prompt_ids(length, vocab=8, seed=seed)
        out = model.generate(
            ids, assistant_model=drafter, ddtree={"budget": 7}, do_sample=False, max_new_tokens=NEW,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert regret(model, out.sequences, length) <= least_gap
        rounds += out.ddtree_stats.rounds
        tokens += sum(out.ddtree_stats.acceptance_lengths)
    return tokens / rounds


@pytest.mark.parametrize("target_dtype", DTYPES)
def test_a_drafter_of_any_dtype_drafts_as_well(
    target_dtype: torch.dtype, pair: tuple[PreTrainedModel, DFlashDraftModel]
) -> None:
    model = copy.deepcopy(pair[0]).to(target_dtype)
    gap = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}[target_dtype]
    same = mean_acceptance(model, copy.deepcopy(pair[1]).to(target_dtype), gap)
    assert same > 2
    for dtype in set(DTYPES) - {target_dtype}:
        drafter = copy.deepcopy(pair[1]).to(dtype)
        assert mean_acceptance(model, drafter, gap) > 0.9 * same
        assert {p.dtype for p in drafter.parameters()} == {dtype}


def quantized_head(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    bnb = pytest.importorskip("bitsandbytes", reason="needs hf-ddtree[bitsandbytes]")
    model, head = copy.deepcopy(model), model.get_output_embeddings()
    sizes = head.in_features, head.out_features
    if kind == "nf4":
        quantized = bnb.nn.Linear4bit(*sizes, bias=False, quant_type="nf4", compute_dtype=head.weight.dtype)
        quantized.weight = bnb.nn.Params4bit(head.weight.detach().clone(), requires_grad=False, quant_type="nf4")
    else:
        quantized = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
        quantized.weight = bnb.nn.Int8Params(head.weight.detach().clone(), requires_grad=False)
    model.set_output_embeddings(quantized.to("cpu"))
    return model


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_head_makes_the_drafts_logits_too(
    kind: str, dtype: torch.dtype, pair: tuple[PreTrainedModel, DFlashDraftModel]
) -> None:
    model = quantized_head(copy.deepcopy(pair[0]).to(dtype), kind)
    same = mean_acceptance(copy.deepcopy(pair[0]).to(dtype), copy.deepcopy(pair[1]).to(dtype), 0.05)
    for drafter_dtype in (dtype, torch.float16):
        assert mean_acceptance(model, copy.deepcopy(pair[1]).to(drafter_dtype), 0.05) > 0.8 * same


@pytest.mark.parametrize("options", [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}])
@pytest.mark.parametrize("quantized", ["drafter", "target", "both"])
def test_a_quantized_drafter_or_target_drafts_nearly_as_well(
    quantized: str, options: dict[str, Any], pair: tuple[PreTrainedModel, DFlashDraftModel], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason="needs hf-ddtree[bitsandbytes]")
    quantization = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.bfloat16, **options)
    model, drafter = (copy.deepcopy(part).to(torch.bfloat16) for part in pair)
    same = mean_acceptance(model, drafter, 0.05)
    if quantized != "target":
        drafter.save_pretrained(tmp_path / "drafter")
        drafter = DFlashDraftModel.from_pretrained(
            tmp_path / "drafter", dtype=torch.bfloat16, quantization_config=quantization
        )
        assert drafter.layers[0].mlp.up_proj.weight.dtype != torch.bfloat16
    if quantized != "drafter":
        model.save_pretrained(tmp_path / "target")
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "target", dtype=torch.bfloat16, quantization_config=quantization
        )
    assert mean_acceptance(model, drafter, 0.1) > 0.6 * same
