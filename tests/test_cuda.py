"""On a GPU: the same text as plain decoding there, and one wait of the host for the device a round."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StaticCache

from hf_ddtree import DDTreeCandidateGenerator, DDTreeConfig, DFlashDraftModel, round_graph
from hf_ddtree.compat import CACHE_KEY
from images import FAMILIES as SEEING
from images import seeing_prompt, tiny_seeing_target
from scripted import prompt_ids, scripted, tiny_drafter, tiny_target
from test_precision import NEW, QUANTIZED, SIZES, assert_regret_is_rounding, quantized
from test_seams import from_text, markov, markov_drafter

__all__ = ["from_text", "markov"]  # fixtures
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}


# The Phi-3 of older versions forgets its context beyond the switch.
FAMILIES = ["llama", "qwen2_mixed", "qwen3", "mistral", *(["phi3"] if CACHE_KEY == "cache" else [])]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_target(request.param).cuda()


def run(model: PreTrainedModel, ids: torch.Tensor, new: int, **options: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(5)
    out = model.generate(ids, max_new_tokens=new, return_dict_in_generate=True, **options)
    return out, torch.cuda.get_rng_state()


class Counting(LogitsProcessor):
    """Makes the walk a lazy one, since it may look at anything."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - 2.0 * (torch.arange(scores.shape[1], device=scores.device) % 7 == input_ids.shape[1] % 7)


@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        SAMPLING,
        {"do_sample": True, "top_k": 0},
        GREEDY | {"repetition_penalty": 1.3},
        SAMPLING | {"output_scores": True},
        GREEDY | {"logits_processor": LogitsProcessorList([Counting()])},
    ],
    ids=["greedy", "warped", "pure", "penalty", "scores", "own"],
)
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_equal_to_plain(target: PreTrainedModel, options: dict[str, Any], where: str) -> None:
    ids = prompt_ids(30).to(where)
    expected, expected_state = run(target, ids, 70, **options)
    for budget, hit in ((7, 0.6), (63, 0.85)):
        drafter = tiny_drafter(target, block_size=16).cuda()
        with scripted(expected.sequences, hit):
            config = DDTreeConfig(budget=budget, execution="plain")  # the script drafts on the host
            out, state = run(target, ids, 70, assistant_model=drafter, ddtree=config, **options)
        assert out.sequences.device.type == where
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(state, expected_state)
        assert out.ddtree_stats.mean_acceptance_length > 1.5


def test_a_drafter_elsewhere_a_static_cache_and_a_second_turn(target: PreTrainedModel) -> None:
    drafter = tiny_drafter(target)
    for cache in (None, StaticCache(config=target.config, max_cache_len=200)):
        options = GREEDY if cache is None else GREEDY | {CACHE_KEY: cache}
        expected, _ = run(target, prompt_ids(12).cuda(), 20, **(GREEDY if cache is None else options))
        if cache is not None:
            options = GREEDY | {CACHE_KEY: StaticCache(config=target.config, max_cache_len=200)}
        out, _ = run(target, prompt_ids(12).cuda(), 20, assistant_model=drafter, ddtree=True, **options)
        assert out.sequences.tolist() == expected.sequences.tolist()
        ids = torch.cat([expected.sequences, prompt_ids(6, seed=1).cuda()], dim=1)
        expected, _ = run(target, ids, 20, **GREEDY, **{CACHE_KEY: expected[CACHE_KEY]})
        out, _ = run(target, ids, 20, assistant_model=drafter, ddtree=True, **GREEDY, **{CACHE_KEY: out[CACHE_KEY]})
        assert out.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("execution", ["captured", "auto"])
