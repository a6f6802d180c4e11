"""Work on the device alone, done operation by operation or by replaying a CUDA graph of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


class GraphMemory:
    """What graphs share of which one runs at a time, and none keeps anything in it."""

    def __init__(self) -> None:
        self.stream: Any | None = None
        self.pool: Any | None = None


class Recorded:
    """
    Work on the device alone, recorded as a CUDA graph.

    Args:
        device: A CUDA device, or any if it is not captured.
        memory: Of the graph.
    """

    def __init__(self, device: torch.device, memory: GraphMemory) -> None:
        self.device, self.memory = device, memory
        self.graph: Any | None = None

    def record(self) -> None:
        """Do the work, operation by operation."""
        raise NotImplementedError

    def touch(self) -> None:
        """Note the rows that are written."""
        raise NotImplementedError

    def restored(self) -> AbstractContextManager[None]:
        """Leave all as it was before."""
        raise NotImplementedError

    def replay(self) -> None:
        """Do the work, by the graph if there is one."""
        self.touch()  # ahead of all that can fail: calls clear what earlier ones have written
        if self.graph is None:
            self.record()
        else:
            self.graph.replay()

    def rehearse(self) -> None:
        """Do the work, and leave the state and the generator as they were before."""
        self.touch()
        with self.restored():
            self.record()

    def capture(self) -> None:
        """Record the work as a CUDA graph."""
        memory, current = self.memory, torch.cuda.current_stream(self.device)
        memory.stream = stream = memory.stream or torch.cuda.Stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.rehearse()  # compiles, and lets libraries allocate what they need
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _own_workspaces(), torch.cuda.graph(graph, memory.pool, stream, capture_error_mode="thread_local"):
            self.record()
        memory.pool = graph.pool()
        self.graph = graph


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
