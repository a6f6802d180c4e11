"""Training on a CPU: a tiny target, a tiny drafter, a few steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ddtree import DFlashDraftModel
from train_drafter import Batch, Recipe, default_taps, draw_batch, pack, train, visible_rows

RECIPE = Recipe(
    layers=2, block_size=4, mask_token_id=3, steps=60, warmup=4, rows=4, row_length=48, anchors=6, learning_rate=1e-2
)


def tiny_target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Answers that count upwards, so that there is something to learn."""
    rng = np.random.default_rng(0)
    ids, answers, lengths = [], [], []
    for _ in range(24):
        prompt, length = rng.integers(5, 60, 6), int(rng.integers(10, 20))
        answer = (prompt[-1] + np.arange(1, length + 1)) % 55 + 5
        ids.append(np.concatenate([prompt, answer]))
        answers.append(np.concatenate([np.zeros(6), np.full(length, 6 + length)]))
        lengths.append(6 + length)
    path = tmp_path / "conversations.npz"
    arrays = {"ids": np.concatenate(ids), "answer": np.concatenate(answers)}
    np.savez(path, lengths=np.array(lengths), **{name: array.astype(np.uint16) for name, array in arrays.items()})
    return path


def test_loss_falls_and_the_result_loads(conversations: Path, tmp_path: Path) -> None:
    losses = train(tiny_target(), conversations, tmp_path / "out", RECIPE)
    assert np.mean(losses[-4:]) < 0.8 * np.mean(losses[:4])
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "out")
    assert drafter.config.target_layer_ids == [1, 2, 3, 4, 5]
    assert drafter.dtype == torch.bfloat16


def test_a_resumed_run_equals_an_uninterrupted_one(conversations: Path, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, steps=20)
    whole = train(tiny_target(), conversations, tmp_path / "whole", recipe)
    parts = train(tiny_target(), conversations, tmp_path / "parts", recipe, max_steps=8)
    parts += train(tiny_target(), conversations, tmp_path / "parts", recipe)
    assert parts == whole
    weights = [DFlashDraftModel.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def test_a_block_sees_its_conversation_before_the_anchor_and_itself() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1, 1, -1]])
    zeros = torch.zeros_like(document)
    visible = visible_rows(Batch(zeros, document, zeros, zeros), torch.tensor([[2, 5]]), 2)[0].int()
    assert visible.tolist() == [
        [1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1],
    ]


def test_anchors_are_answer_tokens_with_a_token_to_predict() -> None:
    answer_end = torch.tensor([[0, 0, 5, 5, 5, 0, 0, 9, 9, 0]])
    zeros = torch.zeros_like(answer_end)
    _, anchors = draw_batch(Batch(zeros, zeros, zeros, answer_end), RECIPE, step=3)
    assert sorted(anchors[0].tolist()) == [-1, -1, -1, 2, 3, 7]


def test_every_conversation_is_packed_once_and_rows_are_full() -> None:
    lengths = np.random.default_rng(1).integers(5, 100, 500)
    rows = pack(lengths, 128)
    assert sorted(member for row in rows for member in row) == list(range(500))
    assert max(lengths[row].sum() for row in rows) <= 128
    assert lengths.sum() / (128 * len(rows)) > 0.95


def test_taps_are_those_of_published_drafters() -> None:
    assert default_taps(30) == [1, 8, 14, 20, 27]
    assert default_taps(36) == [1, 9, 17, 25, 33]
