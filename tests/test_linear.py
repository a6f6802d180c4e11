"""The pass that joins linear layers of a compiled graph."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu
from transformers import Qwen2Config, Qwen3Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from hf_ddtree import linear as joined
from hf_ddtree.shadow import compile_layers

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often products are in a compiled graph, joined or not."""
    counts: Counter[str] = Counter()
    join = joined.JoinLinears.__call__

    def counting(self: Any, graph: torch.fx.Graph) -> None:
        join(self, graph)
        graph.lint()
        for node in graph.nodes:
            name = str(node.target)
            if any(word in name for word in ("mm", "linear")):
                counts["gated" if node.args[-1] is True else name] += 1

    monkeypatch.setattr(joined.JoinLinears, "__call__", counting)
    monkeypatch.setattr(joined.JoinLinears, "uuid", lambda self: None)  # nothing from a cache
    torch.compiler.reset()
    return counts


def run_compiled(function: Any, *args: Any) -> Any:
    options = {"post_grad_custom_pre_pass": joined.JoinLinears()}
    with torch.no_grad():
        return torch.compile(function, dynamic=False, fullgraph=True, options=options)(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_layer(kind: str, dtype: torch.dtype, operators: Counter[str]) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(head_dim=16, **SIZES) if kind == "qwen3" else Qwen2Config(**SIZES)
    config._attn_implementation = "sdpa"
    make: Any = Qwen3DecoderLayer if kind == "qwen3" else Qwen2DecoderLayer
    layer = make(config, 0).to(dtype).eval().requires_grad_(False)
    x, rope = torch.randn(1, 7, 64).to(dtype), torch.randn(2, 1, 7, 16).to(dtype)
    kwargs = {"position_embeddings": (rope[0], rope[1]), "attention_mask": None}
    with torch.no_grad():
        expected = layer(x, **kwargs)
        compile_layers([layer], rows=7, join_linears=True)
        output = layer(x, **kwargs)
    error = (output.float() - expected.float()).norm() / expected.float().norm()
    assert error < (1e-6 if dtype == torch.float32 else 5e-3)  # compiled code rounds less
    assert operators == {"hf_ddtree.linears.default": 1, "gated": 1, "aten.mm.default": 2}  # the last: o and down


def test_what_is_left_alone(operators: Counter[str]) -> None:
    torch.manual_seed(0)
    x, *weights = torch.randn(6, 32, 32)

    def function(x: torch.Tensor, weights: list[torch.Tensor], apart: torch.Tensor) -> list[torch.Tensor]:
        many = torch.cat([x] * 9)
        return [
            *(linear(x, weight) for weight in weights[:4]),  # more than the kernel takes
            *(linear(x + 1, weight * 2) for weight in weights[:2]),  # no weights, but computed
            *(linear(x + 2, weight) for weight in (apart, weights[0])),
            *((x + 3) @ weight for weight in weights[:2]),
            *(linear(many, weight) for weight in weights[:2]),
            linear(x + 4, weights[0]),  # alone
        ]

    apart = torch.randn(32, 32).T
    torch.testing.assert_close(run_compiled(function, x, weights, apart), function(x, weights, apart))
    assert operators == {"aten.mm.default": 13}


def test_many_rows_are_left_alone_where_products_are_large(
    operators: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "_MOST_RESULTS", 200 * 2 * 64)
    _, *weights = torch.randn(4, 64, 64)

    def function(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        more = x + 1
        return [*(linear(x, weight) for weight in weights), silu(linear(more, weights[0])) * linear(more, weights[1])]

    found = []
    for rows in (128, 200, 201, 257):
        operators.clear()
        torch.compiler.reset()
        run_compiled(function, torch.randn(rows, 64), weights)
        found.append((operators["gated"], operators["hf_ddtree.linears.default"]))
    assert found == [(1, 1), (1, 0), (0, 0), (0, 0)]


def test_gates_of_other_forms(operators: Counter[str]) -> None:
    torch.manual_seed(0)
    x, gate, up = torch.randn(3, 16, 16)
    functions = (
        lambda x, gate, up: linear(x, up) * silu(linear(x, gate)),
        lambda x, gate, up: (g := linear(x, gate)) * torch.sigmoid(g) * linear(x, up),
        lambda x, gate, up: (g := linear(x, gate)) / (torch.exp(-g) + 1) * linear(x, up),
        lambda x, gate, up: silu(linear(x, gate)) * linear(x + 1, up),  # not of one input
        lambda x, gate, up: torch.sigmoid(linear(x, gate)) * linear(x, up),
        lambda x, gate, up: (g := linear(x, gate)) / (torch.exp(-g) + 2) * linear(x, up),
        lambda x, gate, up: silu(g := linear(x, gate)) * g,
        lambda x, gate, up: silu(linear(x, gate)).flatten()[:16] * linear(x, up),
        lambda x, gate, up: silu(linear(x, gate))[:, None] * linear(x, up),
    )
    found = []
    for function in functions:
        operators.clear()
        torch.testing.assert_close(run_compiled(function, x, gate, up), function(x, gate, up))
        found.append(operators["gated"])
    assert found == [1, 1, 1, 0, 0, 0, 0, 0, 0]


def test_the_operator_is_well_formed() -> None:
    x, *weights = torch.randn(3, 16, 16)
    for biases, gated in (([], False), ([x[0], x[1]], False), ([], True)):
        args = (x, weights, biases, gated)
        torch.library.opcheck(joined.linears, args, test_utils=("test_schema", "test_faketensor"))
