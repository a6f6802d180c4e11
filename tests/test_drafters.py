"""Drafters of every published family: what loads drafts, the text is the target's own, and the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import save_file
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    PreTrainedModel,
    __version__,
)

from hf_ddtree import DDTreeCandidateGenerator, DDTreeConfig, DFlashConfig, DFlashDraftModel
from hf_ddtree.drafter_families import draft_logits, embed_tokens
from hf_ddtree.drafter_formats import flatten_config_dict
from scripted import SIZES, VOCAB, prompt_ids, tiny_drafter, tiny_target
from test_candidate_generator import Rounds, fit

LAYERS = 8
REQUIRED: dict[str, Any] = {"target_layer_ids": [0, 2], "mask_token_id": 3, "block_size": 8}


@pytest.fixture(scope="module")
def deep_target() -> PreTrainedModel:
    return tiny_target("qwen3", num_hidden_layers=LAYERS)


def zlab(drafter: DFlashDraftModel, **overrides: Any) -> dict[str, Any]:
    """A drafter's config as z-lab writes it."""
    fields = {name: value for name, value in drafter.config.to_dict().items() if value is not None}
    nested = {name: fields.pop(name) for name in ("target_layer_ids", "mask_token_id")}
    for name in ("rope_parameters", "transformers_version", "dtype"):
        fields.pop(name, None)
    rope: dict[str, Any] = dict(drafter.config.rope_parameters or {})
    theta = rope.pop("rope_theta")
    fields |= {"rope_theta": theta, "rope_scaling": rope if rope["rope_type"] != "default" else None}
    top = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "auto_map": {"AutoModel": "dflash.X"}}
    return fields | top | {"dflash_config": nested} | overrides


def newer_zlab(drafter: DFlashDraftModel) -> dict[str, Any]:
    """The same with the block size beside the taps, and the newer name of the rope."""
    fields = zlab(drafter)
    fields["dflash_config"]["block_size"] = fields.pop("block_size")
    del fields["rope_theta"], fields["rope_scaling"]
    return fields | {"rope_parameters": drafter.config.rope_parameters}


def flat(drafter: DFlashDraftModel) -> dict[str, Any]:
    return drafter.config.to_dict()


def speculators(drafter: DFlashDraftModel, **overrides: Any) -> dict[str, Any]:
    """The same as vLLM's trainer writes it."""
    layer = {name: value for name, value in drafter.config.to_diff_dict().items() if name not in REQUIRED}
    for name in ("architectures", "num_target_layers", "transformers_version"):
        layer.pop(name, None)
    assert drafter.config.target_layer_ids is not None
    fields = {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in drafter.config.target_layer_ids],
        "block_size": drafter.config.block_size,
        "draft_vocab_size": drafter.config.vocab_size,
        "mask_token_id": drafter.config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "someone/target"}},
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer | {"model_type": "qwen3"},
    }
    return fields | overrides


FORMS = {"z-lab": zlab, "newer z-lab": newer_zlab, "flat": flat, "speculators": speculators}