@pytest.mark.parametrize(
    "options", [GREEDY, SAMPLING, {"do_sample": True, "top_k": 0}], ids=["greedy", "warped", "pure"]
)
def test_captured_rounds_are_plain_decodings(target: PreTrainedModel, options: dict[str, Any], execution: Any) -> None:
    drafter = tiny_drafter(target).cuda()
    config = DDTreeConfig(budget=31, execution=execution)
    for prompt, new in ((100, 60), (12, 100), (40, 7)):
        ids = prompt_ids(prompt, seed=new).cuda()
        expected, expected_state = run(target, ids, new, **options)
        out, state = run(target, ids, new, assistant_model=drafter, ddtree=config, **options)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(state, expected_state)
        captured = "phi3" not in target.config.model_type
        assert (out.ddtree_stats.launch.value == "graph") == captured, out.ddtree_stats.launch


@pytest.mark.parametrize("tree", ["best_first", "chain", "from_text"])
@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        SAMPLING,
        GREEDY | {"repetition_penalty": 1.3},
        SAMPLING | {"repetition_penalty": 1.3},
        SAMPLING | {"output_scores": True, "output_logits": True},
        GREEDY | {"logits_processor": LogitsProcessorList([Counting()])},
    ],
    ids=["greedy", "warped", "penalty", "warped_penalty", "scores", "own"],
)
@pytest.mark.usefixtures("markov", "from_text")
def test_graphs_of_other_sources_and_policies_with_walks_between_them(options: dict[str, Any], tree: str) -> None:
    model = tiny_target("llama").cuda()
    ids = prompt_ids(20).cuda()
    expected, expected_state = run(model, ids, 60, **options)
    drafter = markov_drafter(model, expected.sequences).cuda()
    for budget, least in ((15, 1.5), ([15, 0, 0, 63, 4] * 12, 1.2)):
        config = DDTreeConfig(budget=budget, tree=tree, execution="captured")
        out, state = run(model, ids, 60, assistant_model=drafter, ddtree=config, **options)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(state, expected_state)
        stats = out.ddtree_stats
        assert stats.launch.value == "graph", stats.launch
        assert (stats.launch.reason is None) == (options in (GREEDY, SAMPLING))
        assert stats.mean_acceptance_length > least
        for mine, theirs in zip(out.scores or (), expected.scores or (), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("budget", ["auto", [0, 15, 0, 0, 63, 31, 7, 0, 127] * 20, 0], ids=["auto", "mixed", "none"])
@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "warped"])
def test_graphs_of_several_sizes(budget: Any, options: dict[str, Any]) -> None:
    model = tiny_target("qwen2_mixed").cuda()
    drafter = tiny_drafter(model, block_size=16).cuda()
    config = DDTreeConfig(budget=budget, execution="captured")
    for prompt, new in ((60, 200), (12, 100)):
        ids = prompt_ids(prompt, seed=new).cuda()
        expected, expected_state = run(model, ids, new, **options)
        out, state = run(model, ids, new, assistant_model=drafter, ddtree=config, **options)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(state, expected_state)
        assert out.ddtree_stats.launch.value == "graph", out.ddtree_stats
        replay = DDTreeConfig(budget=out.ddtree_stats.budgets, execution="captured")
        again, _ = run(model, ids, new, assistant_model=drafter, ddtree=replay, **options)
        assert again.ddtree_stats.acceptance_lengths == out.ddtree_stats.acceptance_lengths


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "warped"])
@pytest.mark.parametrize("budget", [15, [15, 0, 0, 15]])
def test_first_drafts_are_replayed_too(budget: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target("qwen3").cuda()
    drafter = tiny_drafter(model).cuda()
    ids = prompt_ids(20).cuda()
    config = DDTreeConfig(budget=budget, record_trees=True)
    plain = dataclasses.replace(config, execution="plain")
    expected, state = run(model, ids, 60, assistant_model=drafter, ddtree=plain, **options)

    def fail(*args: Any) -> None:
        raise AssertionError("drafted plainly")

    monkeypatch.setattr(DDTreeCandidateGenerator, "propose", fail)
    out, after = run(model, ids, 60, assistant_model=drafter, ddtree=config, **options)
    assert out.ddtree_stats.launch.value == "graph"
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(after, state)
    first, of_plain = out.ddtree_stats.trees[0].tree, expected.ddtree_stats.trees[0].tree
    assert first.token_ids.tolist() == of_plain.token_ids.tolist()
    torch.testing.assert_close(first.log_probs, of_plain.log_probs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "warped"])
