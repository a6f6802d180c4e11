"""One clear error, before any forward, for each request that cannot be served: what, why, and the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from transformers import DynamicCache, GenerationConfig, QuantizedCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.generation.configuration_utils import GenerationMode

from .anatomy import decoder_layers, find_decoder
from .compat import CACHE_KEY, INDEXED_KINDS
from .drafter_families import family_of
from .dynamo import hides_compiled
from .rope import rope_parameters
from .visibility import KINDS

# Attention functions that add a 4D mask to the scores. Flash kernels take none, and flex attention's kernel on a CPU
# crashes on one.
_MASKED_ATTENTION = ("eager", "sdpa")
_LAYER_KINDS = (*KINDS, *INDEXED_KINDS)

# Options that choose another way of drafting or decoding, which would win over the drafter or be ignored.
_OTHER_WAYS = (
    "dola_layers",
    "prompt_lookup_num_tokens",
    "use_mtp",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "speculation_type",
)


def check_assistant(assistant: Any) -> None:
    """Raise unless `assistant` is a DFlash drafter."""
    if assistant is None:
        raise ValueError(
            "`ddtree` needs a drafter: pass `assistant_model=DFlashDraftModel.from_pretrained(...)`, or leave "
            "`ddtree` out."
        )
    if family_of(assistant) is None:
        raise ValueError(
            f"`ddtree` needs a DFlash drafter as `assistant_model`, got {type(assistant).__name__}. Load one with "
            "`DFlashDraftModel.from_pretrained(...)`, or leave `ddtree` out for transformers' assisted decoding."
        )


def check_drafter_has_use(generation_config: GenerationConfig) -> None:
    """Raise when a DFlash drafter was given with nothing that says how to use it."""
    if generation_config.speculation_type != "dflash":
        raise ValueError(
            "The assistant is a DFlash drafter, which transformers' assisted decoding cannot run. Pass `ddtree=True` "
            'for draft trees, `speculation_type="dflash"` for transformers\' own chain, or `ddtree=False` to decode '
            "without it."
        )


def check_options(generation_config: GenerationConfig, generation_mode: GenerationMode) -> None:
    """Raise on options of `generate` that trees cannot be combined with."""
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(
            "`ddtree` decodes one sequence and cannot search beams: set `num_beams=1` or leave `ddtree` out."
        )
    if (generation_config.num_return_sequences or 1) > 1:
        raise ValueError("`ddtree` returns one sequence: set `num_return_sequences=1` and call `generate` repeatedly.")
    if generation_config.use_cache is False:
        raise ValueError("`ddtree` keeps a tree's rows in the cache: remove `use_cache=False`.")
    cache = generation_config.cache_implementation or ""
    if "offloaded" in cache or cache == "quantized":
        raise ValueError(
            f'`ddtree` keeps its rows as the model makes them, on its device: remove `cache_implementation="{cache}"`.'
        )
    for name in _OTHER_WAYS:
        if (value := getattr(generation_config, name, None)) not in (None, False):
            raise ValueError(f"`ddtree` and `{name}={value!r}` are two ways of decoding: leave one of them out.")
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"`ddtree` works with greedy search and sampling, and these options ask for {generation_mode.value}."
        )


def check_not_paged(cache_implementation: Any) -> None:
    """Raise on continuous batching, which never reaches the decoding loop."""
    if cache_implementation == "paged":
        raise ValueError('`ddtree` has its own cache: remove `cache_implementation="paged"` (continuous batching).')


def check_custom_generate(function: Callable[..., Any]) -> None:
    """Raise unless the function that replaces the decoding loop takes `ddtree` itself."""
    if "ddtree" not in inspect.signature(function).parameters:
        raise ValueError(
            "`custom_generate` replaces the decoding loop and takes no `ddtree`, which would have no effect: leave "
            "one of them out."
        )


def check_batch(batch_size: int) -> None:
    if batch_size > 1:
        raise ValueError(
            f"`ddtree` decodes one prompt at a time, got a batch of {batch_size}: call `generate` for each."
        )


def check_prompt(positions: torch.Tensor) -> None:
    if positions.shape[-1] == 0:
        raise ValueError("The prompt is empty: `ddtree` needs at least one token to begin with.")


def check_cache(cache: Any) -> None:
    """Raise on a user's cache whose rows are not those that the model made, or lie elsewhere."""
    if isinstance(cache, QuantizedCache) or getattr(cache, "offloading", False):
        raise ValueError(
            f"`ddtree` cannot continue a quantized or offloaded {type(cache).__name__}: pass a `DynamicCache` or a "
            "`StaticCache`."
        )


