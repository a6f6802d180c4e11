"""The hooks: reversible, invisible to everything else, and one clear error for each request that cannot be served."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.utils import GenerationMixin
from transformers.pipelines import base as pipelines_base

import hf_ddtree
from hf_ddtree import DDTreeConfig, DFlashDraftModel
from hf_ddtree.compat import CACHE_KEY
from scripted import prompt_ids, scripted, tiny_drafter, tiny_target

NEW = 24


@pytest.fixture
def no_forward(target: PreTrainedModel) -> Any:
    """Fails when the target runs before the error."""

    def hook(*_: Any) -> None:
        raise AssertionError("the target ran before the error")

    handle = target.register_forward_pre_hook(hook)
    yield
    handle.remove()


# -- reversible ------------------------------------------------------------------------------------------------------

HOOKED = [
    (GenerationConfig, "__init__"),
    (GenerationMixin, "generate"),
    (GenerationMixin, "_validate_generation_mode"),
    (GenerationMixin, "_assisted_decoding"),
    (pipelines_base, "load_assistant_model"),
]


def test_uninstall_restores_and_install_is_idempotent(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    hooks = [getattr(owner, name) for owner, name in HOOKED]
    hf_ddtree.install()
    assert hooks == [getattr(owner, name) for owner, name in HOOKED]
    try:
        hf_ddtree.uninstall()
        for owner, name in HOOKED:
            original = inspect.unwrap(getattr(owner, name))
            assert not original.__module__.startswith("hf_ddtree")
            assert original.__module__.startswith("transformers")
        assert not hasattr(GenerationConfig, "ddtree")
        with pytest.raises(ValueError, match="ddtree"):
            target.generate(prompt_ids(4), max_new_tokens=2, ddtree=True)
        hf_ddtree.uninstall()
    finally:
        hf_ddtree.install()
    out = target.generate(prompt_ids(4), max_new_tokens=4, do_sample=False, assistant_model=drafter, ddtree=True)
    assert out.shape == (1, 8)


def test_uninstall_leaves_what_others_put_on_top() -> None:
    ours = GenerationMixin._assisted_decoding
    later = lambda *args, **kwargs: ours(*args, **kwargs)  # noqa: E731
    GenerationMixin._assisted_decoding = later
    try:
        hf_ddtree.uninstall()
        assert GenerationMixin.__dict__["_assisted_decoding"] is later
    finally:
        GenerationMixin._assisted_decoding = inspect.unwrap(ours)
        hf_ddtree.install()


def test_signatures_and_names_stay() -> None:
    for owner, name in HOOKED:
        hook = getattr(owner, name)
        assert hook.__name__ == name
        assert inspect.signature(hook) == inspect.signature(hook.__wrapped__)


# -- config ----------------------------------------------------------------------------------------------------------


def test_an_unset_config_is_unchanged() -> None:
    assert GenerationConfig().ddtree is None
    assert "ddtree" not in GenerationConfig().to_dict()
    assert GenerationConfig() == GenerationConfig(ddtree=None)


@pytest.mark.parametrize("value", [True, False, {"budget": 7}, DDTreeConfig(budget=7, tree="chain")])
def test_a_config_round_trips(value: Any, tmp_path: Path) -> None:
    config = GenerationConfig(ddtree=value, max_new_tokens=5)
    stored = value.to_dict() if isinstance(value, DDTreeConfig) else value
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["ddtree"] == stored
    assert GenerationConfig.from_pretrained(tmp_path).ddtree == stored
    assert copy.deepcopy(config).ddtree == stored
    assert repr(config)
    assert hash(config) == hash(copy.deepcopy(config))


def test_a_config_that_says_from_model_config_keeps_ddtree(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"_from_model_config": True, "ddtree": {"budget": 9}}))
    assert GenerationConfig.from_pretrained(tmp_path).ddtree == {"budget": 9}


def test_the_three_ways_to_ask_are_one(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    model, ids = copy.deepcopy(target), prompt_ids(8)
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(ids, **options).sequences.tolist()
    for value in (True, {"budget": 9}, DDTreeConfig(budget=9)):
        out = model.generate(ids, assistant_model=drafter, ddtree=value, **options)
        assert out.sequences.tolist() == expected
        assert out.ddtree_stats.budgets[0] == (7 if value is True else 9)
    config = GenerationConfig(**options, ddtree={"budget": 5})
    out = model.generate(ids, assistant_model=drafter, generation_config=config)
    assert out.ddtree_stats.budgets[0] == 5
    model.generation_config.ddtree = True
    out = model.generate(ids, assistant_model=drafter, **options)
    assert out.ddtree_stats.rounds > 0
    out = model.generate(ids, assistant_model=drafter, ddtree=False, **options)  # a call's False beats the config
    assert out.sequences.tolist() == expected
    assert not hasattr(out, "ddtree_stats")


def test_a_config_level_ddtree_without_a_drafter_decodes_plainly_with_one_warning(target: PreTrainedModel) -> None:
    model, ids = copy.deepcopy(target), prompt_ids(8)
    expected = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    model.generation_config.ddtree = {"budget": 7}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert out.tolist() == expected.tolist()
    assert sum("ddtree" in str(w.message) for w in caught) == 1


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_forward")
class TestErrors:
    def fails(self, target: PreTrainedModel, match: str, kind: type[Exception] = ValueError, **options: Any) -> None:
        options = {"max_new_tokens": 4, "do_sample": False} | options
        ids = options.pop("inputs", prompt_ids(5))
        with pytest.raises(kind, match=match):
            target.generate(ids, **options)

    def test_no_drafter(self, target: PreTrainedModel) -> None:
        self.fails(target, "assistant_model=DFlashDraftModel", ddtree=True)

    def test_another_assistant(self, target: PreTrainedModel) -> None:
        self.fails(target, "DFlash drafter.*got LlamaForCausalLM", ddtree=True, assistant_model=tiny_target("llama"))

    def test_a_drafter_with_no_use(self, target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
        self.fails(target, 'ddtree=True.*speculation_type="dflash".*ddtree=False', assistant_model=drafter)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"num_beams": 2}, "num_beams"),
            ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
            ({"use_cache": False}, "use_cache"),
            ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
            ({"use_mtp": True}, "use_mtp"),
            ({"assistant_early_exit": 2}, "assistant_early_exit"),
            ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
            ({"speculation_type": "dflash"}, "speculation_type"),
            ({"dola_layers": "high"}, "dola_layers"),
            ({"cache_implementation": "paged"}, "paged"),
            ({"custom_generate": lambda model, input_ids, **kwargs: input_ids}, "custom_generate"),
            ({"cache_implementation": "quantized"}, "quantized"),
            ({"cache_implementation": "offloaded"}, "offloaded"),
            ({CACHE_KEY: DynamicCache(offloading=True)}, "offloaded"),
            ({"inputs": prompt_ids(5).repeat(2, 1)}, "batch of 2"),
        ],
    )
    def test_options(self, target: PreTrainedModel, drafter: DFlashDraftModel, options: Any, match: str) -> None:
        if "use_mtp" in options and not hasattr(GenerationConfig(), "use_mtp"):
            pytest.skip("this transformers has no use_mtp")
        self.fails(target, match, assistant_model=drafter, ddtree=True, **options)

    @pytest.mark.parametrize(
        ("value", "kind", "match"),
        [
            ({"budget": -1}, ValueError, "budget"),
            ({"budget": 2.5}, TypeError, "budget"),
            ({"budget": True}, TypeError, "budget"),
            ({"budget": "large"}, TypeError, "budget"),
            ({"nodes": 3}, ValueError, "unknown option nodes"),
            ({"tree": "bush"}, ValueError, "tree"),
            (7, TypeError, "ddtree"),
        ],
    )
    def test_tree_options(
        self, target: PreTrainedModel, drafter: DFlashDraftModel, value: Any, kind: type[Exception], match: str
    ) -> None:
        self.fails(target, match, kind, assistant_model=drafter, ddtree=value)
        config = GenerationConfig(ddtree=value, max_new_tokens=4)
        self.fails(target, match, kind, assistant_model=drafter, generation_config=config)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"hidden_size": 64}, "hidden size is 64; this target's is 48"),
            ({"num_target_layers": 5}, "layers is 5; this target's is 4"),
            ({"vocab_size": 300}, "vocabulary is 300; this target's is 211"),
            (
                {"num_target_layers": None, "target_layer_ids": [0, 4]},
                "taps layer 4, and the target has layers 0 to 3",
            ),
            ({"mask_token_id": 211}, "mask token id 211 lies beyond the 211 rows"),
            ({"mask_token_id": -1}, "mask token id -1 lies beyond the 211 rows"),
            ({"target_layer_ids": [-1, 2]}, "taps layer -1, and the target has layers 0 to 3"),
            ({"target_layer_ids": [0, 1, 2]}, "projects 96 features, and 3 tap layers of width 48 give 144"),
            ({"block_size": 1}, "block of 1 has the bonus token and nothing to draft"),
        ],
    )
    def test_pairs(self, target: PreTrainedModel, drafter: DFlashDraftModel, change: Any, match: str) -> None:
        wrong = copy.deepcopy(drafter)
        for name, value in change.items():
            setattr(wrong.config, name, value)
        self.fails(target, match, assistant_model=wrong, ddtree=True)


def test_a_vocabulary_beyond_the_embeddings_rows(drafter: DFlashDraftModel) -> None:
    model = tiny_target("llama")
    model.set_input_embeddings(torch.nn.Embedding(200, 48))
    with pytest.raises(ValueError, match="vocabulary's last id 210 lies beyond the 200 rows"):
        model.generate(prompt_ids(4), max_new_tokens=4, assistant_model=drafter, ddtree=True)


def test_targets_that_cannot_verify(drafter: DFlashDraftModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "assistant_model": drafter, "ddtree": True}
    sizes = {"vocab_size": 64, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    with pytest.raises(ValueError, match="encoder-decoder"):
        T5ForConditionalGeneration(T5Config(**sizes)).generate(prompt_ids(4, vocab=64), **options)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="recurrent"):
        mamba.generate(prompt_ids(4, vocab=64), **options)
    flex = tiny_target("llama", attn_implementation="flex_attention")
    with pytest.raises(ValueError, match='attn_implementation="sdpa"'):
        flex.generate(prompt_ids(4), **options)


def test_hybrid_targets_are_refused_by_their_layers() -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=0, decoder_sparse_step=1, mlp_only_layers=[0, 1, 2, 3],
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)
    drafter = tiny_drafter(model)
    with pytest.raises(ValueError, match="recurrent"):
        model.generate(prompt_ids(4, vocab=64), max_new_tokens=4, assistant_model=drafter, ddtree=True)


def test_dynamic_rope_is_refused_beyond_its_limit_only() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny_target("llama", max_position_embeddings=32, rope_parameters=rope)
    drafter = tiny_drafter(model)
    options: dict[str, Any] = {"do_sample": False, "assistant_model": drafter, "ddtree": True}
    with pytest.raises(ValueError, match=r"dynamic.*within 32.*asked for: 40"):
        model.generate(prompt_ids(10), max_new_tokens=30, **options)
    expected = model.generate(prompt_ids(10), max_new_tokens=22, do_sample=False)
    assert model.generate(prompt_ids(10), max_new_tokens=22, **options).tolist() == expected.tolist()


# -- everything else is as before ------------------------------------------------------------------------------------


def _stock_results(model: PreTrainedModel) -> dict[str, list[int]]:
    ids, assistant = prompt_ids(8), tiny_target("llama", seed=0)
    runs: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sample": {"do_sample": True, "top_k": 20},
        "beam": {"do_sample": False, "num_beams": 3},
        "assisted": {"do_sample": False, "assistant_model": assistant},
    }
    results = {}
    for name, options in runs.items():
        if options["do_sample"]:
            with torch.random.fork_rng():
                torch.manual_seed(11)
                results[name] = model.generate(ids, max_new_tokens=NEW, **options)[0].tolist()
        else:
            results[name] = model.generate(ids, max_new_tokens=NEW, **options)[0].tolist()
    return results


def test_stock_decoding_is_unchanged_with_the_hooks_in(target: PreTrainedModel) -> None:
    with_hooks = _stock_results(target)
    hf_ddtree.uninstall()
    try:
        without = _stock_results(target)
    finally:
        hf_ddtree.install()
    assert with_hooks == without


def test_stock_decoding_in_two_threads_while_a_tree_decodes_in_a_third(
    target: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    ids = prompt_ids(8)
    stock = {k: v for k, v in _stock_results(target).items() if k != "sample"}  # threads share one random state
    text = target.generate(ids, max_new_tokens=60, do_sample=False)
    failures: list[str] = []
    stop = threading.Event()

    def run_stock() -> None:
        while not stop.is_set():
            for name, options in (
                ("greedy", {}),
                ("beam", {"num_beams": 3}),
                ("assisted", {"assistant_model": tiny_target("llama", seed=0)}),
            ):
                out = target.generate(ids, max_new_tokens=NEW, do_sample=False, **options)
                if out[0].tolist() != stock[name]:
                    failures.append(name)

    threads = [threading.Thread(target=run_stock) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with scripted(text, 0.8):
            for _ in range(8):
                out = target.generate(ids, max_new_tokens=60, do_sample=False, assistant_model=drafter, ddtree=True)
                if out.tolist() != text.tolist():
                    failures.append("tree")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures


def test_calls_from_many_threads_on_one_pair_are_exact(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    prompts = [prompt_ids(5 + i, seed=i) for i in range(8)]
    expected = [target.generate(ids, max_new_tokens=NEW, do_sample=False).tolist() for ids in prompts]
    results: dict[int, Any] = {}

    def call(index: int) -> None:
        out = target.generate(
            prompts[index], max_new_tokens=NEW, do_sample=False, assistant_model=drafter, ddtree={"budget": 7}
        )
        results[index] = out.tolist()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results.get(i) for i in range(8)] == expected


def test_a_used_model_copies_pickles_and_saves_as_before(
    target: PreTrainedModel, drafter: DFlashDraftModel, tmp_path: Path
) -> None:
    ids = prompt_ids(8)
    expected = target.generate(ids, max_new_tokens=NEW, do_sample=False, assistant_model=drafter, ddtree=True).tolist()
    target.save_pretrained(tmp_path)
    for copied in (
        copy.deepcopy(target),
        pickle.loads(pickle.dumps(target)),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        out = copied.generate(ids, max_new_tokens=NEW, do_sample=False, assistant_model=drafter, ddtree=True)
        assert out.tolist() == expected
    hf_ddtree.release_buffers(target)
    out = target.generate(ids, max_new_tokens=NEW, do_sample=False, assistant_model=drafter, ddtree=True)
    assert out.tolist() == expected


def test_import_alone_installs_and_changes_no_plain_model() -> None:
    code = (
        "import hf_ddtree, torch; from transformers import GenerationConfig;"
        "assert GenerationConfig(ddtree=True).to_dict()['ddtree'] is True; print('ok')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ok"


def test_an_untested_transformers_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    from packaging.version import Version

    from hf_ddtree import compat

    monkeypatch.setattr(compat, "_VERSION", Version("5.99.0"))
    with pytest.warns(UserWarning, match=r"tested with transformers 5\.17"):
        compat.warn_if_untested()


def test_a_compiled_model_decodes_with_trees() -> None:
    model = LlamaForCausalLM(LlamaConfig(**tiny_target("llama").config.to_dict())).eval()
    drafter = tiny_drafter(model)
    ids = prompt_ids(8)
    expected = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    model.compile(backend="eager")
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, assistant_model=drafter, ddtree=True)
    assert out.tolist() == expected.tolist()
    assert model._compiled_call_impl is not None


# -- further ways to get it wrong ------------------------------------------------------------------------------------


def test_a_consumer_of_the_stream_may_ask_the_same_pair(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    """A call that waits for its consumer must not make the consumer wait for it."""
    ids = prompt_ids(8)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    expected = target.generate(ids, **options)
    inner: list[Any] = []

    class Consumer:
        def put(self, value: torch.Tensor) -> None:
            if not inner:
                thread = threading.Thread(
                    target=lambda: inner.append(target.generate(ids, assistant_model=drafter, ddtree=True, **options))
                )
                thread.start()
                thread.join(timeout=60)
                assert not thread.is_alive()

        def end(self) -> None:
            pass

    out = target.generate(ids, assistant_model=drafter, ddtree=True, streamer=Consumer(), **options)
    assert out.tolist() == inner[0].tolist() == expected.tolist()


def test_a_library_that_wraps_our_hook_survives_uninstall_and_install(
    target: PreTrainedModel, drafter: DFlashDraftModel
) -> None:
    below = GenerationMixin._validate_generation_mode
    GenerationMixin._validate_generation_mode = lambda self, *args, **kwargs: below(self, *args, **kwargs)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    try:
        hf_ddtree.uninstall()
        plain = target.generate(prompt_ids(4), **options)
        hf_ddtree.install()
        out = target.generate(prompt_ids(4), assistant_model=drafter, ddtree=True, **options)
        assert out.tolist() == plain.tolist()
    finally:
        hf_ddtree.uninstall()
        GenerationMixin._validate_generation_mode = inspect.unwrap(below)
        hf_ddtree.install()


def test_a_second_import_takes_the_place_of_the_first() -> None:
    code = (
        "import sys, hf_ddtree\n"
        "from transformers import GenerationConfig\n"
        "for name in [n for n in sys.modules if n.startswith('hf_ddtree')]: del sys.modules[name]\n"
        "import hf_ddtree\n"
        "assert GenerationConfig().ddtree is None\n"
        "hf_ddtree.uninstall()\n"
        "assert not hasattr(GenerationConfig, 'ddtree')\n"
        "assert not hasattr(GenerationConfig.__init__, '_hf_ddtree_original')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_targets_that_mask_place_or_step_in_their_own_way(drafter: DFlashDraftModel) -> None:
    from transformers import (
        FalconConfig,
        FalconForCausalLM,
        GPTNeoConfig,
        GPTNeoForCausalLM,
    )

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16}
    neo = GPTNeoConfig(**sizes, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]])
    falcon = FalconConfig(**sizes, num_hidden_layers=2, num_attention_heads=2, alibi=True)
    for model, match in (
        (GPTNeoForCausalLM(neo), "attention masks itself"),
        (FalconForCausalLM(falcon), "position_ids"),
    ):
        with pytest.raises(ValueError, match=match):
            model.generate(prompt_ids(4, vocab=64), max_new_tokens=4, assistant_model=drafter, ddtree=True)

    class Biased(LlamaForCausalLM):
        def forward(self, *args: Any, bias: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, position_ids=position_ids, **kwargs)

    biased = Biased(tiny_target("llama").config).eval()
    with pytest.raises(ValueError, match="does not pass `bias`"):
        biased.generate(
            prompt_ids(4), bias=torch.ones(1), max_new_tokens=4, assistant_model=tiny_drafter(biased), ddtree=True
        )

    class Halved(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
            inputs["position_ids"] = inputs["position_ids"] // 2
            return inputs

    halved = Halved(tiny_target("llama").config)
    with pytest.raises(ValueError, match="positions of its own"):
        halved.generate(prompt_ids(4), max_new_tokens=4, assistant_model=tiny_drafter(halved), ddtree=True)


def test_dynamic_rope_counts_embeddings_and_given_positions() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny_target("llama", max_position_embeddings=32, rope_parameters=rope)
    options: dict[str, Any] = {"max_new_tokens": 20, "assistant_model": tiny_drafter(model), "ddtree": True}
    embeds = model.get_input_embeddings()(prompt_ids(25)).detach()
    with pytest.raises(ValueError, match="dynamic"):
        model.generate(inputs_embeds=embeds, **options)
    with pytest.raises(ValueError, match="dynamic"):
        model.generate(prompt_ids(8), position_ids=torch.arange(8)[None] + 20, **options)


def test_a_layer_tapped_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        DFlashDraftModel(hf_ddtree.DFlashConfig(target_layer_ids=[1, 1], mask_token_id=1, block_size=4))


@pytest.mark.parametrize("inputs", ["a text", [[5, 6, 7]], prompt_ids(5)[0]])
def test_prompts_that_plain_generate_refuses_fail_in_the_same_way(
    target: PreTrainedModel, drafter: DFlashDraftModel, inputs: Any
) -> None:
    with pytest.raises(Exception) as plain:  # noqa: PT011
        target.generate(inputs, max_new_tokens=4)
    with pytest.raises(type(plain.value)) as ours:
        target.generate(inputs, max_new_tokens=4, assistant_model=drafter, ddtree=True)
    assert str(ours.value) == str(plain.value)


def test_an_empty_prompt(target: PreTrainedModel, drafter: DFlashDraftModel) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        target.generate(prompt_ids(5)[:, :0], max_new_tokens=4, assistant_model=drafter, ddtree=True)


def test_custom_code_gets_ddtree_only_if_it_takes_it(
    target: PreTrainedModel, drafter: DFlashDraftModel, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"custom_generate": str(tmp_path), "trust_remote_code": True, "ddtree": {"budget": 5}}
    code = tmp_path / "custom_generate" / "generate.py"
    code.parent.mkdir()
    code.write_text("def generate(model, inputs, ddtree, **kwargs):\n    return ddtree\n")
    assert target.generate(prompt_ids(4), assistant_model=drafter, **options) == {"budget": 5}
    code.write_text("def generate(model, inputs, **kwargs):\n    return inputs\n")
    with pytest.raises(ValueError, match="takes no `ddtree`"):
        target.generate(prompt_ids(4), assistant_model=drafter, **options)


def test_a_drafter_without_weights(target: PreTrainedModel) -> None:
    with torch.device("meta"):
        drafter = tiny_drafter(target)
    with pytest.raises(ValueError, match="meta device"):
        target.generate(prompt_ids(4), max_new_tokens=4, assistant_model=drafter, ddtree=True)


def test_training_mode_is_refused_where_it_is_random(drafter: DFlashDraftModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    quiet = tiny_target("llama").train()
    expected = quiet.generate(prompt_ids(4), **options)
    out = quiet.generate(prompt_ids(4), assistant_model=drafter, ddtree=True, **options)
    assert out.tolist() == expected.tolist()
    dropping = tiny_target("llama", attention_dropout=0.1)
    dropping.generate(prompt_ids(4), assistant_model=drafter, ddtree=True, **options)
    with pytest.raises(ValueError, match=r"dropout.*model\.eval"):
        dropping.train().generate(prompt_ids(4), assistant_model=drafter, ddtree=True, **options)
    quiet.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"gradient checkpointing.*model\.eval"):
        quiet.generate(prompt_ids(4), assistant_model=drafter, ddtree=True, **options)


def test_training_mode_is_refused_with_any_kind_of_chance(drafter: DFlashDraftModel) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = tiny_target("llama").config.to_dict()
    for name in ("model_type", "architectures", "rope_parameters"):
        sizes.pop(name, None)
    model = MixtralForCausalLM(MixtralConfig(**sizes, router_jitter_noise=0.5, num_local_experts=4)).train()
    with pytest.raises(ValueError, match=r"training mode.*model\.eval"):
        model.generate(prompt_ids(4), max_new_tokens=4, assistant_model=drafter, ddtree=True)


def test_a_config_beside_ddtree_is_as_quiet_as_without(
    target: PreTrainedModel, drafter: DFlashDraftModel, warnings_of_transformers: pytest.LogCaptureFixture
) -> None:
    config = GenerationConfig(max_new_tokens=4, do_sample=False)
    target.generate(prompt_ids(4), generation_config=config)
    before = [record.message for record in warnings_of_transformers.records]
    out = target.generate(prompt_ids(4), generation_config=config, assistant_model=drafter, ddtree={"budget": 3})
    assert [record.message for record in warnings_of_transformers.records][len(before) :] == before
    assert out.shape == (1, 8)
    assert config.ddtree is None


def test_an_inner_call_does_not_warn_again(target: PreTrainedModel) -> None:
    model, ids = copy.deepcopy(target), prompt_ids(8)
    model.generation_config.ddtree = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate(ids, max_new_tokens=6, do_sample=False, assistant_model=tiny_target("llama", seed=3))
    assert sum("ddtree" in str(w.message) for w in caught) == 1


def test_release_buffers_through_a_compiled_wrapper(drafter: DFlashDraftModel) -> None:
    model = tiny_target("llama")
    wrapper = torch.compile(model, backend="eager")
    wrapper.generate(prompt_ids(4), max_new_tokens=4, do_sample=False, assistant_model=drafter, ddtree=True)
    hf_ddtree.release_buffers(wrapper)
    assert model.__dict__["_hf_ddtree_state"].buffers is None
