"""What is done on the device alone, and recorded as a CUDA graph: how, and a target's forward in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .attention import Rows
from .shadow import each_attends_once, give_rows
from .tree_cache import TreeCache
from .verifier import Constants, FeatureTaps, decoder_layers, layer_kinds


class GraphMemory:
    """What graphs share of which one runs at a time, and none keeps anything in it."""

    def __init__(self) -> None:
        self.stream: Any | None = None
        self.pool: Any | None = None


class Recorded:
    """
    What is done on the device alone, and recorded as a graph.

    Args:
        device: A CUDA device, or any if it is not captured.
        memory: Of the graph.
    """

    def __init__(self, device: torch.device, memory: GraphMemory) -> None:
        self.device, self.memory = device, memory
        self.graph: Any | None = None
        self.path = ""  # how it runs, for the statistics

    def compile(self) -> None:
        """Compile the layers."""
        raise NotImplementedError

    def round(self) -> None:
        """The algorithm."""
        raise NotImplementedError

    def touch(self) -> None:
        """Note the rows that are written."""
        raise NotImplementedError

    def restored(self) -> AbstractContextManager[None]:
        """Leave all as it was before."""
        raise NotImplementedError

    def replay(self) -> None:
        """Do it, by the graph if there is one."""
        self.touch()  # ahead of all that can fail: calls clear what earlier ones have written
        if self.graph is None:
            self.round()
        else:
            self.graph.replay()

    def rehearse(self) -> None:
        """Do it, and leave the state and the generator as they were before."""
        self.touch()
        with self.restored():
            self.round()

    def capture(self) -> None:
        """Record `round` as a CUDA graph."""
        memory, current = self.memory, torch.cuda.current_stream(self.device)
        memory.stream = stream = memory.stream or torch.cuda.Stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles, and lets libraries allocate what they need
                self.rehearse()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _own_workspaces(), torch.cuda.graph(graph, memory.pool, stream, capture_error_mode="thread_local"):
            self.round()
        memory.pool = graph.pool()
        self.graph = graph


@contextmanager
def unchanged(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give tensors the values back that they had before."""
    saved = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, before in saved:
            tensor.copy_(before)


def share_rows(
    owner: Any,
    target: Any,
    cache: TreeCache,
    length: torch.Tensor,
    committed: torch.Tensor,
    visible: torch.Tensor,
    depths: torch.Tensor,
) -> None:
    """Let a shadow's layers attend to a cache's rows, as long as `owner` lives; the tensors are those of `Rows`."""
    kinds = layer_kinds(target.config.get_text_config(decoder=True))
    for layer, own, (_, window) in zip(decoder_layers(target), cache.layers, kinds, strict=True):
        give_rows(owner, layer, Rows(own.keys, own.values, length, committed, visible, depths, depths, window))


def forward(
    target: Any,
    taps: FeatureTaps,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    constants: Constants | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A shadow's forward over its layers' rows.

    Args:
        target: The shadow, whose layers were given rows (`give_rows`).
        taps: On its layers.
        token_ids, positions: `(1, N)`.
        constants: Of the call's steps.

    Returns:
        Logits `(1, N, V)` and features `(1, N, taps * H)`.
    """
    constants = constants or Constants({})
    kinds = dict(layer_kinds(target.config.get_text_config(decoder=True)))
    unused = torch.zeros(1, 1, 1, 1, dtype=target.dtype, device=token_ids.device)  # 4D masks are passed on as is
    with taps.recording() as chunks, each_attends_once(decoder_layers(target)):
        output = target(
            input_ids=token_ids,
            position_ids=constants.place(positions),
            attention_mask=dict.fromkeys(kinds, unused) if len(kinds) > 1 else unused,
            use_cache=False,
            return_dict=True,
            **constants.of_rows(token_ids.shape[1]),
        )
    return output.logits, torch.cat([parts[0] for parts in chunks.values()], dim=-1)


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Have cuBLAS allocate its workspaces in the graph's memory.

    Those that torch keeps for a stream would do, but whoever captures other graphs, as `torch.compile` does, frees
    them, and a replay would write to what belongs to others by then.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
