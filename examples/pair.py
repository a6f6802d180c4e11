"""The target and drafter that an example runs on: the shipped pair, or any other by `--target` and `--drafter`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_ddtree import DFlashDraftModel
from smollm2 import no_progress_bars, prepare_target

DRAFTER = Path(__file__).parent / "smollm2-135m-dflash"


class Pair(NamedTuple):
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DFlashDraftModel


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Add `--target`, `--drafter` and `--dtype`."""
    parser.add_argument("--target", help="directory or hub id of a causal LM; default: SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", help="directory or hub id of its drafter; default: the one beside this file")
    parser.add_argument(
        "--dtype",
        help="float32 (default on a CPU), bfloat16, ..., or auto (default on a GPU): the target's own",
    )


def load_pair(
    target: str | None = None,
    drafter: str | None = None,
    dtype: str | None = None,
    device: torch.device | None = None,
    attention: str | None = None,
) -> Pair:
    """Load a target, its tokenizer and its drafter.

    Args:
        target, drafter: Directory or hub id; default: the shipped pair.
        dtype: Of both, as `add_pair_options` says.
        device: Where they go; default: the GPU, if there is one.
        attention: The target's implementation; default: its own choice.

    Raises:
        ValueError: one of `target` and `drafter` is given alone: a drafter belongs to one target.
    """
    if (target is None) != (drafter is None):
        raise ValueError("A drafter belongs to one target: give both `--target` and `--drafter`, or neither.")
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name, dtype = target or str(prepare_target()), dtype or ("float32" if device.type == "cpu" else "auto")
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attention)
        draft = DFlashDraftModel.from_pretrained(drafter or DRAFTER, dtype=model.dtype)
    return Pair(model.to(device), AutoTokenizer.from_pretrained(name), draft.to(device))
