"""Every causal LM of the installed transformers, tiny and random: trees against plain decoding.

    python tests/all_targets.py [--only llama gemma3_text ...] [--write]

A config of each class is cut down by rules over the names of its attributes. A class is *equal* where trees give plain
decoding's ids, greedy and sampled; *refused* where the library raises before the target's first forward; *plain fails*
where transformers' own decoding does not run; *broken* otherwise. `--write` makes `docs/targets.md` from a whole run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_ddtree
from hf_ddtree import DDTreeConfig
from scripted import VOCAB, prompt_ids, scripted, show_all, tiny_drafter

LIST = Path(__file__).parents[1] / "docs" / "targets.md"
EQUAL, REFUSED, PLAIN_FAILS, BROKEN = RESULTS = ("equal", "refused", "plain fails", "broken")
TEXT, RECURRENT, ENCODER, OTHER = KINDS = ("text", "recurrent", "encoder", "other inputs")

LAYERS, HIDDEN, HEADS, HEAD_DIM, WINDOW = 4, 64, 4, 16, 8
PROMPT, NEW = 30, 40
MOST_PARAMETERS = 30_000_000
SECONDS = 60  # a model

# The first pattern that fits an attribute's whole name (transformers' usual one) gives its value; numbers only, and
# never more than the default.
RULES = [
    (r".*vocab(_size.*)?|n_token|n_words", VOCAB),
    (r"num_hidden_layers|num_layers|n_layers?|num_(encoder|decoder)_layers|(encoder|decoder)_layers|depth", LAYERS),
    (r"index_n_heads", 16),  # of few heads, many scores are zero alike
    (r"(swa_)?num_key_value_heads|num_kv_heads|num_query_groups", HEADS // 2),
    (r".*(num|n)_.*heads|num_heads|n_heads?|(encoder|decoder)_attention_heads", HEADS),
    (r"qk_rope_head_dim|rotary_dim", HEAD_DIM // 2),
    (r"qk_head_dim", HEAD_DIM + HEAD_DIM // 2),
    (r".*head_dim|d_head|dim_head|d_kv|kv_channels|.*head_size", HEAD_DIM),
    (r"(num|n)_.*experts|num_experts|moe_num_experts", 8),
    (r".*experts_per_tok|.*top_?k_experts|n_groups?|.*topk_blocks", 2),
    (r"topk_group|first_k_dense_replace|moe_layer_start_index", 1),
    (r"keep_window_size", 2048),  # chosen among equal scores, where rounding decides
    (r"index_topk|.*window.*|attention_chunk_size|local_attention|.*chunk_length", WINDOW),
    (r"index_block_size", 4),
    (r"floor_scale|log_scaling_n_floor", 64),
    (r".*rank.*", HEAD_DIM),
    (r"num_kv_shared_layers", LAYERS // 2),
    (r".*(intermediate|ffn|feed_forward|inner).*|dff|dim_ff", HIDDEN + HIDDEN // 2),
    (r"adapter_.*(dim|size)", HIDDEN),
    (r".*hidden_size_per_layer.*", HEAD_DIM),
    (r".*(hidden_size|embed_dim|embedding_size|embed_proj_dim|embedding_dim|d_model|_width|state_size)", HIDDEN),
]
# What else a class needs to be built small at all.
MIXED = ["sliding_attention", "full_attention"] * 2
ROPES = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in MIXED}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"num_hidden_layers": 4, "layer_types": MIXED, "rope_parameters": ROPES},
    "dbrx": {"attn_config": {"kv_n_heads": HEADS // 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "layer_types": MIXED},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        "num_hidden_layers": 4,
        "num_key_value_heads": HEADS,
        "num_attention_heads": HEADS,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "per_layer_config": {i: {"head_dim": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 4} for i in (1, 3)},
    },
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_hidden_layers": 2},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": HEAD_DIM, "expand": 2, "hidden_size": HIDDEN},
    "ministral": {"head_dim": HEAD_DIM},
    "mpt": {"use_cache": True},
    "nemotron": {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS // 2},
    "qwen4_exp_text": {
        "head_dim": HEAD_DIM,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": WINDOW,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS},
    "zamba2": {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 2 * HIDDEN // HEADS},
}


class Target(NamedTuple):
    """One line of the list."""

    family: str
    name: str
    kind: str
    result: str
    reason: str = ""


HEAD = """# Targets

