"""The DFlash drafter network (arXiv 2602.06036, section 3), with the calling convention of transformers' own."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DFlashCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from .compat import CACHE_KEY
from .configuration_dflash import DFlashConfig
from .drafter_formats import COPIES_OF_TARGET, drafter_format, other_kind


def _both_sides(config: DFlashConfig, **kwargs: Any) -> Any:
    """The mask of a window that looks both ways: DFlash's does not reach the row that transformers' ends with."""
    config = copy.copy(config)
    assert config.sliding_window is not None
    config.sliding_window -= 1
    return create_bidirectional_sliding_window_mask(config=config, **kwargs)


_MASKS: dict[tuple[str, bool], Callable[..., Any]] = {
    ("full_attention", False): create_bidirectional_mask,
    ("full_attention", True): create_causal_mask,
    ("sliding_attention", False): _both_sides,
    ("sliding_attention", True): create_sliding_window_causal_mask,
}

# Tensors of a checkpoint that are no part of the model being loaded.
_left_out: ContextVar[tuple[str, ...]] = ContextVar("hf_ddtree_left_out", default=())


class DFlashAttention(nn.Module):
    """Queries from the block; keys and values from the projected context and the block."""

    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = config.layer_is_causal(layer_idx)
        self.layer_type = config.layer_types[layer_idx]
        self.sliding_window = config.sliding_window if self.layer_type == "sliding_attention" else None

        query_width = config.num_attention_heads * self.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,  # (B, Q, H)
        context: torch.Tensor,  # (B, C, H)
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # (B, C + Q, head_dim) each
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        batch, q_len = hidden_states.shape[:2]
        heads = (batch, -1, self.config.num_attention_heads, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        # The block's rows are the last of the positions: queries take theirs from there.
        query = query * cos[:, :, -q_len:] + rotate_half(query) * sin[:, :, -q_len:]
        key, value = self.keys_values(torch.cat([context, hidden_states], dim=1), position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        attention: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, _ = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
        )
        projected: torch.Tensor = self.o_proj(output.reshape(batch, q_len, -1))
        return projected

    def keys_values(
        self, states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `(B, heads, L, head_dim)` of `states (B, L, H)`."""
        heads = (states.shape[0], -1, self.config.num_key_value_heads, self.head_dim)
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        key = self.k_norm(self.k_proj(states).view(heads)).transpose(1, 2)
        value = self.v_proj(states).view(heads).transpose(1, 2)
        return key * cos + rotate_half(key) * sin, value


class DFlashDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DFlashConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        attended = self.self_attn(
            self.input_layernorm(hidden_states), context, position_embeddings, attention_mask, cache
        )
        hidden_states = hidden_states + attended
        output: torch.Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return output


class DFlashPreTrainedModel(PreTrainedModel):
    config_class = DFlashConfig
    config: DFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DFlashDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True


