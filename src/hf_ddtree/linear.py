"""Linear layers of compiled graphs, those over one input as one: a pass for inductor, and the operators it puts in."""

from __future__ import annotations

import importlib.util
import operator
from collections import defaultdict
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.nn.functional import linear, silu

aten, prims = torch.ops.aten, torch.ops.prims
_MOST_ROWS = 256  # beyond them products are not bound by reading weights


def _has_kernel(x: torch.Tensor) -> bool:
    return x.is_cuda and importlib.util.find_spec("triton") is not None


@torch.library.custom_op("hf_ddtree::linears", mutates_args=())
def linears(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> list[torch.Tensor]:
    """Linear layers over one input: `(M, K)`, weights `(N_i, K)`, biases `(N_i,)` or none; results `(M, N_i)`."""
    if _has_kernel(x):
        from .linear_kernel import linears_triton

        return linears_triton(x, weights, biases or None)
    return [linear(x, *layer) for layer in zip(weights, *([biases] if biases else []), strict=True)]


@linears.register_fake
def _(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]


@torch.library.custom_op("hf_ddtree::gated_linear", mutates_args=())
def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`: `(M, K)` and twice `(N, K)` give `(M, N)`."""
    if _has_kernel(x):
        from .linear_kernel import gated_linear_triton

        return gated_linear_triton(x, gate, up)
    return silu(linear(x, gate)) * linear(x, up)


@gated_linear.register_fake
def _(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], gate.shape[0])


class JoinLinears(CustomGraphPass):
    """Puts `linears` and `gated_linear` in the place of products by weights; what it does not know stays as it is."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            _replace_gate(graph, node)
        graph.eliminate_dead_code()
        groups: dict[Any, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            if _weight_of(node) is not None:
                groups[_input_of(node), node.target].append(node)
        for products in groups.values():
            if len(products) <= 3:
                _join(graph, products)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.target in targets


def _weight_of(product: Any) -> Node | None:
    """The weight, if this is a product by the transpose of one that the kernel takes."""
    if not _is(product, aten.mm.default, aten.addmm.default) or product.kwargs:
        return None
    *bias, x, transposed = product.args
    if not (_is(transposed, aten.permute.default) and transposed.args[1] == [1, 0]) and not _is(
        transposed, aten.t.default
    ):
        return None
    weight = transposed.args[0]
    if any(node.op not in ("placeholder", "get_attr") for node in (weight, *bias)):
        return None
    tensors = [node.meta["val"] for node in (x, weight, *bias)]
    if len({tensor.dtype for tensor in tensors}) > 1 or not tensors[1].is_contiguous():
        return None
    if bias and tensors[2].shape != tensors[1].shape[:1]:
        return None
    dtypes = (torch.bfloat16, torch.float16, *(() if tensors[0].is_cuda else (torch.float32,)))
    rows = tensors[0].shape[0]
    return weight if tensors[0].dtype in dtypes and isinstance(rows, int) and rows <= _MOST_ROWS else None


def _input_of(product: Node) -> tuple[Any, ...]:
    """The same for products over the same rows, though each layer folds their batch for itself."""
    x: Any = product.args[-2]
    source = x.args[0] if _is(x, aten.reshape.default, aten.view.default) else x
    return source, tuple(x.meta["val"].shape)


def _join(graph: Graph, products: list[Node]) -> None:
    weights = [_weight_of(product) for product in products]
    biases = [product.args[0] for product in products] if len(products[0].args) == 3 else []
    with graph.inserting_before(products[0]):
        joined = graph.call_function(linears._opoverload, (products[0].args[-2], weights, biases))
        joined.meta["val"] = [product.meta["val"] for product in products]
        for index, product in enumerate(products):
            item = graph.call_function(operator.getitem, (joined, index))
            item.meta.update(product.meta)
            product.replace_all_uses_with(item)


def _value(node: Any) -> Any:
    """The same values in another shape, or before they were rounded or widened."""
    while (
        _is(node, aten.reshape.default, aten.view.default)
        or (_is(node, prims.convert_element_type.default) and node.args[1].is_floating_point)
    ):  # fmt: skip
        node = node.args[0]
    return node


def _gate_of(node: Any) -> Any:
    """What `silu` was taken of, in any of the forms that it is decomposed to."""
    if _is(node, aten.silu.default):
        return _value(node.args[0])
    if _is(node, aten.mul.Tensor):
        for x, weight in (node.args, node.args[::-1]):
            weight = _value(weight)
            if _is(weight, aten.sigmoid.default) and _value(weight.args[0]) is _value(x):
                return _value(x)
    if _is(node, aten.div.Tensor):
        x, total = node.args
        if _is(total, aten.add.Tensor) and total.args[1:] == (1,) and not total.kwargs:
            power = total.args[0]
            if _is(power, aten.exp.default) and _is(power.args[0], aten.neg.default):
                return _value(x) if _value(power.args[0].args[0]) is _value(x) else None
    return None


def _replace_gate(graph: Graph, node: Node) -> None:
    """Put `gated_linear` in the place of `silu(gate) * up` of one input."""
    if not _is(node, aten.mul.Tensor) or len(node.args) != 2:
        return
    for gated, up in (node.args, node.args[::-1]):
        gate, up = _gate_of(_value(gated)), _value(up)
        weights = _weight_of(gate), _weight_of(up)
        if None in weights or gate is up or len(gate.args) + len(up.args) != 4 or _input_of(gate) != _input_of(up):
            continue
        value, shape = gate.meta["val"], node.meta["val"].shape
        if up.meta["val"].shape != value.shape or node.meta["val"].dtype != value.dtype:
            continue
        if shape.numel() != value.numel():
            continue
        with graph.inserting_before(node):
            joined = graph.call_function(gated_linear._opoverload, (gate.args[0], *weights))
            joined.meta["val"] = value
            folded = graph.call_function(aten.reshape.default, (joined, list(shape)))
            folded.meta.update(node.meta)
            node.replace_all_uses_with(folded)
        return
