"""Launched rounds over our attention: the same text as over the model's own layers, and not trusted without a look."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_ddtree import DDTreeConfig, attention, our_layers, tree_cache
from hf_ddtree.compat import CACHE_KEY
from hf_ddtree.outputs import Choice
from scripted import prompt_ids, scripted, tiny_drafter, tiny_target

GREEDY: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True}


def compare(model: Any, ids: torch.Tensor, new: int, **options: Any) -> Any:
    """The output with trees, whose text is plain decoding's."""
    mask = options.get("attention_mask")
    plainly = {name: value for name, value in options.items() if name != "ddtree"}
    expected = model.generate(ids, max_new_tokens=new, **GREEDY | plainly)
    padding = 0 if mask is None else int((mask == 0).sum())
    with scripted(expected.sequences[:, padding:], 0.9):  # by position
        options = {"ddtree": DDTreeConfig(budget=15)} | options
        out = model.generate(ids, max_new_tokens=new, assistant_model=tiny_drafter(model), **GREEDY | options)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.ddtree_stats.mean_acceptance_length > 2
    return out


def test_the_models_own_layers_run_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target("qwen3")
    stats = compare(model, prompt_ids(20), 40).ddtree_stats
    assert stats.layers == Choice("ours") and stats.launch == Choice("operations", "a graph gains nothing on a CPU")
    monkeypatch.setattr(our_layers, "ShadowTarget", None)
    stats = compare(model, prompt_ids(20), 40, ddtree=DDTreeConfig(budget=15, execution="plain")).ddtree_stats
    asked = "asked for"
    assert (stats.layers, stats.compiled, stats.launch) == (
        Choice("model", asked), Choice("no", asked), Choice("operations", asked),
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen2_mixed", "mistral"])
@pytest.mark.parametrize("padding", [0, 7])
def test_rows_that_grow_in_a_call(family: str, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_cache, "_MOST_AHEAD", 16)
    model = tiny_target(family)
    mask = torch.ones(1, 20, dtype=torch.int64)
    mask[:, :padding] = 0
    for new in (300, 30):  # the second call is padded where the first was not
        assert compare(model, prompt_ids(20), new, attention_mask=mask).ddtree_stats.layers == Choice("ours")
        mask = torch.ones(1, 20, dtype=torch.int64)


def test_a_later_turn_on_the_returned_cache() -> None:
    model = tiny_target("qwen2_mixed")
    first = compare(model, prompt_ids(20), 30)
    ids = torch.cat([first.sequences, prompt_ids(6, seed=1)], dim=1)
    expected = model.generate(ids, max_new_tokens=30, **GREEDY)
    call = GREEDY | {CACHE_KEY: first[CACHE_KEY], "assistant_model": tiny_drafter(model), "ddtree": True}
    out = model.generate(ids, max_new_tokens=30, **call)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.ddtree_stats.layers == Choice("ours")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_node_whose_values_are_no_numbers_spoils_no_other(value: float) -> None:
    model = tiny_target("llama")
    config = DDTreeConfig(budget=15, record_trees=True)
    out = compare(model, prompt_ids(20), 40, ddtree=config)
    drafted = torch.cat([entry.tree.token_ids.flatten() for entry in out.ddtree_stats.trees]).tolist()
    wrong = next(token for token in drafted if token not in out.sequences)
    model.model.embed_tokens.weight.data[wrong] = value
    assert compare(model, prompt_ids(20), 40, ddtree=config).ddtree_stats.layers == Choice("ours")


def test_weights_that_have_moved_are_looked_at_again() -> None:
    model = tiny_target("llama")
    compare(model, prompt_ids(20), 20)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight = torch.nn.Parameter(layer.self_attn.q_proj.weight.flip(0))
    assert compare(model, prompt_ids(20), 20).ddtree_stats.layers == Choice("ours")
    model.double()
    assert compare(model, prompt_ids(20), 20).ddtree_stats.layers == Choice("ours")


@pytest.mark.parametrize("fault", ["values", "error"])
def test_layers_that_give_something_else_are_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.tree_attention_folded

    def faulty(*arguments: Any) -> torch.Tensor:
        if fault == "error":
            raise RuntimeError("no such kernel\nand more")
        return original(*arguments).roll(1, dims=1)

    monkeypatch.setattr(attention, "tree_attention_folded", faulty)
    reason = "they give something else than the model's own" if fault == "values" else "RuntimeError: no such kernel"
    assert compare(tiny_target("llama"), prompt_ids(20), 40).ddtree_stats.layers == Choice("model", reason)
