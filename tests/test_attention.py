"""The attention of a round: plain tensors against eager attention, the kernel against plain tensors."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from hf_ddtree.attention import Rows, tree_attention, tree_attention_folded, tree_attention_reference
from hf_ddtree.verifier import tree_mask
from hf_ddtree.visibility import Visibility
from interpreter import INTERPRETED, run_interpreted, starts_the_interpreter

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from hf_ddtree.attention_kernel import Blocks, tree_attention_triton
else:

    def tree_attention_triton(*args: Any, blocks: Any = None) -> torch.Tensor:
        raise NotImplementedError

    def Blocks(*args: int) -> None:
        """Nothing: what needs it is skipped."""


@dataclass
class Case:
    """Shapes and options of one call."""

    batch: int = 1
    heads: int = 4
    kv_heads: int = 2
    queries: int = 5
    columns: int = 5
    slots: int = 64
    dim: int = 16
    value_dim: int = 16
    length: int = 20
    padding: int = 0
    kind: str = "sliding_attention"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def inputs(self) -> dict[str, Any]:
        """Random arguments; the rows that nobody may read are NaN."""
        torch.manual_seed(0)
        batch, kv_heads, slots = self.batch, self.kv_heads, self.slots
        rows = torch.randn(2, batch, slots, kv_heads, max(self.dim, self.value_dim)).transpose(2, 3)
        length = torch.tensor([max(self.length - 3 * b, self.padding) for b in range(batch)])
        committed = torch.ones(batch, slots, dtype=torch.bool)
        committed[0, : self.padding] = False
        for b in range(batch):
            rows[:, b, :, length[b] :] = torch.nan
        rows[:, 0, :, : self.padding] = torch.nan
        depths = torch.randint(0, 6, (batch, max(self.queries, self.columns)))
        depths[:, 0] = 0
        new = torch.randn(3, batch, max(self.queries, self.columns), self.heads, max(self.dim, self.value_dim))
        new = new.transpose(2, 3)
        visible = torch.rand(batch, self.queries, self.columns) < 0.4
        visible.diagonal(0, 1, 2).fill_(True)
        inputs = {
            "query": new[0, :, :, : self.queries, : self.dim],
            "key": new[1, :, :kv_heads, : self.columns, : self.dim],
            "value": new[2, :, :kv_heads, : self.columns, : self.value_dim],
            "key_rows": rows[0, ..., : self.dim],
            "value_rows": rows[1, ..., : self.value_dim],
            "length": length,
            "visible": visible,
            "depths": depths[:, : self.queries],
            "column_depths": depths[:, : self.columns],
            "committed": committed,
            "scaling": self.dim**-0.5,
            "kind": self.kind,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": torch.randn(self.heads) if self.sinks else None,
        }
        for name, given in inputs.items():
            if isinstance(given, torch.Tensor):
                inputs[name] = given.to(self.device, self.dtype if given.is_floating_point() else given.dtype)
        return inputs


def seen(inputs: dict[str, Any]) -> Visibility:
    fields = ("kind", "window", "length", "committed", "visible", "depths", "column_depths")
    return Visibility.of(*(inputs[name] for name in fields))


def arguments(inputs: dict[str, Any]) -> tuple[Any, ...]:
    """What `tree_attention` takes."""
    return (
        *(inputs[name] for name in ("query", "key", "value")),
        Rows(inputs["key_rows"], inputs["value_rows"]),
        seen(inputs),
        inputs["scaling"],
        inputs["softcap"],
        inputs["sinks"],
    )


def call(attend: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, and the rows as they are afterwards."""
    own = inputs | {name: inputs[name].clone() for name in ("key_rows", "value_rows")}
    output = attend(*arguments(own))
    return output, own["key_rows"], own["value_rows"]


