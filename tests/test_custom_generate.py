"""The second door: `custom_generate="examples/custom_generate"` answers what `generate(ddtree=...)` answers."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    dynamic_module_utils,
)

from hf_ddtree import DFlashDraftModel, GenerateDDTreeOutput
from scripted import VOCAB, prompt_ids, scripted, tiny_target

DOOR = Path(__file__).parents[1] / "examples" / "custom_generate"
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}


def has_metadata() -> bool:
    try:
        importlib.metadata.version("hf-ddtree")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# transformers asks the installer's records, not the import system, whether requirements.txt is met.
installed = pytest.mark.skipif(not has_metadata(), reason="hf-ddtree is importable, but not installed")


@pytest.fixture
def door(drafter: DFlashDraftModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options that lead through the folder; transformers' copy of its code goes to a folder of the test's own."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    return {"custom_generate": str(DOOR), "trust_remote_code": True, "assistant_model": drafter}


class _Events(LogitsProcessor, StoppingCriteria):
    """Processor, criterion and streamer in one: notes each call, changes the scores, and ends the text at 20 ids."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
        self.events.append(input_ids.tolist())
        if scores is None:  # as a criterion
            return torch.full((1,), input_ids.shape[1] >= 20)
        return scores - 4 * torch.nn.functional.one_hot(input_ids[:, -1], scores.shape[-1])

    def put(self, value: torch.Tensor) -> None:
        self.events.append(("put", value.tolist()))

    def end(self) -> None:
        self.events.append("end")


@installed
def test_the_folder_answers_what_plain_generate_does(target: PreTrainedModel, door: dict[str, Any]) -> None:
    for options in (GREEDY, {"do_sample": True, "temperature": 0.8, "max_new_tokens": 24}):
        for inputs in ({"inputs": prompt_ids(8)}, {"input_ids": prompt_ids(8)}):
            torch.manual_seed(5)
            expected = target.generate(**inputs, **options)
            torch.manual_seed(5)
            with scripted(expected, 0.8):
                out = target.generate(**inputs, **options, **door)
            assert out.tolist() == expected.tolist()


@installed
def test_it_returns_the_statistics(target: PreTrainedModel, door: dict[str, Any]) -> None:
    expected = target.generate(prompt_ids(8), **GREEDY)
    with scripted(expected, 1.0):
        options = door | {"ddtree": {"budget": 15}}
        out = target.generate(prompt_ids(8), return_dict_in_generate=True, **GREEDY, **options)
    assert isinstance(out, GenerateDDTreeOutput)
    assert out.sequences.tolist() == expected.tolist()
    assert out.ddtree_stats.budgets[0] == 15
    assert out.ddtree_stats.mean_acceptance_length > 4


@installed
def test_options_of_the_tree_pass(target: PreTrainedModel, door: dict[str, Any]) -> None:
    out = target.generate(prompt_ids(8), ddtree={"budget": 7}, return_dict_in_generate=True, **GREEDY, **door)
    assert out.ddtree_stats.budgets[0] == 7
    assert out.sequences.tolist() == target.generate(prompt_ids(8), **GREEDY).tolist()


@installed
def test_processors_criteria_and_streamer_pass(target: PreTrainedModel, door: dict[str, Any]) -> None:
    def run(**extra: Any) -> tuple[list[Any], list[Any]]:
        calls = _Events()
        out = target.generate(
            prompt_ids(8),
            logits_processor=LogitsProcessorList([calls]),
            stopping_criteria=StoppingCriteriaList([calls]),
            streamer=calls,
            **GREEDY,
            **extra,
        )
        return out.tolist(), calls.events

    expected, events = run()
    with scripted(expected[0], 0.8):
        assert run(**door) == (expected, events)
    assert len(expected[0]) == 20
    assert events[-1] == "end"


