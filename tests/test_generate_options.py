"""Every option of `generate`: the same as plain decoding, or one clear error. The source of docs/generate_options.md.

`python tests/test_generate_options.py --write` writes the table.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as distributed
import transformers
from packaging.version import Version
from transformers import (
    Cache,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.cache_utils import QuantizedLayer
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.generation.utils import GenerationMixin

from comparison import Puts, Recorder, StopAt, assert_same, assert_several_tokens_a_round, generate, is_same
from comparison import generate_with_trees as with_trees
from hf_ddtree import DFlashDraftModel
from hf_ddtree.compat import CACHE_KEY, TESTED
from scripted import WORDS, prompt_ids, tiny_drafter, tiny_target, word_tokenizer

pytestmark = pytest.mark.usefixtures("each_layers")

TABLE = Path(__file__).parents[1] / "docs" / "generate_options.md"
PROMPT, NEW = 12, 20
IDS = prompt_ids(PROMPT)
BASE: dict[str, Any] = {
    "inputs": IDS,
    "max_new_tokens": NEW,
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
SAMPLE: dict[str, Any] = {"do_sample": True, "temperature": 1.3}
TOKENIZER = word_tokenizer()
HEALED = torch.cat([IDS[:, :-1], torch.tensor([[WORDS.index("w1")]])], dim=1)  # which healing makes "w1..."
EMBEDS = torch.randn(1, PROMPT, 48, generator=torch.Generator().manual_seed(3))


class Inert(dict[str, Any]):
    """A call in which plain decoding gives the same with and without the option."""


Call = dict[str, Any] | Callable[[PreTrainedModel], dict[str, Any]]


class Option(NamedTuple):
    same: list[Call] = []
    refused: list[Call] = []
    note: str = ""
    family: str = "llama"


def token_at(model: PreTrainedModel, index: int, **options: Any) -> int:
    """A new token of the text as it is without further options."""
    out, _ = generate(model, {"inputs": IDS, "max_new_tokens": index + 1} | options)
    return int(out[0, PROMPT + index])


# Of `GenerationConfig`, but nothing that a caller sets.
BOOKKEEPING = {"_commit_hash", "_from_model_config", "transformers_version"}

BEAMS_ONLY = "read by beam search only"
ASSISTED_ONLY = "read by transformers' own assisted decoding only"
MOVED_OUT = "without `trust_remote_code=True`, transformers' own error comes first"
ENCODER_DECODER_ONLY = "read by encoder-decoder models only"

CONFIG: dict[str, Option] = {
    "assistant_confidence_threshold": Option(
        [Inert(assistant_confidence_threshold=0.9), {"assistant_confidence_threshold": 1e-3, "is_assistant": True}],
        note=ASSISTED_ONLY,
    ),
    "assistant_early_exit": Option(refused=[{"assistant_early_exit": 2}]),
    "assistant_ensemble_weight": Option(refused=[{"assistant_ensemble_weight": 0.5}]),
    "assistant_lookbehind": Option([Inert(assistant_lookbehind=3)], note=ASSISTED_ONLY),
    "bad_words_ids": Option([{"bad_words_ids": [[token] for token in range(20, 60)] + [[78, 121]]}]),
    "begin_suppress_tokens": Option([{"begin_suppress_tokens": list(range(4, 150))}]),
    "bos_token_id": Option([{"bos_token_id": 7, "inputs": None}]),
    "cache_config": Option(
        refused=[{"cache_config": {"backend": "quanto"}, "cache_implementation": "quantized"}],
        note="read for quantized caches only",
    ),
    "cache_implementation": Option(
        [
            Inert(cache_implementation="dynamic"),
            Inert(cache_implementation="hybrid"),
            *(
                {"cache_implementation": name, "output_attentions": False}
                for name in ("static", "sliding_window", "hybrid_chunked")
            ),
        ],
        [
            {"cache_implementation": name}
            for name in (
                "offloaded",
                "offloaded_static",
                "offloaded_hybrid",
                "offloaded_hybrid_chunked",
                "quantized",
                "paged",
            )
        ],
    ),
    "compile_config": Option([Inert(compile_config=CompileConfig())]),
    "constraints": Option(refused=[{"constraints": [], "trust_remote_code": True}], note=MOVED_OUT),
    "continuous_batching_config": Option(
        [Inert(continuous_batching_config={})], note='read with `cache_implementation="paged"` only'
    ),
    "decoder_start_token_id": Option([Inert(decoder_start_token_id=3)], note=ENCODER_DECODER_ONLY),
    "disable_compile": Option([Inert(disable_compile=True)]),
    "diversity_penalty": Option([Inert(diversity_penalty=0.5)], note=BEAMS_ONLY),
    "do_sample": Option([{"do_sample": True}, SAMPLE, Inert(do_sample=False)]),
    "dola_layers": Option(refused=[{"dola_layers": "high"}]),
    "early_stopping": Option([Inert(early_stopping=True)], note=BEAMS_ONLY),
    "encoder_no_repeat_ngram_size": Option([{"encoder_no_repeat_ngram_size": 1}]),
    "encoder_repetition_penalty": Option([{"encoder_repetition_penalty": 1.5}]),
    "eos_token_id": Option(
        [
            {"eos_token_id": list(range(20, 30)), "pad_token_id": 0},
            lambda model: {"eos_token_id": token_at(model, 9)},
            lambda model: SAMPLE | {"eos_token_id": [2, token_at(model, 9, **SAMPLE)]},
        ]
    ),
    "epsilon_cutoff": Option([SAMPLE | {"epsilon_cutoff": 0.02}]),
    "eta_cutoff": Option([SAMPLE | {"eta_cutoff": 0.02}]),
    "exponential_decay_length_penalty": Option([{"exponential_decay_length_penalty": (12, 1.3), "eos_token_id": 2}]),
    "force_words_ids": Option(refused=[{"force_words_ids": [[5]], "trust_remote_code": True}], note=MOVED_OUT),
    "forced_bos_token_id": Option([{"forced_bos_token_id": 9, "inputs": IDS[:, :1]}]),
    "forced_eos_token_id": Option([{"forced_eos_token_id": 2}, {"forced_eos_token_id": [2, 9]}]),
    "guidance_scale": Option([{"guidance_scale": 1.5}, SAMPLE | {"guidance_scale": 1.5}]),
    "is_assistant": Option([{"is_assistant": True, "assistant_confidence_threshold": 0.1}]),
    "length_penalty": Option([Inert(length_penalty=2.0)], note=BEAMS_ONLY),
    "low_memory": Option([Inert(low_memory=True)], note="read by contrastive search only"),
    "max_cache_len": Option([{"max_cache_len": 256, "cache_implementation": "static", "output_attentions": False}]),
    "max_length": Option([{"max_length": PROMPT + 17, "max_new_tokens": None}]),
    "max_matching_ngram_size": Option([Inert(max_matching_ngram_size=2)], note=ASSISTED_ONLY),
    "max_new_tokens": Option([{"max_new_tokens": 1}, {"max_new_tokens": 2}, {"max_new_tokens": 33}]),
    "max_time": Option([{"max_time": 0.0}, Inert(max_time=1000.0)]),
    "min_length": Option([{"min_length": PROMPT + 9, "eos_token_id": list(range(4, 150))}]),
    "min_new_tokens": Option([{"min_new_tokens": 9, "eos_token_id": list(range(4, 150))}]),
    "min_p": Option([SAMPLE | {"min_p": 0.05}]),
    "no_repeat_ngram_size": Option([{"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 2}]),
    "num_assistant_tokens": Option([Inert(num_assistant_tokens=3)], note=ASSISTED_ONLY),
    "num_assistant_tokens_schedule": Option([Inert(num_assistant_tokens_schedule="heuristic")], note=ASSISTED_ONLY),
    "num_beam_groups": Option([Inert(num_beam_groups=2)], note=BEAMS_ONLY),
    "num_beams": Option([Inert(num_beams=1)], [{"num_beams": 2}]),
    "num_return_sequences": Option([Inert(num_return_sequences=1)], [SAMPLE | {"num_return_sequences": 2}]),
    "output_attentions": Option([{"output_attentions": True}]),
    "output_hidden_states": Option([{"output_hidden_states": True}]),
    "output_logits": Option([{"output_logits": True}]),
    "output_scores": Option([{"output_scores": True}, SAMPLE | {"output_scores": True}]),
    "pad_token_id": Option([{"pad_token_id": int(IDS[0, 5])}]),
    "penalty_alpha": Option(refused=[{"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True}], note=MOVED_OUT),
    "prefill_chunk_size": Option([{"prefill_chunk_size": 5}, Inert(prefill_chunk_size=50)]),
    "prompt_lookup_num_tokens": Option(refused=[{"prompt_lookup_num_tokens": 3}]),
    "remove_invalid_values": Option(
        [Inert(remove_invalid_values=True), {"remove_invalid_values": True, "sequence_bias": {(31,): float("-inf")}}]
    ),
    "renormalize_logits": Option([{"renormalize_logits": True}, SAMPLE | {"renormalize_logits": True, "top_k": 9}]),
    "repetition_penalty": Option([{"repetition_penalty": 1.4}, SAMPLE | {"repetition_penalty": 1.4}]),
    "return_dict_in_generate": Option([{"return_dict_in_generate": True}, Inert(return_dict_in_generate=False)]),
    "sequence_bias": Option([{"sequence_bias": {(31,): -8.0, (17, 18): 6.0}}]),
    "speculation_type": Option(refused=[{"speculation_type": "dflash"}]),
    "stop_strings": Option([lambda model: {"stop_strings": [WORDS[token_at(model, 9)]], "tokenizer": TOKENIZER}]),
    "suppress_tokens": Option([{"suppress_tokens": list(range(20, 60))}]),
    "target_lookbehind": Option([Inert(target_lookbehind=3)], note=ASSISTED_ONLY),
    "temperature": Option([SAMPLE | {"temperature": 0.4}]),
    "token_healing": Option([{"token_healing": True, "tokenizer": TOKENIZER, "inputs": HEALED}]),
    "top_h": Option([SAMPLE | {"top_h": 0.4}]),
    "top_k": Option([SAMPLE | {"top_k": 5}, SAMPLE | {"top_k": 0}]),
    "top_p": Option([SAMPLE | {"top_p": 0.7}]),
    "typical_p": Option([SAMPLE | {"typical_p": 0.6}]),
    "use_cache": Option([Inert(use_cache=True)], [{"use_cache": False}]),
    "use_mtp": Option(refused=[{"use_mtp": True}]),
    "watermarking_config": Option(
        [
            {"watermarking_config": WatermarkingConfig(bias=4.0)},
            SAMPLE
            | {
                "watermarking_config": SynthIDTextWatermarkingConfig(
                    ngram_len=3, keys=[1, 5, 9], context_history_size=8
                )
            },
        ]
    ),
}


def a_turn(model: PreTrainedModel, cache: Any = None) -> dict[str, Any]:
    """A second turn's call, with the first one's cache."""
    out = model.generate(IDS, max_new_tokens=9, return_dict_in_generate=True, **({CACHE_KEY: cache} if cache else {}))
    return {CACHE_KEY: out[CACHE_KEY], "inputs": torch.cat([out.sequences, prompt_ids(4, seed=1)], dim=1)}


def offloaded(cache: Cache) -> Cache:
    """As `offloading=True` makes it, which needs an accelerator."""
    cache.offloading = True
    return cache


class Unquantized(QuantizedLayer):
    """A quantized layer that needs no backend."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        return tensor

    def _dequantize(self, q_tensor: torch.Tensor) -> torch.Tensor:
        return q_tensor


