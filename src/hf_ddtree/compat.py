"""Every difference between transformers versions, and nowhere else. Imports nothing of the package."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import transformers
from packaging.version import Version
from transformers.generation.utils import GenerateDecoderOnlyOutput

if TYPE_CHECKING:
    from transformers import Cache

TESTED = ("5.17", "5.24")
_VERSION = Version(transformers.__version__)

#: The keyword of the cache in `forward`, in the mask functions, in `model_kwargs` and in generation outputs.
CACHE_KEY = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"

#: The names of layers whose keys an indexer chooses; the second is an older one.
INDEXED_KINDS = ("indexed_attention", "deepseek_sparse_attention")

#: What older versions pass on to each step, though only a prompt's positions are made from it.
IMAGE_MEASURES = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")


def warn_if_untested() -> None:
    """Warn once when the installed transformers is outside the tested range."""
    release = Version(f"{_VERSION.major}.{_VERSION.minor}")
    if not Version(TESTED[0]) <= release <= Version(TESTED[1]):
        warnings.warn(
            f"hf_ddtree was tested with transformers {TESTED[0]} to {TESTED[1]}; {transformers.__version__} is "
            "installed. Check its output against plain generate once.",
            stacklevel=3,
        )


def hidden_states_request(layer_ids: tuple[int, ...]) -> list[int]:
    """The value of `output_hidden_states` that makes a forward return the outputs of these decoder layers.

    Since 5.23 the indices are those of the usual tuple (0 is the embedding); before, index i was layer i's output.
    """
    return [i + 1 if Version("5.23") <= _VERSION else i for i in layer_ids]


def requested_hidden_states(hidden_states: tuple[Any, ...], layer_ids: tuple[int, ...]) -> list[Any]:
    """The entries of a model output's `hidden_states` that `hidden_states_request(layer_ids)` asked for."""
    return [hidden_states[i] for i in hidden_states_request(layer_ids)]


def decoder_only_output(cls: type, cache: Cache | None, **fields: Any) -> Any:
    """Build a generation output whose cache field has this version's name."""
    return cls(**{CACHE_KEY: cache}, **fields)


class CacheAlias:
    """Makes the cache of a generation output readable under both names."""

    if CACHE_KEY == "past_key_values":

        @property
        def cache(self) -> Any:
            return self.past_key_values  # type: ignore[attr-defined]