@installed
def test_a_tokenizer_passes(target: PreTrainedModel, door: dict[str, Any]) -> None:
    words = {word: i for i, word in enumerate(["<unk>", *(f"w{i}" for i in range(1, VOCAB - 1)), "abcdef"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")))
    text = target.generate(prompt_ids(8), **GREEDY)
    options: dict[str, Any] = GREEDY | {"stop_strings": [tokenizer.decode(text[0, 15])], "tokenizer": tokenizer}
    expected = target.generate(prompt_ids(8), **options)
    assert expected.shape[1] < text.shape[1]
    with scripted(text, 0.8):
        assert target.generate(prompt_ids(8), **options, **door).tolist() == expected.tolist()


@installed
def test_a_model_loaded_from_a_repository_with_the_folder_uses_it(
    target: PreTrainedModel, door: dict[str, Any], tmp_path: Path
) -> None:
    """transformers makes the folder's function the `generate` of that one model."""
    expected = target.generate(prompt_ids(8), **GREEDY)
    repository = tmp_path / "repository"
    target.save_pretrained(repository)
    shutil.copytree(DOOR, repository, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=True)
    options: dict[str, Any] = {"assistant_model": door["assistant_model"], "return_dict_in_generate": True} | GREEDY
    for value in (True, {"budget": 5}):
        out = model.generate(prompt_ids(8), ddtree=value, **options)
        assert out.sequences.tolist() == expected.tolist()
        assert out.ddtree_stats.budgets[0] == (7 if value is True else 5)
    assert model.generate(prompt_ids(8), **options).ddtree_stats.rounds > 0
    assert model.generate(prompt_ids(8), ddtree=False, **GREEDY).tolist() == expected.tolist()
    with pytest.raises(ValueError, match="needs a drafter"):
        model.generate(prompt_ids(8), **GREEDY)


@installed
def test_an_older_package_is_refused_by_the_requirements(
    target: PreTrainedModel, door: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(ImportError, match=r"hf-ddtree>=0\.1\.0 \(installed: 0\.0\.1\)"):
        target.generate(prompt_ids(8), **GREEDY, **door)


def test_the_function_is_short() -> None:
    assert len((DOOR / "custom_generate" / "generate.py").read_text().splitlines()) < 30


# -- processes that have not imported hf_ddtree ----------------------------------------------------------------------

_SETUP = f"""
import sys
import torch
from transformers import AutoModelForCausalLM, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor([{prompt_ids(8)[0].tolist()}])
options = {{"do_sample": False, "max_new_tokens": 24}}
expected = model.generate(ids, **options)
drafter = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(
    hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, block_size=8, mask_token_id=3, target_layer_ids=[0, 2], max_position_embeddings=2048,
)).eval()
door = dict(custom_generate={str(DOOR)!r}, trust_remote_code=True, assistant_model=drafter)
assert "hf_ddtree" not in sys.modules
"""

_WITH = """
out = model.generate(ids, ddtree={"budget": 7}, return_dict_in_generate=True, **options, **door)
assert out.sequences.tolist() == expected.tolist()
assert out.ddtree_stats.budgets[0] == 7
import hf_ddtree
hf_ddtree.uninstall()
assert model.generate(ids, **options, **door).tolist() == expected.tolist()
"""

_WITHOUT = """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "hf_ddtree":
            raise ModuleNotFoundError("No module named 'hf_ddtree'", name=name)

sys.meta_path.insert(0, Missing())
try:
    model.generate(ids, **options, **door)
except ImportError as error:
    print(error)
assert model.generate(ids, **options).tolist() == expected.tolist()
"""


def _run(code: str, tmp_path: Path) -> str:
    tiny_target("llama").save_pretrained(tmp_path / "target")
    env = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", _SETUP + code, str(tmp_path / "target")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@installed
def test_a_process_that_never_imported_the_package(tmp_path: Path) -> None:
    _run(_WITH, tmp_path)


def test_without_the_package_one_error_says_how_to_install_it(tmp_path: Path) -> None:
    printed = _run(_WITHOUT, tmp_path)
    assert "hf_ddtree" in printed
    assert "pip install hf_ddtree" in printed
