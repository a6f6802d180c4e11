"""`python -m hf_ddtree inspect`: what a drafter's checkpoint is, and whether it fits a target, without its weights."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from huggingface_hub import get_safetensors_metadata, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .configuration_dflash import DFlashConfig
from .drafter_families import TransformersDFlash, family_of
from .drafter_formats import (
    COPIES_OF_TARGET,
    drafter_format,
    flatten_config_dict,
    other_kind,
)
from .modeling_dflash import DFlashDraftModel
from .validation import pair_faults

_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "BF16": 16, "F16": 16, "I16": 16}  # others have 8
_LISTED = 8  # names in one line


class Header(NamedTuple):
    """What a safetensors file says of a tensor before its data."""

    shape: tuple[int, ...]
    dtype: str


class Report:
    """Lines on what a checkpoint is, and what is wrong with it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.faults: list[str] = []

    def add(self, name: str, value: Any) -> None:
        self.lines.append(f"  {name:<13} {value}")


def inspect_checkpoint(
    drafter: Annotated[str, typer.Argument(help="The drafter, a directory or hub id.")],
    target: Annotated[str | None, typer.Argument(help="The target that it should fit, likewise.")] = None,
) -> None:
    """Say what a drafter's checkpoint is, and whether it fits a target.

    Reads configs and the headers of weights only. Exits with 1 if the drafter cannot be used.
    """
    try:
        report = inspect_drafter(drafter, target)
    except (OSError, ValueError) as error:
        typer.echo(_one_line(error), err=True)
        raise typer.Exit(1) from None
    typer.echo("\n".join(report.lines))
    for fault in report.faults:
        typer.echo(f"  ✗ {fault}")
    use = f"with {target}" if target else "with the target that it was trained for"
    typer.echo(f"  {'cannot be used' if report.faults else f'can be used {use}'}")
    if report.faults:
        raise typer.Exit(1)


def inspect_drafter(drafter: str, target: str | None = None) -> Report:
    """What `inspect` prints.

    Raises:
        OSError, ValueError: There is no checkpoint to read.
    """
    report = Report()
    report.lines.append(drafter)
    config_dict = _config_dict(drafter)
    config = _read_config(config_dict, report)
    if config is None:
        return report
    _describe(config, config_dict, report)
    headers = _headers(drafter)
    if not headers:
        report.faults.append(f"it has no {SAFE_WEIGHTS_NAME}, and only safetensors are loaded")
    else:
        _describe_weights(config, config_dict, headers, report)
    if target is not None:
        _config_dict(target)  # a clear error if there is none
        text_config = AutoConfig.from_pretrained(target).get_text_config(decoder=True)
        report.faults += pair_faults(text_config, config, text_config.vocab_size, text_config.num_hidden_layers)
    return report


def _config_dict(name: str) -> dict[str, Any]:
    looks_like_a_path = os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1
    if looks_like_a_path and not os.path.isdir(name):
        raise OSError(f"There is no directory {name}.")
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise OSError(f"There is no config.json in {name}.")
    config_dict, _ = PreTrainedConfig.get_config_dict(name)
    return config_dict


def _read_config(config_dict: dict[str, Any], report: Report) -> PreTrainedConfig | None:
    form = drafter_format(config_dict)
    native = isinstance(family_of(config_dict), TransformersDFlash)
    if native:
        form = f"transformers' own ({config_dict.get('model_type')})"
    elif form is None or other_kind(config_dict):
        kind = other_kind(config_dict)
        report.add("format", kind or f"no drafter: model_type is {config_dict.get('model_type')!r}")
        report.faults.append("it is no DFlash drafter")
        return None
    report.add("format", form)
    try:
        if native:
            config: PreTrainedConfig = AutoConfig.for_model(**config_dict)
        else:
            config = DFlashConfig.from_dict(flatten_config_dict(config_dict))
            config.require_complete()
    except (ValueError, TypeError, StrictDataclassError) as error:
        report.faults.append(_one_line(error))
        return None
    return config