def save(
    folder: Path, config_dict: dict[str, Any], drafter: DFlashDraftModel, **more: torch.Tensor
) -> DFlashDraftModel:
    """Write a checkpoint and load it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_dict))
    save_file(drafter.state_dict() | more, folder / "model.safetensors", metadata={"format": "pt"})
    loaded: DFlashDraftModel = DFlashDraftModel.from_pretrained(folder)
    return loaded


def spread(taps: int) -> list[int]:
    """Layers to tap, the first and the last among them."""
    return [0] if taps == 1 else [round(i * (LAYERS - 1) / (taps - 1)) for i in range(taps)]


def assert_same_text(model: PreTrainedModel, drafter: Any, new: int = 20, **options: Any) -> Any:
    ids = prompt_ids(9)
    plain = model.generate(ids, max_new_tokens=new, do_sample=False)
    out = model.generate(
        ids, max_new_tokens=new, do_sample=False, assistant_model=drafter, return_dict_in_generate=True,
        ddtree={"budget": 15} | options,
    )  # fmt: skip
    assert out.sequences.tolist() == plain.tolist()
    assert sum(out.ddtree_stats.node_counts) > 0
    return out.ddtree_stats


# -- every form ------------------------------------------------------------------------------------------------------

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "one tap, block 4": {"taps": 1, "block_size": 4},
    "two taps, block 7": {"taps": 2, "block_size": 7},
    "five taps, block 16, mixed layers": {
        "taps": 5,
        "block_size": 16,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 12,
    },
    "eight taps, block 32": {"taps": 8, "block_size": 32},
    "three taps, block 10, YaRN": {"taps": 3, "block_size": 10, "rope_parameters": YARN | {"rope_theta": 1e4}},
    "four taps, block 16, all sliding": {
        "taps": 4,
        "block_size": 16,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 6,
    },
    "six taps, block 12, wide heads": {"taps": 6, "block_size": 12, "head_dim": 32, "num_attention_heads": 2},
    "seven taps, block 8, biases": {"taps": 7, "block_size": 8, "attention_bias": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_drafter_of_each_form_and_shape_loads_as_itself_and_the_text_is_the_targets(
    shape: str, form: str, deep_target: PreTrainedModel, tmp_path: Path, warnings_of_transformers: Any
) -> None:
    fields = {"mask_token_id": 3, "num_hidden_layers": 2} | SHAPES[shape]
    taps = spread(fields.pop("taps"))
    torch.manual_seed(3)
    config = DFlashConfig.from_target(deep_target.config, target_layer_ids=taps, **fields)
    drafter = DFlashDraftModel(config).eval()
    loaded = save(tmp_path, FORMS[form](drafter), drafter)
    assert warnings_of_transformers.messages == []
    for name in ("target_layer_ids", "mask_token_id", "block_size", "layer_types", "sliding_window", "head_dim"):
        assert getattr(loaded.config, name) == getattr(drafter.config, name), name
    assert loaded.config.rope_parameters == drafter.config.rope_parameters
    noise = torch.randn(1, drafter.config.block_size, 48)
    context = torch.randn(1, 30, 48 * len(taps))
    with torch.no_grad():
        expected = drafter(noise, context).last_hidden_state
        assert torch.equal(loaded(noise, context).last_hidden_state, expected)
    assert_same_text(deep_target, loaded)


# -- vLLM's trainer --------------------------------------------------------------------------------------------------


def table(target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The copies of the target's weights that the trainer saves too."""
    rows = target.get_input_embeddings().weight.detach().clone()
    return {"embed_tokens.weight": rows, "lm_head.weight": target.lm_head.weight.detach().clone()}


