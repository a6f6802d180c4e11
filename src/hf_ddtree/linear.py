"""Linear layers of compiled graphs, those over one input as one: a pass for inductor, and the operator it puts in."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.nn.functional import linear, silu

aten, prims = torch.ops.aten, torch.ops.prims
# Products of more rows are less bound by reading weights: cuBLAS is as fast, at first for large ones.
_MOST_ROWS, _MANY_ROWS, _MOST_RESULTS = 256, 128, 2**21


@torch.library.custom_op("hf_ddtree::linears", mutates_args=())
def linears(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], gated: bool
) -> list[torch.Tensor]:
    """Two or three layers over one input: `(M, K)`, weights `(N_i, K)`, biases `(N_i,)` or none; results `(M, N_i)`.

    If `gated`, weights are gate and up, and the one result is `silu(x @ gate.T) * (x @ up.T)`.
    """
    if x.is_cuda:
        from .linear_kernel import gated_linear_triton, linears_triton

        if gated:
            return [gated_linear_triton(x, weights[0], weights[1])]
        return linears_triton(x, weights, biases or None)
    outputs = [linear(x, *layer) for layer in zip(weights, *([biases] if biases else []), strict=True)]
    return [silu(outputs[0]) * outputs[1]] if gated else outputs


@linears.register_fake
def _(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], gated: bool) -> list[torch.Tensor]:
    return [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights[: 1 if gated else None]]


class JoinLinears(CustomGraphPass):
    """Puts `linears` in the place of two or three products by weights, or of gate and up."""

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            pair = _gate_and_up(node)
            if pair and _pays(pair):
                _join(graph, pair, [node], gated=True)
        graph.eliminate_dead_code()
        groups: dict[Any, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            if _is_linear(node):
                groups[_input_of(node)].append(node)
        for products in groups.values():
            if len(products) in (2, 3) and _pays(products):
                _join(graph, products, products, gated=False)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.target in targets


def _is_known(device: torch.device) -> bool:
    """Whether the kernel's gain was measured on such devices."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _is_linear(product: Any) -> bool:
    """Whether this is a product by the transpose of a weight, of few enough rows, that the kernel takes."""
    if not _is(product, aten.mm.default, aten.addmm.default) or product.kwargs:
        return False
    *bias, x, transposed = product.args
    if not _is(transposed, aten.permute.default) or transposed.args[1] != [1, 0]:
        return False
    parameters = [transposed.args[0], *bias]
    value, weight, *biases = (node.meta["val"] for node in (x, *parameters))
    return (
        all(node.op == "placeholder" for node in parameters)
        and all(tensor.dtype == value.dtype and tensor.is_contiguous() for tensor in (weight, *biases))
        and all(tensor.shape == weight.shape[:1] for tensor in biases)
        and value.shape[0] <= _MOST_ROWS
        and (not value.is_cuda or (value.dtype.itemsize == 2 and _is_known(value.device)))
    )


def _pays(products: list[Node]) -> bool:
    """Whether the kernel was faster than cuBLAS for products of this size."""
    values = [product.meta["val"] for product in products]
    return values[0].shape[0] <= _MANY_ROWS or sum(value.numel() for value in values) <= _MOST_RESULTS


def _input_of(product: Node) -> tuple[Any, ...]:
    """The same for products over the same rows, though each layer folds their batch for itself."""
    x: Any = product.args[-2]
    return x.args[0] if _is(x, aten.reshape.default) else x, x.meta["val"].shape, product.target


def _behind(node: Any, *targets: Any) -> Any:
    """What these operators, the last of them first, took: the same values in another shape, or not yet rounded."""
    while _is(node, aten.reshape.default) or (
        _is(node, prims.convert_element_type.default) and node.args[1].is_floating_point
    ):
        node = node.args[0]
    if not targets:
        return node
    return _behind(node.args[0], *targets[1:]) if _is(node, targets[0]) else None


def _gate_of(silu: Any) -> Any:
    """What `silu` was taken of, in either of the forms that versions of torch decompose it to."""
    if _is(silu, aten.mul.Tensor):
        for x, weight in (silu.args, silu.args[::-1]):
            if _behind(weight, aten.sigmoid.default) is _behind(x):
                return _behind(x)
    if _is(silu, aten.div.Tensor):
        gate, total = _behind(silu.args[0]), _behind(silu.args[1])
        if _behind(total, aten.add.Tensor, aten.exp.default, aten.neg.default) is gate and total.args[1:] == (1,):
            return gate
    return None


def _gate_and_up(node: Node) -> list[Node]:
    """Both products, if this is `silu(gate) * up`, else none."""
    for gated, other in (node.args, node.args[::-1]) if _is(node, aten.mul.Tensor) else ():
        gate, up = _gate_of(_behind(gated)), _behind(other)
        if _is_linear(gate) and _is_linear(up) and gate is not up and _input_of(gate) == _input_of(up):
            values = [product.meta["val"] for product in (gate, up, node)]
            alike = len({(value.dtype, value.numel()) for value in values}) == 1  # nothing was repeated to fit
            return [gate, up] if alike and gate.target == aten.mm.default else []
    return []


def _join(graph: Graph, products: list[Any], results: list[Node], gated: bool) -> None:
    weights = [product.args[-1].args[0] for product in products]
    biases = [bias for product in products for bias in product.args[:-2]]
    with graph.inserting_before(results[0]):
        joined = graph.call_function(linears._opoverload, (products[0].args[-2], weights, biases, gated))
        joined.meta["val"] = [product.meta["val"] for product in products[: len(results)]]
        for index, result in enumerate(results):
            item = graph.call_function(operator.getitem, (joined, index))
            item.meta["val"] = joined.meta["val"][index]
            folded = graph.call_function(aten.reshape.default, (item, list(result.meta["val"].shape)))
            folded.meta.update(result.meta)
            result.replace_all_uses_with(folded)
