"""What `generate` prepares for a prompt, and what a step behind it gets: read once a call, or refused."""

from __future__ import annotations

from typing import Any

import torch

from .compat import CACHE_KEY, IMAGE_MEASURES

OUTPUTS = ("output_hidden_states", "output_attentions")  # what `generate` passes on to each forward
_STEP_INPUTS = ("input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict", CACHE_KEY)
# Token types, and what `generate` gives a new token: the prompt's last, or (in a multimodal model) text.
_TOKEN_TYPES = {"token_type_ids": torch.clone, "mm_token_type_ids": torch.zeros_like}


def step_inputs(
    model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any], device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """What a step gets besides its tokens; refuses tensors, and positions that do not grow by one with each token.

    Args:
        model: The target.
        input_ids: `(1, L)`, the prompt.
        model_kwargs: As `generate` prepared them.
        device: Where the target takes its input.

    Returns:
        A new token's types, the position of the prompt's last token in the target, and further arguments.

    Raises:
        ValueError: `prepare_inputs_for_generation` says so.
    """
    token = input_ids if input_ids.shape[1] else input_ids.new_zeros(input_ids.shape[0], 1)  # embeddings: none yet
    kwargs = {name: value for name, value in model_kwargs.items() if name not in ("inputs_embeds", CACHE_KEY)}

    def prepared(ahead: int) -> dict[str, Any]:
        moved = kwargs | {"position_ids": model_kwargs["position_ids"] + ahead}
        inputs: dict[str, Any] = model.prepare_inputs_for_generation(token, next_sequence_length=1, **moved)
        return inputs

    inputs = prepared(0)
    others = {
        name: value
        for name, value in inputs.items()
        if value is not None and name not in (*_STEP_INPUTS, *OUTPUTS, *IMAGE_MEASURES)
    }
    types = {}
    for name, of_next in _TOKEN_TYPES.items():
        if (of_last := others.pop(name, None)) is not None:
            types[name] = of_next(of_last[..., -1:]).to(device)
    if tensors := [name for name, value in others.items() if isinstance(value, torch.Tensor)]:
        raise ValueError(f"`ddtree` does not pass `{tensors[0]}` to a step of the target: leave it out.")
    places: list[Any] = [step.get("position_ids") for step in (inputs, prepared(1), prepared(2))]
    if any(place is None for place in places) or not all(
        torch.equal(place[..., -1:], places[0][..., -1:] + ahead) for ahead, place in enumerate(places)
    ):
        raise ValueError(
            f"{type(model).__name__} places tokens by positions of its own "
            "(`prepare_inputs_for_generation`), which `ddtree` does not know."
        )
    return types, places[0][..., -1:].to(device), others


def is_text(input_ids: torch.Tensor, placed: torch.Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether a prompt is its tokens and nothing else, the last one `placed` where it is counted."""
    others = {name for name, value in model_kwargs.items() if value is not None and value is not False}
    positions, mask = model_kwargs["position_ids"], model_kwargs.get("attention_mask")
    return (
        others <= {*_STEP_INPUTS}
        and positions.shape == input_ids.shape
        and torch.equal(placed, positions[:, -1:].to(placed.device))
        and (mask is None or mask.shape == input_ids.shape)
    )
