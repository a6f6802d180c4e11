"""Rounds that are launched over our attention: where that pays, why it cannot be, and whether it gives the same."""

from __future__ import annotations

import torch

from .draft_tree import DraftTree, TreeRows
from .launched import LaunchedRound
from .prompt import are_alike
from .rope import has_dynamic_rope
from .shadow import ShadowTarget
from .state import DecodingState
from .target_state import Buffers


def why_not_ours(buffers: Buffers, launched: LaunchedRound) -> str | None:
    """Why a call's rounds have to run the model's own layers, or `None`.

    Args:
        buffers: The call's.
        launched: Its rounds.
    """
    source, verifier = launched.source, launched.verifier
    if not buffers.kept:
        return "another call holds the buffers"
    if source.config.execution == "plain":
        return "asked for"
    snapshot = source.target_snapshot
    if torch.device("meta") in snapshot.devices:
        return "weights are offloaded"
    if len(snapshot.devices) > 1:
        return "weights lie on several devices"
    if getattr(source.target, "hf_quantizer", None) is not None:
        return "weights are quantized"
    if launched.record.room < 2:
        return "one token is left"
    if launched.record.needs_states:
        return "outputs hold hidden states or attentions"
    if launched.rope is not None:
        return "rotary frequencies switch"
    if has_dynamic_rope(source.target):
        return "rotary frequencies follow the length"
    if torch.is_autocast_enabled(source.device.type):
        return "autocast is on"
    if verifier.plain_only:
        return "steps have to be plain ones"
    if why := verifier.why_not_ours():
        return why
    if verifier.step_kwargs:
        return "the caller gives each step arguments of their own"
    if snapshot.hooked:
        return "a module has hooks"
    if snapshot.adapted:
        return "adapters may change between rounds"
    return None


def find_layers(buffers: Buffers, launched: LaunchedRound) -> ShadowTarget | str:
    """Our layers for the call's launched rounds, made now if they were not before; or why the model's own run.

    Before they are trusted, a forward of theirs is compared with one of the model's own.

    Args:
        buffers: The call's, with the prompt in them.
        launched: Its rounds.
    """
    source = launched.source
    if source.target_snapshot.devices != {torch.device("cpu")}:
        return "launched one by one they gain nothing on a GPU"
    made_for = source.target_snapshot.fingerprint, source.layer_ids
    if buffers.layers_made_for != made_for:
        buffers.layers, buffers.layers_made_for = _make(buffers, launched), made_for
    if isinstance(buffers.layers, ShadowTarget):
        buffers.layers.committed = _prompt_mask(launched)
    return buffers.layers


@torch.no_grad()
def _make(buffers: Buffers, launched: LaunchedRound) -> ShadowTarget | str:
    source, cache, state = launched.source, buffers.cache, buffers.state
    try:
        with torch.inference_mode(False):  # ordinary tensors, for calls outside of it too
            layers = ShadowTarget(source.target, source.layer_ids, cache, _prompt_mask(launched))
        forwards = [_small_forward(launched, state, own) for own in (None, layers)]
    except Exception as error:  # whatever a model's own code finds amiss
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        cache.close()
    theirs, mine = ([x[:, None] for x in forward] for forward in forwards)
    return layers if are_alike(mine, theirs) else "they give something else than the model's own"


def _prompt_mask(launched: LaunchedRound) -> torch.Tensor:
    mask = launched.verifier.prompt_mask
    return torch.ones(1, 0, dtype=torch.bool, device=launched.source.device) if mask is None else mask


def _small_forward(
    launched: LaunchedRound, state: DecodingState, layers: ShadowTarget | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features of a small tree behind the prompt."""
    parents = torch.tensor([[-1, -1, 0, 1, 2, 2]], device=state.device)
    depths = torch.tensor([[1, 1, 2, 2, 3, 3]], device=state.device)
    rows = TreeRows.of(DraftTree(parents, parents, depths, depths.float()))
    # No node is placed where none of them can be.
    rows = rows._replace(depths=torch.minimum(rows.depths, state.room[:, None] - 1))
    verified = launched.verifier.verify(state.root.expand(-1, 7), state.position[:, None], rows, layers)
    return verified.logits, verified.features
