"""README.md, CONTRIBUTING.md and docs/: code runs, commands parse, links lead somewhere.

A page's Python blocks run in order in one namespace, in a folder where the names of models are folders with tiny
random ones. Each `generate` in them is compared with the same call without trees, and what a block prints with the
`text` block behind it. The commands of a `sh` block are parsed by the programs that they name.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.metadata
import inspect
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomllib
import torch
import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser as torchrun_parser
from transformers import PreTrainedModel, dynamic_module_utils
from transformers.generation.utils import GenerationMixin

import hf_ddtree
import smollm2
from hf_ddtree import DDTreeConfig, DFlashDraftModel, capture, our_layers, verifier
from hf_ddtree.__main__ import app
from scripted import scripted, tiny_drafter, tiny_target, word_tokenizer

ROOT = Path(__file__).parents[1]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md"))]
TARGET, DRAFTER = "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"
LOCAL_DRAFTER = "examples/smollm2-135m-dflash"
SERVER = "localhost:8000"
USAGE_ERROR = typer.BadParameter.__base__  # of the click that typer brings

each_page = pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])


class Block(NamedTuple):
    line: int
    language: str
    source: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page, in some languages or all."""
    text = page.read_text()
    found = [
        Block(text[: match.start()].count("\n") + 1, match[1], match[2])
        for match in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    ]
    return [block for block in found if not languages or block.language in languages]


def prose(page: Path) -> str:
    return re.sub(r"^```.*\n(?:.*\n)*?```$", "", page.read_text(), flags=re.MULTILINE)


