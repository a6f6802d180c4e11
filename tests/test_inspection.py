"""`python -m hf_ddtree inspect`: what a checkpoint is, whether it fits, and one clear line where there is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel
from typer.testing import CliRunner

from hf_ddtree import DFlashDraftModel, inspection
from hf_ddtree.__main__ import app
from scripted import VOCAB, tiny_drafter, tiny_target
from test_drafters import REQUIRED, speculators, zlab

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}


@pytest.fixture
def folder(target: PreTrainedModel, tmp_path: Path) -> Path:
    tiny_drafter(target, **SLIDING).save_pretrained(tmp_path / "drafter")
    target.config.save_pretrained(tmp_path / "target")
    return tmp_path / "drafter"


def inspect(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def edit(folder: Path, **overrides: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | overrides))


def test_it_says_what_a_drafter_is_and_that_it_fits(folder: Path) -> None:
    result = inspect(folder, folder.parent / "target")
    assert result.exit_code == 0, result.output
    for line in (
        "format        flat",
        "layers        2: 1 full, 1 sliding (window 12)",
        "taps          0, 2 of the target's 4 layers",
        "block size    8",
        "mask token    3",
        "rope          rope_theta 10000.0, rope_type default",
        "widths        hidden 48, 4 heads of 12 (2 of keys), MLP 96",
        f"vocabulary    {VOCAB}",
        "parameters    46,416 (F32), 0.2 MiB",
        "can be used with",
    ):
        assert line in result.output
    parameters = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert parameters == 46416
    assert inspect(folder).exit_code == 0


def test_no_weight_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(DFlashDraftModel, "from_pretrained", fail)
    opened = safetensors.safe_open

    class Headers:
        def __init__(self, *arguments: Any) -> None:
            self.file = opened(*arguments)

        def __enter__(self) -> Headers:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def keys(self) -> Any:
            return self.file.keys()

        def get_slice(self, name: str) -> Any:
            return self.file.get_slice(name)

    monkeypatch.setattr(inspection, "safe_open", Headers)
    assert inspect(folder, folder.parent / "target").exit_code == 0


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"hidden_size": 64}, "hidden size is 48; this target's is 64"),
        ({"vocab_size": 99}, f"vocabulary is {VOCAB}; this target's is 99"),
        ({"num_hidden_layers": 2}, "number of target layers is 4; this target's is 2"),
        ({"num_hidden_layers": 2}, "taps layer 2, and the target has layers 0 to 1"),
        ({"vocab_size": 2}, "mask token id 3 lies beyond the 2 rows"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_with_both_values(
    overrides: dict[str, Any], line: str, folder: Path, tmp_path: Path
) -> None:
    tiny_target("llama", **{"num_hidden_layers": 4} | overrides).config.save_pretrained(tmp_path / "other")
    result = inspect(folder, tmp_path / "other")
    assert result.exit_code == 1
    assert line in result.output and "cannot be used" in result.output


def test_weights_that_do_not_fit_the_config_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["norm.weight"]
    weights |= {"lm_head.weight": torch.zeros(2), "fc.weight": torch.zeros(48, 48)}
    save_file(weights, folder / "model.safetensors")
    result = inspect(folder)
    assert result.exit_code == 1
    for line in (
        "missing weights: norm.weight",
        "unexpected weights: lm_head.weight",
        "fc.weight is (48, 48), and the config makes it (48, 96)",
    ):
        assert line in result.output


def test_sharded_weights_are_read_and_a_missing_shard_is_named(folder: Path, target: PreTrainedModel) -> None:
    (folder / "model.safetensors").unlink()
    tiny_drafter(target, **SLIDING).save_pretrained(folder, max_shard_size="60KB")
    assert inspect(folder).exit_code == 0
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.unlink()
    result = inspect(folder)
    assert result.exit_code == 1 and f"names {shard.name}, which is not there" in result.output


def test_every_form_is_known(folder: Path, target: PreTrainedModel, tmp_path: Path) -> None:
    drafter = tiny_drafter(target, **SLIDING)
    (folder / "config.json").write_text(json.dumps(zlab(drafter)))
    assert "format        z-lab" in inspect(folder).output
    drafted = torch.arange(VOCAB) % 3 == 0
    weights = drafter.state_dict() | {
        "t2d": drafted,
        "d2t": torch.zeros(71).long(),
        "lm_head.weight": torch.zeros(71, 48),
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(speculators(drafter, draft_vocab_size=71)))
    result = inspect(folder, folder.parent / "target")
    assert result.exit_code == 0, result.output
    for line in ("format        speculators", "drafts 71", "taps          0, 2", "trained for   someone/target"):
        assert line in result.output
    config = MuseGlimmerAssistantConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=12, **REQUIRED,
    )  # fmt: skip
    MuseGlimmerAssistantModel(config).save_pretrained(tmp_path / "muse")
    result = inspect(tmp_path / "muse", folder.parent / "target")
    assert result.exit_code == 0 and "transformers' own (muse_glimmer_assistant)" in result.output


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2 drafter"),
        ({"mask_token_id": None}, "no `mask_token_id`"),
        ({"attention_sink_bias": True}, "`attention_sink_bias` is True"),
        ({"block_size": 1}, "`block_size` must be at least 2"),
        ({"target_layer_ids": ["a"]}, "target_layer_ids"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_a_config_that_cannot_be_loaded_says_why(overrides: dict[str, Any], line: str, folder: Path) -> None:
    edit(folder, **overrides)
    result = inspect(folder)
    assert result.exit_code == 1
    assert line in result.output


def test_what_is_no_drafter_is_told_so(folder: Path) -> None:
    result = inspect(folder.parent / "target")
    assert result.exit_code == 1
    assert "no drafter: model_type is 'llama'" in result.output


def test_a_path_with_nothing_to_read_gives_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    broken, cut = tmp_path / "broken", tmp_path / "cut"
    shutil.copytree(folder, broken)
    (broken / "config.json").write_text("{")
    shutil.copytree(folder, cut)
    (cut / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    for arguments, line in (
        ([tmp_path / "nothing"], "There is no directory"),
        ([tmp_path / "empty"], "There is no config.json in"),
        ([broken], "config.json' is not a valid JSON file"),
        ([cut], "no whole safetensors file"),
        ([folder, tmp_path / "nothing"], "There is no directory"),
        (["not a name!"], "not a name!"),
    ):
        result = inspect(*arguments)
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
        assert line in result.output
        assert len(result.output.strip().splitlines()) == 1


def test_weights_in_another_format_are_not_enough(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    result = inspect(folder)
    assert result.exit_code == 1
    assert "only safetensors are loaded" in result.output