def check_cross_attention(model: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise where a target would look across at an image, now or from the caller's cache."""
    layers = getattr(model.config.get_text_config(decoder=True), "cross_attention_layers", None) or ()
    cache = model_kwargs.get(CACHE_KEY)
    given = any(model_kwargs.get(name) is not None for name in ("pixel_values", "cross_attention_states"))
    if layers and (given or (cache is not None and any(int(cache.get_seq_length(i)) > 0 for i in layers))):
        raise ValueError(
            f"{type(model).__name__} sees images by cross attention, to keys that are no rows of the text and that "
            "`ddtree` does not keep: decode images without it (text alone works)."
        )


def check_target(model: Any) -> None:
    """Raise when a target cannot verify trees, by what it can do, not by its name."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"`ddtree` needs a decoder-only target, and {name} is an encoder-decoder.")
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or any(isinstance(x, LinearAttentionCacheLayerMixin) for x in layers):
        raise ValueError(
            f"{name} has recurrent layers, whose state cannot go back to before a rejected token: `ddtree` cannot be "
            "used with it yet."
        )
    if unknown := sorted(kinds - set(_LAYER_KINDS)):
        raise ValueError(f"{name} has layers of a kind that trees cannot mask yet: {', '.join(unknown)}.")
    if not _takes(model, "position_ids") or getattr(config, "alibi", False):
        raise ValueError(
            f"{name} takes no `position_ids`, so that the rows of a tree cannot be placed: use another target."
        )
    if not _takes(model, CACHE_KEY):
        raise ValueError(f"{name} has no cache of keys and values, in which `ddtree` keeps a tree's rows.")
    if not _is_causal(model):
        raise ValueError(
            f"{name} says that its attention is not causal (set `is_decoder=True` in its config, if it has that)."
        )
    if (around := hides_compiled(model, find_decoder(model)[0])) is not None:
        raise ValueError(
            f"{around} runs a forward that was compiled, in a way in which `ddtree` cannot run what lies beneath: "
            "compile the module itself (`model.compile()`) or its forward (`model.forward = "
            "torch.compile(model.forward)`), and put no function of your own around that."
        )
    prepare = model.prepare_inputs_for_generation
    if getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise ValueError(
            f"The steps of this {name} are prepared by something else (a prompt-learning adapter?), which `ddtree` "
            "does not know: decode without it, or use an adapter that changes the weights (LoRA)."
        )
    if any(
        getattr(adapter, "alora_invocation_tokens", None) for adapter in getattr(model, "peft_config", {}).values()
    ):
        raise ValueError(
            f"{name} has an activated LoRA, which adapts a forward's last rows, and a tree's rows are no text: decode "
            "without it."
        )
    if model.training and (drawn := _random_parts(model)):
        raise ValueError(
            f"{name} is in training mode with {drawn}, so that a tree cannot be what single steps would be: call "
            "`model.eval()`."
        )
    if not _passes_masks_on(model):
        raise ValueError(f"{name} makes its attention masks itself, so that a tree cannot be masked.")
    if config._attn_implementation not in _MASKED_ATTENTION:
        raise ValueError(
            f'`ddtree` verifies with a 4D mask, which attention "{config._attn_implementation}" does not take: load '
            'the target with `attn_implementation="sdpa"` (or "eager").'
        )


def _is_causal(model: Any) -> bool:
    """Whether new tokens see only what is before them, as far as its layers say.

    What makes masks for `generate` itself shows a prompt more than that, and no new token.
    """
    if hasattr(model, "create_masks_for_generate"):
        return True
    silent = True
    for module in find_decoder(model)[1].modules():
        if (said := getattr(module, "is_causal", None)) is not None:
            if said:
                return True
            silent = False
    return silent


def _passes_masks_on(model: Any) -> bool:
    """Whether a 4D mask reaches the attention scores as it is, and nothing else masks them.

    Models with transformers' attention interface keep to it. Of the others, those do that make their masks with
    transformers' functions, which return a 4D mask unchanged, and that keep no triangle of their own.
    """
    if model._supports_attention_backend:
        return True
    decoder, _ = find_decoder(model)
    names = inspect.unwrap(type(decoder).forward).__code__.co_names
    has_triangle = any(x.dtype == torch.bool and x.dim() > 1 and x.shape[-2] == x.shape[-1] for x in decoder.buffers())
    return "create_causal_mask" in names and not has_triangle


def _random_parts(model: Any) -> str | None:
    """What makes a forward in training mode differ from the same forward cut into steps."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            return "gradient checkpointing"
        names = ["p"] if isinstance(module, _DropoutNd) else [n for n in vars(module) if "drop" in n or "jitter" in n]
        if module.training and any(isinstance(p := getattr(module, name), float) and p > 0 for name in names):
            return "dropout or the like"
    return None


def _takes(model: Any, argument: str) -> bool:
    """Whether the forward of a model's class, or one that it overrides, names an argument."""
    forwards = [vars(cls)["forward"] for cls in type(model).__mro__ if "forward" in vars(cls)]
    return any(argument in inspect.signature(forward).parameters for forward in forwards)


def check_rope(model: Any, positions: int) -> None:
    """Raise when the first `positions` positions pass the point from which `dynamic` rope changes with every token."""
    config = model.config.get_text_config(decoder=True)
    for rope in rope_parameters(config):
        limit = config.max_position_embeddings
        if rope.get("rope_type") == "dynamic" and positions > limit:
            raise ValueError(
                f"The target's `dynamic` rope changes with every token beyond {limit} positions, so that no tree is "
                f"right there: keep prompt and new tokens within {limit} (asked for: {positions})."
            )


def check_pair(model: Any, drafter: Any) -> None:
    """Raise when a drafter was made for another target."""
    if drafter.device.type == "meta" and not hasattr(drafter, "_hf_hook"):  # that fetches offloaded ones
        raise ValueError("The drafter has no weights (it is on the meta device): load it with `from_pretrained`.")
    target, taps = model.config.get_text_config(decoder=True), drafter.config.target_layer_ids
    rows, layers = model.get_input_embeddings().weight.shape[0], len(decoder_layers(model))
    for fault in pair_faults(target, drafter.config, rows, layers):
        raise ValueError(fault)
    projection = getattr(getattr(drafter, "encoder", drafter), "fc", None)
    if projection is not None and projection.in_features != len(taps) * target.hidden_size:
        raise ValueError(
            f"The drafter projects {projection.in_features} features, and {len(taps)} tap layers of width "
            f"{target.hidden_size} give {len(taps) * target.hidden_size}: its config was changed after it was loaded."
        )


def pair_faults(target: Any, draft: Any, rows: int, layers: int) -> Iterator[str]:
    """What speaks against a target with a drafter, by their configs.

    Args:
        target: The target's text config.
        draft: The drafter's config.
        rows: Of the target's embedding.
        layers: Of its decoder.
    """
    pairs = [
        ("hidden size", draft.hidden_size, target.hidden_size),
        ("number of target layers", getattr(draft, "num_target_layers", None), target.num_hidden_layers),
        ("vocabulary", getattr(draft, "vocab_size", None), target.vocab_size),
    ]
    for what, expected, found in pairs:
        if expected is not None and expected != found:
            yield (
                f"The drafter was made for a target whose {what} is {expected}; this target's is {found}. Use the "
                "drafter that belongs to this target."
            )
    if (tap := max(draft.target_layer_ids)) >= layers or (tap := min(draft.target_layer_ids)) < 0:
        yield (
            f"The drafter taps layer {tap}, and the target has layers 0 to {layers - 1}: it belongs to another target."
        )
    if draft.block_size < 2:
        yield f"The drafter's block of {draft.block_size} has the bonus token and nothing to draft: 2 is the least."
    for what, value in (("mask token id", draft.mask_token_id), ("vocabulary's last id", target.vocab_size - 1)):
        if not 0 <= value < rows:
            yield f"The drafter's {what} {value} lies beyond the {rows} rows of the target's embedding."
