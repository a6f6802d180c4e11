"""A target on one GPU, split over several by its layers, and by tensor parallelism: the same text, and a round's time.

    python benchmarks/placement.py

Weights are random, in float32, with wide gaps between logits. Drafts are scripted, as in the tests: 9 of 10 tokens of
the text are drafted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.utils.benchmark
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from hf_ddtree import DDTreeConfig, DFlashConfig, DFlashDraftModel
from scripted import scripted
from timing import synchronize

NEW_TOKENS = 128


def save_target(folder: Path) -> None:
    config = Qwen3Config(
        vocab_size=8192, hidden_size=2048, intermediate_size=6144, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, initializer_range=0.2, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def measure(target: Any, name: str) -> list[int]:
    """Plain and tree decoding of one prompt: the new ids, once they are the same."""
    device = target.get_input_embeddings().weight.device
    torch.manual_seed(1)
    config = DFlashConfig.from_target(
        target.config, target_layer_ids=[1, 8, 13], mask_token_id=5, block_size=16, num_hidden_layers=2
    )
    drafter = DFlashDraftModel(config).eval().to(device)
    ids = (torch.arange(64)[None] * 37 % 8000 + 10).to(device)
    call = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    seconds = []
    for _ in range(3):
        synchronize()
        start = torch.utils.benchmark.timer()
        plain = target.generate(ids, **call)
        synchronize()
        seconds.append(torch.utils.benchmark.timer() - start)
    ms = []
    with scripted(plain.sequences, 0.9):
        for execution in ("auto", "auto", "plain"):
            trees = DDTreeConfig(budget=63, execution=execution, record_times=True)
            out = target.generate(ids, assistant_model=drafter, ddtree=trees, **call)
            stats = out.ddtree_stats
            stages = {stage: seconds for stage, seconds in stats.times.items() if stage != "prefill"}
            ms.append((1e3 * sum(stages.values()) / stats.rounds, stats.launch))
    same = out.sequences.tolist() == plain.sequences.tolist()
    print(
        f"{name}: {'same text' if same else 'ANOTHER TEXT'}, {stats.mean_acceptance_length:.2f} tokens a round, "
        f"{ms[1][0]:.2f} ms a round ({ms[1][1]}), launched plainly {ms[2][0]:.2f} ms, plain decoding "
        f"{1e3 * sorted(seconds)[1] / NEW_TOKENS:.2f} ms a token",
        flush=True,
    )
    assert same
    return plain.sequences[0, 64:].tolist()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank-of", type=Path, help="be one rank of tensor parallelism over the target saved there")
    rank_of = parser.parse_args(argv).rank_of
    if rank_of is not None:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        target = AutoModelForCausalLM.from_pretrained(rank_of, dtype=torch.float32, tp_plan="auto")
        rank = torch.distributed.get_rank()
        new = measure(target, f"tensor parallel, rank {rank}")
        (rank_of / f"rank{rank}.txt").write_text(json.dumps(new))
        torch.distributed.destroy_process_group()
        return
    gpus = torch.cuda.device_count()
    if gpus < 2:
        sys.exit("This benchmark needs two GPUs.")
    print(
        f"{gpus} x {torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_target(folder)
        load = {"pretrained_model_name_or_path": folder, "dtype": torch.float32}
        texts = [measure(AutoModelForCausalLM.from_pretrained(**load).cuda().eval(), "one GPU")]
        half = dict.fromkeys(range(gpus), "3GiB")
        split = AutoModelForCausalLM.from_pretrained(**load, device_map="auto", max_memory=half)
        print(f"layers on {sorted(map(str, set(split.hf_device_map.values())))}")
        assert len(set(split.hf_device_map.values())) > 1
        texts.append(measure(split, "split by layers"))
        del split
        command = ["torchrun", "--standalone", f"--nproc-per-node={gpus}", __file__, "--rank-of", name]
        subprocess.run(command, check=True)
        texts += [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.txt"))]
    assert all(text == texts[0] for text in texts) and len(texts) == 2 + gpus
    print("the same text everywhere")


if __name__ == "__main__":
    main()
