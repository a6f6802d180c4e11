"""Both published forms of a drafter's config say the same, and nothing that a drafter needs is guessed."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    CLIPVisionConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    LlavaConfig,
    MambaConfig,
    Qwen3Config,
)

from hf_ddtree import DFlashConfig, DFlashDraftModel
from hf_ddtree.drafter_formats import drafter_format, flatten_config_dict

REQUIRED: dict[str, Any] = {"target_layer_ids": [1, 3, 5], "mask_token_id": 88, "block_size": 4}
NETWORK: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": 90,
}


def flat(**overrides: Any) -> dict[str, Any]:
    return NETWORK | {"model_type": DFlashConfig.model_type} | REQUIRED | overrides


def nested(at_the_top: tuple[str, ...] = ("block_size",), **overrides: Any) -> dict[str, Any]:
    """z-lab's form: the required values in `dflash_config`, but for those named."""
    inner = {name: value for name, value in REQUIRED.items() if name not in at_the_top}
    top = {name: REQUIRED[name] for name in at_the_top}
    auto_map = {"AutoModel": "dflash.DFlashDraftModel"}
    return NETWORK | {"model_type": "qwen3", "auto_map": auto_map, "dflash_config": inner} | top | overrides


def load(config_dict: dict[str, Any], folder: Path) -> DFlashConfig:
    (folder / "config.json").write_text(json.dumps(config_dict))
    return DFlashConfig.from_pretrained(folder)


