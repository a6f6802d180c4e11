"""Which kinds of drafters there are: how each is known and loaded, and what its pass over a block says."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig

from .configuration_dflash import DFlashConfig
from .draft_source import DraftSource, Proposal
from .drafter_formats import drafter_format, is_transformers_own
from .logits_scaling import multiplies
from .modeling_dflash import DFlashDraftModel
from .verifier import input_device


class DrafterFamily:
    """
    Drafters of one kind. All draft in one pass over a block of mask tokens behind the target's features, in
    transformers' form: `forward(noise_embeds, context_hidden_states, position_ids, attention_mask, cache)`; their
    configs have `target_layer_ids`, `mask_token_id` and `block_size`.

    Attributes:
        model_class: Their network, where it is this library's: rounds over it can be recorded.
    """

    model_class: Any = None

    def knows(self, config: PreTrainedConfig | dict[str, Any]) -> bool:
        """Whether a drafter is one of these.

        Args:
            config: The drafter's, or what stands in its config.json.
        """
        raise NotImplementedError

    def load(self, name: str, **kwargs: Any) -> Any:
        """A drafter.

        Args:
            name: Directory or hub id.
            kwargs: As [`PreTrainedModel.from_pretrained`].
        """
        return self.model_class.from_pretrained(name, **kwargs)

    def most_depth(self, config: Any) -> int:
        """Tokens that a pass drafts, at most.

        Args:
            config: The drafter's.
        """
        return int(config.block_size) - 1

    def propose(
        self, target: Any, drafter: Any, hidden: torch.Tensor, text: torch.Tensor, depth: int, candidates: int
    ) -> DraftSource:
        """What a pass says of the tokens behind the root. Recorded in a graph: no tensor is read on the host.

        Args:
            target: The model that verifies; its output head is the drafter's.
            drafter: One of these.
            hidden: `(B, block, H)`, the last hidden states of a pass.
            text: `(B, 4)` int64, the last committed tokens, the root last; -1 where there are fewer.
            depth: D, tokens to draft, at most `most_depth`.
            candidates: K, tokens of each depth; scores that go by the parent may have another number.

        Returns:
            A source of depth D, where `text` is.
        """
        logits = draft_logits(target, hidden[:, 1 : depth + 1], drafter)
        return Proposal(*(x.to(text.device) for x in best_candidates(logits, candidates)))


class DFlash(DrafterFamily):
    """DFlash (arXiv 2602.06036) in its published forms."""

    model_class = DFlashDraftModel

    def knows(self, config: PreTrainedConfig | dict[str, Any]) -> bool:
        return drafter_format(config) is not None if isinstance(config, dict) else isinstance(config, DFlashConfig)


class TransformersDFlash(DrafterFamily):
    """transformers' own DFlash assistants, which are networks of their own."""

    def knows(self, config: PreTrainedConfig | dict[str, Any]) -> bool:
        return is_transformers_own(config)

    def load(self, name: str, **kwargs: Any) -> Any:
        return AutoModel.from_pretrained(name, **kwargs)


_FAMILIES: list[DrafterFamily] = [DFlash(), TransformersDFlash()]


def register_family(family: DrafterFamily) -> None:
    """Let `ddtree` take drafters of another family. It is asked before those that are there.

    Args:
        family: An instance of a subclass of [`DrafterFamily`].
    """
    _FAMILIES.insert(0, family)


def family_of(drafter: Any) -> DrafterFamily | None:
    """The family of a drafter, of its config, or of what stands in its config.json; `None` if it is no drafter.

    Args:
        drafter: A model, a config or a dict.
    """
    config = drafter if isinstance(drafter, (PreTrainedConfig, dict)) else getattr(drafter, "config", None)
    return None if config is None else next((family for family in _FAMILIES if family.knows(config)), None)


def load_drafter(name: str, **kwargs: Any) -> Any:
    """A drafter of any family from a directory or hub id.

    Args:
        name: Directory or hub id.
        kwargs: As [`PreTrainedModel.from_pretrained`].
    """
    family = family_of(PreTrainedConfig.get_config_dict(name)[0])
    # What is no drafter is refused by name.
    return (family or DFlash()).load(name, **kwargs)


def embed_tokens(target: Any, token_ids: torch.Tensor, drafter: Any = None) -> torch.Tensor:
    """The target's input embedding `(B, L, H)`, without the norm that some embeddings carry (as DFlash is trained).

    A drafter may state the factor of the embedding's rows; else it is the target's own.
    """
    embedding = target.get_input_embeddings()
    token_ids = token_ids.to(input_device(embedding, token_ids.device))
    scale = getattr(getattr(drafter, "config", None), "input_embedding_scale", None)
    if scale is None and getattr(embedding, "embed_norm", None) is None:
        embeds: torch.Tensor = embedding(token_ids)
        return embeds
    rows = torch.nn.functional.embedding(token_ids, embedding.weight)
    return rows if scale is None else rows * scale


def best_candidates(logits: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens of draft logits `(B, D, V)` and their log-probs in float32, `(B, D, K)` each.

    NaN and -inf come last, +inf first: a broken draft costs speed, never text.
    """
    logits = torch.nan_to_num(
        logits.float(), nan=float("-inf"), posinf=torch.finfo(torch.float32).max, neginf=float("-inf")
    )
    best, token_ids = logits.topk(min(candidates, logits.shape[-1]), dim=-1)
    return token_ids, best - logits.logsumexp(-1, keepdim=True)


def draft_logits(target: Any, hidden: torch.Tensor, drafter: Any = None) -> torch.Tensor:
    """Logits `(B, L, V)` of final states `(B, L, H)`: the target's head, then its scale or soft cap.

    A drafter may state scale and cap itself, and the tokens that it drafts at all.
    """
    head = target.get_output_embeddings()
    logits: torch.Tensor = head(hidden.to(input_device(head, hidden.device), target.dtype))
    own = getattr(drafter, "config", None)
    multiplier, cap = getattr(own, "output_multiplier", None), getattr(own, "final_logit_softcapping", None)
    if multiplier is None and cap is None:
        config = target.config.get_text_config(decoder=True)
        multiplier = getattr(config, "logit_scale", None)  # Cohere
        if multiplier is None:
            multiplier = getattr(config, "output_multiplier", None)  # Muse Glimmer
        if (scaling := getattr(config, "logits_scaling", None)) is not None:
            logits = logits * scaling if multiplies(target) else logits / scaling
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    if multiplier is not None:
        logits = logits * multiplier
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    if (drafted := getattr(drafter, "t2d", None)) is not None:
        logits = logits.masked_fill(~drafted.to(logits.device), float("-inf"))
    return logits
