"""One rank of a tensor-parallel target: each writes its texts. Started by torchrun, see `test_placement.py`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import AutoModelForCausalLM

import hf_ddtree  # noqa: F401
from scripted import prompt_ids, scripted, tiny_drafter


def compare(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    whole = AutoModelForCausalLM.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto")
    drafter = tiny_drafter(whole)
    options = {"max_new_tokens": 40, "return_dict_in_generate": True} | options
    outputs = []
    for target in (whole, model):
        torch.manual_seed(5)
        outputs.append(target.generate(prompt_ids(20), **options))
    torch.manual_seed(5)
    with scripted(outputs[0].sequences, 0.9):
        out = model.generate(prompt_ids(20), assistant_model=drafter, ddtree=True, **options)
    part = model.model.layers[0].mlp.up_proj.weight.to_local()
    return {
        "sharded": part.numel() < whole.model.layers[0].mlp.up_proj.weight.numel(),
        "one process": outputs[0].sequences.tolist(),
        "plain": outputs[1].sequences.tolist(),
        "trees": out.sequences.tolist(),
        "acceptance": out.ddtree_stats.mean_acceptance_length,
        "budgets": out.ddtree_stats.budgets,
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    results = [
        compare(folder / family, options)
        for family in ("llama", "qwen3")
        for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 50})
    ]
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