def values(config: DFlashConfig) -> dict[str, Any]:
    """All that a config says, but for where it was read from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def make(**overrides: Any) -> DFlashConfig:
    return DFlashConfig(**(NETWORK | REQUIRED | overrides))


def test_the_nested_and_the_flat_form_load_the_same(tmp_path: Path) -> None:
    config = load(flat(), tmp_path)
    assert type(config) is DFlashConfig
    assert values(load(nested(), tmp_path)) == values(config)
    for name, value in (NETWORK | REQUIRED).items():
        if name != "rope_theta":
            assert getattr(config, name) == value, name
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert config.model_type == "dflash_draft"
    config.require_complete()


@pytest.mark.parametrize("name", REQUIRED)
def test_each_required_value_may_stand_in_either_place_or_equal_in_both(name: str, tmp_path: Path) -> None:
    everything_nested = nested(())
    assert name in everything_nested["dflash_config"] and name not in everything_nested
    expected = values(load(flat(), tmp_path))
    assert values(load(everything_nested, tmp_path)) == expected
    assert values(load(nested((name,)), tmp_path)) == expected
    assert values(load(everything_nested | {name: REQUIRED[name]}, tmp_path)) == expected
    assert values(load(everything_nested | {name: None}, tmp_path)) == expected


def test_the_number_of_target_layers_may_be_nested_too(tmp_path: Path) -> None:
    config_dict = nested()
    config_dict["dflash_config"]["num_target_layers"] = config_dict.pop("num_target_layers")
    assert load(config_dict, tmp_path).num_target_layers == 6


@pytest.mark.parametrize(
    ("name", "other"),
    [("target_layer_ids", [1, 3]), ("mask_token_id", 0), ("block_size", 16), ("num_target_layers", 7)],
)
def test_a_value_that_differs_between_the_places_is_refused(name: str, other: Any, tmp_path: Path) -> None:
    config_dict = nested()
    config_dict["dflash_config"][name] = (NETWORK | REQUIRED)[name]
    config_dict[name] = other
    right = (NETWORK | REQUIRED)[name]
    message = f"`{name}` is {other} at the top of the config and {right} in `dflash_config`."
    with pytest.raises(ValueError, match=re.escape(message)):
        load(config_dict, tmp_path)


@pytest.mark.parametrize("form", [flat, nested])
@pytest.mark.parametrize("written_as", ["absent", "null"])
@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_required_value_makes_no_model_and_is_named(
    form: Any, written_as: str, name: str, tmp_path: Path
) -> None:
    config_dict = copy.deepcopy(form())
    for place in (config_dict, config_dict.get("dflash_config", {})):
        if name in place:
            place[name] = None
            if written_as == "absent":
                del place[name]
    config = load(config_dict, tmp_path)
    assert getattr(config, name) is None
    for use in (config.require_complete, lambda: DFlashDraftModel(config)):
        with pytest.raises(ValueError, match=f"config has no `{name}`"):
            use()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"block_size": 1}, "`block_size` must be at least 2.*got 1"),
        ({"block_size": 0}, "`block_size`"),
        ({"target_layer_ids": []}, "`target_layer_ids`"),
        ({"target_layer_ids": [1, -1]}, r"`target_layer_ids`.*\[1, -1\]"),
        ({"target_layer_ids": [1, 6]}, "Tap layer 6 lies beyond the target's 6 layers"),
        ({"mask_token_id": 90}, "`mask_token_id` 90 lies outside `vocab_size` 90"),
        ({"mask_token_id": -1}, "`mask_token_id` -1"),
    ],
)
def test_a_value_out_of_range_fails_the_load(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**overrides).require_complete()


def test_the_ends_of_the_ranges_are_allowed() -> None:
    make(block_size=2, target_layer_ids=[0, 5], mask_token_id=89).require_complete()
    make(mask_token_id=0, num_target_layers=None, target_layer_ids=[600]).require_complete()


def test_the_bare_class_has_no_value_for_what_is_required() -> None:
    config = DFlashConfig()
    assert [getattr(config, name) for name in (*REQUIRED, "num_target_layers")] == [None] * 4


def test_a_published_config_is_read_without_a_warning(
    warnings_of_transformers: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    load(nested(), tmp_path)
    load(nested(()), tmp_path)
    load(flat(), tmp_path)
    assert warnings_of_transformers.messages == []
    assert [str(warning.message) for warning in recwarn] == []


def test_an_unknown_nested_entry_is_named_in_a_warning(
    warnings_of_transformers: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config_dict = nested()
    config_dict["dflash_config"] |= {"temper": 2, "colour": "red"}
    load(config_dict, tmp_path)
    (message,) = warnings_of_transformers.messages
    assert "['colour', 'temper']" in message


def test_flattening_leaves_its_input_and_other_models_configs_alone() -> None:
    config_dict = nested()
    before = copy.deepcopy(config_dict)
    result = flatten_config_dict(config_dict)
    assert config_dict == before
    assert "dflash_config" not in result and "auto_map" not in result
    target = Qwen3Config(**NETWORK | {"architectures": ["Qwen3ForCausalLM"]}).to_dict()
    assert flatten_config_dict(target) is target
    assert flatten_config_dict(flat()) == flat()


@pytest.mark.parametrize(
    ("config_dict", "expected"),
    [
        ({"model_type": "dflash_draft"}, True),
        ({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, True),
        ({"model_type": "qwen3", "dflash_config": {}}, True),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, False),
        ({"model_type": "qwen3", "architectures": None}, False),
        ({}, False),
    ],
)
def test_a_drafters_config_is_known_by_any_of_its_published_marks(config_dict: dict[str, Any], expected: bool) -> None:
    assert (drafter_format(config_dict) is not None) is expected


@pytest.mark.parametrize("form", [flat, nested])
def test_a_saved_config_loads_equal_under_its_own_name_and_by_autoconfig(form: Any, tmp_path: Path) -> None:
    config = load(form(), tmp_path)
    config.save_pretrained(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["model_type"] == "dflash_draft"
    assert {name: written[name] for name in REQUIRED} == REQUIRED
    assert "dflash_config" not in written and "auto_map" not in written
    for loaded in (DFlashConfig.from_pretrained(tmp_path / "saved"), AutoConfig.from_pretrained(tmp_path / "saved")):
        assert type(loaded) is DFlashConfig
        assert values(loaded) == values(config)
    assert values(DFlashConfig.from_dict(config.to_dict())) == values(config)


def test_keyword_arguments_of_from_pretrained_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(nested()))
    config = DFlashConfig.from_pretrained(tmp_path, block_size=8, rms_norm_eps=1e-3)
    assert (config.block_size, config.rms_norm_eps, config.mask_token_id) == (8, 1e-3, 88)


@pytest.mark.parametrize("switch", [{}, {"use_sliding_window": True}, {"use_sliding_window": False}])
def test_sliding_layers_keep_their_window_whatever_the_switch_says(switch: dict[str, bool], tmp_path: Path) -> None:
    layer_types = ["sliding_attention", "full_attention"]
    for form in (flat, nested):
        config = load(form(layer_types=layer_types, sliding_window=16, **switch), tmp_path)
        assert config.layer_types == layer_types
        assert config.sliding_window == 16
        config.save_pretrained(tmp_path / "saved")
        assert DFlashConfig.from_pretrained(tmp_path / "saved").sliding_window == 16


def test_a_window_without_sliding_layers_is_no_window(tmp_path: Path) -> None:
    config = load(nested(layer_types=["full_attention"] * 2, use_sliding_window=False, sliding_window=None), tmp_path)
    assert config.layer_types == ["full_attention"] * 2
    assert config.sliding_window is None


def test_the_layers_from_max_window_layers_on_slide_without_layer_types() -> None:
    config = make(use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert config.layer_types == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize("switch", [{}, {"use_sliding_window": True}, {"use_sliding_window": False}])
def test_sliding_layers_without_a_window_are_refused(switch: dict[str, bool], tmp_path: Path) -> None:
    overrides: dict[str, Any] = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None}
    with pytest.raises(ValueError, match="no `sliding_window`"):
        make(**overrides, **switch)
    with pytest.raises(ValueError, match="no `sliding_window`"):
        load(nested(**overrides, **switch), tmp_path)


def small_llama(**overrides: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 90,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 3e-5,
        "initializer_range": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": 0,
    }
    return LlamaConfig(**(sizes | overrides))


def test_a_fresh_config_takes_the_targets_widths_rope_and_special_tokens() -> None:
    target = small_llama()
    config = DFlashConfig.from_target(target, target_layer_ids=(1, 4), mask_token_id=88)
    config.require_complete()
    for name in (
        "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads max_position_embeddings "
        "rms_norm_eps initializer_range bos_token_id eos_token_id pad_token_id"
    ).split():
        assert getattr(config, name) == getattr(target, name), name
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert config.head_dim == 8
    assert (config.num_hidden_layers, config.block_size, config.num_target_layers) == (5, 16, 6)
    assert (config.target_layer_ids, config.mask_token_id) == ([1, 4], 88)
    assert config.layer_types == ["full_attention"] * 5
    assert config.tie_word_embeddings is False


def test_a_fresh_config_takes_a_targets_own_head_width() -> None:
    target = Qwen3Config(**NETWORK | {"head_dim": 24, "num_hidden_layers": 6})
    assert DFlashConfig.from_target(target, target_layer_ids=[1], mask_token_id=88).head_dim == 24


def test_a_fresh_config_takes_the_first_layers_widths_where_a_targets_layers_differ() -> None:
    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4}
    arguments: dict[str, Any] = {"target_layer_ids": [1], "mask_token_id": 88}
    target = Gemma3nTextConfig(**sizes, intermediate_size=[48, 48, 48, 96, 96, 96])
    assert DFlashConfig.from_target(target, **arguments).intermediate_size == 48
    target = Gemma4TextConfig(**sizes, head_dim=8, global_head_dim=16, num_key_value_heads=2)
    config = DFlashConfig.from_target(target, **arguments)
    assert (config.head_dim, config.num_key_value_heads) == (8, 2)


def test_a_fresh_config_for_a_target_without_attention_heads_takes_those_given() -> None:
    target = MambaConfig(vocab_size=90, hidden_size=32, num_hidden_layers=6)
    config = DFlashConfig.from_target(target, target_layer_ids=[1], mask_token_id=88, num_attention_heads=4)
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (32, 4, 8)


def test_any_field_of_a_fresh_config_can_be_overridden() -> None:
    config = DFlashConfig.from_target(
        small_llama(),
        target_layer_ids=[2],
        mask_token_id=5,
        block_size=8,
        num_hidden_layers=3,
        intermediate_size=64,
        head_dim=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=32,
    )
    assert (config.block_size, config.num_hidden_layers) == (8, 3)
    assert (config.intermediate_size, config.head_dim, config.sliding_window) == (64, 16, 32)


def test_a_fresh_config_for_a_multimodal_target_is_one_for_its_text_model() -> None:
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    target = LlavaConfig(text_config=small_llama(), vision_config=vision)
    arguments: dict[str, Any] = {"target_layer_ids": [1, 4], "mask_token_id": 88}
    config = DFlashConfig.from_target(target, **arguments)
    assert values(config) == values(DFlashConfig.from_target(small_llama(), **arguments))


def test_a_tap_beyond_the_target_of_a_fresh_config_is_refused() -> None:
    config = DFlashConfig.from_target(small_llama(), target_layer_ids=[1, 6], mask_token_id=88)
    with pytest.raises(ValueError, match="Tap layer 6 lies beyond the target's 6 layers"):
        DFlashDraftModel(config)


# Causality and windows


def test_sliding_layers_are_causal_unless_the_config_says_otherwise() -> None:
    kinds = ["sliding_attention", "full_attention"]
    for stated, expected in ((None, [True, False]), (True, [True, True]), (False, [False, False])):
        fields = {"num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 8, "causal": stated}
        config = DFlashConfig(**fields)
        assert [config.layer_is_causal(i) for i in range(2)] == expected


@pytest.mark.parametrize("place", ["is_causal", "causal"])
def test_published_names_of_causality_and_window_are_read(place: str) -> None:
    nested = {"mask_token_id": 1, "target_layer_ids": [0], "swa_window_size": 7}
    raw: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": nested}
    (raw if place == "is_causal" else nested)[place] = False
    flat = flatten_config_dict(raw)
    assert (flat["causal"], flat["sliding_window"]) == (False, 7)


def test_a_window_is_never_guessed_and_layer_kinds_are_known() -> None:
    with pytest.raises(ValueError, match="sliding_window"):
        DFlashConfig(num_hidden_layers=1, layer_types=["sliding_attention"])
    fields = {"target_layer_ids": [0], "mask_token_id": 1, "block_size": 4, "num_hidden_layers": 1}
    with pytest.raises(ValueError, match="chunked_attention"):
        DFlashConfig(**fields, layer_types=["chunked_attention"]).require_complete()


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_size", 16.0), ("block_size", "16"), ("mask_token_id", True), ("target_layer_ids", "12")],
)
def test_required_values_are_whole_numbers(name: str, value: Any) -> None:
    config = DFlashConfig(target_layer_ids=[0], mask_token_id=1, block_size=4)
    setattr(config, name, value)
    with pytest.raises(ValueError, match=f"`{name}`"):
        config.require_complete()