What `ddtree=True` gives with each causal language model that transformers {version} names, tiny and with random
weights: `python tests/all_targets.py --write` builds them all by rules, decodes plainly and with trees, and writes
this page. `tests/test_all_targets.py` fails for a class that is not here.

- *equal*: with trees the ids are those of plain decoding, greedy and sampled.
- *refused*: an error of this library, before the target runs; the reason is its message. What a target can do
  decides, not its name.
- *plain fails*: transformers' own `generate` does not run with what the rules make of the default config.
- *broken*: anything else.

Kinds, by what config and class say of themselves: *text*, a decoder that takes text; *recurrent*, a decoder with
layers that keep a state; *encoder*, a model that sees later tokens as it is, or half of an encoder-decoder; *other
inputs*, a model whose forward takes images or sound as well. Only its text is compared here; `tests/test_images.py`
compares prompts with images for some families.

A target may be compiled, whole or in part: `model.compile()`, or `torch.compile` of a forward, a module, a layer or
the forward of a class. Trees run what lies beneath, and the compiled form stays as it is, with its graphs, for calls
without trees; those of other threads run uncompiled while one with trees is on. On GPUs rounds are captured as without
compilation, but launched where `torch.compile` put a module of its own in a place or compiled a class's forward. A
class given to `torch.compile`, and a compiled forward inside another function, are refused.

Of {text} text targets {equal} are equal.

| kind | equal | refused | plain fails | broken |
| --- | ---: | ---: | ---: | ---: |
"""


def classes() -> dict[str, str]:
    """Each family (model type) of the installed version and its class."""
    return {family: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] for family in config_classes()}


def config_classes() -> dict[str, type[PreTrainedConfig]]:
    found = {config_class.model_type: config_class for config_class in MODEL_FOR_CAUSAL_LM_MAPPING}
    return dict(sorted(found.items()))


def tiny_config(config_class: type[PreTrainedConfig], **overrides: Any) -> PreTrainedConfig:
    """The default config of a class, small; kinds of layers stay mixed."""
    family = config_class.model_type
    return config_class(**shrunk(config_class(**OVERRIDES.get(family, {})), OVERRIDES.get(family, {}) | overrides))


def shrunk(config: PreTrainedConfig, given: dict[str, Any]) -> dict[str, Any]:
    """What makes a config small, as arguments of its class."""
    usual = {own: name for name, own in type(config).attribute_map.items()}
    values = config.to_dict()
    by_name = {usual.get(own, own): value for own, value in values.items()}
    small: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    for own, value in values.items():
        name = usual.get(own, own)
        if own in type(config).sub_configs:
            if (part := getattr(config, own)) is not None:
                needed = OVERRIDES.get(part.model_type, {})
                small[own] = shrunk(type(part)(**needed), needed) if needed else shrunk(part, {})
        elif name in ("bos_token_id", "pad_token_id", "eos_token_id"):
            small[own] = {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": None}[name]
        elif name in ("initializer_range", "init_std"):
            small[own] = 0.3
        elif name == "rope_parameters" and value:
            small[own] = small_rope(value)
        elif name == "per_layer_config":
            lists[own] = [value.get(f"{i:02}", {}) for i in range(by_name["num_hidden_layers"])]
        elif isinstance(value, list) and len(value) == by_name.get("num_hidden_layers"):
            lists[own] = value
        elif (new := small_number(name, value, by_name)) != value:
            small[own] = new
    if lists:  # a layer of each kind, over and over
        rows = [str(row) for row in zip(*lists.values(), strict=True)]
        kinds = [rows.index(kind) for kind in dict.fromkeys(rows)]
        for own, items in lists.items():
            own_items = [items[kinds[i % len(kinds)]] for i in range(LAYERS)]
            if own == "per_layer_config":
                small[own] = {
                    i: {name: small_number(name, value, by_name) for name, value in item.items()}
                    for i, item in enumerate(own_items)
                }
            else:
                name = re.sub("_per_layer$", "", own)
                small[own] = [small_number(name, value, by_name) for value in own_items]
    return small | given


def small_number(name: str, value: Any, values: dict[str, Any]) -> Any:
    """A number under the rules; anything else as it is."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if name == "head_dim" and value == values.get("qk_rope_head_dim"):
        name = "qk_rope_head_dim"
    if name in ("num_key_value_heads", "num_kv_heads") and value == values.get("num_attention_heads"):
        return HEADS
    new = next((new for pattern, new in RULES if re.fullmatch(pattern, name)), value)
    return new if new == LAYERS and "layers" in name else min(new, value)


