"""The walk: from the root, the token that plain decoding would choose, and on while it is a child.

Two walks with one contract. `lazy_walk` calls processors, selection, criteria and streamer as plain decoding does,
node by node. `device_walk` chooses at all nodes at once, and `commit_path` reads back one small tensor; it serves
greedy search and sampling with warpers that depend on no prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation import logits_process as stock
from transformers.generation.logits_process import LogitsProcessorList

from .draft_tree import DraftTree, TreeRows
from .outputs import GenerationRecord
from .state import DecodingState, Path
from .tree_cache import TreeCache

# Processors that look at one row of scores and nothing else.
_ROW_WISE = (
    stock.TemperatureLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.MinPLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.EtaLogitsWarper,
    stock.EpsilonLogitsWarper,
    stock.LogitNormalization,
)


def is_row_wise(processors: LogitsProcessorList) -> bool:
    """Whether the processors may run on all nodes at once (stock warpers only, no subclass)."""
    return all(type(processor) in _ROW_WISE for processor in processors)


def needs_no_host(
    device: torch.device, record: GenerationRecord, processors: LogitsProcessorList, do_sample: bool
) -> bool:
    """Whether a call's walk can be the device's: nothing looks at single tokens, and it draws where plain decoding
    does, which is where the prompt is."""
    at_the_prompt = not do_sample or device == record.input_ids.device
    return at_the_prompt and is_row_wise(processors) and not record.needs_rows


def walks_on_device(
    device: torch.device, record: GenerationRecord, processors: LogitsProcessorList, do_sample: bool
) -> bool:
    """Whether it gains by that besides: a CPU reads nothing back, and would select at all nodes for nothing."""
    return device.type != "cpu" and needs_no_host(device, record, processors, do_sample)


def commit_next(
    logits: torch.Tensor, record: GenerationRecord, processors: LogitsProcessorList, do_sample: bool
) -> tuple[int, bool]:
    """One step of transformers' `_sample` on logits `(1, V)`: process, select, commit.

    Returns:
        The token, and whether generation ends with it.
    """
    row = logits.to(copy=True, dtype=torch.float32, device=record.input_ids.device)
    scores = processors(record.input_ids, row)
    if do_sample:
        token = torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
    else:
        token = torch.argmax(scores, dim=-1)
    token_id = int(token)
    return token_id, record.commit(token, scores, row, token_id)


def lazy_walk(
    logits: torch.Tensor,
    tree: DraftTree,
    record: GenerationRecord,
    processors: LogitsProcessorList,
    do_sample: bool,
    most: int = 0,
) -> Path:
    """The walk on the host, which commits token by token: exactly the calls that plain decoding makes, in its order.

    Args:
        logits: `(1, N + 1, V)` of the root and the nodes.
        tree: The N nodes.
        record: Receives the tokens.
        processors: The call's prepared processors.
        do_sample: Sample, or take the best.
        most: Tokens for which the path has room, at least.

    Returns:
        The path, where the tree is.
    """
    nodes = torch.stack([tree.parents[0], tree.token_ids[0], tree.depths[0]], dim=1).tolist()  # one wait
    children = {(parent + 1, token): node for node, (parent, token, depth) in enumerate(nodes, start=1) if depth > 0}
    rows, token_ids, stop = [0], [], False
    while True:
        token, stop = commit_next(logits[:, rows[-1]], record, processors, do_sample)
        token_ids.append(token)
        child = children.get((rows[-1], token))
        if stop or child is None:
            break
        rows.append(child)
    empty = [-1] * (most - len(rows))
    packed = torch.tensor([[len(rows), *rows, *empty, *token_ids, *empty]])
    return Path.of_packed(packed.to(tree.parents.device), rows, stop)


def device_walk(
    logits: torch.Tensor,
    tree: DraftTree,
    rows: TreeRows,
    room: torch.Tensor,
    ends: torch.Tensor,
    processors: LogitsProcessorList,
    noise: Noise | None,
    most: int,
) -> tuple[Path, torch.Tensor]:
    """The walk on tensors: choose at every node, follow the choices, and end where plain decoding would.

    Args:
        logits: `(B, N + 1, V)` of the root and the nodes.
        tree: The N nodes.
        rows: The same with the root.
        room: `(B,)`, tokens that may still be committed.
        ends: `(E,)`, tokens that end a text.
        processors: Row-wise ones.
        noise: `None` for greedy search.
        most: Tokens that can be committed; rows of noise are drawn for as many.

    Returns:
        The path, and whether the text ends with it, `(B,)`.
    """
    choices = choose(logits, rows.depths, tree.token_ids, processors, noise, most)
    path, token_ids = follow(choices, tree, rows.ancestors, rows.depths, most)
    kept = (path >= 0) & (torch.arange(most, device=path.device) < room[:, None])
    ended = (token_ids[..., None] == ends).any(dim=-1) & kept
    kept &= ended.cumsum(dim=1) == ended  # nothing behind the first end
    count = kept.sum(dim=1)
    packed = torch.cat([count[:, None], path.where(kept, -1), token_ids], dim=1)
    finished = (ended & kept).any(dim=1) | (count >= room)
    return Path.of_packed(packed), finished


def commit_path(
    path: Path, state: DecodingState, cache: TreeCache, record: GenerationRecord, noise: Noise | None
) -> tuple[Sequence[int], bool]:
    """Commit what a round has kept; fetching what the device has chosen is the round's one synchronisation.

    Where less is committed than was kept, state and cache go back; then, or where a streamer raises, the generator is
    left where plain decoding would leave it.

    Returns:
        The rows that committed a token, root (0) first, and whether generation ends.
    """
    if path.on_host is not None:
        state.moved(len(path.on_host))
        return path.on_host, path.stop
    most, before = path.rows.shape[1], record.length
    kept, *fetched = path.fetch()
    try:
        stop = record.commit_path(fetched[most : most + kept], path.token_ids)
    finally:
        count = record.length - before
        if noise is not None:
            noise.give_back(count)
    if count < kept:
        cache.keep(path.first(count))
        state.take_back(path, count, record.input_ids)
    state.moved(count)
    return fetched[:count], stop


def choose(
    logits: torch.Tensor,
    depths: torch.Tensor,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    noise: Noise | None,
    rows: int,
) -> torch.Tensor:
    """The token that plain decoding would select at every node, `(B, N + 1)`.

    Args:
        logits: `(B, N + 1, V)`.
        depths: `(B, N + 1)`: nodes of one depth share a row of noise, since at most one of them is reached.
        input_ids: For the processors' signature; row-wise ones do not look at it.
        processors: Row-wise ones.
        noise: `None` for greedy search.
        rows: Rows of noise to draw, and tokens that can be committed; nodes below choose for nothing.
    """
    if noise is None and not processors and logits.dtype.itemsize < 8:
        return logits.argmax(dim=-1)  # as of their float32 copy, which would take longer than this
    scores = processors(input_ids, logits.float().flatten(0, 1)).view(logits.shape)
    if noise is None:
        return scores.argmax(dim=-1)
    # multinomial(p, 1) is argmax(p / q), q exponential of p's shape.
    probs = torch.nn.functional.softmax(scores, dim=-1)
    return probs.div_(noise.draw(rows, logits.shape[-1])[depths.clamp(max=rows - 1)]).argmax(dim=-1)


def follow(
    choices: torch.Tensor, tree: DraftTree, ancestors: torch.Tensor, depths: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The path that the choices `(B, N + 1)` take through the tree.

    Returns:
        Rows and chosen tokens of the path, `(B, length)` each, root first, row -1 behind its end.
    """
    chosen = (tree.depths > 0) & (tree.token_ids == choices.gather(1, tree.parents + 1))
    chosen = torch.nn.functional.pad(chosen, (1, 0), value=True)  # the root
    accepted = (chosen[:, None, :] | ~ancestors).all(dim=-1)  # (B, N + 1): the whole path to the node was chosen
    place = torch.where(accepted & (depths < length), depths, length)
    row = torch.arange(choices.shape[1], device=choices.device).expand_as(place)
    rows = torch.full_like(choices, -1)[:, :1].repeat(1, length + 1).scatter(1, place, row)[:, :length]
    return rows, choices.gather(1, rows.clamp(min=0))