class DFlashDraftModel(DFlashPreTrainedModel):
    """
    The drafter of DFlash (arXiv 2602.06036): one pass over a block gives a hidden state for each of its positions. It
    has neither embedding nor output head; both are the target's. `t2d`, a `(V,)` bool buffer where there is one, says
    which of the target's tokens it drafts.

    `from_pretrained` reads the published checkpoints (safetensors only, no remote code) and fails on missing,
    unexpected or misshapen weights.

    Args:
        config: The drafter's; of a new one usually `DFlashConfig.from_target(...)`.

    Raises:
        ValueError: The config lacks a required value, or one is out of range.
    """

    def __init__(self, config: DFlashConfig) -> None:
        config.require_complete()
        super().__init__(config)
        assert config.target_layer_ids is not None
        self.layers = nn.ModuleList([DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        reduced = config.draft_vocab_size is not None
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool) if reduced else None)
        self.gradient_checkpointing = False
        self._keys_to_ignore_on_load_unexpected = set(_left_out.get()) - ({"t2d"} if reduced else set())
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Load a drafter; further arguments as in [`PreTrainedModel.from_pretrained`].

        Args:
            pretrained_model_name_or_path: Directory or hub id.

        Raises:
            ValueError: The config lacks a required value, or the weights do not fit it exactly.
            OSError: The checkpoint has no safetensors file.
        """
        config_dict, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **kwargs)
        form = drafter_format(config_dict)
        if form is None:
            kind = other_kind(config_dict)
            raise ValueError(
                f"{pretrained_model_name_or_path} is no DFlash drafter: its model_type is "
                f"{config_dict.get('model_type')!r}, and "
                f"{f'it is {kind}' if kind else 'nothing in its config.json speaks of DFlash'}."
            )
        return_info = kwargs.pop("output_loading_info", False)
        if kwargs.pop("use_safetensors", True) is False:
            raise ValueError("DFlashDraftModel loads safetensors only; convert the checkpoint.")
        kwargs.pop("trust_remote_code", None)
        kwargs["ignore_mismatched_sizes"] = True  # so that they are listed with the other faults below
        with _leaving_out((*COPIES_OF_TARGET, "t2d") if form == "speculators" else ()):
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, use_safetensors=True, output_loading_info=True, **kwargs
            )
        faults = {
            kind: sorted(map(str, info.get(f"{kind}_keys") or ())) for kind in ("missing", "unexpected", "mismatched")
        }
        if any(faults.values()):
            listing = "; ".join(f"{kind}: {', '.join(keys[:8])}" for kind, keys in faults.items() if keys)
            raise ValueError(
                f"The weights of {pretrained_model_name_or_path} do not fit its config. {listing}. A drafter with "
                "other weights than its config says drafts badly without any other sign, so it is not loaded."
            )
        if model.t2d is not None and (drafted := int(model.t2d.sum())) != model.config.draft_vocab_size:
            raise ValueError(
                f"`t2d` of {pretrained_model_name_or_path} names {drafted} tokens, and `draft_vocab_size` is "
                f"{model.config.draft_vocab_size}."
            )
        return (model, info) if return_info else model

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        r"""
        Args:
            noise_embeds (`torch.Tensor` of shape `(B, Q, H)`):
                The target's embeddings of the bonus token and the mask tokens.
            context_hidden_states (`torch.Tensor` of shape `(B, C, taps * H)`):
                The tap layers' outputs, concatenated, of the C tokens committed since the last call.
            position_ids (`torch.LongTensor` of shape `(B, C + Q)`, *optional*):
                Positions of the context, then of the block. Counted on from the cache's length by default.
            attention_mask (`torch.Tensor`, *optional*):
                `(B, past + C + Q)` with 0 for padding, or an additive mask `(B, 1, Q, past + C + Q)`.
            cache (`Cache`, *optional*):
                Grows by C + Q rows; the caller crops the block's Q rows again. `past_key_values` is its older name.
            use_cache (`bool`, *optional*):
                Without effect; what decides is whether there is a cache.

        Returns:
            `BaseModelOutput`: `last_hidden_state` of shape `(B, Q, H)`, after the final norm. Row k goes through the
            target's output head to predict the token k places after the bonus token.
        """
        cache = cache if cache is not None else past_key_values
        # Kernels of quantized layers may divide by the number of rows.
        new = context_hidden_states.shape[1] > 0
        context = self.hidden_norm(self.fc(context_hidden_states)) if new else noise_embeds[:, :0]
        rows = context.shape[1] + noise_embeds.shape[1]
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(rows, device=noise_embeds.device).unsqueeze(0) + past
        masks = self._masks(noise_embeds, context.shape[1], attention_mask, cache)
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        hidden_states = noise_embeds
        for layer in self.layers:
            attention: Any = layer.self_attn
            mask = masks[attention.layer_type]
            hidden_states = layer(hidden_states, context, position_embeddings, mask, cache)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def extend(self, context_hidden_states: torch.Tensor, position_ids: torch.Tensor, cache: Cache) -> None:
        """Append rows to the context without drafting: they do not depend on a block.

        Args:
            context_hidden_states: `(B, C, taps * H)`, as in `forward`.
            position_ids: `(B, C)`.
            cache: Grows by C rows. One that drops the rows before a window, as transformers' own, will not do.
        """
        context = self.hidden_norm(self.fc(context_hidden_states))
        position_embeddings = self.rotary_emb(context, position_ids)
        for layer in self.layers:
            attention: Any = layer.self_attn
            cache.update(*attention.keys_values(context, position_embeddings), attention.layer_idx)

    def _masks(
        self,
        noise_embeds: torch.Tensor,
        context_rows: int,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None,
        cache: Cache | None,
    ) -> dict[str, torch.Tensor | None]:
        """One mask per layer type: all but padding, what a window leaves out, and a causal layer's later rows."""
        if isinstance(attention_mask, dict):
            return dict(attention_mask)
        if attention_mask is not None and attention_mask.dim() == 4:
            return dict.fromkeys(self.config.layer_types, attention_mask)
        if cache is None:
            cache = DFlashCache(config=self.config)
        if hasattr(cache, "set_previous_accepted_tokens"):
            # Queries start behind the context rows that this call is about to append.
            cache.set_previous_accepted_tokens(context_rows)
        arguments = {
            "config": self.config,
            "inputs_embeds": noise_embeds,
            "attention_mask": attention_mask,
            CACHE_KEY: cache,
        }
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        kinds = {attention.layer_type: attention.is_causal for attention in attentions}
        return {kind: _MASKS[kind, causal](**arguments) for kind, causal in kinds.items()}


@contextmanager
def _leaving_out(names: tuple[str, ...]) -> Iterator[None]:
    token = _left_out.set(names)
    try:
        yield
    finally:
        _left_out.reset(token)