def small_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rope with its sections cut to the smaller heads."""
    rope = {key: small_rope(value) if isinstance(value, dict) else value for key, value in parameters.items()}
    if section := rope.get("mrope_section"):
        share = sum(section) // (HEAD_DIM // 2)
        rope["mrope_section"] = [size // share for size in section]
    return rope


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> Any:
    """A random fp32 model of a config; refuses what is not tiny."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise MemoryError(f"{parameters} parameters are not tiny")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    show_all(model)
    model.generation_config.forced_eos_token_id = None
    return model


def sees_later_tokens(model: Any) -> bool:
    ids = prompt_ids(6)
    other = ids.clone()
    other[0, -1] += 1
    with torch.no_grad():
        return not torch.allclose(model(ids).logits[0, 0], model(other).logits[0, 0], atol=1e-4)


def kind_of(config: PreTrainedConfig, model_class: type) -> str:
    """What a target is, by what config and class say of themselves."""
    if config.is_encoder_decoder:
        return ENCODER
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    if getattr(model_class, "_is_stateful", False) or any(
        isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers
    ):
        return RECURRENT
    inputs = inspect.signature(model_class.forward).parameters
    if any(re.search("pixel|image|audio|video|input_features|speech", name) for name in inputs):
        return OTHER
    return TEXT


def examine(config_class: type[PreTrainedConfig]) -> Target:
    """Build one class small and compare."""
    family, name = config_class.model_type, classes()[config_class.model_type]
    kind = TEXT
    try:
        config = tiny_config(config_class)
        kind = kind_of(config, getattr(transformers, name))
        model = tiny_model(config)
        if getattr(config, "is_decoder", None) is False and sees_later_tokens(model):
            kind = ENCODER
            model = tiny_model(tiny_config(config_class, is_decoder=True))
        ids = prompt_ids(PROMPT)
        texts = {sampled: plain(model, ids, sampled) for sampled in (False, True)}
    except Exception as error:
        return Target(family, name, kind, PLAIN_FAILS, told(error))
    try:
        return Target(family, name, kind, *compare(model, ids, texts))
    except Exception as error:
        return Target(family, name, kind, BROKEN, told(error))


def options(sampled: bool) -> dict[str, Any]:
    """No token twice: many random models would else repeat one, whatever they see. No padding: it has no embedding."""
    return {
        "max_new_tokens": NEW,
        "do_sample": sampled,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": [0],
        "return_dict_in_generate": True,
        "output_logits": True,
    }


def plain(model: Any, ids: torch.Tensor, sampled: bool) -> Any:
    torch.manual_seed(7)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options(sampled))


