"""The target's forward: the only place that runs the target, with its feature taps and tree masks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from .anatomy import find_decoder, layer_kinds, row_scale_period
from .compat import CACHE_KEY
from .draft_tree import TreeRows, single_row
from .target_state import uncompiled
from .tree_cache import TreeCache
from .visibility import KINDS, Visibility

OUTPUTS = ("output_hidden_states", "output_attentions")  # what `generate` passes on to each forward
_MOST_ROWS = 2048  # of features at a time; a tree has fewer


@dataclass
class _Recording:
    taps: FeatureTaps
    chunks: dict[int, list[torch.Tensor]]
    shape: tuple[int, ...] = ()  # (B, chunk) of the present forward
    already_run: set[int] = field(default_factory=set)  # layers that it has run


class FeatureTaps:
    """Forward hooks on the tap layers, live only inside `recording()`.

    The last layer is tapped after the final norm, as transformers' own DFlash sees it. Of a layer that a forward runs
    several times the last output counts; where layers pass on several streams, their mean. A processor's own forward,
    an inner `generate` and other threads find another recording, or none, and write nowhere.
    """

    _current: ContextVar[_Recording | None] = ContextVar("hf_ddtree_recording", default=None)

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        decoder, layers = find_decoder(model)
        self._handles = [
            (decoder if i == len(layers) - 1 else layers[i]).register_forward_hook(self._hook(i))
            for i in self.layer_ids
        ]
        self._handles.append(decoder.register_forward_pre_hook(self._begin, with_kwargs=True))

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_dynamo_compiling():  # what others compile meanwhile, without the taps
            return
        current = self._current.get()
        if current is not None and current.taps is self:
            inputs = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
            current.shape = inputs.shape[:2]
            current.already_run.clear()

    def _hook(self, layer_id: int) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            if torch.compiler.is_dynamo_compiling():
                return
            current = self._current.get()
            if current is None or current.taps is not self:
                return
            state = output if isinstance(output, torch.Tensor) else output[0]
            if state.dim() == 4:
                state = state.mean(dim=2 if state.shape[:2] == current.shape else 0)
            if layer_id in current.already_run:
                current.chunks[layer_id].pop()
            current.already_run.add(layer_id)
            current.chunks[layer_id].append(state)

        return record

    @contextmanager
    def recording(self) -> Iterator[dict[int, list[torch.Tensor]]]:
        """Collect what the tap layers return: per layer, one `(B, chunk, H)` tensor a forward."""
        recording = _Recording(self, {layer_id: [] for layer_id in self.layer_ids})
        token = self._current.set(recording)
        try:
            yield recording.chunks
        finally:
            self._current.reset(token)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Constants(NamedTuple):
    """What is the same in all steps of a call."""

    types: dict[str, torch.Tensor]  # (B, 1) token types of every new token
    offset: torch.Tensor | None = None  # (B, 1) or (axes, B, 1), see `place`

    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """Where the target places tokens: on several axes, or further on than their number.

        Args:
            positions: `(B, N)`, behind the prompt's.

        Returns:
            `(B, N)` or `(axes, B, N)`.
        """
        return positions if self.offset is None else positions + self.offset

    def clone(self) -> Constants:
        offset = None if self.offset is None else self.offset.clone()
        return Constants({name: types.clone() for name, types in self.types.items()}, offset)

    def copy_(self, other: Constants) -> None:
        for name, types in self.types.items():
            types.copy_(other.types[name])
        if self.offset is not None and other.offset is not None:
            self.offset.copy_(other.offset)

    def of_rows(self, rows: int) -> dict[str, torch.Tensor]:
        """The token types of `rows` rows."""
        return {name: types.expand(-1, rows) for name, types in self.types.items()}


class Features:
    """
    The tap layers' outputs, handed out once, some rows at a time: a long prompt's in one piece would take much memory.

    Args:
        layers: Of each tap layer, a `(B, chunk, H)` tensor a forward.
    """

    def __init__(self, layers: list[list[torch.Tensor]]) -> None:
        self._layers = layers
        self.rows = sum(part.shape[1] for part in layers[0])

    def __iter__(self) -> Iterator[torch.Tensor]:
        """`(B, rows, taps * H)` each, where the first tap layer is."""
        while self._layers[0]:
            parts = [layer.pop(0) for layer in self._layers]
            for rows in zip(*(part.split(_MOST_ROWS, dim=1) for part in parts), strict=True):
                yield torch.cat([row.to(rows[0].device) for row in rows], dim=-1)


class Verification(NamedTuple):
    """What one target call over a tree gives; row 0 is the root, row i + 1 node i."""

    logits: torch.Tensor  # (B, N + 1, V), the target's dtype
    features: torch.Tensor  # (B, N + 1, taps * H)
    rows: TreeRows
    outputs: Any  # the model's own output, for hidden states and attentions


class Verifier:
    """
    One target call: ids, positions, mask -> logits and features. What the caller compiled of the target is put aside
    until `close`, as long as there are hooks on it.

    Args:
        model: The target.
        layer_ids: Tap layers.
        cache: Where the rows go.
        model_kwargs: As `generate` prepared them; a cache among them may hold earlier turns.
        prompt_device: Where the prompt's ids are.
    """

    def __init__(
        self,
        model: Any,
        layer_ids: Sequence[int],
        cache: TreeCache,
        model_kwargs: dict[str, Any],
        prompt_device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self.model = model
        self.cache = cache
        self._open = ExitStack()
        self._open.enter_context(uncompiled(model))
        self.taps = FeatureTaps(model, layer_ids)
        self._open.callback(self.taps.remove)
        self.config = model.config.get_text_config(decoder=True)
        self.dtype = model.dtype
        self.device = input_device(model.get_input_embeddings(), prompt_device)
        self.output_kwargs = {name: flag for name, flag in model_kwargs.items() if name in OUTPUTS}
        self.prompt_mask: torch.Tensor | None = None  # (B, slots) bool, False where the prompt is padded
        self.scale_period = row_scale_period(self.config)
        kinds = layer_kinds(self.config)
        self.layer_windows = [window for _, window in kinds]  # a layer
        self.windows = dict(kinds)  # a kind
        self.step_kwargs: dict[str, Any] = {}  # what the caller passes to each forward besides
        self.constants = Constants({})
        self.prompt_positions = torch.empty(1, 0, dtype=torch.long)  # (B, new slots)
        self.plain_only = False  # whether only plain steps see the columns that plain decoding's see
        self.drops_cache = False  # whether the next step has to be a plain one as well
        self.recomputed = False  # whether the rows of the caller's cache have been replaced

    def plain_step(
        self, input_ids: torch.Tensor, position: torch.Tensor, model_kwargs: dict[str, Any]
    ) -> Verification:
        """One step as plain decoding makes it, for the place where a model may drop its own cache.

        Phi-3 recomputes all rows when it passes its rope switch; it then gets our cache, empty. The tree left open is
        the root alone.

        Args:
            input_ids: `(1, L)`, the root last.
            position: `(1, 1)`, the root's.
            model_kwargs: As `generate` prepared them for the prompt.
        """
        step_kwargs = model_kwargs | {CACHE_KEY: self.cache}
        prompt_positions = model_kwargs["position_ids"]
        since = torch.arange(int(position - self.prompt_positions[:, -1:]), device=prompt_positions.device) + 1
        step_kwargs["position_ids"] = torch.cat([prompt_positions, prompt_positions[..., -1:] + since], dim=-1)
        if (mask := model_kwargs.get("attention_mask")) is not None:
            step_kwargs["attention_mask"] = torch.nn.functional.pad(mask, (0, len(since)), value=1)
        inputs = self.model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **step_kwargs)
        if dropped := inputs.get(CACHE_KEY) is None:
            if getattr(users := model_kwargs.get(CACHE_KEY), "_is_user_defined", False) and not self.recomputed:
                self.cache.export(users)  # as plain decoding leaves it behind
            self.cache.reset()
            inputs[CACHE_KEY], self.recomputed = self.cache, True
        already = self.cache.length
        self.cache.reserve(already + inputs["input_ids"].shape[1])
        with self.taps.recording() as chunks:
            outputs = self.model(**inputs, return_dict=True)
        *_, features = self.features(chunks, self.cache.length - already)
        # Some versions of Phi-3 run the last token alone, and drop the cache again at every later step.
        self.drops_cache = dropped and self.cache.length < input_ids.shape[1]
        self.cache.crop(-1)
        self.cache.settle()
        rows = single_row(self.device)
        self.cache.open(rows)
        return Verification(outputs.logits[:, -1:], features[:, -1:], rows, outputs)

    def verify(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: TreeRows, layers: Any | None = None
    ) -> Verification:
        """Run a tree through the target, its rows open in the cache.

        Args:
            token_ids: `(B, N + 1)`, root first.
            positions: `(B, 1)`, the root's position; a node's is its depth further on.
            rows: Who sees whom.
            layers: A [`ShadowTarget`], in place of the model's own layers.
        """
        ancestors, depths = rows.ancestors, rows.depths
        slots = self.cache.length + token_ids.shape[1]
        self.cache.reserve(slots)
        self.cache.open(rows)
        if layers is not None:
            logits, features = layers.forward(token_ids, positions + depths, ancestors, depths, self.constants, slots)
            return Verification(logits, features, rows, None)
        length = depths.new_full(depths.shape[:1], self.cache.length)
        committed = ancestors.new_ones(depths.shape[0], self.cache.view)
        if self.prompt_mask is not None:
            committed[:, : self.prompt_mask.shape[1]] = self.prompt_mask
        masks = {
            kind: tree_mask(Visibility.of(kind, size, length, committed, ancestors, depths), self.dtype)
            for kind, size in self.windows.items()
        }
        with self.taps.recording() as chunks:
            outputs = self.model(
                input_ids=token_ids,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                position_ids=self.constants.place(positions + depths),
                use_cache=True,
                return_dict=True,
                **{CACHE_KEY: self.cache},
                **self.output_kwargs,
                **self.step_kwargs,
                **self.constants.of_rows(token_ids.shape[1]),
            )
        (features,) = self.features(chunks, token_ids.shape[1])
        return Verification(outputs.logits, features, rows, outputs)

    @property
    def most_nodes(self) -> int:
        """Nodes that a tree behind the next root may have."""
        if self.scale_period is None:
            return sys.maxsize
        return self.scale_period - 1 - (self.cache.length + 1) % self.scale_period

    def why_not_ours(self) -> str | None:
        """What of the target our attention cannot do."""
        if not set(self.windows) <= set(KINDS):
            return f"layers of the kind {', '.join(sorted(self.windows))}"
        if self.scale_period is not None:
            return "attention goes by the number of a row"
        if not all(layer.is_initialized for layer in self.cache.layers):
            return "layers have no keys of their own"
        return None

    def idle(self, root: torch.Tensor, position: torch.Tensor) -> None:
        """A forward that commits nothing, for the ranks that wait for it (`synced_gpus`)."""
        self.verify(root, position, single_row(root.device))
        self.cache.close()

    def close(self) -> None:
        self._open.close()

    def features(self, chunks: dict[int, list[torch.Tensor]], rows: int) -> Features:
        """What the tap layers gave for so many rows.

        Raises:
            RuntimeError: A layer gave nothing or too little, as when something bypasses the hooks.
        """
        for layer_id, parts in chunks.items():
            if (given := sum(part.shape[1] for part in parts)) != rows or not parts:
                got = f"{given} rows" if parts else "nothing"
                raise RuntimeError(f"Layer {layer_id} of the target gave {got} instead of features for {rows} rows.")
        return Features(list(chunks.values()))


def input_device(module: Any, given: torch.device) -> torch.device:
    """Where a module takes its input: an offloaded one's weight is on "meta", and its hook moves what it is given.

    A quantized module's weight may go by any name.
    """
    device: torch.device = next(itertools.chain(module.parameters(), module.buffers())).device
    return given if device.type == "meta" else device


def tree_mask(seen: Visibility, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask of a forward over the model's own layers, `(B, 1, Q, S)`."""
    return seen.mask(1, dtype)
