"""How fast a target and a drafter decode real prompts: stock decoding, chains and trees in one run, alternating.

    python examples/evaluate.py --output runs/evaluation
    accelerate launch examples/evaluate.py --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 \\
        --data humaneval mt-bench gsm8k --temperature 0 1 --new-tokens 2048 --output runs/qwen3

Every prompt is answered by every method, one after another and beginning with another method each time, so that what
else the machine does falls on all of them; sampled answers begin with the same seed. Seconds are those of the whole
call. With several turns a method goes on from its own answer, and the whole chat is its next prompt.

Started again with the same arguments, it goes on where it was stopped; with several processes, each takes every n-th
prompt. The last to finish writes `rows.jsonl`, `summary.json` and `summary.md` to the output directory. Of a run that
was stopped, `--summarize` says what the prompts show that all methods have answered.

With `--simulate` only the plain method answers the prompts. What trees would gain is counted along its texts, and
predicted with what rounds cost here; a few prompts and minutes are enough. It writes `prediction.json` and `.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from tqdm import tqdm

import hf_ddtree
from evaluation_data import Prompt, load_sets
from evaluation_methods import (
    PLAIN,
    ChatPair,
    converse,
    default_base,
    default_budgets,
    longest_prompt,
    make_methods,
    regret,
    warm_up,
)
from evaluation_rows import Key, Row, RowFiles, WriteError, read_rows, read_settings, write_text, writing
from evaluation_summary import answered_by_all, markdown, summarize
from pair import DRAFTER, load_pair
from prediction import is_predicted, predict
from prediction import markdown as markdown_of_predictions

UNFINISHED = ", of a run that has not ended"


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
    parser.add_argument("--drafter", help="directory or hub id; default: the one beside this file")
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
    parser.add_argument("--simulate", action="store_true", help="predict from one plain run: would it pay here?")
    parser.add_argument("--summarize", action="store_true", help="only summarize the rows that there are")
    parser.add_argument("--output", type=Path, required=True, metavar="DIRECTORY")
    arguments = parser.parse_args(argv)
    arguments.temperature = list(dict.fromkeys(arguments.temperature))
    if min(arguments.temperature) < 0:
        parser.error("--temperature must not be negative.")
    return arguments


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def make_tasks(
    prompts: list[Prompt],
    methods: Sequence[str],
    temperatures: Sequence[float],
    seed: int,
    plain_prompts: int | None = None,
) -> list[list[Task]]:
    """The methods for each prompt at each temperature, every time beginning with the next.

    One temperature after the other, since each has graphs of its own; and all sets side by side, so that a run that is
    stopped has some of each.

    Args:
        prompts: Of all sets.
        methods: Names.
        temperatures: 0 for greedy.
        seed: Of the first prompt; each has another.
        plain_prompts: How many of each set, evenly spread, the methods of `PLAIN` get; default: all.
    """
    sizes = Counter(prompt.set for prompt in prompts)
    seen = dict.fromkeys(sizes, 0)
    places = []
    for number, prompt in enumerate(prompts):
        place, size = seen[prompt.set], sizes[prompt.set]
        seen[prompt.set] += 1
        plain = min(plain_prompts or size, size)
        is_plain = place * plain // size != (place - 1) * plain // size
        due = [name for name in methods if is_plain or name not in PLAIN]
        places.append(((place + 0.5) / size, number, prompt, due))
    places.sort(key=lambda entry: entry[:2])
    groups = []
    for temperature in temperatures:
        for _, number, prompt, due in places:
            first = len(groups) % len(due) if due else 0
            groups.append([Task(prompt, temperature, name, seed + number) for name in due[first:] + due[:first]])
    return groups


def run_task(
    pair: ChatPair,
    task: Task,
    options: dict[str, Any],
    new_tokens: int,
    regrets: dict[tuple[int, ...], list[float]],
) -> Row:
    """All turns of one prompt with one method.

    Args:
        pair: The models.
        task: Prompt, temperature, method and seed.
        options: Of the method.
        new_tokens: Of each answer.
        regrets: Of texts, prompt included, that were looked at before; added to.
    """
    row: Row = dict(zip(("set", "prompt", "method", "temperature"), task.key, strict=True))
    turns, error = converse(pair, task.prompt, new_tokens, options, task.temperature, task.seed)
    row |= {"seed": task.seed, "turns": len(turns), "prompt_tokens": sum(turn.prompt.shape[1] for turn in turns)}
    row |= {"tokens": sum(len(turn.ids) for turn in turns), "seconds": sum(turn.seconds for turn in turns)}
    if error:
        return row | {"error": error}
    for name in ("acceptance_lengths", "budgets"):
        if name in turns[0].found:
            row[name] = [value for turn in turns for value in turn.found[name]]
    if "acceptance_lengths" in row:
        row["rounds"] = len(row["acceptance_lengths"])
    if "launch" in turns[0].found:
        row["launch"] = turns[-1].found["launch"]
    if not task.temperature:
        gaps = []
        for turn in turns:
            whole = (*turn.prompt[0].tolist(), *turn.ids)
            if whole not in regrets:
                regrets[whole] = regret(pair.target, turn.prompt, turn.ids)
            gaps += regrets[whole]
        row["regret"] = {"not_best": sum(gap > 0 for gap in gaps), "most": max(gaps)}
    row["text"] = hashlib.sha256(json.dumps([turn.ids for turn in turns]).encode()).hexdigest()[:16]
    return row


def run(
    pair: ChatPair,
    groups: list[list[Task]],
    methods: dict[str, dict[str, Any]],
    files: RowFiles,
    new_tokens: int,
    quiet: bool,
) -> None:
    """Do what `files` does not hold yet of `groups`."""
    total = sum(map(len, groups))
    sums = {name: [0, 0.0, 0, 0] for name in methods}  # tokens, seconds, rounds, tokens of rounds
    with tqdm(total=total, initial=sum(t.key in files.done for g in groups for t in g), disable=quiet) as bar:
        for group in groups:
            regrets: dict[tuple[int, ...], list[float]] = {}
            for task in group:
                if task.key in files.done:
                    continue
                row = run_task(pair, task, methods[task.method], new_tokens, regrets)
                files.append(row)
                bar.update()
                if "error" in row:
                    bar.write(f"skipped {task.prompt.set} {task.prompt.index}: {row['error']}", file=sys.stderr)
                    continue
                lengths = row.get("acceptance_lengths", [])
                new = row["tokens"], row["seconds"], len(lengths), sum(lengths)
                tokens, seconds, rounds, of_rounds = sums[task.method] = [
                    a + b for a, b in zip(sums[task.method], new, strict=True)
                ]
                shown = f"{task.method}: {tokens / seconds:.1f} tokens/s"
                bar.set_postfix_str(f"{shown}, {of_rounds / rounds:.2f} tokens per round" if rounds else shown)


def describe(
    pair: ChatPair, prompts: list[Prompt], arguments: argparse.Namespace, methods: list[str], budgets: list[int]
) -> dict[str, Any]:
    """What rows depend on: of other settings they are not to be mixed."""
    device = pair.target.device
    cuda = device.type == "cuda"
    return {
        "target": arguments.target or "SmolLM2-135M-Instruct",
        "drafter": arguments.drafter or DRAFTER.name,
        "data": [Path(name).name for name in arguments.data],
        "hash of the prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
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
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())
    rank, ranks, device = state.process_index, state.num_processes, state.device
    # Processes share a directory, not a model: none waits for another, and to the models this is no distributed run.
    state.destroy_process_group()
    thinking = None if arguments.thinking is None else arguments.thinking == "on"
    target, tokenizer, drafter = load_pair(
        arguments.target, arguments.drafter, arguments.dtype, device, arguments.attention
    )
    pair = ChatPair(target.eval(), drafter, tokenizer, thinking)
    cuda = device.type == "cuda"
    budgets = arguments.budgets or default_budgets(cuda)
    longest = longest_prompt(pair, prompts, arguments.new_tokens)
    slots = -(-(longest + arguments.new_tokens) // 256) * 256
    methods = make_methods(pair.drafter, budgets, cuda, slots)
    if unknown := [name for name in arguments.methods or () if name not in methods]:
        raise ValueError(f"there is no method {', '.join(unknown)} here; there are {', '.join(methods)}.")
    base = arguments.base or default_base(cuda)
    if base not in methods:
        raise ValueError(f"there is no method {base} here; there are {', '.join(methods)}.")
    chosen = arguments.methods or list(methods)
    methods = {name: methods[name] for name in methods if name in (*chosen, *([base] if arguments.simulate else []))}

    settings = describe(pair, prompts, arguments, list(methods), budgets)
    if arguments.simulate:
        if rank == 0:  # others would only disturb its times
            simulate(pair, prompts, methods, base, longest, settings, arguments)
        return
    plain = arguments.plain_prompts if cuda else None
    groups = make_tasks(prompts, list(methods), arguments.temperature, arguments.seed, plain)
    mine = groups[rank::ranks]
    with closing(RowFiles(arguments.output, rank, settings)) as files:
        if needed := {task.method for group in mine for task in group if task.key not in files.done}:
            new = arguments.new_tokens if cuda else min(arguments.new_tokens, 32)
            warm_up(pair, {n: o for n, o in methods.items() if n in needed}, arguments.temperature, longest, new)
        run(pair, mine, methods, files, arguments.new_tokens, quiet=rank > 0)
        rows = files.merge([task.key for group in groups for task in group])
    if rows is None:
        print(f"process {rank} is done; the last one merges.", file=sys.stderr)
        return
    write_summary(arguments.output, rows, settings, {"processes": ranks, "rows": len(rows)}, base)


def summarize_rows(directory: Path, base: str | None) -> None:
    """Summarize the rows that there are of a run.

    Args:
        directory: Of its output.
        base: What speedups are over; default: as in a run.

    Raises:
        ValueError: No prompt was answered by all methods, or the base is none of them.
        FileNotFoundError: No run was begun there.
    """
    settings = read_settings(directory)
    methods, cuda = settings["methods"], settings["cuda"] is not None
    if base and base not in methods:
        raise ValueError(f"the method {base} was not run; {', '.join(methods)} were.")
    base = base or default_base(cuda)
    few = PLAIN if cuda and settings["prompts of each set for plain methods"] else ()
    rows = answered_by_all(read_rows(directory), [name for name in methods if name not in few])
    if not rows:
        raise ValueError(f"{directory} holds no prompt yet that all methods have answered.")
    ended = (directory / "rows.jsonl").exists()  # written when all are there
    write_summary(directory, rows, settings, {"rows": f"{len(rows)}{'' if ended else UNFINISHED}"}, base)


def write_summary(
    directory: Path, rows: list[Row], settings: dict[str, Any], about: dict[str, Any], base: str
) -> None:
    """Write and print what rows show."""
    summary = {"settings": settings, "about": about}
    summary |= summarize(rows, settings["methods"], base, settings["seed"])
    write_text(directory / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_text(directory / "summary.md", markdown(summary))
    print(markdown(summary))


def simulate(
    pair: ChatPair,
    prompts: list[Prompt],
    methods: dict[str, dict[str, Any]],
    base: str,
    longest: int,
    settings: dict[str, Any],
    arguments: argparse.Namespace,
) -> None:
    """Write and print what methods would gain."""
    if "ddtree" in methods[base] or "speculation_type" in methods[base]:
        raise ValueError(f"a prediction begins with plain decoding, and {base} is not that.")
    fixed = {name: options for name, options in methods.items() if name == base or is_predicted(options)}
    new_tokens = arguments.new_tokens
    with writing(arguments.output):
        arguments.output.mkdir(parents=True, exist_ok=True)
    warm_up(pair, fixed, arguments.temperature, longest, min(new_tokens, 32))
    found = [
        predict(pair, prompts, fixed, base, temperature, arguments.seed, new_tokens)
        for temperature in arguments.temperature
    ]
    write_text(arguments.output / "prediction.json", json.dumps({"settings": settings, "predictions": found}) + "\n")
    write_text(arguments.output / "prediction.md", markdown_of_predictions(found))
    print(markdown_of_predictions(found))


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments `argv` (default: those of the process); returns the exit code."""
    arguments = parse_arguments(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    go_on = f"What is done stays in {arguments.output}; the same command goes on from there."
    try:
        if arguments.summarize:
            summarize_rows(arguments.output, arguments.base)
        else:
            evaluate(arguments)
    except KeyboardInterrupt:
        print(f"\nStopped. {go_on}", file=sys.stderr)
        return 130
    except WriteError as error:
        print(f"evaluate.py: {error}. {go_on}", file=sys.stderr)
        return 1
    except (ValueError, OSError, ModuleNotFoundError) as error:  # what was asked for, or is missing
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