def _describe(config: Any, config_dict: dict[str, Any], report: Report) -> None:
    kinds = Counter(config.layer_types)
    parts = [f"{kinds['full_attention']} full"] if kinds["full_attention"] else []
    if kinds["sliding_attention"]:
        parts.append(f"{kinds['sliding_attention']} sliding (window {config.sliding_window})")
    report.add("layers", f"{config.num_hidden_layers}: {', '.join(parts)}")
    of = f" of the target's {n} layers" if (n := getattr(config, "num_target_layers", None)) else ""
    report.add("taps", f"{', '.join(map(str, config.target_layer_ids))}{of}")
    report.add("block size", config.block_size)
    report.add("mask token", config.mask_token_id)
    report.add("rope", ", ".join(f"{name} {value}" for name, value in (config.rope_parameters or {}).items()))
    heads = f"{config.num_attention_heads} heads of {config.head_dim} ({config.num_key_value_heads} of keys)"
    report.add("widths", f"hidden {config.hidden_size}, {heads}, MLP {config.intermediate_size}")
    vocabulary, drafted = getattr(config, "vocab_size", None), getattr(config, "draft_vocab_size", None)
    if vocabulary is not None:
        report.add("vocabulary", f"{vocabulary}{f', of which it drafts {drafted}' if drafted else ''}")
    verifier = (config_dict.get("speculators_config") or {}).get("verifier") or {}
    if verifier.get("name_or_path"):
        report.add("trained for", verifier["name_or_path"])


def _describe_weights(
    config: PreTrainedConfig, config_dict: dict[str, Any], headers: dict[str, Header], report: Report
) -> None:
    speculators = drafter_format(config_dict) == "speculators"
    with torch.device("meta"):
        model = DFlashDraftModel(config) if isinstance(config, DFlashConfig) else AutoModel.from_config(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if speculators:
        headers = {n: h for n, h in headers.items() if n in expected or n not in (*COPIES_OF_TARGET, "t2d")}
    counts: Counter[str] = Counter()
    for header in headers.values():
        counts[header.dtype] += math.prod(header.shape)
    size = sum(count * _BITS.get(dtype, 8) for dtype, count in counts.items()) / 8
    dtypes = ", ".join(sorted(counts))
    report.add("parameters", f"{sum(counts.values()):,} ({dtypes}), {size / 2**20:,.1f} MiB")
    if quantization := config_dict.get("quantization_config"):
        report.add("quantized", f"{quantization.get('quant_method')}; the tensors are not compared with the config")
        return
    for kind, names in (
        ("missing", sorted(set(expected) - set(headers))),
        ("unexpected", set(headers) - set(expected)),
    ):
        if names:
            report.faults.append(f"{kind} weights: {_listed(sorted(names))}")
    for name in sorted(set(expected) & set(headers)):
        if headers[name].shape != expected[name]:
            report.faults.append(f"{name} is {headers[name].shape}, and the config makes it {expected[name]}")


def _headers(name: str) -> dict[str, Header]:
    """Of all tensors in the safetensors files of a directory or hub id; empty if it has none."""
    folder = Path(name) if os.path.isdir(name) else _cached(name)
    if folder is not None:
        return dict(_local_headers(folder))
    files = get_safetensors_metadata(name).files_metadata
    return {
        tensor: Header(tuple(info.shape), info.dtype)
        for file in files.values()
        for tensor, info in file.tensors.items()
    }


def _cached(name: str) -> Path | None:
    """Where a hub id's weights are on this machine, if they are."""
    for file in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        if isinstance(path := try_to_load_from_cache(name, file), str):
            return Path(path).parent
    return None


def _local_headers(folder: Path) -> Iterator[tuple[str, Header]]:
    files = {SAFE_WEIGHTS_NAME}
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        files = set(json.loads(index.read_text())["weight_map"].values())
    elif not (folder / SAFE_WEIGHTS_NAME).is_file():
        return
    for file in sorted(files):
        if not (path := folder / file).is_file():
            raise OSError(f"{index.name} names {file}, which is not there.")
        try:
            with safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(name)
                    yield name, Header(tuple(part.get_shape()), str(part.get_dtype()))
        except Exception as error:
            raise OSError(f"{path} is no whole safetensors file: {error}") from error


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