def test_hidden_states_are_counted_with_the_embeddings_output_as_0(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = tiny_drafter(target)
    config_dict = speculators(drafter)
    assert config_dict["aux_hidden_state_layer_ids"] == [1, 3]
    loaded = save(tmp_path, config_dict, drafter, **table(target))
    assert loaded.config.target_layer_ids == [0, 2]
    with pytest.raises(ValueError, match=r"`aux_hidden_state_layer_ids` are \[0, 3\]"):
        save(tmp_path, config_dict | {"aux_hidden_state_layer_ids": [0, 3]}, drafter)


def test_the_copies_of_the_targets_weights_are_left_out(
    target: PreTrainedModel, tmp_path: Path, warnings_of_transformers: Any
) -> None:
    drafter = tiny_drafter(target)
    full = {"t2d": torch.ones(VOCAB, dtype=torch.bool), "d2t": torch.zeros(VOCAB, dtype=torch.long)}
    loaded = save(tmp_path, speculators(drafter), drafter, **table(target), **full)
    assert warnings_of_transformers.messages == []
    assert sorted(loaded.state_dict()) == sorted(drafter.state_dict())
    assert loaded.t2d is None
    loaded.save_pretrained(tmp_path / "saved")
    again = DFlashDraftModel.from_pretrained(tmp_path / "saved")
    assert again.config.target_layer_ids == [0, 2]
    with pytest.raises(ValueError, match=r"unexpected: lm_head\.weight"):
        save(tmp_path / "flat", flat(drafter), drafter, **{"lm_head.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"unexpected: markov_head\.weight"):
        save(tmp_path, speculators(drafter), drafter, **{"markov_head.weight": torch.zeros(2)})


def test_a_reduced_vocabulary_is_all_that_is_drafted(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = tiny_drafter(target)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[::3] = True
    drafted = int(t2d.sum())
    d2t = t2d.nonzero().flatten() - torch.arange(drafted)
    weights = table(target) | {"t2d": t2d, "d2t": d2t}
    weights["lm_head.weight"] = weights["lm_head.weight"][t2d]
    config_dict = speculators(drafter, draft_vocab_size=drafted)
    loaded = save(tmp_path, config_dict, drafter, **weights)
    hidden = torch.randn(1, 3, 48)
    restricted = hidden @ weights["lm_head.weight"].T
    source = DDTreeCandidateGenerator(target, loaded, DDTreeConfig(budget=40), max_length=100)
    source.append(torch.randn(1, 5, 96), torch.arange(5)[None])
    token_ids, log_probs, _ = source.propose(torch.tensor([[7]]), torch.tensor([[5]]), depth=7, candidates=40)
    assert (token_ids % 3 == 0).all() and log_probs.isfinite().all()
    with torch.no_grad():
        logits = draft_logits(target, hidden, loaded)
    torch.testing.assert_close(logits[..., t2d], restricted)
    assert (logits[..., ~t2d] == float("-inf")).all()
    assert_same_text(target, loaded)
    loaded.save_pretrained(tmp_path / "saved")
    assert torch.equal(DFlashDraftModel.from_pretrained(tmp_path / "saved").t2d, t2d)
    with pytest.raises(ValueError, match=rf"`t2d` .* names {drafted} tokens, and `draft_vocab_size` is 50"):
        save(tmp_path, config_dict | {"draft_vocab_size": 50}, drafter, **weights)
    with pytest.raises(ValueError, match="missing: t2d"):
        save(tmp_path, config_dict, drafter, **{name: w for name, w in weights.items() if name != "t2d"})


@pytest.mark.usefixtures("stepped")
def test_captured_rounds_draft_the_same(target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = tiny_drafter(target)
    t2d = torch.arange(VOCAB) % 3 == 0
    scales = {"input_embedding_scale": 3.0, "output_multiplier": 0.25, "final_logit_softcapping": 2}
    config_dict = flat(drafter) | scales | {"draft_vocab_size": int(t2d.sum())}
    loaded = save(tmp_path, config_dict, drafter, t2d=t2d)
    trees = []
    for execution in ("auto", "plain"):
        stats = assert_same_text(target, loaded, execution=execution, record_trees=True)
        assert (stats.launch.value == "operations") == (execution == "plain")
        trees.append([round.tree.token_ids.tolist() for round in stats.trees])
    for captured, plain in zip(*trees, strict=True):
        assert captured == plain or not plain[0]  # the last rounds of plain ones have no room for a tree


def test_what_the_trainer_leaves_to_the_layers_defaults_is_read_from_there(target: PreTrainedModel) -> None:
    config_dict = speculators(tiny_drafter(target))
    layer = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 4, "vocab_size": VOCAB}
    config = DFlashConfig(**flatten_config_dict(config_dict | {"transformer_layer_config": layer}))
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (12, 4, 1e-6)
    assert config.rope_parameters["rope_theta"] == 10000.0
    with pytest.raises(ValueError, match="unknown model type 'nothing'"):
        flatten_config_dict(config_dict | {"transformer_layer_config": layer | {"model_type": "nothing"}})


def test_its_sliding_layers_are_causal_unless_it_says_otherwise(target: PreTrainedModel) -> None:
    kinds = ["sliding_attention", "full_attention"]
    config_dict = speculators(tiny_drafter(target, layer_types=kinds, sliding_window=9))
    for non_causal, expected in ((False, [True, False]), (True, [False, False])):
        flattened = flatten_config_dict(config_dict | {"sliding_window_non_causal": non_causal})
        config = DFlashConfig(**flattened)
        assert (config.layer_types, config.sliding_window) == (kinds, 9)
        assert [config.layer_is_causal(i) for i in range(2)] == expected
    # Its later versions write these beside the layer.
    layer = {name: v for name, v in config_dict["transformer_layer_config"].items() if "slid" not in name}
    del layer["layer_types"]
    moved = config_dict | {"transformer_layer_config": layer, "layer_types": kinds, "sliding_window": 9}
    assert flatten_config_dict(moved)["layer_types"] == kinds


def test_its_embedding_is_the_bare_table(tmp_path: Path) -> None:
    class Scaled(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 7.0

    model = tiny_target("llama")
    model.set_input_embeddings(Scaled(VOCAB, 48))
    drafter = tiny_drafter(model)
    ids = prompt_ids(4)
    rows = model.get_input_embeddings().weight[ids]
    assert torch.equal(embed_tokens(model, ids, drafter), rows * 7)
    assert torch.equal(embed_tokens(model, ids, save(tmp_path, speculators(drafter), drafter)), rows)


# -- options of published configs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["top", "nested"])
def test_scales_of_the_drafter_are_honoured(place: str, target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = tiny_drafter(target)
    scales = {"input_embedding_scale": 3.0, "output_multiplier": 0.25, "final_logit_softcapping": 2}
    config_dict = zlab(drafter)
    (config_dict if place == "top" else config_dict["dflash_config"]).update(scales)
    loaded = save(tmp_path, config_dict, drafter)
    ids, hidden = prompt_ids(4), torch.randn(1, 3, 48)
    assert torch.equal(embed_tokens(target, ids, loaded), target.get_input_embeddings().weight[ids] * 3)
    with torch.no_grad():
        plain = draft_logits(target, hidden, drafter)
        torch.testing.assert_close(draft_logits(target, hidden, loaded), torch.tanh(plain * 0.25 / 2) * 2)
    for name in scales:
        with pytest.raises(ValueError, match=f"`{name}`"):
            save(tmp_path, config_dict | {"dflash_config": config_dict["dflash_config"] | {name: -1.0}}, drafter)


def test_a_cap_of_0_is_no_cap_and_a_logit_scale_is_a_multiplier(target: PreTrainedModel) -> None:
    config_dict = zlab(tiny_drafter(target), logit_scale=0.5, final_logit_softcapping=0)
    config = DFlashConfig(**flatten_config_dict(config_dict))
    assert (config.output_multiplier, config.final_logit_softcapping) == (0.5, None)
    with pytest.raises(ValueError, match=r"`logit_scale` is 0\.5 and `output_multiplier` is 2"):
        flatten_config_dict(config_dict | {"output_multiplier": 2})


@pytest.mark.parametrize("kinds", [None, ["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_use_swa_makes_all_layers_slide_unless_some_are_named(kinds: Any, target: PreTrainedModel) -> None:
    config_dict = zlab(tiny_drafter(target), layer_types=kinds)
    config_dict["dflash_config"] |= {"use_swa": True, "swa_window_size": 5}
    config = DFlashConfig(**flatten_config_dict(config_dict))
    named = kinds is not None and "sliding_attention" in kinds
    assert config.layer_types == (kinds if named else ["sliding_attention"] * 2)
    assert [config.layer_is_causal(i) for i in range(2)] == [named, False]
    assert config.sliding_window == 5
    config_dict["dflash_config"] |= {"causal": True, "use_swa": False}
    config = DFlashConfig(**flatten_config_dict(config_dict))
    assert config.layer_types == (kinds or ["full_attention"] * 2) and config.causal is True


def test_use_swa_without_a_window_is_refused(target: PreTrainedModel) -> None:
    config_dict = zlab(tiny_drafter(target))
    config_dict["dflash_config"]["use_swa"] = True
    with pytest.raises(ValueError, match="no `sliding_window`"):
        DFlashConfig(**flatten_config_dict(config_dict))


REFUSED: dict[str, Any] = {
    "attention_sink_bias": True,
    "add_swa_attention_sink_bias": True,
    "attention_value_scale": 0.612,
    "partial_rotary_factor": 0.5,
    "is_neox_style": False,
    "rope_is_neox_style": False,
    "fc_norm": True,
    "use_aux_hidden_state": False,
    "sample_from_anchor": True,
    "target_hidden_size": 96,
    "v_head_dim": 24,
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, form) for name in REFUSED for form in ("z-lab", "flat")),
        *((name, "speculators") for name in ("sample_from_anchor", "target_hidden_size")),
    ],
)
def test_what_the_network_lacks_is_refused_by_name(
    name: str, form: str, target: PreTrainedModel, tmp_path: Path
) -> None:
    drafter = tiny_drafter(target)
    config_dict = FORMS[form](drafter)
    places = [config_dict, config_dict["dflash_config"]] if form == "z-lab" and name != "v_head_dim" else [config_dict]
    for place in places:
        place[name] = REFUSED[name]
        with pytest.raises(ValueError, match=f"`{name}` is {REFUSED[name]}"):
            save(tmp_path, config_dict, drafter)
        place.pop(name)
    save(tmp_path, config_dict, drafter)


MIMO: dict[str, Any] = {
    "dflash_config": {"attention_sink_bias": True, "use_swa": True, "swa_window_size": 1024},
    "partial_rotary_factor": 0.5,
    "v_head_dim": 12,
}


def test_mimos_drafter_is_refused(target: PreTrainedModel) -> None:
    config_dict = zlab(tiny_drafter(target))
    config_dict |= MIMO | {"dflash_config": config_dict["dflash_config"] | MIMO["dflash_config"]}
    with pytest.raises(ValueError, match="`attention_sink_bias` is True"):
        flatten_config_dict(config_dict)


def test_entries_that_only_training_needs_are_read_silently(
    target: PreTrainedModel, warnings_of_transformers: Any
) -> None:
    config_dict = zlab(tiny_drafter(target))
    config_dict["dflash_config"] |= {"num_anchors": 512, "loss_decay_gamma": 7.0, "attention_sink_bias": False}
    flatten_config_dict(config_dict)
    assert warnings_of_transformers.messages == []


# -- what is no DFlash ----------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "EAGLE-3 of speculators": ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "EAGLE-3"),
    "EAGLE-3": ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "EAGLE-3"),
    "P-EAGLE": ({"speculators_model_type": "peagle"}, "P-EAGLE"),
    "a newer one": ({"speculators_model_type": "dflare"}, "of the kind 'dflare'"),
    "DSpark": ({"speculators_model_type": "dspark"}, "DSpark"),
    "MTP": ({"speculators_model_type": "mtp"}, "multi-token"),
    "Medusa": ({"model_type": "medusa"}, "Medusa"),
    "MLP": ({"model_type": "mlp_speculator"}, "MLP speculator"),
    "Muse Glimmer's": ({"model_type": "muse_glimmer_assistant", **REQUIRED}, "AutoModel.from_pretrained"),
    "DFlash 2": (
        {"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "dflash_config": REQUIRED},
        "DFlash 2",
    ),
    "DFlash 2 by another name": (
        {"architectures": ["DFlashDraftModel"], "dflash_config": REQUIRED | {"selector_rank": 256}},
        "DFlash 2",
    ),
    "DSpark by another name": ({"architectures": ["DFlashDraftModel"], "markov_rank": 64}, "DSpark"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_of_drafter_is_refused_as_what_it_is(name: str, tmp_path: Path) -> None:
    config_dict, kind = OTHERS[name]
    (tmp_path / "config.json").write_text(json.dumps(config_dict))
    with pytest.raises(ValueError, match=kind):
        DFlashDraftModel.from_pretrained(tmp_path)


# -- transformers' own ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def muse() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny Muse Glimmer, and transformers' own DFlash assistant for it, fitted a little."""
    sizes = {name: value for name, value in SIZES.items() if name != "num_hidden_layers"}
    sizes |= {"head_dim": 12, "vocab_size": 8, "initializer_range": 0.1}
    text = sizes | {"num_hidden_layers": 4, "sliding_window": 24, "output_multiplier": 0.3}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = MuseGlimmerForConditionalGeneration(
        MuseGlimmerConfig(text_config=text, vision_config=vision, out_hidden_size=16)
    ).eval()
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight *= 0.3
    del sizes["vocab_size"]
    config = MuseGlimmerAssistantConfig(**sizes | {"num_hidden_layers": 2, "sliding_window": 9} | REQUIRED)
    torch.manual_seed(1)
    drafter = MuseGlimmerAssistantModel(config).eval()
    fit(drafter, model)
    return model, drafter


@pytest.mark.parametrize("layers", ["sliding", "full"])
def test_transformers_own_assistant_accepts_what_it_does_natively(
    layers: str, muse: tuple[PreTrainedModel, PreTrainedModel]
) -> None:
    model, drafter = muse
    longest = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter.config, "layer_types", [f"{layers}_attention"] * 2)
        for part in drafter.layers:
            patch.setattr(part.self_attn, "is_sliding", layers == "sliding")
        for length, new in ((2, 40), (6, 60), (30, 50)):
            ids = prompt_ids(length, vocab=8, seed=length)
            options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
            plain = model.generate(ids, **options)
            rounds = Rounds()
            options["assistant_model"] = drafter
            native = model.generate(ids, speculation_type="dflash", streamer=rounds, **options)
            options["return_dict_in_generate"] = True
            chain = model.generate(ids, ddtree={"tree": "chain", "budget": 7}, **options)
            tree = model.generate(ids, ddtree={"budget": 31}, **options)
            assert plain.tolist() == native.tolist() == chain.sequences.tolist() == tree.sequences.tolist()
            if Version(__version__) >= Version("5.23"):  # native DFlash taps other layers before
                assert rounds.puts[2:] == chain.ddtree_stats.acceptance_lengths
            assert tree.ddtree_stats.mean_acceptance_length >= chain.ddtree_stats.mean_acceptance_length
            longest = max(longest, *chain.ddtree_stats.acceptance_lengths)
    assert longest > 3


def test_draft_logits_are_those_of_a_target_that_scales_before_its_cap(
    muse: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    model, drafter = muse
    with torch.no_grad():
        out = model(prompt_ids(5, vocab=8), output_hidden_states=True)
        torch.testing.assert_close(draft_logits(model, out.hidden_states[-1], drafter), out.logits)
