"""Shadows of models: modules of their own over the same weights, with another attention and compiled layers.

What has to differ for captured rounds is so never seen by the models' other users.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import Rows, tree_attention

ATTENTION = "hf_ddtree"


# What layers pass on that says nothing of the scores, or what the rows say already.
_WITHOUT_EFFECT = (
    "sliding_window is_causal position_ids use_cache cache_position output_attentions output_hidden_states "
    "output_router_logits return_dict logits_to_keep"
).split()

# A compiler that saw the rows would copy them in order to change them: it gets a number instead, in a tensor on the
# host, since it would compile anew for each number that it can read.
_ROWS: dict[int, Rows] = {}
_calls: Counter[int] = Counter()  # of a layer's attention, by the number of its rows
_numbers = itertools.count()


@torch.library.custom_op("hf_ddtree::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    number: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows = _ROWS[int(number)]
    _calls[int(number)] += 1
    for new, kept in ((key, rows.keys), (value, rows.values)):
        if (new.shape[:2], new.shape[3], new.dtype) != (kept.shape[:2], kept.shape[3], kept.dtype):
            raise NotImplementedError("attention over other keys or values than the cache keeps")
    return tree_attention(query, key, value, rows, scaling, softcap, sinks)


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over a shadow's rows, whose masks stand in them.

    Raises:
        NotImplementedError: The layer asks for something that changes the scores in another way.
    """
    if attention_mask is not None and attention_mask.numel() > 1:  # what is passed in has one element
        raise NotImplementedError("attention that makes a mask of its own")
    for name, given in kwargs.items():
        if name not in _WITHOUT_EFFECT and (isinstance(given, torch.Tensor) or given):
            raise NotImplementedError(f"attention with `{name}`")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attend(query, key, value, module.hf_ddtree_rows, scaling, softcap, s_aux), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)


def shadow(model: Any) -> Any:
    """The same module tree over the same parameters, with hooks and configs of its own."""
    modules: dict[int, nn.Module] = {}
    configs: dict[int, Any] = {}

    def config_of(config: Any) -> Any:
        if id(config) not in configs:
            configs[id(config)] = own = copy.copy(config)
            own._attn_implementation_internal = ATTENTION
        return configs[id(config)]

    def copied(module: nn.Module) -> nn.Module:
        if id(module) not in modules:
            twin = modules[id(module)] = module.__class__.__new__(module.__class__)
            twin.__dict__ = {
                name: config_of(value) if name == "config" else value
                for name, value in vars(module).items()
                if name not in ("_compiled_call_impl", "forward", "_hf_ddtree_state")
            }
            twin.__dict__["_modules"] = {
                name: child if child is None else copied(child) for name, child in module._modules.items()
            }
            twin.__dict__["_buffers"] = dict(module._buffers)  # a rotary embedding may rewrite its own
            for hooks in ("_forward_hooks", "_forward_pre_hooks"):
                twin.__dict__[hooks] = OrderedDict()
            twin.__dict__["_compiled_call_impl"] = None
        return modules[id(module)]

    return copied(model)


def compile_layers(layers: Iterable[nn.Module], rows: int, join_linears: bool = False) -> None:
    """
    Compile a shadow's layers for inputs of `rows` rows, once for all that are alike.

    Args:
        join_linears: Linear layers over one input become one launch.
    """
    for layer in layers:
        kind: Any = type(layer)
        layer.__dict__["forward"] = functools.partial(_compiled_forward(kind, rows, join_linears), layer)


@functools.cache
def _compiled_forward(kind: Any, rows: int, join_linears: bool) -> Callable[..., Any]:
    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(layer, *args, **kwargs)

    # A code object of its own: what is compiled for one size does not count against the limit of another.
    own = FunctionType(
        forward.__code__.replace(), forward.__globals__, f"forward_of_{rows}", closure=forward.__closure__
    )
    options: dict[str, Any] | None = None
    if join_linears:
        from .linear import JoinLinears

        options = {"post_grad_custom_pre_pass": JoinLinears()}
    return torch.compile(own, dynamic=False, fullgraph=True, options=options)


@contextmanager
def each_attends_once(layers: Iterable[nn.Module]) -> Iterator[None]:
    """A forward of a shadow, all of whose layers must have attended to their rows, and once.

    Raises:
        NotImplementedError: A layer has attention of its own, or is run several times.
    """
    numbers = [int(layer.__dict__["hf_ddtree_rows"]) for layer in layers]
    for number in numbers:
        _calls[number] = 0
    yield
    if any(_calls[number] != 1 for number in numbers):
        raise NotImplementedError("layers with attention of their own")


def give_rows(owner: Any, layer: nn.Module, rows: Rows) -> None:
    """Let a shadow's layer attend to these rows, as long as `owner` lives."""
    number = next(_numbers)
    _ROWS[number] = rows
    for kept in (_ROWS, _calls):
        weakref.finalize(owner, kept.pop, number, None)
    for module in layer.modules():
        module.__dict__["hf_ddtree_rows"] = torch.tensor(number, device="cpu")
