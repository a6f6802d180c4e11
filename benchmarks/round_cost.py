"""What a round costs: trees of random weights against compiled decoding, and against reading the weights once.

    python benchmarks/round_cost.py                  # Qwen3-8B's shapes, on a GPU
    python benchmarks/round_cost.py --shapes tiny    # anywhere, in seconds: that it runs, not how fast

Weights are random and acceptance is scripted, since a round's cost does not depend on what the text says.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.initialization import no_init_weights

import hf_ddtree
from hf_ddtree import DDTreeConfig, DFlashConfig, DFlashDraftModel, capture, drafter_families, launched, logits_process
from hf_ddtree.outputs import DDTreeStats
from hf_ddtree.state import Path
from timing import copy_bandwidth, synchronize

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 40960,
    },
}  # fmt: skip
STATIC_SLOTS = (768, 2048)  # stock decoding attends to all of them, ours to the committed ones
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def make_pair(shapes: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """A target and a 5-layer drafter with 5 taps and blocks of 16, random."""
    config = Qwen3Config(**SHAPES[shapes], eos_token_id=None, tie_word_embeddings=False)
    taps = [1, 2, 3, 4, 5] if shapes == "tiny" else [1, 9, 17, 25, 33]
    with device, no_init_weights():
        torch.set_default_dtype(dtype)
        target = Qwen3ForCausalLM(config)
        drafter = DFlashDraftModel(
            DFlashConfig.from_target(
                config, target_layer_ids=taps, mask_token_id=5, block_size=16, num_hidden_layers=5
            )
        )
        torch.set_default_dtype(torch.float32)
    for model in (target, drafter):
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.fill_(1)
            else:
                parameter.data.normal_(0, 0.02)
        model.eval()
    return target, drafter


class Script:
    """Makes every captured round commit `length` tokens: peaked drafts, and choices that follow a path of the tree.

    The length is a tensor on the device, so that one captured graph serves all of them. Where the host walks, the
    path's tokens are given such logits that it goes there, which is a dozen launches more.
    """

    def __init__(self, device: torch.device) -> None:
        self.length = torch.ones((), dtype=torch.int64, device=device)
        best_candidates, follow = drafter_families.best_candidates, logits_process.follow
        lazy_walk = launched.lazy_walk

        def peaked(logits: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
            token_ids, log_probs = best_candidates(logits, candidates)
            ranks = torch.arange(token_ids.shape[-1], device=device)
            return token_ids, 0 * log_probs + torch.log_softmax(-1.5 * ranks.float(), 0)

        def script(tree: Any, depths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Of the root and each node the most probable child's token, and whether the path goes on there."""
            nodes = torch.arange(1, depths.shape[1], device=device)[None]
            child = torch.zeros_like(depths)
            child = child.scatter_reduce(1, tree.parents + 1, nodes, "amin", include_self=False)
            token = torch.nn.functional.pad(tree.token_ids, (1, 0)).gather(1, child)
            return token, (child > 0) & (depths < self.length - 1)

        def walk(logits: torch.Tensor, tree: Any, *args: Any) -> Path:
            if tree.depths.shape[1]:
                token, goes_on = script(tree, torch.nn.functional.pad(tree.depths, (1, 0)))
                logits.scatter_add_(2, token[..., None], 100 * goes_on[..., None].to(logits.dtype))
            return lazy_walk(logits, tree, *args)

        def follow_path(
            choices: torch.Tensor, tree: Any, ancestors: torch.Tensor, depths: torch.Tensor, most: int
        ) -> Any:
            token, goes_on = script(tree, depths)
            rows, tokens = follow(torch.where(goes_on, token, -1 - choices), tree, ancestors, depths, most)
            return rows, tokens.clamp(min=0)

        drafter_families.best_candidates, logits_process.follow = peaked, follow_path
        launched.lazy_walk = walk


def count_captures() -> list[int]:
    """A number that goes up with each step that is made."""
    count = [0]
    original = capture._capture

    def counted(*args: Any) -> Any:
        count[0] += 1
        return original(*args)

    capture._capture = counted
    return count


