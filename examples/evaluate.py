"""How fast a target and a drafter decode real prompts: stock decoding, chains and trees in one run, alternating.

    python examples/evaluate.py --output runs/evaluation
    accelerate launch examples/evaluate.py --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 \\
        --data humaneval mt-bench gsm8k --temperature 0 1 --new-tokens 2048 --output runs/qwen3

Every prompt is answered by every method, one after another and beginning with another method each time, so that what
else the machine does falls on all of them; sampled answers begin with the same seed. Seconds are those of the whole
call. With several turns a method goes on from its own answer, and the whole chat is its next prompt.

Started again with the same arguments, it goes on where it was stopped; with several processes, each takes every n-th
prompt. The last to finish writes `rows.jsonl`, `summary.json` and `summary.md` to the output directory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import torch
import transformers
from accelerate import PartialState
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_ddtree
from evaluation_data import Prompt, load_sets
from evaluation_methods import PLAIN, answer, make_methods, regret, settling
from evaluation_rows import Key, Row, RowFiles, write_text
from evaluation_summary import markdown, summarize
from hf_ddtree import DFlashDraftModel
from smollm2 import no_progress_bars, prepare_target

WARM_UP = [
    "Say hello.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tom has 12 apples and gives a third of them to Anna. How many are left?",
    "List five tips for a good night's sleep.",
]


class Pair(NamedTuple):
    """A target and its drafter on this process's device."""

    target: PreTrainedModel
    drafter: DFlashDraftModel
    tokenizer: PreTrainedTokenizerBase
    thinking: bool | None

    def encode(self, messages: list[dict[str, str]]) -> torch.Tensor:
        """A chat up to where the assistant answers, `(1, L)`; a model without a chat template gets the texts alone."""
        if not self.tokenizer.chat_template:
            ids = self.tokenizer("\n\n".join(m["content"] for m in messages), return_tensors="pt").input_ids
        else:
            options = {} if self.thinking is None else {"enable_thinking": self.thinking}
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **options
            )["input_ids"]
        return ids.to(self.target.device)


class Task(NamedTuple):
    """What one row is of."""

    prompt: Prompt
    temperature: float
    method: str
    seed: int

    @property
    def key(self) -> Key:
        return self.prompt.set, self.prompt.index, self.method, self.temperature


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="directory or hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", default=str(Path(__file__).parent / "smollm2-135m-dflash"), help="likewise")
    parser.add_argument(
        "--data",
        nargs="+",
        default=["humaneval", "mt-bench", "gsm8k"],
        metavar="SET",
        help="of packages: humaneval, mt-bench, gsm8k; through `datasets`: hub:gsm8k, math500, ...; or files *.jsonl",
    )
    parser.add_argument("--prompts", type=positive, help="of each set, evenly spread; default: all")
    parser.add_argument(
        "--plain-prompts", type=positive, help="of each set, for `generate` and `native chain` on CUDA"
    )
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="default: all that the device has")
    parser.add_argument("--budgets", type=positive, nargs="+", help="default: 15 7 31, on CUDA 63 15 127 255")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--new-tokens", type=positive, default=128, help="of each answer, at most")
    parser.add_argument("--thinking", choices=("on", "off"), help="what the chat template is told, if anything")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--attention", help="the target's attention implementation; default: its own choice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base", help="what speedups are over; default: compiled generate on CUDA, else generate")
    parser.add_argument("--output", type=Path, required=True, metavar="DIRECTORY")
    arguments = parser.parse_args(argv)
    if min(arguments.temperature) < 0:
        parser.error("--temperature must not be negative.")
    return arguments


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def load_pair(arguments: argparse.Namespace, device: torch.device) -> Pair:
    path, dtype = arguments.target or prepare_target(), getattr(torch, arguments.dtype)
    with no_progress_bars():
        target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=arguments.attention)
        drafter = DFlashDraftModel.from_pretrained(arguments.drafter, dtype=dtype)
    thinking = None if arguments.thinking is None else arguments.thinking == "on"
    return Pair(target.to(device).eval(), drafter.to(device).eval(), AutoTokenizer.from_pretrained(path), thinking)