def test_prompts_are_replayed_too(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target("qwen2_mixed", max_position_embeddings=2048).cuda()
    drafter = tiny_drafter(model).cuda()
    texts = [prompt_ids(length, seed=length).cuda() for length in (900, 2, 40, 256, 257, 900)]
    expected = [run(model, ids, 40, **options) for ids in texts]
    call = options | {"assistant_model": drafter, "ddtree": {"budget": 15}}
    run(model, texts[0], 40, **call)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr(type(model), "_prefill", fail)
    for ids, (plain, state) in zip(texts, expected, strict=True):
        out, after = run(model, ids, 40, **call)
        assert out.sequences.tolist() == plain.sequences.tolist()
        assert torch.equal(after, state)


def test_prompts_of_a_larger_target_are_replayed_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """That rounding is not taken for another result."""
    model = tiny_target("llama", hidden_size=512, num_hidden_layers=24, initializer_range=0.02).cuda().bfloat16()
    call = GREEDY | {"assistant_model": tiny_drafter(model).cuda().bfloat16(), "ddtree": {"budget": 15}}
    first, _ = run(model, prompt_ids(90).cuda(), 20, **call)
    monkeypatch.setattr(type(model), "_prefill", None)
    again, _ = run(model, prompt_ids(90).cuda(), 20, **call)
    assert again.sequences.tolist() == first.sequences.tolist()


def test_graphs_stand_when_others_free_what_cublas_keeps() -> None:
    """As `torch.compile` does when it captures graphs of its own."""
    model = tiny_target("qwen3", hidden_size=1024, intermediate_size=4096, initializer_range=0.02).cuda().bfloat16()
    drafter = tiny_drafter(model).cuda().bfloat16()
    call = GREEDY | {"assistant_model": drafter, "ddtree": {"budget": 15, "execution": "captured"}}
    expected, _ = run(model, prompt_ids(30).cuda(), 40, **call)
    assert expected.ddtree_stats.launch.value == "graph"
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((2**20,), 7.0, device="cuda") for _ in range(200)]
    out, _ = run(model, prompt_ids(30).cuda(), 40, **call)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert all(bool((other == 7).all()) for other in others)


@pytest.mark.parametrize("execution", ["captured", "plain"])
def test_calls_on_streams_of_their_own(execution: Any) -> None:
    model = tiny_target("qwen3").cuda()
    call = GREEDY | {"assistant_model": tiny_drafter(model).cuda(), "ddtree": {"budget": 15, "execution": execution}}
    prompts = [prompt_ids(length, seed=length).cuda() for length in (200, 30, 90)]
    expected = [run(model, ids, 30, **GREEDY)[0].sequences.tolist() for ids in prompts]
    torch.cuda.synchronize()
    for _ in range(3):
        for ids, text in zip(prompts, expected, strict=True):
            with torch.cuda.stream(torch.cuda.Stream()):
                out, _ = run(model, ids, 30, **call)
                assert out.sequences.tolist() == text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(dtype: torch.dtype) -> None:
    model = tiny_target("qwen3").to("cuda", dtype)
    out, _ = run(
        model, prompt_ids(12).cuda(), 40, assistant_model=tiny_drafter(model).to("cuda", dtype), ddtree=True, **GREEDY
    )
    assert out.sequences.shape == (1, 52)