@contextlib.contextmanager
def timed_rounds() -> Iterator[list[tuple[float, float]]]:
    """(end of round, seconds waited for its path), a round; NaN seconds where the host walks."""
    times: list[tuple[float, float]] = []
    waits = [float("nan")]
    fetch, add_round = Path.fetch, DDTreeStats.add_round

    def fetched(self: Path) -> list[int]:
        start = time.perf_counter()
        result = fetch(self)
        waits.append(time.perf_counter() - start)
        return result

    def added(self: DDTreeStats, *args: Any, **kwargs: Any) -> None:
        add_round(self, *args, **kwargs)
        times.append((time.perf_counter(), waits.pop() if len(waits) > 1 else waits[0]))

    Path.fetch, DDTreeStats.add_round = fetched, added
    try:
        yield times
    finally:
        Path.fetch, DDTreeStats.add_round = fetch, add_round


def round_ms(
    target: Any, drafter: Any, ids: torch.Tensor, accepted: int, rounds: int, **options: Any
) -> dict[str, Any]:
    """Median time of a round, from the end of one to that of the next."""
    call = {"max_new_tokens": accepted * rounds + 1, "assistant_model": drafter, "return_dict_in_generate": True}
    call |= options
    with timed_rounds() as times:
        out = target.generate(ids, **call)
    ends, waits = [end for end, _ in times], [wait for _, wait in times]
    whole = [b - a for a, b in itertools.pairwise(ends)]
    host = [w - wait for w, wait in zip(whole, waits[1:], strict=True)]
    stats = out.ddtree_stats
    return {
        "ms": 1e3 * statistics.median(whole) if whole else float("nan"),
        "host_ms": 1e3 * statistics.median(host) if whole else float("nan"),
        "accepted": stats.mean_acceptance_length,
        "rounds": stats.rounds,
        "layers": str(stats.layers),
        "compiled": str(stats.compiled),
        "launch": str(stats.launch),
    }


def static_ms(target: Any, ids: torch.Tensor, slots: int) -> float:
    """A token of compiled decoding with a static cache of `slots`, the fastest that stock `generate` has."""
    call = {"do_sample": False, "cache_implementation": "static", "max_cache_len": slots}
    target.generate(ids, max_new_tokens=8, **call)
    seconds = []
    for new in (16, 80) * 3:
        synchronize()
        start = time.perf_counter()
        target.generate(ids, max_new_tokens=new, **call)
        synchronize()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(b - a for a, b in zip(seconds[::2], seconds[1::2], strict=True)) / 64


def bytes_of_a_round(target: Any, drafter: Any) -> int:
    """The target without its input embedding, the drafter, and the output head once more."""
    size = sum(p.numel() * p.element_size() for model in (target, drafter) for p in model.parameters())
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    return size - embedding.numel() * embedding.element_size() + head.numel() * head.element_size()


def waits_a_round(target: Any, drafter: Any, ids: torch.Tensor, budget: int) -> float:
    """How often the host waits for the device in a round, by the profiler: the difference of two lengths."""
    counts, rounds = [], []
    for new in (17, 49):
        call = {"max_new_tokens": new, "assistant_model": drafter, "do_sample": False, "ddtree": {"budget": budget}}
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            out = target.generate(ids, return_dict_in_generate=True, **call)
        counts.append(sum(event.count for event in recorded.key_averages() if event.key in WAITS))
        rounds.append(out.ddtree_stats.rounds)
    return (counts[1] - counts[0]) / (rounds[1] - rounds[0])


