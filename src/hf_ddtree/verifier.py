"""The target's forward: the only place that runs the target, with its feature taps and tree masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import GenerationConfig

from .compat import CACHE_KEY
from .draft_tree import ancestor_matrix, node_depths
from .target_state import uncompiled
from .tree_cache import TreeCache

_STEP_INPUTS = ("input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict", CACHE_KEY)
# Token types, and what `generate` gives a new token: the prompt's last, or (in a multimodal model) text.
_TOKEN_TYPES = {"token_type_ids": torch.clone, "mm_token_type_ids": torch.zeros_like}
_OUTPUTS = ("output_hidden_states", "output_attentions")  # what `generate` passes on to each forward


class FeatureTaps:
    """Forward hooks on the tap layers, live only inside `recording()`.

    The last layer is tapped after the final norm, as transformers' own DFlash sees it. A processor's own forward, an
    inner `generate` and other threads find another recording, or none, and write nowhere.
    """

    _current: ContextVar[tuple[FeatureTaps, dict[int, list[torch.Tensor]]] | None] = ContextVar(
        "hf_ddtree_recording", default=None
    )

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        layers = decoder_layers(model)
        self._handles = [
            (model.get_decoder() if i == len(layers) - 1 else layers[i]).register_forward_hook(self._hook(i))
            for i in self.layer_ids
        ]

    def _hook(self, layer_id: int) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            current = self._current.get()
            if current is not None and current[0] is self:
                current[1][layer_id].append(output if isinstance(output, torch.Tensor) else output[0])

        return record

    @contextmanager
    def recording(self) -> Iterator[dict[int, list[torch.Tensor]]]:
        """Collect what the tap layers return: per layer, one `(B, chunk, H)` tensor a forward."""
        chunks: dict[int, list[torch.Tensor]] = {layer_id: [] for layer_id in self.layer_ids}
        token = self._current.set((self, chunks))
        try:
            yield chunks
        finally:
            self._current.reset(token)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Verification(NamedTuple):
    """What one target call over a tree gives; row 0 is the root, row i + 1 node i."""

    logits: torch.Tensor  # (B, N + 1, V), the target's dtype
    features: torch.Tensor  # (B, N + 1, taps * H)
    outputs: Any  # the model's own output, for hidden states and attentions


class Verifier:
    """
    One target call: ids, positions, mask -> logits and features.

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
        self.taps = FeatureTaps(model, layer_ids)
        self.config = model.config.get_text_config(decoder=True)
        self.dtype = model.dtype
        self.device = input_device(model.get_input_embeddings(), prompt_device)
        self.output_kwargs = {name: flag for name, flag in model_kwargs.items() if name in _OUTPUTS}
        self.prompt_mask: torch.Tensor | None = None  # (B, slots) bool, False where the prompt is padded
        kinds = layer_kinds(self.config)
        self.layer_windows = [window for _, window in kinds]  # a layer
        self.windows = dict(kinds)  # a kind
        self.step_kwargs: dict[str, Any] = {}  # what the caller passes to each forward besides
        self.step_types: dict[str, torch.Tensor] = {}  # (B, 1) token types, the same for every new token
        self.plain_only = False  # whether only plain steps see the columns that plain decoding's see
        self.drops_cache = False  # whether the next step has to be a plain one as well
        self.recomputed = False  # whether the rows of the caller's cache have been replaced

    def prefill(
        self, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> tuple[Any, torch.Tensor]:
        """Run the prompt through the stock path into our cache.

        Returns:
            The model's output (logits of the last position) and the features `(B, new slots, taps * H)`.
        """
        earlier, mask = model_kwargs.get(CACHE_KEY), model_kwargs.get("attention_mask")
        if earlier is not None and earlier.get_seq_length() > 0:
            self.cache.load(earlier)
        self._check_steps(input_ids, model_kwargs)
        already = self.cache.length
        embeds = model_kwargs.get("inputs_embeds")
        self.cache.reserve(already + (input_ids if embeds is None else embeds).shape[1])
        with self._target_call() as chunks:
            outputs = self.model._prefill(
                input_ids,
                generation_config,
                model_kwargs | {CACHE_KEY: self.cache},
                is_first_iteration=not generation_config.is_assistant,
            )
        if (filled := outputs[CACHE_KEY]) is not self.cache:  # Phi-3 takes a new cache beyond its rope switch
            self.cache.load(filled)
            already, self.recomputed = 0, True
        # Some versions run rows again that the cache has: they mask by a length that is not the cache's.
        self.plain_only = mask is not None and mask.shape[1] != self.cache.length
        if mask is not None and not bool(mask.all()):
            self.prompt_mask = mask[:, : self.cache.length].to(self.device).bool()
        return outputs, self._features(chunks, self.cache.length - already)

    def _check_steps(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
        """Note what else a step gets; refuse tensors, and other positions than `verify` gives the rows of a tree.

        Raises:
            ValueError: `prepare_inputs_for_generation` says so.
        """
        token = input_ids if input_ids.shape[1] else input_ids.new_zeros(input_ids.shape[0], 1)  # embeddings: none yet
        kwargs = {name: value for name, value in model_kwargs.items() if name not in ("inputs_embeds", CACHE_KEY)}
        inputs = self.model.prepare_inputs_for_generation(token, next_sequence_length=1, **kwargs)
        others = {
            name: value
            for name, value in inputs.items()
            if value is not None and name not in (*_STEP_INPUTS, *_OUTPUTS)
        }
        for name, of_next in _TOKEN_TYPES.items():
            if (types := others.pop(name, None)) is not None:
                self.step_types[name] = of_next(types[..., -1:]).to(self.device)
        if tensors := [name for name, value in others.items() if isinstance(value, torch.Tensor)]:
            raise ValueError(f"`ddtree` does not pass `{tensors[0]}` to a step of the target: leave it out.")
        self.step_kwargs = others
        positions, expected = inputs.get("position_ids"), model_kwargs["position_ids"]
        if positions is not None and not torch.equal(positions[..., -1], expected[..., -1].to(positions.device)):
            raise ValueError(
                f"{type(self.model).__name__} places tokens by positions of its own "
                "(`prepare_inputs_for_generation`), which `ddtree` does not know."
            )

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
        since = torch.arange(int(position.max() - prompt_positions[..., -1].max()), device=prompt_positions.device) + 1
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
        with self._target_call() as chunks:
            outputs = self.model(**inputs, return_dict=True)
        features = self._features(chunks, self.cache.length - already)
        # Some versions of Phi-3 run the last token alone, and drop the cache again at every later step.
        self.drops_cache = dropped and self.cache.length < input_ids.shape[1]
        self.cache.crop(-1)
        self.cache.open_tree(1, self.device)
        return Verification(outputs.logits[:, -1:], features[:, -1:], outputs)

    def verify(self, token_ids: torch.Tensor, positions: torch.Tensor, ancestors: torch.Tensor) -> Verification:
        """Run a tree through the target, its rows open in the cache.

        Args:
            token_ids: `(B, N + 1)`, root first.
            positions: `(B, 1)` or `(3, B, 1)`, the root's position; a node's is its depth further on.
            ancestors: `(B, N + 1, N + 1)` bool, see `ancestor_matrix`.
        """
        depths = node_depths(ancestors)  # (B, N + 1)
        length = self.cache.length
        self.cache.reserve(length + token_ids.shape[1])
        slots = self.cache.open_tree(token_ids.shape[1], token_ids.device, token_ids.shape[0])
        masks = {
            kind: tree_mask(ancestors, depths, slots, length, self.cache.view, self.prompt_mask, window, self.dtype)
            for kind, window in self.windows.items()
        }
        with self._target_call() as chunks:
            outputs = self.model(
                input_ids=token_ids,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                position_ids=positions + depths,
                use_cache=True,
                return_dict=True,
                **{CACHE_KEY: self.cache},
                **self.output_kwargs,
                **self.step_kwargs,
                **{name: types.expand(-1, token_ids.shape[1]) for name, types in self.step_types.items()},
            )
        return Verification(outputs.logits, self._features(chunks, token_ids.shape[1]), outputs)

    def idle(self, root: torch.Tensor, position: torch.Tensor) -> None:
        """A forward that commits nothing, for the ranks that wait for it (`synced_gpus`)."""
        self.verify(root, position, ancestor_matrix(root[:, 1:], root[:, 1:]))
        self.cache.close_tree()

    def close(self) -> None:
        self.taps.remove()

    @contextmanager
    def _target_call(self) -> Iterator[dict[int, list[torch.Tensor]]]:
        """Record features; hooks fire in the uncompiled forward only."""
        with uncompiled(self.model), self.taps.recording() as chunks:
            yield chunks

    def _features(self, chunks: dict[int, list[torch.Tensor]], rows: int) -> torch.Tensor:
        """The tap layers' outputs, concatenated.

        Raises:
            RuntimeError: A layer gave nothing or too little, as when something bypasses the hooks.
        """
        states = []
        for layer_id, parts in chunks.items():
            state = torch.cat(parts, dim=1) if len(parts) > 1 else (parts[0] if parts else None)
            if state is None or state.shape[1] != rows:
                got = "nothing" if state is None else f"{state.shape[1]} rows"
                raise RuntimeError(f"Layer {layer_id} of the target gave {got} instead of features for {rows} rows.")
            states.append(state)
        return torch.cat([state.to(states[0].device) for state in states], dim=-1)


def input_device(module: Any, given: torch.device) -> torch.device:
    """Where a module takes its input: an offloaded one's weight is on "meta", and its hook moves what it is given."""
    device: torch.device = module.weight.device
    return given if device.type == "meta" else device


def decoder_layers(model: Any) -> nn.ModuleList:
    """The target's decoder layers.

    Raises:
        ValueError: The decoder has no list of `num_hidden_layers` modules.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for child in model.get_decoder().children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers to take features from.")


def layer_kinds(config: Any) -> list[tuple[str, int | None]]:
    """Each decoder layer's kind and sliding window, `None` for full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    return [(kind, window if kind == "sliding_attention" else None) for kind in kinds]


def tree_mask(
    ancestors: torch.Tensor,
    depths: torch.Tensor,
    slots: torch.Tensor,
    length: int | torch.Tensor,
    view: int,
    prompt_mask: torch.Tensor | None,
    window: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The additive mask of a tree: committed rows, ancestors and itself.

    Args:
        ancestors: `(B, N, N)` bool, root included.
        depths: `(B, N)`.
        slots: `(B, N)`, where the tree's rows are written.
        length: Committed rows.
        view: Columns of the mask.
        prompt_mask: `(B, slots)` bool, False for padded prompt rows.
        window: Sliding window. It goes by slot, the root's plus the depth, as plain decoding's would.
        dtype: The model's.

    Returns:
        `(B, 1, N, view)`: 0 where attention is allowed, `finfo.min` elsewhere (eager attention would add a bool mask
        as ones, and -inf makes a row of NaN).
    """
    batch, nodes = slots.shape
    columns = torch.arange(view, device=slots.device).expand(batch, -1)
    committed = columns < length
    if prompt_mask is not None:
        prompt = torch.nn.functional.pad(prompt_mask, (0, view - prompt_mask.shape[1]), value=True)
        committed = committed & prompt
    allowed = committed[:, None, :].expand(batch, nodes, view).clone()
    allowed.scatter_(2, slots[:, None, :].expand(batch, nodes, nodes), ancestors)
    if window is not None:
        node_slots = length + depths
        key_slots = columns.scatter(1, slots, node_slots)
        allowed &= node_slots[:, :, None] - key_slots[:, None, :] < window
    mask = torch.zeros(batch, 1, nodes, view, dtype=dtype, device=slots.device)
    return mask.masked_fill_(~allowed[:, None], torch.finfo(dtype).min)
