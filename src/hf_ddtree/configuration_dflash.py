"""The config of a DFlash drafter, read from all published forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .drafter_formats import MODEL_TYPE, REQUIRED, flatten_config_dict

_LAYER_TYPES = ("full_attention", "sliding_attention")


@strict
class DFlashConfig(Qwen3Config):
    r"""
    Config of a [`DFlashDraftModel`] (DFlash, arXiv 2602.06036): a Qwen3-style decoder that drafts a block in one pass.

    Args:
        target_layer_ids (`list[int]`):
            The target's decoder layers, counted from 0, whose outputs are the drafter's context (the tap layers).
        mask_token_id (`int`):
            The id whose embedding stands at the positions to draft.
        block_size (`int`):
            Positions of a block: the bonus token and `block_size - 1` drafted ones.
        num_target_layers (`int`, *optional*):
            Decoder layers of the target that the drafter was trained for.
        causal (`bool`, *optional*):
            Whether a block's rows see only the rows before them. By default sliding layers are causal and full ones
            are not, as published drafters are served.
        input_embedding_scale (`float`, *optional*):
            Factor of the rows of the target's embedding. By default they are what the target's embedding gives.
        output_multiplier, final_logit_softcapping (`float`, *optional*):
            Factor of the draft's logits, then their soft cap. By default those of the target.
        sliding_window (`int`, *optional*):
            Rows that a row of a sliding layer (`layer_types`) sees, itself and those before it; as many behind it
            where the layer is not causal. Required where there is one.
        draft_vocab_size (`int`, *optional*):
            Tokens that the drafter was trained to draft, if not all; which ones is in its weights (`t2d`).

    The other fields are those of [`Qwen3Config`]. Reads the published forms: flat keys, z-lab's nested `dflash_config`
    under `model_type="qwen3"`, and those of vLLM's `speculators`. A config without one of the three required values
    cannot make a model: none of them is guessed.
    """

    model_type = MODEL_TYPE
    base_model_tp_plan = None
    base_model_pp_plan = None

    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    block_size: int | None = None
    num_target_layers: int | None = None
    causal: bool | None = None
    input_embedding_scale: float | int | None = None
    output_multiplier: float | int | None = None
    final_logit_softcapping: float | int | None = None
    draft_vocab_size: int | None = None
    sliding_window: int | None = None  # Qwen3's default is a number, and a window must not be guessed

    def __post_init__(self, **kwargs: Any) -> None:
        if self.layer_types is not None and "sliding_attention" in self.layer_types:
            # Qwen3's config drops the window unless this is set, and the layers would silently see everything.
            self.use_sliding_window: bool = True
            if self.sliding_window is None:
                raise ValueError("`layer_types` names sliding layers, but the config has no `sliding_window`.")
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return flatten_config_dict(config_dict), kwargs

    @classmethod
    def from_target(
        cls,
        target_config: Any,
        *,
        target_layer_ids: Sequence[int],
        mask_token_id: int,
        block_size: int = 16,
        num_hidden_layers: int = 5,
        **overrides: Any,
    ) -> DFlashConfig:
        """A fresh drafter config with the widths, rope and special tokens of a target.

        Args:
            target_config: The target's config; the text config of a multimodal one is used.
            target_layer_ids: Tap layers.
            mask_token_id: A token that the target never emits.
            block_size: Positions of a block, bonus token included.
            num_hidden_layers: Layers of the drafter.
            overrides: Any other field of the config.

        Raises:
            ValueError: A field is unknown to the config's checks, as a sliding layer without a `sliding_window`.
        """
        text_config = target_config.get_text_config(decoder=True)
        first_layer = (getattr(text_config, "per_layer_config", None) or [text_config])[0]  # layers may differ
        fields: dict[str, Any] = {}
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "max_position_embeddings",
            "initializer_range",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
        ):
            if name not in overrides and (value := getattr(first_layer, name, None)) is not None:
                fields[name] = value[0] if isinstance(value, list) and name != "eos_token_id" else value
        known = fields | overrides
        if heads := known.get("num_attention_heads"):
            fields.setdefault("head_dim", known["hidden_size"] // heads)
            fields.setdefault("num_key_value_heads", heads)
        rope = getattr(text_config, "rope_parameters", None) or {}
        if "rope_theta" in rope:
            fields["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        fields.update(
            num_hidden_layers=num_hidden_layers,
            num_target_layers=text_config.num_hidden_layers,
            target_layer_ids=list(target_layer_ids),
            mask_token_id=mask_token_id,
            block_size=block_size,
            tie_word_embeddings=False,
        )
        return cls(**(fields | overrides))

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether a block's rows see only the rows before them in layer `layer_idx` of the drafter, from 0."""
        return self.layer_types[layer_idx] == "sliding_attention" if self.causal is None else self.causal

    def require_complete(self) -> None:
        """Raise a `ValueError` that names the first value that is missing or out of range."""
        for name in REQUIRED:
            if getattr(self, name) is None:
                raise ValueError(
                    f"The drafter's config has no `{name}`. It is not guessed: take it from the checkpoint's authors "
                    "and set it at the top level of config.json or in its `dflash_config`."
                )
        assert self.target_layer_ids is not None and self.block_size is not None and self.mask_token_id is not None
        for name, values in (
            ("block_size", [self.block_size]),
            ("mask_token_id", [self.mask_token_id]),
            ("target_layer_ids", self.target_layer_ids),
        ):
            if not isinstance(values, (list, tuple)) or not all(type(value) is int for value in values):
                raise ValueError(f"`{name}` must be made of whole numbers, got {getattr(self, name)!r}.")
        if unknown := sorted(set(self.layer_types) - set(_LAYER_TYPES)):
            raise ValueError(f"The drafter has layers of an unknown kind: {', '.join(unknown)}.")
        if self.block_size < 2:
            raise ValueError(f"`block_size` must be at least 2 (bonus token and one draft), got {self.block_size}.")
        if not self.target_layer_ids or min(self.target_layer_ids) < 0:
            raise ValueError(f"`target_layer_ids` must be layer numbers from 0, got {self.target_layer_ids}.")
        if len(set(self.target_layer_ids)) < len(self.target_layer_ids):
            raise ValueError(f"`target_layer_ids` names a layer twice: {self.target_layer_ids}.")
        if self.num_target_layers is not None and max(self.target_layer_ids) >= self.num_target_layers:
            raise ValueError(
                f"Tap layer {max(self.target_layer_ids)} lies beyond the target's {self.num_target_layers} layers "
                "(`num_target_layers`)."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"`mask_token_id` {self.mask_token_id} lies outside `vocab_size` {self.vocab_size}.")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"`draft_vocab_size` {self.draft_vocab_size} exceeds `vocab_size` {self.vocab_size}.")
        for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
            if (scale := getattr(self, name)) is not None and not 0 < scale < math.inf:
                raise ValueError(f"`{name}` must be a positive number, got {scale}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` {self.num_attention_heads} is no multiple of `num_key_value_heads` "
                f"{self.num_key_value_heads}."
            )
        if self.rope_parameters is None or "rope_type" not in self.rope_parameters:
            raise ValueError(f"`rope_parameters` must be one rope for all layers, got {self.rope_parameters}.")
