"""Where a target keeps what decoding needs of it: its decoder, its layers, their kinds and their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules in a model, each once. Each call waits for this: no generators."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += [child for child in module.__dict__["_modules"].values() if child is not None]
    return list(found.values())


def decoder_layers(model: Any) -> nn.ModuleList:
    """The target's decoder layers; see `find_decoder`."""
    return find_decoder(model)[1]


def find_decoder(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The module that returns the target's last hidden states, and its list of layers.

    That is the first list of `num_hidden_layers` modules; where a layer counts several times, since it fills several
    layers of a cache, the only list of transformers' decoder layers.

    Raises:
        ValueError: There is no such list.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    starts = (model.get_decoder(), model.base_model)
    for start in starts:
        for owner, layers in _lists(start, start):
            if len(layers) == count:
                return owner, layers
    for start in starts:
        found = [(owner, layers) for owner, layers in _lists(start, start) if count % len(layers) == 0]
        found = [x for x in found if all(isinstance(layer, GradientCheckpointingLayer) for layer in x[1])]
        if len(found) == 1:
            return found[0]
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers to take features from.")


def _lists(module: nn.Module, owner: nn.Module) -> Iterator[tuple[nn.Module, nn.ModuleList]]:
    """The lists of modules in a module, its own before its children's, each with the innermost model around it."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    children = list(module.children())
    for child in children:
        if isinstance(child, nn.ModuleList) and len(child):
            yield owner, child
    for child in children:
        if not isinstance(child, nn.ModuleList):
            yield from _lists(child, owner)


def cache_index(layer: nn.Module, place: int) -> int:
    """The layer of a cache to which a decoder layer writes: the one that it names, else that at its place.

    Raises:
        NotImplementedError: It names several.
    """
    named = {i for module in layer.modules() if isinstance(i := getattr(module, "layer_idx", None), int)}
    if len(named) > 1:
        raise NotImplementedError("a decoder layer that writes to several layers of a cache")
    return named.pop() if named else place


def layer_kinds(config: Any) -> list[tuple[str, int | None]]:
    """Each decoder layer's kind and its sliding window or chunk, `None` for attention to everything before."""
    sizes = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kind = next((kind for kind, size in sizes.items() if size is not None), "full_attention")
        kinds = [kind] * config.num_hidden_layers
    return [(kind, sizes.get(kind)) for kind in kinds]


def row_scale_period(config: Any) -> int | None:
    """The rows after which queries are scaled anew, where layers count rows instead of positions (Llama 4)."""
    period: int | None = getattr(config, "floor_scale", None)
    return period if getattr(config, "attn_temperature_tuning", False) else None
