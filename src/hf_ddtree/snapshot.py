"""What a model is made of when a call begins, in one walk: it tells whether graphs of earlier calls still hold."""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as _module
from transformers import PreTrainedConfig

from .anatomy import modules_of
from .dynamo import is_own_forward

# Attributes of modules that a graph has baked in, by their types.
_NUMBER, _FUNCTION, _TENSOR = range(3)
_KINDS = dict.fromkeys((bool, int, float, str), _NUMBER)
_KINDS |= dict.fromkeys((FunctionType, BuiltinFunctionType, MethodType, functools.partial), _FUNCTION)
_KINDS[torch.Tensor] = _TENSOR
_HARMLESS = ("transformers.utils.output_capturing", "hf_ddtree.verifier")  # hooks that write what they were asked for


class Snapshot(NamedTuple):
    """What matters of a model to a graph of its forward."""

    # Changes with all that a graph has baked in: modules, their numbers and functions, configs, and where weights lie.
    # To be compared itself: -1 and -2 have one hash.
    fingerprint: tuple[Any, ...]
    devices: frozenset[torch.device]  # of parameters
    hooked: bool  # whether something runs around a module's forward that a graph would not repeat
    adapted: bool  # whether adapters are in it


def take_snapshot(model: nn.Module) -> Snapshot:
    """Look at all modules of a model. Each call waits for this: one walk, no generators."""
    seen: list[Any] = []
    devices: set[torch.device] = set()
    configs: dict[int, Any] = {}
    hooks: list[Any] = [*_module._global_forward_hooks.values(), *_module._global_forward_pre_hooks.values()]
    hooked = adapted = False
    for module in modules_of(model):
        own = vars(module)
        seen += (id(module), type(module), id(type(module).forward))
        for value in own.values():
            kind = _KINDS.get(type(value))
            if kind is None:
                continue
            if kind == _NUMBER:
                seen.append(value)
            elif kind == _FUNCTION:
                seen.append(id(getattr(value, "__func__", value)))  # of methods there is a new one at any time
            else:
                seen += (id(value), value.data_ptr(), value.dtype)
        for tensor in own["_parameters"].values():
            if tensor is not None:
                seen += (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.stride())
                devices.add(tensor.device)
        for tensor in own["_buffers"].values():
            if tensor is not None:
                seen += (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.stride())
        hooks += own["_forward_hooks"].values()
        hooks += own["_forward_pre_hooks"].values()
        hooked = hooked or ("forward" in own and not is_own_forward(module, own["forward"]))
        adapted = adapted or type(module).__module__.startswith("peft.")
        if (config := own.get("config")) is not None:
            configs[id(config)] = config
    for config in configs.values():  # those within it are some module's
        seen.append(str([(name, x) for name, x in vars(config).items() if not isinstance(x, PreTrainedConfig)]))
    hooked = hooked or any(getattr(hook, "__module__", None) not in _HARMLESS for hook in hooks)
    return Snapshot(tuple(seen), frozenset(devices), hooked, adapted)
