"""A long prompt costs memory once for each of its rows, beside what plain decoding needs."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from hf_ddtree import DDTreeConfig, DFlashDraftModel, release_buffers
from hf_ddtree.draft_tree import ancestor_matrix
from hf_ddtree.tree_cache import TreeCache
from hf_ddtree.verifier import tree_mask
from hf_ddtree.visibility import Visibility
from scripted import prompt_ids, tiny_drafter, tiny_target


class Live(TorchDispatchMode):
    """Follows the bytes of all tensors made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[int, int] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        return sum(self.bytes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.bytes and key not in given:
                    self.bytes[key] = storage.nbytes()
                    weakref.finalize(storage, self.bytes.pop, key, None)
        self.peak = max(self.peak, self.now)
        return out


def measure(model: PreTrainedModel, length: int, **options: Any) -> Live:
    release_buffers(model)
    with Live() as live:
        model.generate(prompt_ids(length), max_new_tokens=20, do_sample=False, **options)
    return live


@pytest.fixture(scope="module")
def pair() -> tuple[PreTrainedModel, DFlashDraftModel]:
    """A drafter with keys and values many times as wide as the target's."""
    model = tiny_target("llama", max_position_embeddings=2**16, num_hidden_layers=3, num_key_value_heads=1)
    return model, tiny_drafter(model, num_attention_heads=16, num_key_value_heads=16, head_dim=24)


def test_the_peak_is_plain_decodings_with_buffers_and_features(pair: tuple[PreTrainedModel, DFlashDraftModel]) -> None:
    length = 16_000
    model, drafter = pair
    plain = measure(model, length)
    ours = measure(model, length, assistant_model=drafter, ddtree=DDTreeConfig(budget=15))
    features = length * 2 * 48 * 4
    assert ours.now > features  # the buffers stay for the next call
    drafter_pass = 6 * 2048 * 16 * 24 * 4
    assert ours.peak < plain.peak + ours.now + features + drafter_pass


def test_the_peak_grows_with_the_prompt_not_with_its_square(pair: tuple[PreTrainedModel, DFlashDraftModel]) -> None:
    model, drafter = pair
    peaks = [measure(model, n, assistant_model=drafter, ddtree=DDTreeConfig(budget=15)).peak for n in (4000, 16_000)]
    assert peaks[1] < 4.5 * peaks[0]


def test_buffers_do_not_grow_with_a_prompt_in_them(
    pair: tuple[PreTrainedModel, DFlashDraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    grown: list[int] = []
    original = TreeCache.reserve

    def reserve(self: TreeCache, rows: int) -> None:
        if rows > self.capacity and self.length:
            grown.append(rows)
        original(self, rows)

    monkeypatch.setattr(TreeCache, "reserve", reserve)
    model, drafter = pair
    measure(model, 1020, assistant_model=drafter, ddtree=DDTreeConfig(budget=15))
    assert not grown


@pytest.mark.parametrize("window", [None, 100])
def test_a_mask_takes_a_few_bytes_for_each_node_and_slot(window: int | None) -> None:
    nodes, view = 64, 8192
    root = torch.zeros(1, nodes - 1, dtype=torch.long)
    ancestors = ancestor_matrix(root - 1, root + 1)
    depths, committed = ancestors.sum(-1) - 1, torch.ones(1, view, dtype=torch.bool)
    with Live() as live:
        seen = Visibility.of("sliding_attention", window, torch.tensor([8000]), committed, ancestors, depths)
        tree_mask(seen, torch.bfloat16)
    assert live.peak < 6 * nodes * view