def eager(inputs: dict[str, Any]) -> torch.Tensor:
    """As transformers' eager attention computes it, from the additive mask."""
    query, length = inputs["query"], inputs["length"]
    columns = inputs["key"].shape[2]
    outputs = []
    for b in range(query.shape[0]):
        start = int(length[b])
        stop = start + columns
        keys, values = (
            torch.cat([inputs[f"{name}_rows"][b, :, :start].nan_to_num(), inputs[name][b]], 1).repeat_interleave(
                query.shape[1] // inputs["key"].shape[1], 0
            )
            for name in ("key", "value")
        )
        all_ = seen(inputs)
        first = None if all_.first is None else all_.first[b : b + 1]
        own = Visibility(all_.length[b : b + 1], all_.committed[b : b + 1, :stop], first, all_.visible[b : b + 1])
        mask = tree_mask(own, torch.float32)[0]
        scores = query[b] @ keys.transpose(1, 2) * inputs["scaling"]
        if inputs["softcap"] is not None:
            scores = torch.tanh(scores / inputs["softcap"]) * inputs["softcap"]
        scores = scores + mask
        if inputs["sinks"] is not None:
            sinks = inputs["sinks"][:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32)[..., :stop]
        outputs.append((weights @ values).transpose(0, 1))
    return torch.stack(outputs)


