"""The forms in which drafters are published: those of DFlash as `DFlashConfig`'s flat fields, others by their name."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

logger = logging.get_logger(__name__)

MODEL_TYPE = "dflash_draft"
REQUIRED = ("target_layer_ids", "mask_token_id", "block_size")
SLIDING = "sliding_attention"

#: Tensors that vLLM's trainer saves beside the drafter: frozen copies of the target's, and maps of a vocabulary.
COPIES_OF_TARGET = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "d2t")

_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_SAME_NAME = (*REQUIRED, *_SCALES, "num_target_layers", "causal", "use_swa", "draft_vocab_size", "target_hidden_size")
# Entries of z-lab's `dflash_config`, and their names at the top level.
_NESTED = {name: name for name in _SAME_NAME} | {"swa_window_size": "sliding_window"}

# What was only needed for training, or describes the target.
_WITHOUT_EFFECT = ("num_anchors", "max_anchors", "loss_decay_gamma", "backbone_rotary_base")

# Options of other engines' drafter networks, and the value of each that leaves our network right.
_UNSUPPORTED: dict[str, Any] = {
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "partial_rotary_factor": 1.0,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "fc_norm": False,
    "norm_before_fc": False,
    "use_aux_hidden_state": True,
    "sample_from_anchor": False,
}

# Drafters that are no DFlash, by a mark in their config's `speculators_model_type`, `model_type` or `architectures`.
_OTHER_KINDS = {
    "dflash2": "a DFlash 2 drafter (convolutions in its layers, and a selector that scores pairs of tokens)",
    "dspark": "a DSpark drafter (a Markov head makes each drafted token depend on the one before)",
    "peagle": "a P-EAGLE drafter",
    "eagle3": "an EAGLE-3 drafter (it drafts one token after the other)",
    "eagle": "an EAGLE drafter (it drafts one token after the other)",
    "medusa": "a set of Medusa heads",
    "mlpspeculator": "an MLP speculator",
    "mtp": "a head for multi-token prediction",
}
# The same by entries that only they have.
_OTHER_ENTRIES = {"selector_rank": "dflash2", "conv_kernel_size": "dflash2", "markov_rank": "dspark"}

# What a drafter's network needs of the decoder layer that a `speculators` config describes.
_NETWORK = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act max_position_embeddings initializer_range rms_norm_eps attention_bias attention_dropout layer_types "
    "sliding_window use_sliding_window max_window_layers bos_token_id eos_token_id pad_token_id"
).split()
_KEPT = ("dtype", "torch_dtype", "quantization_config", "target_hidden_size", "draft_vocab_size", "sample_from_anchor")


def drafter_format(config_dict: dict[str, Any]) -> str | None:
    """Which form of a DFlash drafter's config this is; `None` if it is none."""
    if config_dict.get("speculators_model_type") == "dflash":
        return "speculators"
    if "dflash_config" in config_dict:
        return "z-lab (`dflash_config`)"
    if config_dict.get("model_type") == MODEL_TYPE or _architecture(config_dict):
        return "flat"
    return None


def is_transformers_own(config: PreTrainedConfig | dict[str, Any]) -> bool:
    """Whether a config that is none of these forms, or its config.json, is that of a DFlash assistant."""
    entries = config if isinstance(config, dict) else {name: getattr(config, name, None) for name in REQUIRED}
    return all(entries.get(name) is not None for name in REQUIRED)


def other_kind(config_dict: dict[str, Any]) -> str | None:
    """What a drafter's config.json describes if it is no DFlash drafter that can be loaded."""
    names = [config_dict.get("speculators_model_type"), config_dict.get("model_type")]
    names += config_dict.get("architectures") or ()
    marks = " ".join(map(str, names)).lower().replace("-", "").replace("_", "")
    for mark, kind in _OTHER_KINDS.items():
        if mark in marks:
            return kind
    entries = config_dict | _nested(config_dict)
    for name, mark in _OTHER_ENTRIES.items():
        if entries.get(name):
            return _OTHER_KINDS[mark]
    if (speculator := config_dict.get("speculators_model_type")) not in (None, "dflash"):
        return f"a speculator of the kind {speculator!r}"
    if "eagle_config" in config_dict:
        return _OTHER_KINDS["eagle3"]
    if drafter_format(config_dict) is None and is_transformers_own(config_dict):
        return "one of transformers' own DFlash assistants (load it with `AutoModel.from_pretrained`)"
    return None


