"""Shadows of models: modules of their own over the same weights, with another attention and compiled layers.

What has to differ for captured rounds is so never seen by the models' other users.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from .anatomy import cache_index, decoder_layers, layer_kinds
from .attention import ATTENTION, attending, give_rows
from .tree_cache import TreeCache
from .verifier import Constants, FeatureTaps
from .visibility import Visibility


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


class ShadowTarget:
    """
    A target whose layers attend to a cache's rows.

    Args:
        model: The target, or a shadow of it.
        layer_ids: Tap layers.
        cache: The rows; its buffers are there already.
        committed: `(1, S)` bool, False for rows that hold padding; those beyond do not.
    """

    def __init__(self, model: Any, layer_ids: Iterable[int], cache: TreeCache, committed: torch.Tensor) -> None:
        self.model = shadow(model)
        self.layers = decoder_layers(self.model)
        self.taps = FeatureTaps(self.model, tuple(layer_ids))
        self.length, self.committed = cache.count.tensor, committed
        self.layer_kinds = layer_kinds(model.config.get_text_config(decoder=True))
        self.kinds = dict(self.layer_kinds)
        for place, layer in enumerate(self.layers):
            give_rows(self, layer, cache.layers[cache_index(layer, place)])
        # What layers see is told otherwise; 4D masks are passed on as they are.
        unused = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=committed.device)
        self.mask = dict.fromkeys(self.kinds, unused) if len(self.kinds) > 1 else unused

    def compile(self, rows: int) -> None:
        """Compile the layers for forwards of so many rows."""
        compile_layers(self.layers, rows, join_linears=self.committed.device.type == "cuda")

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
        depths: torch.Tensor,
        constants: Constants | None = None,
        slots: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run tokens over the rows of the cache.

        Args:
            token_ids, positions: `(1, N)`.
            visible, depths: As in `Visibility.of`.
            constants: Of the call.
            slots: Those that are looked at, where the host knows, which hold numbers; else those of `committed`.

        Returns:
            Logits `(1, N, V)` and features `(1, N, taps * H)`.
        """
        constants = constants or Constants({})
        committed = self.committed
        if slots is not None:
            committed = torch.nn.functional.pad(committed, (0, slots - committed.shape[1]), value=True)
        seen = {
            kind: Visibility.of(kind, size, self.length, committed, visible, depths)
            for kind, size in self.kinds.items()
        }
        if slots is None:
            return self._run(token_ids, positions, seen, constants)
        start = slots - token_ids.shape[1]
        known = {kind: replace(one, start=start) for kind, one in seen.items()}
        logits, features = self._run(token_ids, positions, known, constants)
        if bool(logits[..., 0].isnan().any()):  # a row's own, or one that a mask let through
            return self._run(token_ids, positions, seen, constants)
        return logits, features

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, seen: dict[str, Visibility], constants: Constants
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_layers = [seen[kind] for kind, _ in self.layer_kinds]
        with self.taps.recording() as chunks, attending(self.layers, of_layers):
            output = self.model(
                input_ids=token_ids,
                position_ids=constants.place(positions),
                attention_mask=self.mask,
                use_cache=False,
                return_dict=True,
                **constants.of_rows(token_ids.shape[1]),
            )
        return output.logits, torch.cat([parts[0] for parts in chunks.values()], dim=-1)