@each_page
def test_blocks_have_a_language_that_says_what_is_checked(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= {"python", "sh", "text"}
    assert len(re.findall("^ *```", page.read_text(), re.MULTILINE)) == 2 * len(blocks(page))


# -- Python ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which the models' names lead to tiny ones."""
    place = tmp_path_factory.mktemp("checkout")
    target = tiny_target("qwen3")
    target.save_pretrained(place / TARGET)
    word_tokenizer().save_pretrained(place / TARGET)
    tiny_drafter(target).save_pretrained(place / DRAFTER)
    for entry in (ROOT / "examples").iterdir():
        link = place / "examples" / entry.name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(place / DRAFTER if entry.name == Path(LOCAL_DRAFTER).name else entry)
    return place


class Compared:
    """`generate` beside the same call without trees, whose text the drafter is then made to know."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("assistant_model") is None or "custom_generate" in kwargs:  # which calls this again
            return GenerationMixin.generate(model, *args, **kwargs)
        state = torch.get_rng_state()
        # Without the cache too: the whole text is given.
        left_out = "assistant_model streamer speculation_type past_key_values".split()
        plainly = {name: value for name, value in kwargs.items() if name not in left_out}
        plainly |= {"ddtree": False, "return_dict_in_generate": False}
        plain = GenerationMixin.generate(model, *args, **plainly)
        torch.set_rng_state(state)
        forwards: list[Any] = []
        counter = model.register_forward_pre_hook(lambda *_: forwards.append(None))
        with scripted(plain, hit=0.95):
            out = GenerationMixin.generate(model, *args, **kwargs)
        counter.remove()
        ids = out if isinstance(out, torch.Tensor) else out.sequences
        assert ids.tolist() == plain.tolist()
        prompt = args[0] if args else kwargs["input_ids"]
        assert len(forwards) <= (plain.shape[1] - prompt.shape[1]) / 2
        self.calls += 1
        return out


@pytest.fixture
def compared(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compared:
    compared = Compared()
    generate = lambda model, *args, **kwargs: compared(model, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(type(tiny_target("qwen3")), "generate", generate, raising=False)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    version = importlib.metadata.version  # which knows nothing of a package that was not installed
    records = lambda name: hf_ddtree.__version__ if name == "hf-ddtree" else version(name)  # noqa: E731
    monkeypatch.setattr(importlib.metadata, "version", records)
    monkeypatch.setattr(smollm2, "load_target", lambda *_: tiny_target("qwen3"))
    monkeypatch.setattr(smollm2, "load_tokenizer", word_tokenizer)
    monkeypatch.chdir(place)
    return compared


@contextlib.contextmanager
def served(source: str) -> Iterator[str]:
    """A block that asks a server, with the address of one that runs."""
    if SERVER not in source:
        yield source
        return
    pytest.importorskip("openai", reason="needs hf-ddtree[serving]")
    from hf_ddtree.serve import DDTreeServe
    from test_serve import OPTIONS, running

    with running(DDTreeServe(TARGET, DRAFTER, DDTreeConfig(), **OPTIONS), TARGET) as server:
        yield source.replace(f"http://{SERVER}", server.url)


def given() -> dict[str, Any]:
    """What a block may use that does not make it: the first page to be read does."""
    target, tokenizer = tiny_target("qwen3"), word_tokenizer()
    chat = [{"role": "user", "content": "w1 w2 w3"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    return {
        "model": target,
        "drafter": DFlashDraftModel.from_pretrained(DRAFTER),
        "tokenizer": tokenizer,
        "chat": chat,
        "inputs": inputs,
    }


PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", PYTHON, ids=[page.relative_to(ROOT).as_posix() for page in PYTHON])
def test_python_runs(page: Path, compared: Compared) -> None:
    namespace, printed = given() | {"__name__": page.stem}, ""
    for block in blocks(page):
        if block.language == "python":
            with served(block.source) as source, contextlib.redirect_stdout(io.StringIO()) as out:
                code = compile("\n" * block.line + source, str(page), "exec")
                exec(code, namespace)
            printed = out.getvalue()
        elif printed and block.language == "text":
            assert block.source == printed, f"{page.name}, line {block.line}"
        if block.language != "python":
            printed = ""
    if "assistant_model" in page.read_text():
        assert compared.calls > 0


# -- commands --------------------------------------------------------------------------------------------------------


class ParsedError(Exception):
    """A script has parsed its arguments, and need not do more."""


def check_program(words: list[str]) -> None:
    """The program of a command, with its subcommand, is there."""
    match words:
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case ["make"] | ["pip", "install", *_] | ["accelerate", "launch", *_] | ["torchrun", *_]:
            pass
        case ["python", "-m", "hf_ddtree", command, *_]:
            assert command in typer.main.get_command(app).commands  # type: ignore[attr-defined]
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), script
        case _:
            raise AssertionError(f"nothing knows how to check {words}")


def check_arguments(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The program takes the arguments of a command."""
    match words:
        case ["pip", "install", *packages]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for package in packages:
                assert (found := re.fullmatch(r"\.(?:\[(.*)\])?", package)), package
                assert set((found[1] or "").split(",")) <= {*extras, ""}
        case ["python", "-m", "hf_ddtree", name, *arguments]:
            command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
            command.make_context(name, list(arguments))
        case ["python", script, "--write"] if script.startswith("tests/"):
            assert '"--write"' in (ROOT / script).read_text()
        case ["python", script, *arguments]:
            parse = argparse.ArgumentParser.parse_args

            def parse_only(*args: Any, **kwargs: Any) -> None:
                parse(*args, **kwargs)
                raise ParsedError

            monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
            monkeypatch.setattr(sys, "argv", [script, *arguments])
            with pytest.raises(ParsedError):
                runpy.run_path(str(ROOT / script), run_name="__main__")
            monkeypatch.undo()
        case ["accelerate", "launch", *arguments]:
            launched = launch_command_parser().parse_args(arguments)
            check_arguments(["python", launched.training_script, *launched.training_script_args], monkeypatch)
        case ["torchrun", *arguments]:
            launched = torchrun_parser().parse_args(arguments)
            check_arguments(["python", launched.training_script, *launched.training_script_args], monkeypatch)


def without_environment(words: list[str]) -> list[str]:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[:1] == [".venv/bin/python"]:
        words = ["python", *words[1:]]
    return words


@each_page
def test_commands_are_taken(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks(page, "sh"):
        for line in block.source.replace("\\\n", " ").splitlines():
            if words := without_environment(shlex.split(line, comments=True)):
                check_program(words)
                check_arguments(words, monkeypatch)
    for span in re.findall(r"`((?:make|python|pip|accelerate|torchrun) [^`]+)`", prose(page)):
        check_program(shlex.split(span))


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "pip install '.[nothing]'",
        "python -m hf_ddtree serve model --assistant-model drafter --nothing",
        "python -m hf_ddtree nothing",
        "python benchmarks/speed.py --nothing",
        "python benchmarks/nothing.py",
        "accelerate launch benchmarks/speed.py --nothing",
        "torchrun --nproc_per_node 2 benchmarks/speed.py --nothing",
        "nothing",
    ],
)
def test_a_renamed_option_is_seen(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        check_program(shlex.split(command))
        check_arguments(shlex.split(command), monkeypatch)

    with pytest.raises((AssertionError, SystemExit, USAGE_ERROR)):
        check()


# -- links and names -------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as they are shown in a repository."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match("https?:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@each_page
def test_named_files_are_there(page: Path) -> None:
    for name in re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", prose(page)):
        assert (ROOT / name).exists(), name


def test_every_page_is_reached_from_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in PAGES[len(TOP) :]:
        assert page.name == "README.md" or f"({page.name})" in index


def test_every_module_has_its_place_in_the_algorithm() -> None:
    page = (ROOT / "docs" / "how_it_works.md").read_text()
    for module in (ROOT / "src" / "hf_ddtree").glob("*.py"):
        if module.stem not in ("__init__", "__main__", "visualize"):
            assert f"(../src/hf_ddtree/{module.name})" in page, module.name


def test_every_reason_for_a_slower_choice_is_explained() -> None:
    modules = (capture, our_layers, verifier)
    nodes = [node for module in modules for node in ast.walk(ast.parse(inspect.getsource(module)))]
    names = ("why_not_captured", "_on_one_gpu", "why_not_ours", "find_layers", "_make")
    functions = [node for node in nodes if getattr(node, "name", "") in names]
    reasons = [
        constant.value.strip()
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value
        for constant in ast.walk(node.value)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str) and " " in constant.value
    ]
    assert len(reasons) > 20
    reasons.append(capture._HOST_WALKS.partition(":")[0])
    page = (ROOT / "docs" / "performance.md").read_text()
    assert [reason for reason in reasons if reason not in page] == []


def test_the_citation_is_complete() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == hf_ddtree.__version__
    papers = {reference["identifiers"][0]["value"] for reference in citation["references"]}
    assert papers == {"arXiv:2602.06036", "arXiv:2604.12989"}
    assert f"## [{hf_ddtree.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
