"""The drafter network against attention written out row by row, and its checkpoints, read strictly and silently."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel
from transformers.cache_utils import Cache, DFlashCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_ddtree import DFlashConfig, DFlashDraftModel
from hf_ddtree.tree_cache import DraftCache
from scripted import tiny_drafter, tiny_target

HIDDEN, TAPS, BLOCK, WINDOW = 32, 2, 4, 6
LAYERS = {
    "full": ["full_attention"] * 2,
    "sliding": ["sliding_attention"] * 2,
    "mixed": ["sliding_attention", "full_attention", "sliding_attention"],
}
CHUNKS = [[20], [3, 5, 4, 8], [12, 1, 1, 6], [1] * 20, [7, 6, 7]]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def small_config(**overrides: Any) -> DFlashConfig:
    fields: dict[str, Any] = {
        "vocab_size": 90,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "target_layer_ids": [0, 2],
        "mask_token_id": 3,
        "block_size": BLOCK,
    }
    return DFlashConfig(**(fields | overrides))


def drafter_of(layers: str = "full", attention: str = "eager", **overrides: Any) -> DFlashDraftModel:
    """A random drafter, its norms included (they start as ones)."""
    kinds = LAYERS[layers]
    sliding = {"sliding_window": WINDOW} if "sliding_attention" in kinds else {}
    torch.manual_seed(0)
    model = DFlashDraftModel(small_config(num_hidden_layers=len(kinds), layer_types=kinds, **(sliding | overrides)))
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.copy_(1 + 0.3 * torch.randn_like(weight))
    model.set_attn_implementation(attention)
    return model.eval()


def inputs_of(context_rows: int, batch: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of a block and the features of a context."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, BLOCK, HIDDEN, generator=generator)
    return noise, torch.randn(batch, context_rows, TAPS * HIDDEN, generator=generator)


def hidden_of(model: DFlashDraftModel, noise: torch.Tensor, context: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return model(noise_embeds=noise, context_hidden_states=context, **kwargs).last_hidden_state


def in_chunks(
    model: DFlashDraftModel, noise: torch.Tensor, context: torch.Tensor, cache: Cache, chunks: list[int], **kwargs: Any
) -> torch.Tensor:
    """Several drafter calls, each with the next rows of the context and the whole block; the last one's output.

    The blocks before the last are other ones, so that rows of theirs that stayed in the cache would be seen.
    """
    mask = kwargs.pop("attention_mask", None)
    output, seen = torch.empty(0), 0
    for i, rows in enumerate(chunks):
        block = noise if i == len(chunks) - 1 else noise.roll(1, dims=1) + i
        until = seen + rows
        if mask is not None:
            kwargs["attention_mask"] = torch.cat([mask[:, :until], mask[:, -BLOCK:]], dim=1)
        output = hidden_of(model, block, context[:, seen:until], cache=cache, **kwargs)
        cache.crop(-BLOCK)
        seen = until
        assert cache.get_seq_length() == seen
    assert seen == context.shape[1]
    return output


def draft_cache(model: DFlashDraftModel) -> DraftCache:
    return DraftCache([kind == "sliding_attention" for kind in model.config.layer_types])


def dflash_cache(model: DFlashDraftModel) -> DFlashCache:
    """As transformers' own generator makes it."""
    cache = DFlashCache(config=model.config)
    cache.activate_past_recording()
    return cache


def sees(kind: str, causal: bool, query: int, key: int, window: int) -> bool:
    """Whether row `query` of context and block attends to row `key`.

    A window has `window` rows to each side that a layer looks to, the query's included.
    """
    if causal and key > query:
        return False
    return kind == "full_attention" or abs(query - key) < window