def quantized(model: PreTrainedModel) -> Cache:
    cache = QuantizedCache.__new__(QuantizedCache)
    Cache.__init__(cache, layers=[Unquantized() for _ in range(model.config.num_hidden_layers)])
    return cache


def only_multiples_of_3(batch: int, ids: torch.Tensor) -> list[int]:
    return list(range(len(ids) % 3 + 3, 211, 3))


def padded(pads: int) -> torch.Tensor:
    mask = torch.ones_like(IDS)
    mask[:, :pads] = 0
    return mask


# Arguments of `generate` that are no options of its config, and arguments of a target's forward.
ARGUMENTS: dict[str, Option] = {
    "assistant_model": Option(
        refused=[{"assistant_model": None}, lambda model: {"assistant_model": model}], note="a DFlash drafter"
    ),
    "assistant_tokenizer": Option([Inert(assistant_tokenizer=TOKENIZER)]),
    "attention_mask": Option([lambda _: {"attention_mask": padded(3)}]),
    "cache": Option(
        [
            lambda model: a_turn(model),
            lambda model: a_turn(model, DynamicCache(config=model.config)),
            lambda model: {CACHE_KEY: StaticCache(model.config, 64), "output_attentions": False},
            lambda model: a_turn(model, StaticCache(model.config, 64)) | {"output_attentions": False},
        ],
        [
            lambda model: {CACHE_KEY: offloaded(DynamicCache(config=model.config))},
            lambda model: {CACHE_KEY: offloaded(StaticCache(model.config, 64))},
            lambda model: {CACHE_KEY: quantized(model)},
        ],
        note="`past_key_values` in older versions",
    ),
    "custom_generate": Option(
        refused=[
            {"custom_generate": lambda model, input_ids, **_: input_ids},
        ]
    ),
    "generation_config": Option([{"generation_config": GenerationConfig(max_new_tokens=NEW, repetition_penalty=1.4)}]),
    "input_ids": Option([{"input_ids": prompt_ids(9), "inputs": None}]),
    "inputs": Option([{"inputs": prompt_ids(9)}, Inert(inputs=IDS.int())], [{"inputs": IDS.repeat(2, 1)}]),
    "inputs_embeds": Option(
        [{"inputs_embeds": EMBEDS, "inputs": None}, {"inputs_embeds": EMBEDS}, SAMPLE | {"inputs_embeds": EMBEDS}]
    ),
    "labels": Option([Inert(labels=IDS)]),
    "logits_processor": Option([lambda _: {"logits_processor": LogitsProcessorList([Recorder()])}]),
    "logits_to_keep": Option([Inert(logits_to_keep=0), Inert(logits_to_keep=3)]),
    "negative_prompt_attention_mask": Option(
        [
            lambda _: {
                "negative_prompt_attention_mask": padded(5),
                "negative_prompt_ids": prompt_ids(PROMPT, seed=7),
                "guidance_scale": 1.5,
            }
        ]
    ),
    "negative_prompt_ids": Option([{"negative_prompt_ids": prompt_ids(6, seed=7), "guidance_scale": 1.5}]),
    "position_ids": Option([{"position_ids": torch.arange(0, 2 * PROMPT, 2)[None]}]),
    "prefix_allowed_tokens_fn": Option([{"prefix_allowed_tokens_fn": only_multiples_of_3}]),
    "stopping_criteria": Option([lambda _: {"stopping_criteria": StoppingCriteriaList([StopAt(PROMPT + 7)])}]),
    "streamer": Option([lambda _: Inert(streamer=Puts())]),
    "synced_gpus": Option([Inert(synced_gpus=False), Inert(synced_gpus=True)]),
    "token_type_ids": Option([{"token_type_ids": torch.arange(PROMPT)[None] % 2}], family="gpt2"),
    "tokenizer": Option([Inert(tokenizer=TOKENIZER)]),
    "trust_remote_code": Option([Inert(trust_remote_code=True)]),
}

