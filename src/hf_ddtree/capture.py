"""Which calls run by CUDA graphs, and how the graphs are made, found again and given up."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import CausalLMOutput

from .candidate_generator import DDTreeCandidateGenerator
from .draft_tree import DraftTree, TreeRows
from .launched import LaunchedRound
from .logits_process import Noise
from .our_layers import why_not_ours
from .outputs import Choice, Choices
from .prompt import MOST_TOKENS, Prompt, are_alike
from .rope import has_dynamic_rope
from .round_graph import RoundGraph, RoundKind
from .target_state import Buffers
from .tree_cache import rows_ahead
from .verifier import Features

_MOST_KINDS = 16  # of calls whose graphs are kept for later ones
_MOST_SIZES = 16  # of one kind of call
_ALIKE = 0.9  # of a round's nodes: experts that are chosen by a rounding error make others differ
_HOST_WALKS = "processors, criteria or outputs look at single tokens: two graphs, and the host walks between them"
_capturing = threading.Lock()
_GraphT = TypeVar("_GraphT", RoundGraph, Prompt)


def why_not_captured(buffers: Buffers, launched: LaunchedRound, synced_gpus: bool) -> str | None:
    """Why a call's rounds cannot be graphs, or `None`.

    Args:
        buffers: The call's.
        launched: Its rounds as they would be launched.
        synced_gpus: Whether ranks wait for each other's forwards.
    """
    if why := why_not_ours(buffers, launched):
        return why
    source = launched.source
    if why := _on_one_gpu({*source.target_snapshot.devices, *source.drafter_snapshot.devices}):
        return why
    if type(source.drafter) is not source.family.model_class:
        return "the drafter's network is not this library's"
    if source.drafter_snapshot.hooked:
        return "a module has hooks"
    if has_dynamic_rope(source.drafter):
        return "rotary frequencies follow the length"
    if synced_gpus:
        return "ranks wait for each other"
    return None


def _on_one_gpu(devices: set[torch.device]) -> str | None:
    """What speaks against it, or `None`."""
    if devices == {torch.device("cpu")}:
        return "a graph gains nothing on a CPU"
    if torch.device("meta") in devices:
        return "weights are offloaded"
    if len(devices) > 1:
        return "weights lie on several devices"
    return None if {device.type for device in devices} == {"cuda"} else "only CUDA graphs are captured"


def find_kind(buffers: Buffers, launched: LaunchedRound) -> RoundKind:
    """What serves calls of this kind, with the graphs that earlier ones left, and room for another round at least.

    Rows that have to grow for it take their graphs with them, and the state stays.
    """
    source, constants = launched.source, launched.verifier.constants
    own = buffers.of(source.drafter)
    rows = rows_ahead(launched.record.room, source.nodes)
    buffers.cache.reserve(buffers.cache.length + rows)
    source.reserve(rows)
    target_where = source.target_snapshot.fingerprint, buffers.cache.places
    where = source.drafter_snapshot.fingerprint, own.context.places
    walk = launched.needs_no_host and (
        launched.do_sample, len(launched.record.end_token_ids),
        tuple((type(processor), _values(processor)) for processor in launched.processors),
    )  # fmt: skip
    what = (
        source.policy, source.config.execution, source.nodes, source.max_depth, walk,
        None if constants.offset is None else constants.offset.shape,
        tuple((name, types.dtype) for name, types in constants.types.items()),
        _numeric_modes(),
    )  # fmt: skip
    for others in buffers.drafters:
        moved = others.made_for is not None and others.made_for[0] != target_where
        if moved or (others is own and own.made_for != (target_where, where)):
            others.kinds.clear()
    own.made_for = target_where, where
    _forget_moved_prompts(buffers, source)
    kind: RoundKind | None = own.kinds.pop(what, None)
    if kind is None:
        gc.collect()  # graphs and what they belong to know each other, and old ones hold memory that new ones need
        with torch.inference_mode(False), _on(source.device):  # ordinary tensors, for calls outside of it too
            kind = RoundKind(launched, buffers.state)
    own.kinds[what] = kind  # the last used is the last
    while len(own.kinds) > _MOST_KINDS:
        del own.kinds[next(iter(own.kinds))]
    kind.begin(launched)
    return kind


def run_prompt(
    buffers: Buffers,
    source: DDTreeCandidateGenerator,
    why_not: Callable[[], str | None],
    launch: Callable[[], tuple[Any, Features]],
    token_ids: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[Any, Features]:
    """The forward of a text without rows before it: by a graph, captured now if it was not before, where that can be.

    Before a graph is used, what it gives is compared with what launching gives: a model may see its prompt in another
    way than what follows. From then on it is always used, so that a text is answered alike in each call.

    Args:
        why_not: `why_not_captured` of this call.
        launch: Runs the text through the stock path; returns what this function returns.
        token_ids, positions: `(1, L)`.

    Returns:
        The model's output, or its logits of the last token alone, and the features.
    """

    def run(prompt: Prompt) -> tuple[Any, Features]:
        logits, features = prompt.run(token_ids, positions)
        return CausalLMOutput(logits=logits), Features([[features]])

    def results(logits: torch.Tensor) -> list[torch.Tensor]:
        """Of all layers, copied."""
        rows = (part[:, :, : cache.length] for layer in cache.layers for part in (layer.keys, layer.values))
        return [logits[:, None, -1:].clone(), *(part.clone() for part in rows)]

    cache = buffers.cache
    _forget_moved_prompts(buffers, source)
    if not 1 < token_ids.shape[1] <= MOST_TOKENS:  # in one token nothing could be compared
        return launch()
    if source.layer_ids in buffers.prompts and why_not() is None:
        kept = buffers.prompts[source.layer_ids]
        return launch() if kept is None else run(kept)
    launched = launch()  # which gives the buffers their memory
    if why_not() is not None:
        return launched
    expected = results(launched[0].logits)
    cache.reset()
    make = functools.partial(Prompt, source.target, source.layer_ids, cache, source.device)
    prompt, _ = _capture(make, source.device, nullcontext, "captured")
    if prompt is not None:
        captured = run(prompt)
        if are_alike(results(captured[0].logits), expected):
            _keep_prompt(buffers, source, prompt)
            return captured
        cache.reset()
    _keep_prompt(buffers, source, None)
    return launch()


def _forget_moved_prompts(buffers: Buffers, source: DDTreeCandidateGenerator) -> None:
    """Drop the graphs of prompts if weights or rows have moved since they were made."""
    if buffers.prompts and buffers.prompts_made_for != _prompts_made_for(buffers, source):
        buffers.prompts.clear()


def _keep_prompt(buffers: Buffers, source: DDTreeCandidateGenerator, prompt: Prompt | None) -> None:
    """Keep a graph of prompts for later calls, or that there can be none."""
    _forget_moved_prompts(buffers, source)
    buffers.prompts[source.layer_ids] = prompt
    buffers.prompts_made_for = _prompts_made_for(buffers, source)


def _prompts_made_for(buffers: Buffers, source: DDTreeCandidateGenerator) -> tuple[Any, ...]:
    """What graphs of prompts are made for, but for the tap layers."""
    return source.target_snapshot.fingerprint, _numeric_modes(), buffers.cache.places


def find_graph(
    kind: RoundKind, nodes: int, decode_round: Callable[..., Any], launched: LaunchedRound, execution: str
) -> RoundGraph | str:
    """The graph of rounds of a size, captured now (which takes seconds) if it was not before; or why there is none.

    Before a graph is trusted, one of its rounds is compared with a launched one from where decoding stands.

    Args:
        kind: Of the call.
        nodes: Of a tree.
        decode_round: The algorithm.
        launched: The call's, to compare.
        execution: Whether to compile.
    """
    nodes = min(nodes, kind.nodes)
    if nodes not in kind.graphs and nodes not in kind.failed:
        make = functools.partial(RoundGraph, kind, nodes, decode_round)
        graph, why = _capture(make, kind.device, kind.restored, execution)
        kind.forget_lost()
        if graph is None:
            kind.failed[nodes] = f"the capture failed ({why})"
        elif not _agree(graph, launched):
            kind.failed[nodes] = "a graph's round differs from a launched one"
        else:
            compiled = Choice("yes") if execution == "auto" and not why else Choice("no", why or "asked for")
            graph.choices = Choices(Choice("ours"), compiled, Choice("graph", None if kind.walks else _HOST_WALKS))
            kind.graphs[nodes] = graph
            if len(kind.graphs) > _MOST_SIZES:
                del kind.graphs[next(iter(kind.graphs))]
    return kind.graphs.get(nodes) or kind.failed[nodes]


@torch.no_grad()
def _agree(graph: RoundGraph, launched: LaunchedRound) -> bool:
    """Whether a graph's round and a launched one verify the same tree alike, from the same state."""
    state = graph.kind.state
    with graph.kind.restored():
        graph.stretches[0].replay()
        captured = graph.steps.verified
        assert captured is not None
        if graph.kind.walks:  # nothing else looks at it: other graphs may use its memory
            graph.steps.verified = None
        # Nodes that lie beyond the text's end have other positions in a graph.
        tree = graph.tree._replace(depths=graph.tree.depths * (graph.tree.depths < state.room[:, None]))
        tree = DraftTree(*map(torch.clone, tree))
        mine = captured.logits.clone(), captured.features.clone()
    ids = torch.cat([state.root, tree.token_ids], dim=1)
    verified = launched.verifier.verify(ids, state.position[:, None], TreeRows.of(tree))
    launched.cache.close()
    within = torch.nn.functional.pad(tree.depths[0] > 0, (1, 0), value=True)
    return all(
        are_alike([one[:, None, within]], [other[:, None, within]], share=_ALIKE)
        for one, other in zip(mine, (verified.logits, verified.features), strict=True)
    )