def rms(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(head: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    half = len(head) // 2
    result = head.clone()
    for i in range(half):
        angle = position * theta ** (-i / half)
        result[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)
        result[i + half] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)
    return result


def naive_hidden(model: DFlashDraftModel, noise: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """DFlash's forward for one sequence in float64, attention row by row and head by head."""
    config, weights = model.config, {name: weight.double() for name, weight in model.state_dict().items()}
    theta, eps, head_dim = config.rope_parameters["rope_theta"], config.rms_norm_eps, config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    features = rms(context[0].double() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    block, length = noise[0].double(), context.shape[1]
    for index, kind in enumerate(config.layer_types):
        layer = {name.split(f"layers.{index}.")[-1]: w for name, w in weights.items() if f"layers.{index}." in name}
        normed = rms(block, layer["input_layernorm.weight"], eps)
        rows = torch.cat([features, normed])

        def heads_of(states: torch.Tensor, name: str, layer: dict[str, torch.Tensor] = layer) -> torch.Tensor:
            return (states @ layer[f"self_attn.{name}_proj.weight"].T).view(len(states), -1, head_dim)

        queries = rms(heads_of(normed, "q"), layer["self_attn.q_norm.weight"], eps)
        keys = rms(heads_of(rows, "k"), layer["self_attn.k_norm.weight"], eps)
        values = heads_of(rows, "v")
        attended = torch.zeros_like(queries)
        causal = kind == "sliding_attention" if config.causal is None else config.causal
        for q in range(len(block)):
            visible = [k for k in range(len(rows)) if sees(kind, causal, length + q, k, config.sliding_window or 0)]
            for head in range(config.num_attention_heads):
                query = rotated(queries[q, head], length + q, theta)
                scores = torch.stack([query @ rotated(keys[k, head // group], k, theta) for k in visible])
                attended[q, head] = (scores / head_dim**0.5).softmax(0) @ values[visible, head // group]
        block = block + attended.flatten(1) @ layer["self_attn.o_proj.weight"].T
        normed = rms(block, layer["post_attention_layernorm.weight"], eps)
        gate, up = (normed @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        block = block + (gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].T
    return rms(block, weights["norm.weight"], eps)[None].float()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


# The network


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("context_rows", [1, WINDOW, 20])
@pytest.mark.parametrize("causal", [None, True, False])
def test_the_forward_is_attention_written_out_row_by_row(
    layers: str, attention: str, context_rows: int, causal: bool | None
) -> None:
    model = drafter_of(layers, attention, causal=causal)
    noise, context = inputs_of(context_rows)
    close(hidden_of(model, noise, context), naive_hidden(model, noise, context))


@pytest.mark.parametrize("causal", [None, False])
@pytest.mark.parametrize("window", [1, 2, BLOCK])
@pytest.mark.parametrize("layers", ["sliding", "mixed"])
def test_a_window_narrower_than_the_block_bounds_the_block_too(layers: str, window: int, causal: bool | None) -> None:
    model = drafter_of(layers, sliding_window=window, causal=causal)
    noise, context = inputs_of(8)
    expected = naive_hidden(model, noise, context)
    close(hidden_of(model, noise, context), expected)
    for chunks in ([3, 5], [1] * 8):
        close(in_chunks(model, noise, context, draft_cache(model), chunks), expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("make_cache", [draft_cache, dflash_cache])
@pytest.mark.parametrize("layers", LAYERS)
def test_calls_with_a_cache_add_up_to_the_single_call(
    layers: str, make_cache: Callable[[DFlashDraftModel], Cache], attention: str
) -> None:
    model = drafter_of(layers, attention)
    noise, context = inputs_of(20)
    expected = hidden_of(model, noise, context)
    for chunks in CHUNKS:
        close(in_chunks(model, noise, context, make_cache(model), chunks), expected)


@pytest.mark.parametrize("layers", LAYERS)
def test_context_may_be_appended_without_a_draft(layers: str) -> None:
    model = drafter_of(layers)
    noise, context = inputs_of(20)
    expected = hidden_of(model, noise, context)
    for chunks in ([20], [3, 17], [12, 1, 1, 6]):
        cache, start = draft_cache(model), 0
        for rows in chunks:
            model.extend(context[:, start : start + rows], torch.arange(start, start + rows)[None], cache)
            start += rows
        close(hidden_of(model, noise, context[:, 20:], cache=cache), expected)
    cache = draft_cache(model)
    model.extend(context[:, :15], torch.arange(15)[None], cache)
    close(hidden_of(model, noise, context[:, 15:], cache=cache), expected)


@pytest.mark.parametrize("causal", [None, False])
def test_a_context_row_outside_the_window_has_no_influence_and_one_on_its_edge_has(causal: bool | None) -> None:
    noise, context = inputs_of(20)
    first = 20 - WINDOW + 1  # the last context row that the block's first row still sees
    for layers, changed in (("sliding", [False, False, True]), ("mixed", [True] * 3), ("full", [True] * 3)):
        model = drafter_of(layers, causal=causal)
        expected = hidden_of(model, noise, context)
        for row, matters in zip((0, first - 1, first), changed, strict=True):
            other = context.clone()
            other[:, row] += 3
            assert torch.equal(hidden_of(model, noise, other), expected) is not matters, (layers, row)


def test_an_old_sliding_row_has_no_influence_over_several_calls_either() -> None:
    model = drafter_of("sliding")
    noise, context = inputs_of(20)
    other = context.clone()
    other[:, : 20 - WINDOW] += 3
    for make_cache in (draft_cache, dflash_cache):
        outputs = [in_chunks(model, noise, rows, make_cache(model), [7, 6, 7]) for rows in (context, other)]
        close(outputs[1], outputs[0])


def test_every_block_row_sees_the_whole_block() -> None:
    model = drafter_of("full")
    noise, context = inputs_of(5)
    expected = hidden_of(model, noise, context)
    for row in range(BLOCK):
        other = noise.clone()
        other[:, row] = other[:, row].roll(1)
        difference = (hidden_of(model, other, context) - expected).abs().amax(-1)[0]
        assert (difference > 1e-3).all(), row


def test_positions_are_counted_on_from_the_caches_length() -> None:
    model = drafter_of("mixed")
    noise, context = inputs_of(9)
    rows = 9 + BLOCK
    expected = hidden_of(model, noise, context)
    assert torch.equal(hidden_of(model, noise, context, position_ids=torch.arange(rows)[None]), expected)
    cache = draft_cache(model)
    in_chunks(model, noise, context[:, :5], cache, [2, 3])
    positions = torch.arange(5, rows)[None]
    explicit = hidden_of(model, noise, context[:, 5:], cache=cache, position_ids=positions)
    cache.crop(-rows + 5)
    assert torch.equal(hidden_of(model, noise, context[:, 5:], cache=cache), explicit)
    close(explicit, expected)


def test_positions_matter_but_only_relative_to_each_other() -> None:
    model = drafter_of("mixed")
    noise, context = inputs_of(9)
    positions = torch.arange(9 + BLOCK)[None]
    expected = hidden_of(model, noise, context, position_ids=positions)
    close(hidden_of(model, noise, context, position_ids=positions + 40), expected)
    for changed in (range(9), range(9, 9 + BLOCK), [9], [9 + BLOCK - 1]):
        other = positions.clone()
        other[:, list(changed)] += 5
        assert (hidden_of(model, noise, context, position_ids=other) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("layers", "hidden"),
    [("full", [0]), ("full", [0, 3, 4, 10]), ("full", [11]), ("sliding", [0, 1]), ("mixed", [0, 1, 2, 3, 4, 5, 6])],
)
def test_a_context_row_with_a_zero_in_the_mask_is_as_good_as_absent(
    layers: str, hidden: list[int], attention: str
) -> None:
    model = drafter_of(layers, attention)
    noise, context = inputs_of(12)
    positions = torch.arange(12 + BLOCK)[None]
    mask = torch.ones(1, 12 + BLOCK, dtype=torch.long)
    mask[:, hidden] = 0
    kept = mask[0].bool()
    expected = hidden_of(model, noise, context[:, kept[:12]], position_ids=positions[:, kept])
    close(hidden_of(model, noise, context, position_ids=positions, attention_mask=mask), expected)
    close(hidden_of(model, noise, context, position_ids=positions, attention_mask=mask.bool()), expected)
    assert (hidden_of(model, noise, context) - expected).abs().max() > 1e-3 or layers == "sliding"


@pytest.mark.parametrize("make_cache", [draft_cache, dflash_cache])
@pytest.mark.parametrize("layers", LAYERS)
def test_a_mask_over_cached_rows_hides_them_too(layers: str, make_cache: Callable[[DFlashDraftModel], Cache]) -> None:
    model = drafter_of(layers)
    noise, context = inputs_of(20)
    mask = torch.ones(1, 20 + BLOCK, dtype=torch.long)
    mask[:, [0, 1, 9, 16, 19]] = 0
    expected = hidden_of(model, noise, context, attention_mask=mask)
    assert (hidden_of(model, noise, context) - expected).abs().max() > 1e-3
    for chunks in CHUNKS:
        close(in_chunks(model, noise, context, make_cache(model), chunks, attention_mask=mask), expected)


def test_a_mask_of_ones_is_no_mask() -> None:
    model = drafter_of("mixed")
    noise, context = inputs_of(12)
    expected = hidden_of(model, noise, context)
    close(hidden_of(model, noise, context, attention_mask=torch.ones(1, 12 + BLOCK)), expected)


def test_an_additive_mask_is_taken_as_it_is() -> None:
    model = drafter_of("full")
    noise, context = inputs_of(12)
    mask = torch.ones(1, 12 + BLOCK)
    mask[:, [2, 5]] = 0
    additive = ((1 - mask) * torch.finfo(torch.float32).min)[:, None, None].expand(1, 1, BLOCK, -1)
    expected = hidden_of(model, noise, context, attention_mask=mask)
    close(hidden_of(model, noise, context, attention_mask=additive), expected)
    close(hidden_of(model, noise, context, attention_mask={"full_attention": additive}), expected)


@pytest.mark.parametrize("layers", LAYERS)
def test_eager_and_sdpa_agree(layers: str) -> None:
    noise, context = inputs_of(20, batch=3)
    mask = torch.ones(3, 20 + BLOCK, dtype=torch.long)
    mask[1, :15], mask[2, [3, 17]] = 0, 0
    outputs = [
        hidden_of(drafter_of(layers, attention), noise, context, attention_mask=mask)
        for attention in ("eager", "sdpa")
    ]
    close(outputs[1], outputs[0])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("layers", LAYERS)
def test_a_batch_equals_its_rows_alone(layers: str, attention: str) -> None:
    model = drafter_of(layers, attention)
    noise, context = inputs_of(20, batch=3)
    expected = torch.cat([hidden_of(model, noise[i : i + 1], context[i : i + 1]) for i in range(3)])
    close(hidden_of(model, noise, context), expected)
    for make_cache in (draft_cache, dflash_cache):
        close(in_chunks(model, noise, context, make_cache(model), [7, 6, 7]), expected)


@pytest.mark.parametrize("layers", LAYERS)
def test_a_left_padded_batch_equals_its_rows_alone(layers: str) -> None:
    model = drafter_of(layers)
    noise, context = inputs_of(20, batch=3)
    lengths = [20, 11, 4]
    mask = (torch.arange(20 + BLOCK) >= torch.tensor([[20 - length] for length in lengths])).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    padded = hidden_of(model, noise, context, attention_mask=mask, position_ids=positions)
    for i, length in enumerate(lengths):
        close(padded[i : i + 1], hidden_of(model, noise[i : i + 1], context[i : i + 1, 20 - length :]))


def test_the_cache_may_be_given_under_its_older_name() -> None:
    model = drafter_of("mixed")
    noise, context = inputs_of(20)
    cache = draft_cache(model)
    hidden_of(model, noise, context[:, :12], past_key_values=cache)
    cache.crop(-BLOCK)
    close(hidden_of(model, noise, context[:, 12:], past_key_values=cache), hidden_of(model, noise, context))


def test_a_drafter_for_a_target_takes_its_embeddings_and_features() -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    states = target(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states
    context = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    block = torch.tensor([[8] + [drafter.config.mask_token_id] * (drafter.config.block_size - 1)])
    hidden = hidden_of(drafter, target.get_input_embeddings()(block), context)
    assert hidden.shape == (1, drafter.config.block_size, target.config.hidden_size)
    assert target.get_output_embeddings()(hidden).isfinite().all()
    assert sorted(drafter.state_dict()) == sorted(published_tensors(drafter.config.to_dict()))


# Rotary embeddings

THETA = 300.0
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


def rope_config(rope: dict[str, Any], max_positions: int = 16) -> dict[str, Any]:
    """A published config with these rope entries, in short contexts, so that 40 rows are a long one."""
    fields = small_config().to_dict() | {"max_position_embeddings": max_positions, "model_type": "qwen3"}
    required = {name: fields.pop(name) for name in ("target_layer_ids", "mask_token_id", "block_size")}
    for name in ("rope_parameters", "num_target_layers"):
        fields.pop(name)
    return fields | {"dflash_config": required} | rope


def loaded(config_dict: dict[str, Any], folder: Path) -> DFlashDraftModel:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_dict))
    config = DFlashConfig.from_pretrained(folder)
    torch.manual_seed(0)
    return DFlashDraftModel(config).eval()


@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS])
@pytest.mark.parametrize("max_positions", [16, 64])
def test_every_rope_type_gives_the_same_in_both_forms_of_the_config(
    rope_type: str, max_positions: int, tmp_path: Path
) -> None:
    entries = ROPES[rope_type]
    scaling = {"rope_type": rope_type, **entries}
    new: dict[str, Any] = {"rope_parameters": scaling | {"rope_theta": THETA}}
    old: dict[str, Any] = {"rope_theta": THETA, "rope_scaling": scaling if entries else None}
    oldest: dict[str, Any] = {"rope_theta": THETA, "rope_scaling": {"type": rope_type, **entries}}
    noise, context = inputs_of(40)
    outputs = []
    for rope in (new, old, oldest):
        model = loaded(rope_config(rope, max_positions), tmp_path)
        assert model.rotary_emb.rope_type == rope_type
        assert model.config.rope_parameters["rope_theta"] == THETA
        outputs.append(hidden_of(model, noise, context))
    assert outputs[0].isfinite().all()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    plain = loaded(rope_config({"rope_theta": THETA}, max_positions), tmp_path)
    scaled = rope_type not in (("default", "dynamic") if max_positions == 64 else ("default",))
    assert ((hidden_of(plain, noise, context) - outputs[0]).abs().max() > 1e-3) == scaled


@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS])
def test_a_rope_survives_saving(rope_type: str, tmp_path: Path) -> None:
    rope = {"rope_parameters": {"rope_type": rope_type, "rope_theta": THETA, **ROPES[rope_type]}}
    model = loaded(rope_config(rope), tmp_path / "made")
    model.save_pretrained(tmp_path / "saved")
    again = DFlashDraftModel.from_pretrained(tmp_path / "saved")
    noise, context = inputs_of(40)
    assert torch.equal(hidden_of(again, noise, context), hidden_of(model, noise, context))


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn", "llama3"])
def test_a_scaled_rope_is_the_same_over_several_calls(rope_type: str, tmp_path: Path) -> None:
    rope = {"rope_parameters": {"rope_type": rope_type, "rope_theta": THETA, **ROPES[rope_type]}}
    model = loaded(rope_config(rope), tmp_path)
    noise, context = inputs_of(20)
    close(in_chunks(model, noise, context, draft_cache(model), [7, 6, 7]), hidden_of(model, noise, context))


# Checkpoints


def published_tensors(config_dict: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Random weights of a drafter under the names of the published checkpoints, without any code of the model's."""
    hidden, inner, head = (config_dict[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config_dict[f"num_{name}_heads"] * head for name in ("attention", "key_value"))
    taps = len((config_dict.get("dflash_config") or config_dict)["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config_dict["num_hidden_layers"]):
        shapes |= {
            f"layers.{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"layers.{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"layers.{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"layers.{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"layers.{layer}.self_attn.q_norm.weight": (head,),
            f"layers.{layer}.self_attn.k_norm.weight": (head,),
            f"layers.{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{layer}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{layer}.mlp.down_proj.weight": (hidden, inner),
            f"layers.{layer}.input_layernorm.weight": (hidden,),
            f"layers.{layer}.post_attention_layernorm.weight": (hidden,),
        }
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def zlab_config(**overrides: Any) -> dict[str, Any]:
    """z-lab's form of config.json, scaled down."""
    fields: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "bos_token_id": 151643,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 40960,
        "max_window_layers": 5,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "num_target_layers": 36,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    return fields | overrides


def without(config_dict: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config_dict.items() if name not in names}


QWEN35 = {"vocab_size": 248320, "bos_token_id": None, "eos_token_id": 248046, "rope_theta": 10000000}
QWEN35_ROPE = {"rope_type": "default", "rope_theta": 10000000}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-4B-DFlash-b16": zlab_config(tie_word_embeddings=True),
    "Qwen3-8B-DFlash-b16": zlab_config(),
    "Qwen3.5-4B-DFlash": zlab_config(
        **QWEN35,
        dflash_config={"mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]},
        num_target_layers=32,
    ),
    "Qwen3.5-27B-DFlash": zlab_config(
        **QWEN35,
        dflash_config={"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        num_target_layers=64,
    ),
    "Qwen3.6-27B-DFlash": zlab_config(
        **QWEN35,
        dflash_config={"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        num_target_layers=64,
        layer_types=["sliding_attention"] * 4 + ["full_attention"],
        sliding_window=2048,
        use_sliding_window=True,
    ),
    "Qwen3.5-122B-A10B-DFlash": without(
        zlab_config(
            **QWEN35,
            dflash_config={
                "block_size": 16,
                "mask_token_id": 248077,
                "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45],
            },
            num_hidden_layers=6,
            num_target_layers=48,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
            max_window_layers=6,
            rope_parameters=QWEN35_ROPE,
            sliding_window=4096,
            use_sliding_window=True,
        ),
        "block_size",
        "rope_scaling",
        "rope_theta",
    ),
    "Qwen3.5-35B-A3B-DFlash": without(
        zlab_config(
            **QWEN35,
            dflash_config={
                "block_size": 16,
                "mask_token_id": 248077,
                "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
            },
            num_hidden_layers=6,
            num_target_layers=40,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
            max_window_layers=6,
            sliding_window=4096,
            use_sliding_window=True,
        ),
        "block_size",
    ),
    "gemma-4-31B-it-DFlash": zlab_config(
        dflash_config={"mask_token_id": 4, "target_layer_ids": [1, 12, 23, 35, 46, 57]},
        bos_token_id=2,
        eos_token_id=1,
        final_logit_softcapping=30.0,
        num_target_layers=60,
        layer_types=["sliding_attention"] * 4 + ["full_attention"],
        sliding_window=2048,
        tie_word_embeddings=True,
        use_sliding_window=True,
        vocab_size=262144,
    ),
    "Llama-3.1-8B-Instruct-DFlash": zlab_config(
        block_size=10,
        bos_token_id=128000,
        dflash_config={"mask_token_id": 128002, "target_layer_ids": [1, 8, 15, 22, 29]},
        eos_token_id=[128001, 128008, 128009],
        max_position_embeddings=131072,
        num_target_layers=32,
        rope_scaling={
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        rope_theta=500000.0,
        vocab_size=128256,
    ),
    "gpt-oss-20b-DFlash": zlab_config(
        block_size=8,
        bos_token_id=199998,
        dflash_config={"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
        eos_token_id=200002,
        max_position_embeddings=131072,
        num_target_layers=24,
        rope_scaling=YARN | {"rope_type": "yarn", "truncate": False},
        rope_theta=150000,
        vocab_size=201088,
    ),
    "flat": without(
        zlab_config(model_type="dflash_draft", mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33]),
        "auto_map",
        "dflash_config",
    ),
}


def write_checkpoint(
    folder: Path, config_dict: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None, shards: int = 1
) -> dict[str, torch.Tensor]:
    tensors = published_tensors(config_dict) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(config_dict))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def assert_weights(model: DFlashDraftModel, tensors: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert sorted(state) == sorted(tensors)
    for name, tensor in tensors.items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_checkpoint_in_a_published_form_loads_whole_and_without_a_warning(
    name: str,
    shards: int,
    tmp_path: Path,
    warnings_of_transformers: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
) -> None:
    config_dict = PUBLISHED[name]
    tensors = write_checkpoint(tmp_path, config_dict, shards=shards)
    model = DFlashDraftModel.from_pretrained(tmp_path, dtype="auto")
    assert warnings_of_transformers.messages == []
    assert [str(warning.message) for warning in recwarn] == []

    assert model.training is False
    assert_weights(model, tensors)
    config = model.config
    nested = config_dict.get("dflash_config", {})
    for key in ("target_layer_ids", "mask_token_id", "block_size"):
        assert getattr(config, key) == nested.get(key, config_dict.get(key))
    assert config.final_logit_softcapping == config_dict.get("final_logit_softcapping")
    for key in ("num_target_layers", "layer_types", "sliding_window", "rms_norm_eps", "vocab_size", "eos_token_id"):
        assert getattr(config, key) == config_dict[key]
    rope = config_dict.get("rope_parameters") or (config_dict["rope_scaling"] or {"rope_type": "default"})
    assert config.rope_parameters == {"rope_theta": config_dict.get("rope_theta"), **rope}

    noise = torch.randn(1, config.block_size, HIDDEN, dtype=torch.bfloat16)
    context = torch.randn(1, 7, len(config.target_layer_ids) * HIDDEN, dtype=torch.bfloat16)
    hidden = hidden_of(model, noise, context)
    assert hidden.shape == (1, config.block_size, HIDDEN) and hidden.dtype == torch.bfloat16
    assert hidden.isfinite().all()


def test_a_checkpoint_asks_for_no_remote_code_and_trusts_none(tmp_path: Path) -> None:
    (tmp_path / "dflash.py").write_text("raise AssertionError('remote code was run')\n")
    tensors = write_checkpoint(tmp_path, zlab_config())
    for trust in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        assert_weights(DFlashDraftModel.from_pretrained(tmp_path, dtype="auto", **trust), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_dtype_is_the_callers(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, zlab_config())
    assert_weights(
        DFlashDraftModel.from_pretrained(tmp_path, dtype=dtype),
        {name: tensor.to(dtype) for name, tensor in tensors.items()},
    )


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_drafter_loads_bit_equal(layers: str, dtype: torch.dtype, tmp_path: Path) -> None:
    drafter_of(layers, attention_bias=True).save_pretrained(tmp_path / "float32")
    model = DFlashDraftModel.from_pretrained(tmp_path / "float32", dtype=dtype, attn_implementation="eager")
    model.save_pretrained(tmp_path / "again")
    assert [file.name for file in (tmp_path / "again").glob("*.safetensors")] == ["model.safetensors"]
    noise, context = (rows.to(dtype) for rows in inputs_of(20))
    for load in (DFlashDraftModel.from_pretrained, AutoModel.from_pretrained):
        again = load(tmp_path / "again", dtype="auto", attn_implementation="eager")
        assert type(again) is DFlashDraftModel
        assert_weights(again, model.state_dict())
        assert again.config.layer_types == LAYERS[layers]
        assert torch.equal(hidden_of(again, noise, context), hidden_of(model, noise, context))


def test_a_published_checkpoint_saved_by_us_is_a_flat_one_with_the_same_weights(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, PUBLISHED["Qwen3.6-27B-DFlash"])
    DFlashDraftModel.from_pretrained(tmp_path, dtype="auto").save_pretrained(tmp_path / "ours")
    assert_weights(DFlashDraftModel.from_pretrained(tmp_path / "ours", dtype="auto"), tensors)
    config = AutoConfig.from_pretrained(tmp_path / "ours")
    assert type(config) is DFlashConfig
    assert (config.sliding_window, config.block_size) == (2048, 16)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["model_type"] == "dflash_draft" and "dflash_config" not in written
    assert sorted(load_file(tmp_path / "ours" / "model.safetensors")) == sorted(tensors)


def test_loading_info_is_returned_when_asked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, zlab_config())
    model, info = DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, DFlashDraftModel)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_a_checkpoint_without_safetensors_is_refused(tmp_path: Path) -> None:
    config_dict = zlab_config()
    (tmp_path / "config.json").write_text(json.dumps(config_dict))
    torch.save(published_tensors(config_dict), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        DFlashDraftModel.from_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        DFlashDraftModel.from_pretrained(tmp_path, use_safetensors=None)
    with pytest.raises(ValueError, match="safetensors only"):
        DFlashDraftModel.from_pretrained(tmp_path, use_safetensors=False)


@pytest.mark.parametrize("name", ["target_layer_ids", "mask_token_id", "block_size"])
def test_a_checkpoint_without_a_required_value_is_refused_with_its_name(name: str, tmp_path: Path) -> None:
    config_dict = zlab_config(dflash_config={"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]})
    tensors = published_tensors(config_dict)
    config_dict["dflash_config"].pop(name, None)
    write_checkpoint(tmp_path, without(config_dict, name), tensors)
    with pytest.raises(ValueError, match=f"config has no `{name}`"):
        DFlashDraftModel.from_pretrained(tmp_path)


ANY_WEIGHT = [
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    "layers.0.self_attn.q_norm.weight",
    "layers.4.mlp.down_proj.weight",
]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", ANY_WEIGHT)
def test_a_missing_weight_is_refused_with_its_name(name: str, shards: int, tmp_path: Path) -> None:
    tensors = without(published_tensors(zlab_config()), name)
    write_checkpoint(tmp_path, zlab_config(), tensors, shards)
    with pytest.raises(ValueError, match=f"missing: {name}"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name", ["embed_tokens.weight", "lm_head.weight", "layers.5.mlp.up_proj.weight", "layers.0.self_attn.q_proj.bias"]
)
def test_an_unexpected_weight_is_refused_with_its_name(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, zlab_config(), published_tensors(zlab_config()) | {name: torch.zeros(HIDDEN)})
    with pytest.raises(ValueError, match=f"unexpected: {name}"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ANY_WEIGHT)
def test_a_misshapen_weight_is_refused_with_its_name(name: str, tmp_path: Path) -> None:
    tensors = published_tensors(zlab_config())
    tensors[name] = tensors[name][..., :-1].contiguous()
    write_checkpoint(tmp_path, zlab_config(), tensors)
    with pytest.raises(ValueError, match=name):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_taps_that_do_not_fit_the_projection_are_refused(tmp_path: Path) -> None:
    config_dict = zlab_config(dflash_config={"mask_token_id": 151669, "target_layer_ids": [1, 9]})
    write_checkpoint(tmp_path, config_dict, published_tensors(zlab_config()))
    with pytest.raises(ValueError, match=r"fc\.weight"):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_a_target_is_no_drafter(tmp_path: Path) -> None:
    tiny_target("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no DFlash drafter: its model_type is 'llama'"):
        DFlashDraftModel.from_pretrained(tmp_path)