OPTIONS = CONFIG | ARGUMENTS
ARGUMENT_NAMES = {"cache": CACHE_KEY}  # where this version's name is another one


def cases(kind: str) -> list[Any]:
    found = []
    for name, option in OPTIONS.items():
        for index, call in enumerate(getattr(option, kind)):
            test_id = f"{name}-{kind}-{index}"
            marks = []
            if name in CONFIG and not hasattr(GenerationConfig(), name):
                marks = [pytest.mark.skip(reason=f"this transformers has no {name}")]
            found.append(pytest.param(name, call, id=test_id, marks=marks))
    return found


@functools.cache
def pair(family: str) -> tuple[PreTrainedModel, DFlashDraftModel]:
    if family == "gpt2":  # the only one with token types
        torch.manual_seed(0)
        sizes = {"n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 256, "initializer_range": 0.3}
        special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
        config = GPT2Config(vocab_size=211, attn_implementation="eager", **sizes, **special)
        model = GPT2LMHeadModel(config).eval()
    else:
        model = tiny_target(family, attn_implementation="eager")
    return model, tiny_drafter(model)


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    """`synced_gpus` asks the other ranks."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def resolved(call: Call, model: PreTrainedModel) -> dict[str, Any]:
    return call(model) if callable(call) else call


@functools.cache
def base_output(family: str) -> Any:
    return generate(pair(family)[0], BASE)[0]


def without(name: str, call: dict[str, Any], family: str) -> Any:
    if name == "inputs":
        return base_output(family)
    rest = {key: value for key, value in (BASE | call).items() if key not in (name, ARGUMENT_NAMES.get(name))}
    if rest.keys() == BASE.keys() and all(rest[key] is BASE[key] for key in BASE):
        return base_output(family)
    return generate(pair(family)[0], rest)[0]


def known_text(call: dict[str, Any], out: Any) -> list[int]:
    """What a drafter may know: the new tokens, at their positions."""
    ids = out if isinstance(out, torch.Tensor) else out.sequences
    new = len(getattr(out, "scores", None) or range(NEW))
    last = ids.shape[1] - new - 1
    if "position_ids" in call:
        last = int(call["position_ids"].max())
    elif "attention_mask" in call:
        last = int(call["attention_mask"].sum()) - 1
    elif "pad_token_id" in call:
        last -= int((ids[:, : last + 1] == call["pad_token_id"]).sum())
    elif "inputs_embeds" in call:
        last = PROMPT - 1
    return [0] * (last + 1) + ids[0, -new:].tolist()


@pytest.mark.parametrize(("name", "call"), cases("same"))
def test_an_option_gives_what_it_gives_plain_decoding(name: str, call: Call) -> None:
    model, drafter = pair(OPTIONS[name].family)
    expected, expected_state = generate(model, BASE | (options := resolved(call, model)))
    changed = not is_same(without(name, options, OPTIONS[name].family), expected)
    assert changed is not isinstance(options, Inert), "the call does not show the option's effect"
    out, state = with_trees(model, drafter, BASE | resolved(call, model), known_text(options, expected))
    assert_same(out, expected)
    assert torch.equal(state, expected_state)
    if not isinstance(out, torch.Tensor):
        assert_several_tokens_a_round(out.ddtree_stats)


def refuse(name: str, call: Call) -> None:
    """Make a call that should raise before the target runs."""
    model, drafter = pair(OPTIONS[name].family)
    handle = model.register_forward_pre_hook(ran_before_the_error)
    try:
        model.generate(**(BASE | {"assistant_model": drafter, "ddtree": True} | resolved(call, model)))
    finally:
        handle.remove()


def ran_before_the_error(*_: Any) -> None:
    raise AssertionError("the target ran before the error")


@pytest.mark.parametrize(("name", "call"), cases("refused"))
def test_a_refused_option_raises_one_clear_error_before_the_target_runs(name: str, call: Call) -> None:
    with pytest.raises(ValueError, match=r"`ddtree`"):
        refuse(name, call)


# -- nothing is left out ---------------------------------------------------------------------------------------------


def newest() -> bool:
    return Version(transformers.__version__).release[:2] == Version(TESTED[1]).release


def check_classified(found: set[str], known: set[str]) -> None:
    assert not found - known, f"not yet classified: {', '.join(sorted(found - known))}"
    assert not newest() or not known - found, f"no longer there: {', '.join(sorted(known - found))}"


def test_every_option_of_the_installed_transformers_is_classified() -> None:
    check_classified(set(vars(GenerationConfig())) - BOOKKEEPING, set(CONFIG))


def test_every_argument_of_generate_and_of_a_forward_is_classified() -> None:
    taken = inspect.getsource(inspect.unwrap(GenerationMixin.generate))
    taken += inspect.getsource(GenerationMixin._extract_generation_mode_kwargs)
    found = set(re.findall(r'kwargs\.pop\("(\w+)"', taken))
    for function in (GenerationMixin.generate, LlamaForCausalLM.forward):
        found |= set(inspect.signature(function).parameters)
    found = {{CACHE_KEY: "cache"}.get(name, name) for name in found - {"self", "kwargs"}}
    check_classified(found - set(CONFIG), set(ARGUMENTS) - {"token_type_ids"})


def test_every_cache_implementation_has_a_call() -> None:
    calls = [*CONFIG["cache_implementation"].same, *CONFIG["cache_implementation"].refused]
    check_classified(
        {*ALL_CACHE_IMPLEMENTATIONS, "paged"},
        {call["cache_implementation"] for call in calls if isinstance(call, dict)},
    )


# Bases, and what only encoder-decoder, speech and older models' own code makes.
NOT_MADE = {
    "AlternatingCodebooksLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
    "LogitsProcessor",
    "StoppingCriteria",
    "WhisperNoSpeechDetection",
    "WhisperTimeStampLogitsProcessor",
}


def test_every_processor_and_criterion_of_transformers_is_made_by_some_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair("llama")
    made: set[type] = set()

    def spy(self: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, *_: Any, **__: Any) -> Any:
        made.update(type(each) for each in (*logits_processor, *stopping_criteria))
        return torch.cat([input_ids, input_ids[:, -1:]], dim=1)

    calls = [resolved(call, model) for option in OPTIONS.values() if option.family == "llama" for call in option.same]
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_sample", spy)
        for call in calls:
            model.generate(**(BASE | call))
    found = {
        name
        for module, base in ((logits_process, LogitsProcessor), (stopping_criteria, StoppingCriteria))
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, base)
    }
    check_classified(found, {each.__name__ for each in made if each.__module__.startswith("transformers")} | NOT_MADE)


# -- the table -------------------------------------------------------------------------------------------------------

INTRODUCTION = f"""\
# Options of `generate`

What each option of `generate` in transformers {TESTED[1]} does in a call with `ddtree=True`. "Same" means: with that
option, too, ids, random state after the call, scores, logits, hidden states, attentions and cache are those of plain
decoding. Anything else is the error that the call raises before the target runs.

`tests/test_generate_options.py` compares each of them with plain decoding and fails for an option that is not here;
`python tests/test_generate_options.py --write` writes this page.
"""


def shown(value: Any) -> str:
    """A value as it stands in the table."""
    if isinstance(value, torch.Tensor):
        return f"{value.shape[0]} prompts"
    if isinstance(value, Cache) and getattr(value, "offloading", False):
        return f"an offloaded {type(value).__name__}"
    if isinstance(value, (Cache, PreTrainedModel)):
        return f"a {type(value).__name__}"
    return "a function" if callable(value) else f"`{value!r}`"


def result(name: str) -> str:
    option = OPTIONS[name]
    model, _ = pair(option.family)
    errors: dict[str, list[str]] = {}
    for call in option.refused:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the page shows the message)
            refuse(name, call)
        errors.setdefault(str(caught.value), []).append(shown(resolved(call, model)[ARGUMENT_NAMES.get(name, name)]))
    parts = ["same"] if option.same else []
    parts += [f"{', '.join(values)}: {error}" for error, values in errors.items()]
    return "<br>".join(parts)


def page() -> str:
    text = INTRODUCTION
    for title, options in (("Options of the generation config", CONFIG), ("Other arguments", ARGUMENTS)):
        text += f"\n## {title}\n\n| option | result | note |\n| --- | --- | --- |\n"
        text += "".join(f"| `{name}` | {result(name)} | {options[name].note} |\n" for name in sorted(options))
    return text


@pytest.mark.skipif(not newest(), reason=f"the page is that of transformers {TESTED[1]}")
def test_the_page_of_the_documentation_says_what_was_seen() -> None:
    assert TABLE.read_text(encoding="utf-8") == page(), "python tests/test_generate_options.py --write"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    TABLE.write_text(page(), encoding="utf-8")
