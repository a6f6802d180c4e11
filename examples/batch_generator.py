"""Continue many texts at once, fast: for training data and benchmarks."""

from __future__ import annotations

import itertools
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
        self.shape = (rows, size)
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # made when a layer first brings its rows
        self.slot = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.prompt: tuple[torch.Tensor, torch.Tensor] | None = None  # rows and slots that a prefill fills

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any):
        """The cache's part of an attention layer; called by transformers."""
        if layer not in self.layers:
            rows, size = self.shape
            self.layers[layer] = tuple(x.new_zeros(rows, x.shape[1], size, x.shape[3]) for x in (key, value))
        for states, new in zip(self.layers[layer], (key, value), strict=True):
            if self.prompt is None:
                states.index_copy_(2, self.slot, new)
            else:
                rows, slots = self.prompt
                states[rows[:, None], :, slots] = new.transpose(1, 2)
        return self.layers[layer] if self.prompt is None else (key, value)

    def get_seq_length(self, *_: Any) -> int:
        return 0


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **_: Any):
    """Attention of one query a row that reads keys and values once: the queries of a group become rows."""
    batch, heads, length, dim = query.shape
    scaling = dim**-0.5 if scaling is None else scaling
    if length > 1:
        groups = heads // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return output.transpose(1, 2), None
    query = query.reshape(batch, key.shape[1], -1, dim)
    weights = (query @ key.transpose(2, 3)) * scaling + attention_mask
    weights = weights.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).view(batch, 1, heads, -1), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)


class Request(NamedTuple):
    """A text to continue."""

    ids: list[int]
    temperature: float


def make_generator(model: PreTrainedModel, rows: int, size: int, cache_key: str) -> Generator | PlainGenerator:
    """The fast generator where it computes what the model does, else the one that works for any causal LM."""
    try:
        return Generator(model, rows, size, cache_key)
    except UnsupportedTarget as reason:
        print(f"{reason} Its texts are written by `generate`, which is slower.")
        return PlainGenerator(model, rows, size)


class UnsupportedTarget(ValueError):
    """The fast generator would not write what the model writes."""


class PlainGenerator:
    """The same by `model.generate`, in batches of texts about equally long: for any causal LM, and slower.

    Args:
        model, rows, size: as for `Generator`.
    """

    def __init__(self, model: PreTrainedModel, rows: int, size: int) -> None:
        self.model, self.rows, self.size = model, rows, size

    def generate(
        self, requests: Sequence[Request], new_tokens: int, stop: Sequence[int], seconds: float = float("inf")
    ) -> Iterator[tuple[int, list[int]]]:
        """As `Generator.generate`."""
        deadline = time.monotonic() + seconds
        # A limit on time should meet all lengths and temperatures alike, so sorting stays within a part.
        for first in range(0, len(requests), 8 * self.rows):
            part = range(first, min(first + 8 * self.rows, len(requests)))
            order = sorted(part, key=lambda i: (requests[i].temperature, len(requests[i].ids)))
            for temperature, group in itertools.groupby(order, key=lambda i: requests[i].temperature):
                batch = list(group)
                for at in range(0, len(batch), self.rows):
                    if time.monotonic() > deadline:
                        return
                    chosen = batch[at : at + self.rows]
                    texts = self._continue([requests[i].ids for i in chosen], temperature, new_tokens, list(stop))
                    yield from zip(chosen, texts, strict=True)

    def _continue(
        self, prompts: list[list[int]], temperature: float, new_tokens: int, stop: list[int]
    ) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), stop[0])
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask = torch.arange(longest) >= longest - torch.tensor([[len(prompt)] for prompt in prompts])
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        output = self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.long().to(self.model.device),
            max_new_tokens=new_tokens,
            eos_token_id=stop,
            pad_token_id=stop[0],
            **({"do_sample": False} | sampling),
        )
        texts = []
        for text in output[:, longest:].tolist():
            end = next((place for place, token in enumerate(text, start=1) if token in stop), len(text))
            texts.append(text[:end])
        return texts


class Generator:
    """Continues many texts at once. Ended rows are refilled, so that no step is wasted.

    On a GPU a step is one CUDA graph.

    Args:
        model: a causal LM whose layers attend to everything within `size` tokens, by nothing but scaled products.
        rows: texts at a time.
        size: most tokens of a text, prompt included.
        cache_key: what the model's forward calls its cache.

    Raises:
        UnsupportedTarget: the model gives other logits by itself than here.
    """

    def __init__(self, model: PreTrainedModel, rows: int, size: int, cache_key: str, steps_a_check: int = 8) -> None:
        self.model, self.rows, self.size, self.cache_key = model, rows, size, cache_key
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
        self._switch_attention()
        if device.type == "cuda":
            self.pick = torch.compile(pick_tokens)
            self._capture()

    def _switch_attention(self) -> None:
        """Take the model's own attention away, unless a text as long as any shows that this changes its logits."""
        model, device = self.model, self.model.device
        attention = model.config._attn_implementation
        generator = torch.Generator().manual_seed(0)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        ids = torch.randint(vocabulary, (1, self.size - 1), generator=generator)
        with torch.no_grad():
            expected = model(input_ids=ids.to(device), use_cache=False).logits[0, -1].float()
        try:
            model.set_attn_implementation("grouped")
            self._fill([0], [Request(ids[0].tolist(), 0.0)])
            with torch.no_grad():
                found = self._logits()[0].float()
        except Exception as error:  # what a model asks of its cache and its attention is known when it runs
            fault: str | None = f"fails with {error!r}"
        else:
            # Rounding in bfloat16 makes about 2% of the spread; a window that is missed, far more.
            same = (found - expected).std() < 0.1 * expected.std()
            fault = None if bool(same) else "gives other logits"
        if fault is not None:
            model.set_attn_implementation(attention)
            raise UnsupportedTarget(f"{type(model).__name__} {fault} with the attention of the batch generator.")

    def _logits(self) -> torch.Tensor:
        age = (self.cache.slot - self.slots) % self.size
        mask = torch.where(age < self.length, 0.0, torch.finfo(self.model.dtype).min).to(self.model.dtype)
        logits: torch.Tensor = self._forward(self.token, self.length - 1, mask[:, None, None]).logits[:, -1]
        return logits

    @torch.no_grad()
    def _step(self) -> None:
        logits = self._logits()
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
        longest = min(-(-int(lengths.max()) // 32) * 32, self.size)
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
        ends = np.zeros(self.model.config.get_text_config(decoder=True).vocab_size, dtype=bool)
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
