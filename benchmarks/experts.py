"""Which implementation of the experts of a mixture is fastest, by the number of a round's rows.

    python benchmarks/experts.py                  # a few layers of Qwen3-30B-A3B's shapes, on a GPU
    python benchmarks/experts.py --shapes tiny    # anywhere, in seconds: that it runs, not how fast

Stock `generate` changes to `batched_mm` for its steps of one row. A round has as many rows as its tree has nodes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.utils.benchmark
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_ddtree import DDTreeConfig, DFlashConfig, DFlashDraftModel
from round_cost import round_ms
from timing import synchronize

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "vocab_size": 32000, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 128, "hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8,
        "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8,
    },
}  # fmt: skip


def make_pair(shapes: str, device: torch.device) -> tuple[Any, Any]:
    """A target and a one-layer drafter with blocks of 16, random."""
    config = Qwen3MoeConfig(**SHAPES[shapes], eos_token_id=None, decoder_sparse_step=1, mlp_only_layers=[])
    with device:
        torch.set_default_dtype(torch.bfloat16)
        target = Qwen3MoeForCausalLM(config).eval()
        drafter = DFlashDraftModel(
            DFlashConfig.from_target(config, target_layer_ids=[1], mask_token_id=5, block_size=16, num_hidden_layers=1)
        ).eval()
        torch.set_default_dtype(torch.float32)
    return target, drafter


def forward_ms(target: Any, rows: int) -> float:
    """Median time of a forward without a cache, launched operation by operation."""
    ids = torch.randint(10, target.config.vocab_size, (1, rows), device=target.device)
    seconds = []
    for _ in range(9):
        synchronize()
        start = torch.utils.benchmark.timer()
        with torch.no_grad():
            target(ids, use_cache=False)
        synchronize()
        seconds.append(torch.utils.benchmark.timer() - start)
    return 1e3 * sorted(seconds[2:])[3]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--budgets", type=int, nargs="+", default=[0, 15, 63, 255])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--implementations", nargs="+", default=["eager", *ALL_EXPERTS_FUNCTIONS])
    arguments = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    target, drafter = make_pair(arguments.shapes, device)
    where = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, {arguments.shapes}, bfloat16")
    print(f"default: {target.get_experts_implementation()}")
    ids = torch.randint(10, target.config.vocab_size, (1, 128), device=device)
    for implementation in arguments.implementations:
        for budget in arguments.budgets:
            try:
                target.set_experts_implementation(implementation)
                alone = forward_ms(target, budget + 1)
                call = {"ddtree": DDTreeConfig(budget=budget), "do_sample": False}
                round_ms(target, drafter, ids, 1, 4, **call)
                row = round_ms(target, drafter, ids, 1, arguments.rounds, **call)
            except Exception as error:
                print(f"{implementation:12} {budget:4} nodes: {type(error).__name__} {str(error)[:90]!r}", flush=True)
                break
            print(
                f"{implementation:12} {budget:4} nodes: a round {row['ms']:.2f} ms, a forward launched plainly "
                f"{alone:.2f} ms ({row['launch']})",
                flush=True,
            )


if __name__ == "__main__":
    main()