CASES = {
    "plain": Case(),
    "nothing committed": Case(length=0),
    "one query": Case(heads=1, kv_heads=1, queries=1, columns=1),
    "padding": Case(padding=7),
    "padding alone": Case(length=9, padding=9),
    "window": Case(window=4),
    "window in a batch": Case(batch=2, window=9, padding=14),
    "chunks": Case(kind="chunked_attention", window=4, padding=3),
    "a chunk that begins with the root": Case(kind="chunked_attention", window=8, padding=4),
    "chunks in a batch": Case(kind="chunked_attention", batch=2, window=9, length=30, padding=14),
    "odd sizes": Case(heads=9, kv_heads=3, queries=7, columns=7, dim=12, value_dim=20, slots=75, length=67),
    "one K/V head": Case(kv_heads=1, dim=96, value_dim=64),
    "no groups": Case(kv_heads=4),
    "softcap": Case(softcap=2.0, window=8),
    "sinks": Case(sinks=True),
    "everything": Case(batch=2, padding=3, window=12, softcap=3.0, sinks=True),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_eager_attention(name: str) -> None:
    inputs = CASES[name].inputs()
    output, key_rows, value_rows = call(tree_attention, inputs)
    torch.testing.assert_close(output, eager(inputs))
    assert output.is_contiguous()
    for rows, new, before in ((key_rows, "key", "key_rows"), (value_rows, "value", "value_rows")):
        expected = inputs[before].clone()
        for b, length in enumerate(inputs["length"].tolist()):
            expected[b, :, length : length + inputs[new].shape[2]] = inputs[new][b]
        assert torch.equal(rows.nan_to_num(9), expected.nan_to_num(9))


def finite(inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of `tree_attention` that speak of slots which hold numbers alone."""
    slots = int(inputs["length"]) + inputs["key"].shape[2]
    rows = {name: inputs[name].nan_to_num() for name in ("key_rows", "value_rows")}
    query, key, value, kept, who, *rest = arguments(inputs | rows | {"committed": inputs["committed"][:, :slots]})
    return query, key, value, kept, replace(who, start=int(inputs["length"])), *rest


FOLDED = [name for name, case in CASES.items() if case.batch == 1 and case.softcap is None and not case.sinks]


@pytest.mark.parametrize("name", FOLDED)
def test_folded_equals_eager_attention(name: str) -> None:
    inputs = CASES[name].inputs()
    output = tree_attention_folded(*finite(inputs)[:6])
    torch.testing.assert_close(output, eager(inputs))
    assert torch.equal(tree_attention(*finite(inputs)), output)
    assert output.is_contiguous()


def compare(case: Case, attend: Any, tolerance: float) -> None:
    """What `attend` gives is what plain tensors give, in a norm of the whole."""
    inputs = case.inputs()
    inputs["visible"][:, -1] = False  # sees the committed rows alone
    output, *rows = call(attend, inputs)
    exact, *exact_rows = call(tree_attention_reference, inputs)
    assert distance(output, exact) < tolerance
    for ours, theirs in zip(rows, exact_rows, strict=True):
        assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9))
    assert output.is_contiguous() and output.dtype == exact.dtype


def distance(output: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, in a norm of the whole; NaN where either is."""
    return float((output.double() - exact.double()).norm() / exact.double().norm())


def check_spoilt_columns(attend: Any) -> None:
    """NaN or infinity in a new column reaches the queries that see it, and no others."""
    inputs = Case(batch=2, columns=7).inputs()
    inputs["visible"][:, :, 3] = torch.tensor([True, False, True, False, False])
    clean, *_ = call(attend, inputs)
    for name, bad in (("key", torch.nan), ("value", torch.nan), ("value", torch.inf)):
        spoilt = inputs[name].clone()
        spoilt[:, 0, 3, 1] = bad
        output, *_ = call(attend, inputs | {name: spoilt})
        seeing, others = output[:, ::2, :2], output[:, 1::2]  # heads 0 and 1 share the first K/V head
        assert not seeing[:, 0].isfinite().any() and not seeing[:, 1, :, 1].isfinite().any()
        torch.testing.assert_close(others[:, :1], clean[:, 1::2][:, :1])
        torch.testing.assert_close(output[:, :, 2:], clean[:, :, 2:])


def check_rows_that_see_nothing(attend: Any) -> None:
    inputs = Case(sinks=True, length=9, padding=9).inputs()
    inputs["visible"][:, 2] = False
    for sinks in (inputs["sinks"], None):
        output, *_ = call(attend, inputs | {"sinks": sinks})
        assert output.isfinite().all()
        assert not output[:, 2].any() and output[:, 1].all()


def test_spoilt_columns() -> None:
    check_spoilt_columns(tree_attention)


def test_rows_that_see_nothing() -> None:
    check_rows_that_see_nothing(tree_attention)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_refuses_rows_of_another_dtype_and_rows_that_lie_apart() -> None:
    inputs = Case().inputs()
    with pytest.raises(TypeError, match="float16"):
        call(tree_attention_triton, inputs | {"key_rows": inputs["key_rows"].half()})
    with pytest.raises(ValueError, match="stride"):
        tree_attention_triton(*arguments(inputs | {"key_rows": inputs["key_rows"].mT.contiguous().mT}))


INTERPRETED_CASES: dict[str, tuple[Case, Blocks | None]] = {
    **{name: (case, Blocks(16, 16, 7, 4, 1)) for name, case in CASES.items()},
    "chosen blocks": (CASES["everything"], None),
    "long": (Case(slots=1400, length=1300, padding=2), Blocks(16, 128, 1, 4, 1)),
    "float16": (Case(dtype=torch.float16, queries=17, columns=17, slots=99, length=80), None),
}


@pytest.mark.skipif(not INTERPRETED, reason="run by test_kernel_under_the_interpreter")
@pytest.mark.parametrize("name", INTERPRETED_CASES)
def test_interpreted_kernel(name: str) -> None:
    case, blocks = INTERPRETED_CASES[name]
    compare(case, partial(tree_attention_triton, blocks=blocks), 1e-6 if case.dtype == torch.float32 else 1e-3)


@pytest.mark.skipif(not INTERPRETED, reason="run by test_kernel_under_the_interpreter")
@pytest.mark.parametrize("check", [check_spoilt_columns, check_rows_that_see_nothing])
def test_interpreted_kernel_of(check: Any) -> None:
    check(tree_attention_triton)


@starts_the_interpreter
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_kernel_under_the_interpreter() -> None:
    run_interpreted(__file__, "interpreted_kernel")


ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON or INTERPRETED, reason="needs CUDA and Triton"),
]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LLAMA = Case(heads=32, kv_heads=8, dim=128, value_dim=128, device="cuda")
GPU_CASES = {
    **{name: replace(case, device="cuda") for name, case in CASES.items()},
    **{
        f"{queries} queries, {columns} columns, {length} rows": replace(
            LLAMA, queries=queries, columns=columns, length=length, slots=slots
        )
        for queries, columns in ((16, 16), (16, 32), (64, 64), (128, 128), (256, 256), (17, 17))
        for length, slots in ((3, 512), (512, 2048), (1777, 2048))
    },
    "many rows": replace(LLAMA, queries=16, columns=16, length=16384, slots=32768),
    "many rows and queries": replace(LLAMA, queries=128, columns=128, length=8192, slots=16384),
    "long window": replace(LLAMA, queries=64, columns=64, length=3000, slots=4096, window=1024, padding=2500),
    "window in a batch of 4": replace(LLAMA, batch=4, queries=32, columns=32, length=700, slots=1024, window=100),
    "padding": replace(LLAMA, queries=64, columns=64, length=3000, slots=4096, padding=1500, softcap=30.0, sinks=True),
    "head dimension 64": replace(LLAMA, dim=64, value_dim=64, queries=64, columns=64, length=700, slots=1024),
    "head dimension 96": replace(LLAMA, dim=96, value_dim=96, queries=64, columns=64, length=700, slots=1024),
    "head dimension 256": replace(LLAMA, dim=256, value_dim=256, queries=64, columns=64, length=700, slots=1024),
    "head dimension 512": replace(LLAMA, dim=512, value_dim=512, queries=64, columns=64, length=700, slots=1024),
    "9 heads": replace(
        LLAMA, heads=9, kv_heads=3, dim=64, value_dim=64, queries=64, columns=64, length=700, slots=1024
    ),
    "one head": replace(LLAMA, heads=32, kv_heads=1, queries=64, columns=64, length=700, slots=1024),
    "no groups": replace(LLAMA, heads=8, kv_heads=8, queries=64, columns=64, length=700, slots=1024),
}