def most_memory(target: Any, ids: torch.Tensor, **options: Any) -> int:
    """The most device memory that a call reserves, weights included."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(ids.device)
    target.generate(ids, do_sample=False, **options)
    return torch.cuda.max_memory_reserved(ids.device)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--budgets", type=int, nargs="+", default=[63, 15, 127, 255])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--accepted", type=int, nargs="+", default=[6, 1, 15])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--execution", default="auto", help="see DDTreeConfig")
    parser.add_argument("--no-static", action="store_true", help="leave out stock compiled decoding")
    parser.add_argument("--profile", action="store_true", help="list a round's kernels by time")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures there")
    arguments = parser.parse_args(argv)

    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    target, drafter = make_pair(arguments.shapes, device, dtype)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else platform.processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_ddtree": hf_ddtree.__version__,
        "shapes": arguments.shapes,
        "dtype": str(dtype),
        "rows": [],
    }
    bandwidth = copy_bandwidth(device)
    report["floor_ms"] = 1e3 * bytes_of_a_round(target, drafter) / bandwidth
    print(f"{report['device']}, torch {torch.__version__}, transformers {transformers.__version__}, {dtype}")
    print(f"copy {bandwidth / 1e12:.2f} TB/s, so that a round's weights need {report['floor_ms']:.2f} ms", flush=True)

    def prompt(length: int) -> torch.Tensor:
        return torch.randint(10, SHAPES[arguments.shapes]["vocab_size"], (1, length), device=device)

    def measure(context: int, accepted: int, config: DDTreeConfig, **options: Any) -> None:
        script.length.fill_(accepted)
        start = time.perf_counter()
        target.generate(
            prompt(context), max_new_tokens=2 * accepted + 1, assistant_model=drafter, ddtree=config, **options
        )
        row = {"budget": config.budget, "context": context, "first_s": time.perf_counter() - start, **options}
        before = captures[0], counters["stats"]["unique_graphs"]
        row |= round_ms(target, drafter, prompt(context), accepted, arguments.rounds, ddtree=config, **options)
        row["captured_again"], row["compiled_again"] = (
            now - then for now, then in zip((captures[0], counters["stats"]["unique_graphs"]), before, strict=True)
        )
        report["rows"].append(row)
        print(
            f"budget {row['budget']:3}, context {context:5}, {row['accepted']:4.1f} accepted, "
            f"{'sampled' if options['do_sample'] else 'greedy'}"
            f"{', penalty' if 'repetition_penalty' in options else ''}: {row['ms']:.2f} ms a round, "
            f"{row['host_ms']:.2f} of it the host's (first call {row['first_s']:.1f} s, "
            f"{row['captured_again']} captures and {row['compiled_again']} compilations in the second; "
            f"{row['launch']})",
            flush=True,
        )

    captures = count_captures()
    script = Script(device)
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0}
    # The longest context first: later calls of any length find their buffers, and their graphs, already there.
    contexts = sorted(arguments.contexts, reverse=True)
    for budget in arguments.budgets:
        config = DDTreeConfig(budget=budget, execution=arguments.execution)
        for context in contexts:
            for accepted in arguments.accepted:
                measure(context, accepted, config, do_sample=False)
        if budget == 63:
            measure(min(contexts), arguments.accepted[0], config, **sampling)
            measure(min(contexts), arguments.accepted[0], config, do_sample=False, repetition_penalty=1.1)
    script.length.fill_(1)
    if cuda and arguments.profile:
        round_ms(target, drafter, prompt(512), 1, 2, ddtree=DDTreeConfig(budget=63), do_sample=False)
        own = target.__dict__["_hf_ddtree_state"].buffers.of(drafter)
        graph = list(own.kinds.values())[-1].graphs[63].graph
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
            for _ in range(10):
                graph.replay()
            synchronize()
        print(recorded.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=70))
    if cuda:
        report["waits"] = waits_a_round(target, drafter, prompt(512), 63)
        print(f"the host waits {report['waits']:.2f} times a round", flush=True)
    if cuda and not arguments.no_static:
        hf_ddtree.release_buffers(target)
        script.length.fill_(15)
        slots, ids = STATIC_SLOTS[-1], prompt(512)
        trees = {"assistant_model": drafter, "ddtree": DDTreeConfig(budget=63)}
        ours = most_memory(target, ids, max_new_tokens=slots - 512 - 64, **trees)
        kept = target.__dict__["_hf_ddtree_state"].buffers
        assert kept.cache.capacity == slots
        context = sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in kept.of(drafter).context.layers)
        del kept
        hf_ddtree.release_buffers(target)
        stock = most_memory(target, ids, max_new_tokens=8, cache_implementation="static", max_cache_len=slots)
        drafter_bytes = sum(p.numel() * p.element_size() for p in drafter.parameters())
        report["extra_memory"] = (ours - context - stock) / (stock - drafter_bytes)
        print(
            f"memory over compiled generate, {slots} slots, drafter aside: {report['extra_memory']:+.1%}", flush=True
        )
        report["static_ms"] = {}
        for slots in STATIC_SLOTS:
            report["static_ms"][slots] = static_ms(target, prompt(512), slots)
            print(f"compiled generate, {slots} static slots: {report['static_ms'][slots]:.2f} ms a token", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
