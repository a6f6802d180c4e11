from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import demo
import smollm2
import visualize
from hf_ddtree import DFlashConfig, DFlashDraftModel, DraftTree
from hf_ddtree.outputs import DDTreeStats, RoundTree


def test_demo_shows_texts_speeds_and_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = smollm2.load_target()
    config = DFlashConfig.from_target(
        target.config, target_layer_ids=[1, 14], mask_token_id=16, block_size=8, num_hidden_layers=1
    )
    DFlashDraftModel(config).save_pretrained(tmp_path)
    capsys.readouterr()
    prompts = ["Say hello.", "What is 1 + 1?"]
    options = ["--dtype", "float32", "--max-new-tokens", "8", "--budget", "5"]
    demo.main(["--drafter", str(tmp_path), *options, "--prompts", *prompts])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[")] == [f"[1/2] {prompts[0]}", f"[2/2] {prompts[1]}"]
    assert sum("tokens/s" in line for line in lines) == 5
    assert sum(line.startswith("    speedup ") and line.endswith(", same text") for line in lines) == 2
    assert any(line.startswith("└─") for line in lines)
    assert lines[-1].startswith("All prompts: generate ")
    assert "same text 2 of 2" in lines[-1]


def test_pictures_of_a_generation(tmp_path: Path) -> None:
    target = smollm2.load_target()
    config = DFlashConfig.from_target(
        target.config, target_layer_ids=[1, 14], mask_token_id=16, block_size=8, num_hidden_layers=1
    )
    DFlashDraftModel(config).save_pretrained(tmp_path)
    options = ["Say hello.", "--drafter", str(tmp_path), "--max-new-tokens", "4", "--budget", "5"]
    for suffix, begin in ((".html", "<!doctype html>"), (".svg", "<svg"), (".dot", "digraph"), (".txt", '"')):
        file = tmp_path / f"picture{suffix}"
        visualize.main([*options, "--output", str(file), *(["--round", "1"] if suffix == ".dot" else [])])
        assert file.read_text(encoding="utf-8").startswith(begin)
    for wrong in (["--output", "picture.png"], ["--output", "picture.svg", "--round", "9"]):
        with pytest.raises(SystemExit):
            visualize.main([*options, *wrong])


def test_texts_that_part_are_explained() -> None:
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).eval()
    ids = torch.tensor([[1, 2, 3]])
    plain, tree = demo.Run([4, 5, 6], 1.0, None), demo.Run([4, 5, 7], 1.0, DDTreeStats())
    assert demo.compare_texts(target, ids, plain, plain) == "same text"
    with torch.no_grad():
        first, second = target(torch.tensor([[1, 2, 3, 4, 5]])).logits[0, -1].topk(2).values.tolist()
    message = demo.compare_texts(target, ids, plain, tree)
    assert message.startswith(f"the texts part at token 3, where the best two logits differ by {first - second:.2g} ")


def test_most_telling_round_prefers_long_paths_then_branches() -> None:
    tree = DraftTree(
        torch.tensor([[5, 6, 7, 8]]),
        torch.tensor([[-1, 0, -1, 2]]),
        torch.tensor([[1, 2, 1, 2]]),
        torch.tensor([[0.6, 0.5, 0.3, 0.2]]).log(),
    ).pad(6)
    assert tree.log_probs[0, -1] == -math.inf
    rounds = [RoundTree(1, tree, path) for path in ([], [2], [0, 1], [2, 3])]
    assert demo.most_telling_round([DDTreeStats(trees=rounds[:2])]).path == [2]
    assert demo.most_telling_round([DDTreeStats(trees=rounds[:2]), DDTreeStats(trees=rounds[2:])]).path == [2, 3]
    assert demo.most_telling_round([DDTreeStats(trees=rounds[:3])]).path == [0, 1]
