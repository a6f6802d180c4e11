"""What a target does with the `logits_scaling` of its config: some multiply their head's output by it, some divide."""

from __future__ import annotations

import threading
from typing import Any

import torch

from .target_state import uncompiled
from .verifier import input_device

_multiplying: dict[type, bool] = {}  # by class, whose forward it is a part of: a model's shadow is of its class


def multiplies(target: Any) -> bool:
    """Whether a target multiplies its logits by its `logits_scaling`; if not it divides, as Granite does.

    The first target of a class shows it by a forward of two tokens, whose logits are read on the host: whoever
    captures asks before.
    """
    kind, scaling = type(target), getattr(target.config.get_text_config(decoder=True), "logits_scaling", None)
    if scaling is None or scaling == 1:
        return False
    if kind not in _multiplying:
        _multiplying[kind] = _is_seen_to_multiply(target, scaling)
    return _multiplying[kind]


@torch.no_grad()
def _is_seen_to_multiply(target: Any, scaling: float) -> bool:
    outputs: dict[int, torch.Tensor] = {}  # of the head, by thread: another may be running the target now

    def keep(module: Any, args: Any, output: torch.Tensor) -> None:
        outputs[threading.get_ident()] = output

    ids = torch.arange(2, device=input_device(target.get_input_embeddings(), torch.device("cpu")))[None]
    hook = target.get_output_embeddings().register_forward_hook(keep)
    try:
        with uncompiled(target):
            logits = target(input_ids=ids, use_cache=False, return_dict=True).logits.float()
    finally:
        hook.remove()
    given = outputs[threading.get_ident()][..., : logits.shape[-1]].to(logits.device).float()
    return float((given * scaling - logits).norm()) < float((given / scaling - logits).norm())
