"""How the benchmarks time a device: waits, replays of a CUDA graph, and the bandwidth of a copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def graph_microseconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of `run` on a GPU, captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) * 1e3 for before, after in pairwise(events))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        synchronize()
        start = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        synchronize()
        seconds.append((time.perf_counter() - start) / 4)
    return 2 * source.numel() / statistics.median(seconds)