def make_tasks(
    prompts: list[Prompt],
    methods: Sequence[str],
    temperatures: Sequence[float],
    seed: int,
    plain_prompts: int | None = None,
) -> list[list[Task]]:
    """For each prompt and temperature the methods in their order, each time beginning with the next.

    Args:
        prompts: Of all sets.
        methods: Names.
        temperatures: 0 for greedy.
        seed: Of the first prompt; each has another.
        plain_prompts: How many of each set, evenly spread, the methods of `PLAIN` get; default: all.
    """
    sizes = {name: sum(prompt.set == name for prompt in prompts) for name in {prompt.set for prompt in prompts}}
    seen = dict.fromkeys(sizes, 0)
    groups = []
    for number, prompt in enumerate(prompts):
        size, place = sizes[prompt.set], seen[prompt.set]
        seen[prompt.set] += 1
        plain = min(plain_prompts or size, size)
        is_plain = place * plain // size != (place - 1) * plain // size
        for temperature in temperatures:
            due = [name for name in methods if is_plain or name not in PLAIN]
            first = len(groups) % len(due) if due else 0
            groups.append([Task(prompt, temperature, name, seed + number) for name in due[first:] + due[:first]])
    return groups


def longest_prompt(pair: Pair, prompts: list[Prompt], new_tokens: int, most: int) -> int:
    """Tokens of the longest chat that will be asked; those that are too long, and will be skipped, do not count."""
    longest = 0
    for prompt in prompts:
        messages = prompt.messages + [{"role": "user", "content": text} for text in prompt.later]
        tokens = pair.encode(messages).shape[1] + len(prompt.later) * (new_tokens + 8)  # answers and their frames
        longest = max(longest, tokens if tokens + new_tokens <= most else 0)
    return longest