class Noise:
    """Exponential noise from the device's default generator, a row a draw of `torch.multinomial`.

    What is not used goes back, so that the generator ends where plain decoding would leave it.
    """

    generation = 0  # how often torch's generator was given another state to draw from

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        if self.on_cuda:
            index = torch.cuda.current_device() if device.index is None else device.index
            self.generator = torch.cuda.default_generators[index]
        else:
            self.generator = torch.default_generator
        self.renew()
        self._start: Any = None
        self._draw = 0  # what a draw adds to a CUDA generator's offset, by the device and the length of a row
        self._states: list[torch.Tensor] = []

    def renew(self) -> None:
        """What is recorded from now on draws from the state that torch's generator has now."""
        self._generation = Noise.generation

    @property
    def is_lost(self) -> bool:
        """Whether graphs that have recorded its draws would draw from a state that torch's generator has no more."""
        return self._generation != Noise.generation

    def begin(self) -> None:
        """Note where a round's draws start. Not while a graph is captured."""
        # A CUDA generator's offset is a number on the host; its whole state would be copied.
        self._start = self.generator.get_offset() if self.on_cuda else self.generator.get_state()
        self._states = []

    def draw(self, rows: int, vocabulary: int) -> torch.Tensor:
        """`(rows, V)` float32, drawn row after row."""
        drawn = []
        for _ in range(rows):
            drawn.append(torch.empty(1, vocabulary, device=self.device).exponential_(1, generator=self.generator))
            if not self.on_cuda:
                self._states.append(self.generator.get_state())
            elif not self._draw:  # before any capture, in which the offset cannot be read
                self._draw = self.generator.get_offset() - self._start
        return torch.cat(drawn)

    def give_back(self, used: int) -> None:
        """Set the generator to its state after the first `used` rows of the round."""
        if self.on_cuda:
            self.generator.set_offset(self._start + used * self._draw)
        else:
            self.generator.set_state(self._states[used - 1] if used else self._start)