def _capture(
    make: Callable[[], _GraphT],
    device: torch.device,
    restored: Callable[[], AbstractContextManager[None]],
    execution: str,
) -> tuple[_GraphT | None, str]:
    """Something new, captured, without compilation if that fails; or nothing. Then what failed last."""
    why = ""
    for compiled in (True, False) if execution == "auto" else (False,):
        step: _GraphT | None = None
        random, recording = _random_state(device), False
        try:
            # One capture at a time, as torch asks.
            with _capturing, torch.inference_mode(False), _on(device), restored():
                step = make()
                with _NoHostReads():  # type: ignore[no-untyped-call]
                    step.rehearse()
                if compiled:
                    step.compile()
                recording = True
                step.capture()
        except Exception as error:
            why, hopeless = _name(error), isinstance(error, torch.OutOfMemoryError)
        else:
            return step, why
        step = None  # behind the error, whose traceback holds it
        _release(device)
        if recording:
            _restore_random(device, random)
        if hopeless:
            break
    return None, why


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _release(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _restore_random(device: torch.device, state: torch.Tensor) -> None:
    """Let torch's generator draw again: a capture that fails on its way leaves it waiting for the graph's end.

    It gets another state for that. Graphs that were recorded before would go on with the one that it had.
    """
    Noise.generation += 1
    if device.type == "cuda":
        fresh = torch.Generator(device)
        fresh.set_state(state)
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())


def _numeric_modes() -> tuple[Any, ...]:
    """torch's choices among kernels, which a graph has made for good."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )


def _values(processor: Any) -> str:
    """What a processor holds, tensors to their last digit."""
    return str([(k, v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in sorted(vars(processor).items())])


class _NoHostReads(TorchDispatchMode):
    """Raises where a forward reads a tensor on the host, or copies one to it: in a capture that would be too late."""

    _READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
    _COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._READS and args[0].device.type != "cpu":
            raise NotImplementedError("a forward that reads tensors on the host")
        result = func(*args, **(kwargs or {}))
        source = args[1] if func is torch.ops.aten.copy_.default else args[0]
        if func in self._COPIES and source.device.type != result.device.type:
            raise NotImplementedError("a forward that copies tensors between host and device")
        return result