def warm_up(
    pair: Pair, methods: dict[str, dict[str, Any]], temperatures: Sequence[float], longest: int, new: int
) -> None:
    """Compile, capture, allocate and learn, with texts as long as those to come."""
    texts = [pair.encode([{"role": "user", "content": text}]) for text in WARM_UP]
    if pair.target.device.type == "cuda":
        texts.insert(0, texts[1].repeat(1, longest // texts[1].shape[1] + 1)[:, : max(longest, 1)])
    with settling():
        for temperature in temperatures:
            for name, options in methods.items():
                for ids in texts if name == "ddtree auto" else texts[:2]:
                    row = answer(pair.target, ids, new, options, temperature)
                tqdm.write(f"temperature {temperature:g}, {name}: {row.get('path', 'stock')}", file=sys.stderr)


def run_task(
    pair: Pair,
    task: Task,
    options: dict[str, Any],
    new_tokens: int,
    most: int,
    regrets: dict[tuple[int, ...], list[float]],
) -> Row:
    """All turns of one prompt with one method.

    Args:
        pair: The models.
        task: Prompt, temperature, method and seed.
        options: Of the method.
        new_tokens: Of each answer.
        most: Tokens that the target takes.
        regrets: Of texts, prompt included, that were looked at before; added to.
    """
    prompt = task.prompt
    row: Row = {"set": prompt.set, "prompt": prompt.index, "method": task.method, "temperature": task.temperature}
    row |= {"seed": task.seed, "turns": 0, "prompt_tokens": 0, "tokens": 0, "seconds": 0.0}
    messages, later, texts, gaps = list(prompt.messages), list(prompt.later), [], []
    torch.manual_seed(task.seed)
    while True:
        ids = pair.encode(messages)
        if ids.shape[1] + new_tokens > most:
            error = f"{ids.shape[1]} tokens and {new_tokens} new ones are more than the target's {most}"
            return row | {"error": f"turn {row['turns'] + 1}: {error}"}
        found = answer(pair.target, ids, new_tokens, options, task.temperature)
        row["turns"] += 1
        row["prompt_tokens"] += ids.shape[1]
        row["tokens"] += len(found["ids"])
        row["seconds"] += found["seconds"]
        for name in ("acceptance_lengths", "budgets"):
            if name in found:
                row[name] = row.get(name, []) + found[name]
        if "path" in found:
            row["path"] = found["path"]
        if not task.temperature:
            whole = (*ids[0].tolist(), *found["ids"])
            if whole not in regrets:
                regrets[whole] = regret(pair.target, ids, found["ids"])
            gaps += regrets[whole]
        texts.append(found["ids"])
        if not later:
            break
        reply = pair.tokenizer.decode(found["ids"], skip_special_tokens=True)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": later.pop(0)}]
    if "acceptance_lengths" in row:
        row["rounds"] = len(row["acceptance_lengths"])
    if gaps:
        row["regret"] = {"not_best": sum(gap > 0 for gap in gaps), "most": max(gaps)}
    row["text"] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    return row


def run(
    pair: Pair,
    groups: list[list[Task]],
    methods: dict[str, dict[str, Any]],
    files: RowFiles,
    new_tokens: int,
    most: int,
    quiet: bool,
) -> None:
    """Do what `files` does not hold yet of `groups`."""
    total = sum(map(len, groups))
    sums = {name: [0, 0.0, 0] for name in methods}  # tokens, seconds, rounds
    with tqdm(total=total, initial=sum(t.key in files.done for g in groups for t in g), disable=quiet) as bar:
        for group in groups:
            regrets: dict[tuple[int, ...], list[float]] = {}
            for task in group:
                if task.key in files.done:
                    continue
                row = run_task(pair, task, methods[task.method], new_tokens, most, regrets)
                files.append(row)
                bar.update()
                if "error" in row:
                    bar.write(f"skipped {task.prompt.set} {task.prompt.index}: {row['error']}", file=sys.stderr)
                    continue
                own = sums[task.method]
                own[0], own[1], own[2] = own[0] + row["tokens"], own[1] + row["seconds"], own[2] + row.get("rounds", 0)
                shown = f"{task.method}: {own[0] / own[1]:.1f} tokens/s"
                bar.set_postfix_str(f"{shown}, {own[0] / own[2]:.2f} tokens per round" if own[2] else shown)


def describe(pair: Pair, arguments: argparse.Namespace, methods: list[str], budgets: list[int]) -> dict[str, Any]:
    """What rows depend on: of other settings they are not to be mixed."""
    device = pair.target.device
    cuda = device.type == "cuda"
    return {
        "target": arguments.target or "SmolLM2-135M-Instruct",
        "drafter": Path(arguments.drafter).name if Path(arguments.drafter).is_dir() else arguments.drafter,
        "data": [Path(name).name for name in arguments.data],
        "prompts of each set": arguments.prompts,
        "prompts of each set for plain methods": arguments.plain_prompts,
        "methods": methods,
        "budgets": budgets,
        "temperatures": arguments.temperature,
        "new tokens": arguments.new_tokens,
        "thinking": arguments.thinking,
        "dtype": arguments.dtype,
        "attention": pair.target.config._attn_implementation,
        "seed": arguments.seed,
        "device": torch.cuda.get_device_name(device) if cuda else f"{torch.get_num_threads()} threads of a CPU",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "hf_ddtree": hf_ddtree.__version__,
    }


def evaluate(arguments: argparse.Namespace) -> None:
    """All of it: load, go on or begin, run, and summarize when all is there."""
    prompts = load_sets(arguments.data, arguments.prompts)
    state = PartialState()
    rank, ranks, device = state.process_index, state.num_processes, state.device
    # Processes share a directory, not a model: none waits for another, and to the models this is no distributed run.
    state.destroy_process_group()
    pair = load_pair(arguments, device)
    cuda = device.type == "cuda"
    budgets = arguments.budgets or ([63, 15, 127, 255] if cuda else [15, 7, 31])
    most = getattr(pair.target.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    longest = longest_prompt(pair, prompts, arguments.new_tokens, most)
    slots = -(-(longest + arguments.new_tokens) // 256) * 256
    methods = make_methods(pair.drafter, budgets, cuda, slots)
    if unknown := [name for name in arguments.methods or () if name not in methods]:
        raise ValueError(f"there is no method {', '.join(unknown)} here; there are {', '.join(methods)}.")
    methods = {name: methods[name] for name in arguments.methods or methods}
    base = arguments.base or ("compiled generate" if cuda else "generate")

    settings = describe(pair, arguments, list(methods), budgets)
    files = RowFiles(arguments.output, rank, settings)
    plain = arguments.plain_prompts if cuda else None
    groups = make_tasks(prompts, list(methods), arguments.temperature, arguments.seed, plain)
    turns = len(arguments.temperature)
    mine = [group for i, group in enumerate(groups) if i // turns % ranks == rank]
    due = [[task for task in group if task.key not in files.done] for group in mine]
    if any(due):
        needed = {task.method for group in due for task in group}
        new = arguments.new_tokens if cuda else min(arguments.new_tokens, 32)
        warm_up(pair, {n: o for n, o in methods.items() if n in needed}, arguments.temperature, longest, new)
    run(pair, mine, methods, files, arguments.new_tokens, most, quiet=rank > 0)

    rows = files.merge([task.key for group in groups for task in group])
    if rows is None:
        print(f"process {rank} is done; the last one merges.", file=sys.stderr)
        return
    summary = {"settings": settings, "about": {"processes": ranks, "rows": len(rows)}}
    summary |= summarize(rows, list(methods), base, arguments.seed)
    write_text(arguments.output / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_text(arguments.output / "summary.md", markdown(summary))
    print(markdown(summary))


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments `argv` (default: those of the process); returns the exit code."""
    arguments = parse_arguments(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    go_on = f"What is done stays in {arguments.output}; the same command goes on from there."
    try:
        evaluate(arguments)
    except KeyboardInterrupt:
        print(f"\nStopped. {go_on}", file=sys.stderr)
        return 130
    except (ValueError, ModuleNotFoundError, FileNotFoundError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"evaluate.py: {arguments.output} cannot be written ({error}). {go_on}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