def flatten_config_dict(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Any published form as the flat one; a flat form, and the config of no drafter, are returned as they are.

    Raises:
        ValueError: One value stands in two places and differs, or something is asked for that our network lacks.
    """
    form = drafter_format(config_dict)
    if form is None:
        return config_dict
    if (kind := other_kind(config_dict)) is not None:
        raise ValueError(f"This is {kind}, which hf_ddtree cannot run: it needs a DFlash drafter.")
    nested = _nested(config_dict)
    flat = _from_speculators(config_dict) if form == "speculators" else dict(config_dict)
    for name in ("dflash_config", "auto_map"):
        flat.pop(name, None)
    flat["model_type"] = MODEL_TYPE
    _rename(flat, "is_causal", "causal")
    _rename(flat, "logit_scale", "output_multiplier")
    for entry, name in _NESTED.items():
        if entry not in nested:
            continue
        if flat.get(name) is not None and flat[name] != nested[entry]:
            raise ValueError(
                f"`{name}` is {flat[name]} at the top of the config and {nested[entry]} in `dflash_config`."
            )
        flat[name] = nested[entry]
    _check_supported(flat | {name: nested[name] for name in _UNSUPPORTED if name in nested})
    if unknown := sorted(set(nested) - set(_NESTED) - set(_UNSUPPORTED) - set(_WITHOUT_EFFECT)):
        logger.warning(f"Unknown entries of the drafter's `dflash_config` are not used: {unknown}")
    if flat.pop("use_swa", None):
        _slide_everywhere(flat)
    for name in _SCALES:
        if flat.get(name) == 0 and name == "final_logit_softcapping":
            flat[name] = None  # as engines write "no cap"
    return flat


def _architecture(config_dict: dict[str, Any]) -> bool:
    return "DFlashDraftModel" in (config_dict.get("architectures") or ())


def _nested(config_dict: dict[str, Any]) -> dict[str, Any]:
    nested = config_dict.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"The drafter's `dflash_config` is no dictionary: {nested!r}.")
    return nested


def _rename(flat: dict[str, Any], old: str, new: str) -> None:
    if (value := flat.pop(old, None)) is None:
        return
    if flat.get(new) is not None and flat[new] != value:
        raise ValueError(f"`{old}` is {value} and `{new}` is {flat[new]}: they mean the same.")
    flat[new] = value


def _check_supported(options: dict[str, Any]) -> None:
    """Raise on what our network would leave out: such a drafter would load, and draft badly without any other sign."""
    rope = options.get("rope_parameters") or options.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) == "proportional":  # which means something else by it
        options = {name: value for name, value in options.items() if name != "partial_rotary_factor"}
    elif "partial_rotary_factor" in rope:
        options = options | {"partial_rotary_factor": rope["partial_rotary_factor"]}
    for name, harmless in _UNSUPPORTED.items():
        if (value := options.get(name)) is not None and value != harmless:
            raise ValueError(f"`{name}` is {value!r}, which hf_ddtree's drafter network does not know.")
    for name, other in (("target_hidden_size", "hidden_size"), ("v_head_dim", "head_dim")):
        value, expected = options.get(name), options.get(other)
        if value is not None and expected is not None and value != expected:
            raise ValueError(f"`{name}` is {value} and `{other}` {expected}: the drafter network has one width.")


def _slide_everywhere(flat: dict[str, Any]) -> None:
    """`use_swa`, as vLLM reads it: all layers slide unless `layer_types` names those that do, and none is causal."""
    if SLIDING in (flat.get("layer_types") or ()):
        return
    if flat.get("num_hidden_layers") is None:
        raise ValueError("`use_swa` makes all layers sliding ones, but the config has no `num_hidden_layers`.")
    flat["layer_types"] = [SLIDING] * flat["num_hidden_layers"]
    if flat.get("causal") is None:
        flat["causal"] = False


def _from_speculators(config_dict: dict[str, Any]) -> dict[str, Any]:
    """The `speculators` form of vLLM's trainer: the decoder layer in `transformer_layer_config`, the rest on top.

    Its layer ids count hidden states, the embedding's first, and its embedding is the bare table.
    """
    given = dict(config_dict.get("transformer_layer_config") or {})
    kind = given.pop("model_type", "qwen3")
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"The drafter's `transformer_layer_config` is of the unknown model type {kind!r}.")
    # Only what differs from that type's defaults was saved.
    layer: PreTrainedConfig = CONFIG_MAPPING[kind](**given)
    flat = {name: getattr(layer, name) for name in _NETWORK if getattr(layer, name, None) is not None}
    flat |= {name: given[name] for name in _NETWORK if given.get(name) is not None}
    flat |= {name: config_dict[name] for name in _NETWORK if config_dict.get(name) is not None}
    rope = layer.rope_parameters or {}
    flat["rope_parameters"] = rope.get(SLIDING, rope)  # one rope for all layers, where each kind has its own
    flat |= {name: config_dict[name] for name in _KEPT if name in config_dict}
    flat["mask_token_id"], flat["block_size"] = config_dict.get("mask_token_id"), config_dict.get("block_size")
    taps = config_dict.get("aux_hidden_state_layer_ids")
    if taps is not None:
        if min(taps, default=1) < 1:
            raise ValueError(f"`aux_hidden_state_layer_ids` are {taps}, and the first layer's output is 1.")
        taps = [tap - 1 for tap in taps]
    flat["target_layer_ids"] = taps
    flat["input_embedding_scale"] = 1.0
    if config_dict.get("sliding_window_non_causal"):
        flat["causal"] = False
    if flat.get("draft_vocab_size") == flat.get("vocab_size"):
        flat.pop("draft_vocab_size", None)
    return flat