def test_a_capture_that_fails_on_its_way_leaves_the_generator_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    original = round_graph.ShadowTarget.forward

    def forward(*args: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            torch.zeros(3, device="cuda").tolist()
        return original(*args)

    monkeypatch.setattr(round_graph.ShadowTarget, "forward", forward)
    model = tiny_target("qwen3").cuda()
    drafter = tiny_drafter(model).cuda()
    for options in (SAMPLING, GREEDY, SAMPLING):
        expected, expected_state = run(model, prompt_ids(30).cuda(), 40, **options)
        out, state = run(model, prompt_ids(30).cuda(), 40, assistant_model=drafter, ddtree=True, **options)
        assert "the capture failed" in out.ddtree_stats.launch.reason
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(state, expected_state)


@pytest.mark.parametrize("family", SEEING)
def test_images_in_captured_rounds(family: str) -> None:
    model = tiny_seeing_target(family).cuda()
    drafter = tiny_drafter(model).cuda()
    for images in (1, 2, 0):
        prompt = {name: tensor.cuda() for name, tensor in seeing_prompt(family, images).items()}
        call = GREEDY | prompt | {"ids": prompt["input_ids"], "new": 40}
        del call["input_ids"]
        expected, _ = run(model, **call)
        out, _ = run(model, **call, assistant_model=drafter, ddtree=DDTreeConfig(budget=15, execution="captured"))
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert out.ddtree_stats.launch.value == "graph", out.ddtree_stats


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_targets(kind: str, tmp_path: Path) -> None:
    model = quantized(tiny_target("qwen3", **SIZES), tmp_path, QUANTIZED[kind], device="cuda:0")
    ids = prompt_ids(20).cuda()
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    for dtype in (torch.bfloat16, torch.float16):
        drafter = tiny_drafter(model).to("cuda", dtype)
        with scripted(text, 0.9, vocab=256):
            out, _ = run(model, ids, NEW, assistant_model=drafter, ddtree={"budget": 15}, **GREEDY)
        if kind.startswith("nf4"):  # what int8 leaves out of its integers depends on all rows, and the texts part
            assert out.ddtree_stats.mean_acceptance_length > 1.5
        assert_regret_is_rounding(model, out.sequences, ids.shape[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "warped"])
def test_layers_on_two_devices(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_target("qwen3").cuda()
    expected, expected_state = run(model, prompt_ids(20).cuda(), 60, **options)
    model.save_pretrained(tmp_path)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{layer}": layer // 2 for layer in range(4)}
    split = type(model).from_pretrained(tmp_path, device_map=places)
    for device in ("cuda:0", "cuda:1"):
        drafter = tiny_drafter(split).to(device)
        with scripted(expected.sequences, 0.8):
            out, state = run(split, prompt_ids(20).cuda(), 60, assistant_model=drafter, ddtree=True, **options)
        assert out.sequences.tolist() == expected.sequences.tolist()
        assert torch.equal(state, expected_state)
        assert out.ddtree_stats.launch.reason == "weights lie on several devices"


_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def waits(model: PreTrainedModel, drafter: DFlashDraftModel, new: int, options: dict[str, Any]) -> tuple[int, int]:
    """How often the host waited for the device in one call, and the call's rounds."""
    ids = prompt_ids(30).cuda()
    call = {"assistant_model": drafter} | options
    for _ in range(2):
        run(model, ids, new, **call)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        out, _ = run(model, ids, new, **call)
    return sum(event.count for event in recorded.key_averages() if event.key in _WAITS), out.ddtree_stats.rounds


@pytest.mark.parametrize("execution", ["captured", "plain"])
@pytest.mark.parametrize("options", [GREEDY, SAMPLING], ids=["greedy", "warped"])
def test_a_round_waits_once(options: dict[str, Any], execution: Any) -> None:
    """Two calls that differ in their rounds only: what is left is a round's."""
    model = tiny_target("qwen3").cuda()
    drafter = copy.deepcopy(tiny_drafter(model)).cuda()
    options = options | {"ddtree": DDTreeConfig(budget=31, execution=execution)}
    (short, few), (long, many) = (waits(model, drafter, new, options) for new in (20, 60))
    assert many > few
    assert long - short == many - few