def compare(model: Any, ids: torch.Tensor, texts: dict[bool, Any]) -> tuple[str, str]:
    """Trees against plain decoding's texts: the result and its reason."""
    forwards = 0

    def count(*args: Any) -> None:
        nonlocal forwards
        forwards += 1

    counter = model.register_forward_pre_hook(count)
    try:
        drafter = tiny_drafter(model)
    except Exception as error:
        return BROKEN, f"no drafter: {told(error)}"
    for sampled, expected in texts.items():
        text = expected.sequences
        torch.manual_seed(7)
        try:
            with scripted(text, hit=0.7):
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    assistant_model=drafter,
                    ddtree=DDTreeConfig(budget=15),
                    **options(sampled),
                )
        except ValueError as error:
            frames = traceback.extract_tb(error.__traceback__)
            if forwards == 0 and Path(hf_ddtree.__file__).parent in Path(frames[-1].filename).parents:
                return REFUSED, str(error)
            raise
        how = "sampled" if sampled else "greedy"
        if not torch.equal(out.sequences, text):
            same = min(out.sequences.shape[1], text.shape[1])
            at = int((out.sequences[:, :same] != text[:, :same]).int().argmax())
            best = expected.logits[at - PROMPT][0].topk(2).values
            return BROKEN, f"{how}: another token at {at - PROMPT} (top-2 gap {best[0] - best[1]:.2g})"
        if (mean := out.ddtree_stats.mean_acceptance_length) < 1.5:
            return BROKEN, f"{how}: {mean:.2f} tokens a round"
    counter.remove()
    return EQUAL, ""


def told(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]} ({Path(frame.filename).name})"


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    if not seconds:
        yield
        return

    def stop(*args: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def examine_all(only: Iterable[str] = (), seconds: int = 0) -> list[Target]:
    """All classes or some, each in at most `seconds` (0: as long as it takes)."""
    wanted, targets = set(only), []
    for family, config_class in config_classes().items():
        if wanted and family not in wanted:
            continue
        begin = time.time()
        with at_most(seconds):
            targets.append(target := examine(config_class))
        gc.collect()
        print(f"{time.time() - begin:5.1f} s ", *target, sep="  ", flush=True)
    return targets


def share(targets: Iterable[Target]) -> tuple[int, int]:
    """How many text targets without recurrence are equal, and how many there are."""
    text = [target for target in targets if target.kind == TEXT and target.result != PLAIN_FAILS]
    return sum(target.result == EQUAL for target in text), len(text)


def page(targets: Sequence[Target]) -> str:
    """The list as Markdown; `listed` reads it."""
    equal, text = share(targets)
    counts = {kind: [sum(x[2:4] == (kind, result) for x in targets) for result in RESULTS] for kind in KINDS}
    lines = [
        *HEAD.format(version=transformers.__version__, equal=equal, text=text).splitlines(),
        *(f"| {kind} | {' | '.join(map(str, numbers))} |" for kind, numbers in counts.items()),
        "",
        "| family | class | kind | result | reason |",
        "| --- | --- | --- | --- | --- |",
        *(f"| `{x.family}` | `{x.name}` | {x.kind} | {x.result} | {x.reason} |" for x in targets),
    ]
    return "\n".join(lines) + "\n"


def listed() -> tuple[str, list[Target]]:
    """The version of transformers and the targets of the committed list."""
    text = LIST.read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    targets = [Target(row[0].strip("`"), row[1].strip("`"), *(cell.strip() for cell in row[2:5])) for row in rows]
    return re.search(r"transformers ([\d.]+\d)", text)[1], targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="families (model types)")
    parser.add_argument("--write", action="store_true", help=f"write {LIST.name}")
    arguments = parser.parse_args()
    if arguments.write and arguments.only:
        parser.error("--write needs a whole run")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    targets = examine_all(arguments.only, SECONDS)
    for kind in KINDS:
        for result in RESULTS:
            if count := sum(target[2:4] == (kind, result) for target in targets):
                print(f"{count:4} {kind}: {result}")
    print("text, equal:", *share(targets))
    if arguments.write:
        LIST.write_text(page(targets))
    sys.exit(any(target.result == BROKEN for target in targets))


if __name__ == "__main__":
    main()
