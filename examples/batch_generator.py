"""Continue many texts at once, fast: for training data and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask


class RingCache:
    """Keys and values of `rows` sequences in `size` slots each, in rings: every row writes the same slot at a time.

    A row that has ended makes room for a new one at any time: the new prompt is laid into the slots before the common
    one. Keys are rotated before they come here, so the order of slots does not matter.
    """

    def __init__(self, model: PreTrainedModel, rows: int, size: int) -> None:
        config = model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, size, head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros_like(self.keys)
        self.slot = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.prompt: tuple[torch.Tensor, torch.Tensor] | None = None  # rows and slots that a prefill fills

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any):
        """The cache's part of an attention layer; called by transformers."""
        for states, new in ((self.keys[layer], key), (self.values[layer], value)):
            if self.prompt is None:
                states.index_copy_(2, self.slot, new)
            else:
                rows, slots = self.prompt
                states[rows[:, None], :, slots] = new.transpose(1, 2)
        return (self.keys[layer], self.values[layer]) if self.prompt is None else (key, value)

    def get_seq_length(self, *_: Any) -> int:
        return 0


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **_: Any):
    """Attention of one query a row that reads keys and values once: the queries of a group become rows."""
    batch, heads, length, dim = query.shape
    if length > 1:
        groups = heads // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return output.transpose(1, 2), None
    query = query.reshape(batch, key.shape[1], -1, dim)
    weights = (query @ key.transpose(2, 3)) * scaling + attention_mask
    weights = weights.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).view(batch, 1, heads, dim), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


class Request(NamedTuple):
    """A text to continue."""

    ids: list[int]
    temperature: float


