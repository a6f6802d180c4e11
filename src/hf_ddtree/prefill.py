"""The prompt's forward, by transformers' own path, and what it says of the steps behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig

from .compat import CACHE_KEY, IMAGE_MEASURES
from .verifier import OUTPUTS, Constants, Features, Verifier

_STEP_INPUTS = ("input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict", CACHE_KEY)
# Token types, and what `generate` gives a new token: the prompt's last, or (in a multimodal model) text.
_TOKEN_TYPES = {"token_type_ids": torch.clone, "mm_token_type_ids": torch.zeros_like}


def prefill(
    verifier: Verifier,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    ahead: int = 0,
    run_text: Callable[..., tuple[Any, Features]] | None = None,
) -> tuple[Any, Features]:
    """Run the prompt into the verifier's cache.

    Args:
        verifier: Is told what the prompt brings: its mask and positions, and what each step gets besides.
        input_ids: `(1, L)`.
        generation_config, model_kwargs: As `generate` prepared them.
        ahead: Rows that will follow: reserved now, the buffers need not grow with the prompt in them.
        run_text: Runs a prompt of nothing but tokens without padding, given the stock path, ids and positions;
            default: by that path.

    Returns:
        The model's output (logits of the last position) and the features of the new slots.
    """
    earlier, mask = model_kwargs.get(CACHE_KEY), model_kwargs.get("attention_mask")
    if earlier is not None and earlier.get_seq_length() > 0:
        verifier.cache.load(earlier)
    types, placed, verifier.step_kwargs = step_inputs(verifier.model, input_ids, model_kwargs, verifier.device)
    already = verifier.cache.length
    embeds = model_kwargs.get("inputs_embeds")
    verifier.cache.reserve(already + (input_ids if embeds is None else embeds).shape[1] + ahead)

    def launch() -> tuple[Any, Features]:
        with verifier.taps.recording() as chunks:
            outputs = verifier.model._prefill(
                input_ids,
                generation_config,
                model_kwargs | {CACHE_KEY: verifier.cache},
                is_first_iteration=not generation_config.is_assistant,
            )
        if (filled := outputs.get(CACHE_KEY)) is None:
            raise ValueError(
                f"{type(verifier.model).__name__} returned no cache: `ddtree` needs a target that keeps one."
            )
        if filled is not verifier.cache:  # Phi-3 takes a new cache beyond its rope switch
            verifier.cache.load(filled)
            verifier.recomputed = True
        verifier.cache.settle()
        return outputs, verifier.features(chunks, verifier.cache.length - (0 if verifier.recomputed else already))

    padded = mask is not None and not bool(mask.all())
    only_text = not (already or types or padded) and is_text(input_ids, placed, model_kwargs)
    if run_text is not None and only_text:
        outputs, features = run_text(launch, input_ids, model_kwargs["position_ids"])
    else:
        outputs, features = launch()
    # Some versions run rows again that the cache has: they mask by a length that is not the cache's.
    verifier.plain_only = mask is not None and mask.shape[1] != verifier.cache.length
    if mask is not None and padded:
        verifier.prompt_mask = mask[:, : verifier.cache.length].to(verifier.device).bool()
    verifier.prompt_positions = _count(verifier, features.rows, model_kwargs)
    last = verifier.prompt_positions[:, -1:]
    verifier.constants = Constants(types, None if torch.equal(placed, last) else placed - last)
    return outputs, features


def _count(verifier: Verifier, rows: int, model_kwargs: dict[str, Any]) -> torch.Tensor:
    """The positions of the last `rows` rows; those on several axes say where in an image a row is: count them."""
    positions: torch.Tensor = model_kwargs["position_ids"].to(verifier.device)
    if positions.dim() > 2:
        mask = torch.ones(positions.shape[1], verifier.cache.length, dtype=torch.long, device=verifier.device)
        if verifier.prompt_mask is not None:
            mask[:, : verifier.prompt_mask.shape[1]] = verifier.prompt_mask
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return positions[:, -rows:]


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