class TestOnGPU:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize("name", GPU_CASES)
    def test_kernel_equals_plain_tensors(self, name: str, dtype: torch.dtype) -> None:
        compare(replace(GPU_CASES[name], dtype=dtype), tree_attention, TOLERANCES[dtype])

    @pytest.mark.parametrize("check", [check_spoilt_columns, check_rows_that_see_nothing])
    def test_what_is_not_seen(self, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        inputs = Case.inputs
        monkeypatch.setattr(Case, "inputs", lambda case: inputs(replace(case, device="cuda")))
        check(tree_attention)

    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize("window", [None, 300])
    @pytest.mark.parametrize("queries", [16, 64, 256])
    def test_one_graph_serves_every_length(self, queries: int, window: int | None, dtype: torch.dtype) -> None:
        case = replace(LLAMA, queries=queries, columns=queries, slots=2048, length=700, window=window, dtype=dtype)
        inputs = replace(case, batch=2).inputs()
        rows = [inputs[name].nan_to_num(0.1) for name in ("key_rows", "value_rows")]
        own = inputs | {name: torch.empty_like(inputs[name]) for name in ("key_rows", "value_rows")}
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            tree_attention(*arguments(own))
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = tree_attention(*arguments(own))
        for lengths in ((700, 1), (1792, 100), (0, 0), (63, 64), (65, 1500), (700, 1)):
            own["length"].copy_(torch.tensor(lengths))
            for name, kept in zip(("key_rows", "value_rows"), rows, strict=True):
                own[name].copy_(kept)
                for b, length in enumerate(lengths):
                    own[name][b, :, length:] = torch.nan
            expected, *_ = call(tree_attention_reference, own)
            output.fill_(torch.nan)
            graph.replay()
            assert distance(output, expected) < TOLERANCES[dtype], lengths

    def test_never_waits_for_the_device(self) -> None:
        inputs = GPU_CASES["padding"].inputs()
        call(tree_attention, inputs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(tree_attention, inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
