"""Shadows of models: modules of their own over the same weights, with another attention and compiled layers.

What has to differ for captured rounds is so never seen by the models' other users.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .attention import ATTENTION


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