class Generator:
    """Continues many texts at once. Ended rows are refilled, so that no step is wasted.

    On a GPU a step is one CUDA graph.

    Args:
        model: any causal LM whose attention is transformers' own.
        rows: texts at a time.
        size: most tokens of a text, prompt included.
        cache_key: what the model's forward calls its cache.
    """

    def __init__(self, model: PreTrainedModel, rows: int, size: int, cache_key: str, steps_a_check: int = 8) -> None:
        self.model, self.rows, self.size, self.cache_key = model, rows, size, cache_key
        model.set_attn_implementation("grouped")
        device = model.device
        self.cache = RingCache(model, rows, size)
        self.token = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.length = torch.ones(rows, 1, dtype=torch.int64, device=device)  # tokens of a row, `token` included
        self.temperature = torch.zeros(rows, 1, device=device)
        self.recent = torch.zeros(steps_a_check, rows, dtype=torch.int64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.slots = torch.arange(size, device=device)
        self.pick: Callable[..., torch.Tensor] = pick_tokens
        self.replay: Callable[[], Any] = self._step
        if device.type == "cuda":
            self.pick = torch.compile(pick_tokens)
            self._capture()

    @torch.no_grad()
    def _step(self) -> None:
        age = (self.cache.slot - self.slots) % self.size
        mask = torch.where(age < self.length, 0.0, torch.finfo(self.model.dtype).min).to(self.model.dtype)
        logits = self._forward(self.token, self.length - 1, mask[:, None, None]).logits[:, -1]
        self.token.copy_(self.pick(logits, self.temperature))
        self.recent.index_copy_(0, self.count % len(self.recent), self.token.T)
        self.length += 1
        self.count += 1
        self.cache.slot.copy_((self.cache.slot + 1) % self.size)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any) -> Any:
        return self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self.cache_key: self.cache},
            **kwargs,
        )

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.replay = graph.replay

    @torch.no_grad()
    def _fill(self, rows: list[int], requests: list[Request]) -> None:
        """Lay the prompts of `requests`, all but their last tokens, into the slots before the common one."""
        device = self.model.device
        lengths = torch.tensor([len(request.ids) for request in requests])
        longest = -(-int(lengths.max()) // 32) * 32
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        for row, request in enumerate(requests):
            ids[row, : len(request.ids)] = torch.tensor(request.ids)
        last = ids[torch.arange(len(rows)), lengths - 1]
        index, lengths = torch.tensor(rows, device=device), lengths.to(device)
        places = torch.arange(longest, device=device)
        # Padding comes after the prompt, in slots that are written again before they are looked at.
        slots = (self.cache.slot + places - (lengths[:, None] - 1)) % self.size
        self.cache.prompt = (index, slots)
        mask = torch.zeros(1, 1, 1, 1, device=device)  # four dimensions: passed through; the attention is causal
        self._forward(ids.to(device), places.expand(len(rows), -1), mask, logits_to_keep=1)
        self.cache.prompt = None
        self.token[index, 0] = last.to(device)
        self.length[index, 0] = lengths
        self.temperature[index, 0] = torch.tensor([request.temperature for request in requests], device=device)

    def generate(
        self, requests: Sequence[Request], new_tokens: int, stop: Sequence[int], seconds: float = float("inf")
    ) -> Iterator[tuple[int, list[int]]]:
        """Continue `requests`, all shorter than `size - new_tokens`, each up to a token in `stop`.

        Yields:
            The number of a request and its new tokens, the stop token included, in the order in which they end.
            Those that have not ended after `seconds` are left out.
        """
        deadline = time.monotonic() + seconds
        # Prompts of a refill should be about equally long; a limit on time should meet all lengths alike.
        order = list(range(len(requests)))
        chunks = [
            sorted(order[at : at + 8192], key=lambda i: len(requests[i].ids)) for at in range(0, len(order), 8192)
        ]
        waiting = [index for chunk in chunks for index in chunk][::-1]
        free = list(range(self.rows))
        smallest_fill = max(1, self.rows // 16)
        steps = len(self.recent)
        owner = np.full(self.rows, -1)  # the request of a row
        since = np.zeros(self.rows, dtype=np.int64)  # the check from which on its tokens count
        count = np.zeros(self.rows, dtype=np.int64)
        text = np.zeros((self.rows, new_tokens + steps), dtype=np.int64)
        ends = np.zeros(self.model.config.get_text_config().vocab_size, dtype=bool)
        ends[list(stop)] = True
        checks, behind = 0, None
        self.count.zero_()
        while (waiting or (owner >= 0).any()) and time.monotonic() < deadline:
            while waiting and free and (len(free) >= smallest_fill or len(free) == self.rows):
                batch = [waiting.pop() for _ in range(min(len(free), len(waiting), 512))]
                rows = [free.pop() for _ in batch]
                self._fill(rows, [requests[index] for index in batch])
                owner[rows], since[rows], count[rows] = batch, checks, 0
            for _ in range(steps):
                self.replay()
            # The host reads a check's tokens while the device is at the next one.
            recent, behind = behind, self._read_recent()
            checks += 1
            if recent is None:
                continue
            tokens = recent()
            live = np.flatnonzero((owner >= 0) & (since < checks - 1))
            text[live[:, None], count[live, None] + np.arange(steps)] = tokens[live]
            stops = ends[tokens[live]]
            ended = stops.any(axis=1)
            count[live] += np.where(ended, stops.argmax(axis=1) + 1, steps)
            for row in live[ended | (count[live] >= new_tokens)].tolist():
                yield int(owner[row]), text[row, : min(count[row], new_tokens)].tolist()
                owner[row] = -1
                free.append(row)

    def _read_recent(self) -> Callable[[], np.ndarray]:
        """Start to copy the last tokens to the host; the result waits for them and returns `(rows, steps)`."""
        if self.recent.device.type != "cuda":
            copied = self.recent.T.clone().numpy()
            return lambda: copied
        host = torch.empty(self.recent.shape, dtype=self.recent.dtype, pin_memory=True)
        host.copy_(self.recent, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> np.ndarray:
            done.synchronize()
            return host.T.numpy()

        return wait


def pick_tokens(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """The best token after adding Gumbel noise: a sample at `temperature` `(B, 1)`, the argmax where it is 0."""
    noise = -torch.log(-torch.log(torch.rand_like(logits, dtype=torch.float32).clamp(1e-20, 1 - 1e-7)))
    return (logits.float() + temperature * noise).argmax(dim=-1, keepdim=True)
