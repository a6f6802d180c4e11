"""Tiny targets with wide logit gaps, and drafters whose quality a test sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_ddtree import DDTreeCandidateGenerator, DFlashConfig, DFlashDraftModel, drafter_families, round_graph
from hf_ddtree.draft_source import DraftSource
from hf_ddtree.draft_tree import DraftTree, TreeRows
from hf_ddtree.state import Path
from hf_ddtree.tree_cache import TreeCache

VOCAB = 211
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}

# "abcdef" is what transformers encodes to learn how stop strings look in a vocabulary.
WORDS = ["<pad>", "<s>", "</s>", "<mask>", "<unk>", "abcdef", *(f"w{i}" for i in range(VOCAB - 6))]


def word_tokenizer(vocab: int = VOCAB) -> PreTrainedTokenizerFast:
    """A word for each id of the tiny targets."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS[:vocab])}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    )


def tiny_target(family: str, seed: int = 0, switch: int = 64, **overrides: Any) -> PreTrainedModel:
    """A random fp32 target of a family, with logit gaps far above rounding noise; `switch` is Phi-3's rope switch."""
    sizes = SIZES | overrides
    torch.manual_seed(seed)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    elif family == "qwen2_mixed":  # full and sliding layers in one model
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, use_sliding_window=True, sliding_window=24, max_window_layers=2))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=24))
    elif family == "phi3":
        half = 6  # head_dim 12
        rope = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * half,
            "long_factor": [1.0 + 0.7 * i for i in range(half)],
            "original_max_position_embeddings": switch,
        }
        model = Phi3ForCausalLM(Phi3Config(**sizes, rope_parameters=rope, original_max_position_embeddings=switch))
    else:
        raise ValueError(family)
    return model.eval()


@torch.no_grad()
def show_all(model: PreTrainedModel) -> None:
    """Give every weight of a new model an effect, and its generations no end."""
    for parameter in model.parameters():
        if bool((parameter == parameter.flatten()[0]).all()):  # what begins as zeros or ones shows nothing
            parameter.add_(torch.rand_like(parameter) * 0.3)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0


def tiny_drafter(target: PreTrainedModel, seed: int = 1, block_size: int = 8, **overrides: Any) -> DFlashDraftModel:
    """A random drafter that fits a target: it drafts nonsense."""
    torch.manual_seed(seed)
    config = DFlashConfig.from_target(
        target.config,
        **{"target_layer_ids": [0, 2], "mask_token_id": 3, "num_hidden_layers": 2} | overrides,
        block_size=block_size,
    )
    return DFlashDraftModel(config).eval()


def prompt_ids(length: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, vocab, (1, length), generator=generator)


@contextlib.contextmanager
def scripted(text: torch.Tensor | Sequence[int], hit: float, seed: int = 0, vocab: int = VOCAB) -> Iterator[None]:
    """Make every drafter propose from a known continuation.

    At each depth the true token is the first choice with probability `hit`; else it is the second or third half the
    time (so that a branch is the right one), or missing. The drafter's own forward still runs.

    Args:
        text: Prompt and continuation, as plain decoding gave them; positions must count from 0.
        hit: From 0 (useless) to 1 (perfect).
    """
    known = torch.as_tensor(text).flatten().tolist()
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> float:
        return float(torch.rand((), generator=generator))

    def draft(start: int, depth: int, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
        width = min(candidates, vocab)
        token_ids = torch.stack([torch.randperm(vocab, generator=generator)[:width] for _ in range(depth)])
        for d in range(depth):
            truth = known[start + d] if start + d < len(known) else None
            if truth is None:
                continue
            rank = 0 if uniform() < hit else (1 + int(uniform() * 2) if uniform() < 0.5 else None)
            if rank is None or rank >= width:
                token_ids[d][token_ids[d] == truth] = (truth + 1) % vocab
                continue
            if (there := (token_ids[d] == truth).nonzero()).numel():
                token_ids[d, there[0, 0]] = token_ids[d, rank]
            token_ids[d, rank] = truth
        log_probs = torch.log_softmax(-torch.arange(width, dtype=torch.float32) * (0.5 + 3 * hit), dim=0)
        return token_ids[None], log_probs.expand(1, depth, width)

    launched, recorded = DDTreeCandidateGenerator.propose, round_graph.BlockDraft.hidden_states
    starts = [0]

    def propose(self: DDTreeCandidateGenerator, text: torch.Tensor, position: torch.Tensor, *args: Any) -> DraftSource:
        starts[0] = int(position) + 1
        return launched(self, text, position, *args)

    def hidden_states(self: round_graph.BlockDraft, features: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        starts[0] = int(self.kind.state.position) + 1
        return recorded(self, features, new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDTreeCandidateGenerator, "propose", propose)
        patch.setattr(round_graph.BlockDraft, "hidden_states", hidden_states)
        patch.setattr(
            drafter_families, "best_candidates", lambda logits, width: draft(starts[0], logits.shape[1], width)
        )
        yield


def chain_rows(rows: int) -> TreeRows:
    """A chain of `rows` rows, root included."""
    depths = torch.arange(1, rows)[None]
    return TreeRows.of(DraftTree(depths, depths - 2, depths, -depths.float()))


def keep_path(cache: TreeCache, rows: list[int], known: bool = True) -> None:
    """Keep a path's rows as a round does, which the host knows or not, and count them."""
    path = torch.tensor([rows])
    cache.keep(Path(path, path, torch.tensor([len(rows)]), rows if known else None))
    cache.count.set(cache.count.host + len(rows))
