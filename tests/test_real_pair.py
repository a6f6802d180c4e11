"""The real pair: SmolLM2-135M-Instruct and the drafter trained for it, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ddtree import DDTreeConfig, DFlashDraftModel
from hf_ddtree.compat import CACHE_KEY
from smollm2 import chat_ids, load_prompts, load_target, load_tokenizer

DRAFTER = Path(__file__).parents[1] / "examples" / "smollm2-135m-dflash"
PROMPTS = [("humaneval", 3), ("humaneval", 40), ("mt_bench", 2), ("mt_bench", 21), ("gsm8k", 3), ("gsm8k", 50)]
NEW = 40


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return load_target(torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer()


@pytest.fixture(scope="module")
def drafter() -> DFlashDraftModel:
    return load_drafter()


def load_drafter(**overrides: Any) -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(DRAFTER, dtype=torch.float32, **overrides)


def generate(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    torch.manual_seed(7)
    options = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def assert_equal_or_tied(model: PreTrainedModel, ids: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal ids; a first difference counts as right only where plain decoding itself cannot tell the two apart.

    That is where its top-2 gap is below four times the difference between a forward of one row and one of sixteen.
    """
    if ids.shape == expected.shape and torch.equal(ids, expected):
        return
    shared = min(ids.shape[1], expected.shape[1])
    index = int((ids[0, :shared] != expected[0, :shared]).int().argmax())
    prefix = expected[:, :index]
    rows = []
    with torch.no_grad():
        for count in (1, 16):
            cache = model(prefix[:, :-count], use_cache=True)[CACHE_KEY]
            rows.append(model(prefix[:, -count:], **{CACHE_KEY: cache}).logits[0, -1])
    noise = float((rows[0] - rows[1]).abs().max())
    best = rows[0].topk(2).values
    gap = float(best[0] - best[1])
    print(f"a near-tie at token {index}: top-2 gap {gap:.1e}, noise {noise:.1e}")
    assert gap < 4 * noise, f"token {index} differs, and its top-2 gap {gap:.1e} is no tie (noise {noise:.1e})"


@pytest.mark.parametrize(("name", "index"), PROMPTS)
def test_equal_to_plain(
    target: PreTrainedModel, drafter: DFlashDraftModel, tokenizer: PreTrainedTokenizerBase, name: str, index: int
) -> None:
    ids = chat_ids(tokenizer, load_prompts(name)[index])
    expected = generate(target, ids).sequences
    out = generate(target, ids, assistant_model=drafter, ddtree=DDTreeConfig(budget=15))
    assert_equal_or_tied(target, out.sequences, expected)
    assert out.ddtree_stats.mean_acceptance_length > 1.2


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.3}, {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}],
    ids=["penalty", "sampling"],
)
def test_processors_and_sampling(
    target: PreTrainedModel, drafter: DFlashDraftModel, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> None:
    ids = chat_ids(tokenizer, "Name three colours and say what they make you think of.")
    expected = generate(target, ids, **options).sequences
    state = torch.get_rng_state()
    out = generate(target, ids, assistant_model=drafter, ddtree=DDTreeConfig(budget=31), **options).sequences
    assert_equal_or_tied(target, out, expected)
    assert torch.equal(torch.get_rng_state(), state)


def acceptance(target: PreTrainedModel, drafter: DFlashDraftModel, tokenizer: PreTrainedTokenizerBase) -> float:
    """Tokens a round over three prompts at 15 nodes."""
    tokens = rounds = 0
    for name in ("humaneval", "mt_bench", "gsm8k"):
        ids = chat_ids(tokenizer, load_prompts(name)[5])
        stats = generate(target, ids, assistant_model=drafter, ddtree=DDTreeConfig(budget=15)).ddtree_stats
        tokens, rounds = tokens + sum(stats.acceptance_lengths), rounds + stats.rounds
    return tokens / rounds


PINNED = 4.5  # what the committed weights accept


@pytest.fixture(scope="module")
def pinned(target: PreTrainedModel, drafter: DFlashDraftModel, tokenizer: PreTrainedTokenizerBase) -> float:
    return acceptance(target, drafter, tokenizer)


def test_the_pinned_acceptance(pinned: float) -> None:
    # A near-tie that falls the other way moves a round or two of some forty.
    assert pinned == pytest.approx(PINNED, rel=0.05)


def test_a_wrong_tap_lowers_the_acceptance(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pinned: float
) -> None:
    wrong = load_drafter()
    wrong.config.target_layer_ids = [layer - 1 for layer in wrong.config.target_layer_ids]
    assert acceptance(target, wrong, tokenizer) < 0.95 * pinned


def test_an_unloaded_weight_lowers_the_acceptance(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pinned: float
) -> None:
    wrong = load_drafter()
    # In place, not by `torch.nn.init`: while transformers loads a model it replaces those functions by ones that skip
    # loaded weights, and loads in two threads can leave them so.
    with torch.no_grad():
        wrong.hidden_norm.weight.fill_(1)
        wrong.layers[1].self_attn.k_proj.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    assert acceptance(target, wrong, tokenizer) < 0.95 * pinned


def test_a_window_that_the_drafter_was_not_trained_with_lowers_the_acceptance(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pinned: float
) -> None:
    """The weights have full attention: if a config's window were ignored, acceptance would stay what it is."""
    layers = load_drafter().config.num_hidden_layers
    windowed = load_drafter(layer_types=["sliding_attention"] * layers, sliding_window=4, use_sliding_window=True)
    assert acceptance(target, windowed, tokenizer) < 0.95 * pinned
