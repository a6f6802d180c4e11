"""A round as one step of fixed shapes, which a CUDA graph replays: verify, walk, keep, draft, next tree.

The step runs on shadows of target and drafter, so that nothing of it touches the models themselves.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as _module
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import LogitsProcessorList

from .candidate_generator import DDTreeCandidateGenerator, best_candidates, draft_logits, embed_tokens
from .draft_tree import DraftTree, TreeKind, ancestor_matrix, build_tree, node_depths
from .logits_process import Noise, choose, follow, is_row_wise
from .modeling_dflash import DFlashDraftModel
from .outputs import GenerationRecord
from .rope import RopeSwitch, rope_parameters
from .shadow import Rows, compile_layers, each_attends_once, give_rows, shadow
from .target_state import Buffers
from .tree_cache import TreeCache
from .verifier import FeatureTaps, Verifier, decoder_layers, layer_kinds

_MOST_AHEAD = 4096  # tokens for which a call reserves rows at once
_MOST_STEPS = 8  # that are kept for later calls
_capturing = threading.Lock()


class Outcome(NamedTuple):
    """A round's result on the host."""

    rows: list[int]  # that chose the committed tokens, root (0) first
    token_ids: list[int]
    tokens: torch.Tensor  # the same first in (1, P), on the device


class Step:
    """
    One round at fixed shapes, over the buffers of a target and a drafter's context.

    Args:
        source: The drafter's generator, with the target.
        cache: The target's rows, prefilled.
        processors: Row-wise ones.
        do_sample: Sample, or take the best.
    """

    def __init__(
        self, source: DDTreeCandidateGenerator, cache: TreeCache, processors: LogitsProcessorList, do_sample: bool
    ) -> None:
        self.cache, self.context, self.processors = cache, source.cache, processors
        self.target, self.drafter = shadow(source.target), shadow(source.drafter)
        self.taps = FeatureTaps(self.target, source.layer_ids)
        config = source.target.config.get_text_config(decoder=True)
        self.kinds = layer_kinds(config)
        self.nodes, self.depth, self.block = source.nodes, source.max_depth, source.block_size
        self.candidates = min(self.nodes, config.vocab_size)
        self.device, self.dtype = source.device, source.dtype
        self.noise = Noise(self.device) if do_sample else None
        self.graph: Any | None = None
        self.path = ""  # how it runs, for the statistics

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        # What a round leaves for the next.
        blank = zeros(1, self.depth, self.candidates)
        self.build_tree, self.find_ancestors = tree_functions(source.config.tree, self.nodes, self.device)
        self.tree = self.build_tree(blank, blank.float(), self.nodes)
        self.most = min(self.depth, self.tree.token_ids.shape[1]) + 1  # tokens that a round can commit
        self.root, self.position, self.length, self.context_length = zeros(1, 1), zeros(1, 1), zeros(1), zeros(1)
        self.last_position = zeros(1, 1)
        self.result = zeros(1, 1 + 2 * self.most)

        # What the layers see of the round.
        rows, columns = self.tree.token_ids.shape[1] + 1, self.most + self.block
        self.committed = torch.ones(1, cache.capacity, dtype=torch.bool, device=self.device)
        self.visible, self.depths = zeros(1, rows, rows, dtype=torch.bool), zeros(1, rows)
        self.context_committed = torch.ones(1, self.context.capacity, dtype=torch.bool, device=self.device)
        self.block_visible = {causal: zeros(1, self.block, columns, dtype=torch.bool) for causal in (False, True)}
        self.block_depths, self.column_depths = zeros(1, self.block), zeros(1, columns)
        self._give_rows()

    def _give_rows(self) -> None:
        for layer, own, (_, window) in zip(decoder_layers(self.target), self.cache.layers, self.kinds, strict=True):
            rows = Rows(
                own.keys, own.values, self.length, self.committed, self.visible, self.depths, self.depths, window
            )
            give_rows(self, layer, rows)
        for index, (layer, own) in enumerate(zip(self.drafter.layers, self.context.layers, strict=True)):
            visible = self.block_visible[self.drafter.config.layer_is_causal(index)]
            rows = Rows(
                own.keys, own.values, self.context_length, self.context_committed, visible, self.block_depths,
                self.column_depths, layer.self_attn.sliding_window,
            )  # fmt: skip
            give_rows(self, layer, rows)

    def compile(self) -> None:
        """Compile the layers."""
        compile_layers(decoder_layers(self.target), self.tree.token_ids.shape[1] + 1)
        compile_layers(self.drafter.layers, self.block)

    def fits(self) -> bool:
        """Whether the buffers hold another round."""
        tree = self.tree.token_ids.shape[1] + 1
        return (
            self.cache.length + tree <= self.cache.capacity
            and self.context.length + self.most + self.block <= self.context.capacity
        )

    def begin(
        self,
        root: torch.Tensor,
        position: torch.Tensor,
        room: int,
        tree: DraftTree,
        prompt_mask: torch.Tensor | None,
    ) -> None:
        """Take over from the loop before its first round.

        Args:
            root, position: `(1, 1)`.
            room: Tokens that may still be committed: no node is placed where none of them can be.
            tree: The first round's.
            prompt_mask: `(1, slots)` bool, False for padding.
        """
        self.root.copy_(root)
        self.position.copy_(position)
        self.last_position.copy_(position + (room - 1))
        for own, given in zip(self.tree, tree.pad(self.tree.token_ids.shape[1]), strict=True):
            own.copy_(given)
        self.length.fill_(self.cache.length)
        self.context_length.fill_(self.context.length)
        self.committed.fill_(True)
        if prompt_mask is not None:
            self.committed[:, : prompt_mask.shape[1]] = prompt_mask

    def run(self) -> Outcome:
        """Run a round. The result comes back in the round's one synchronisation."""
        if self.noise is not None:
            self.noise.begin()
        if self.graph is None:
            self.round()
        else:
            self.graph.replay()
        count, *path = self.fetch()
        return Outcome(path[:count], path[self.most : self.most + count], self.result[:, 1 + self.most :])

    def fetch(self) -> list[int]:
        """The result on the host: the round's one wait for the device."""
        result: list[int] = self.result[0].tolist()
        return result

    def commit(self, count: int) -> None:
        """Count a round's first `count` rows as committed; fewer than it chose end the text."""
        self.cache.touch(self.tree.token_ids.shape[1] + 1)
        self.context.touch(self.most + self.block)
        self.cache.commit(count)
        self.context.commit(count)
        if self.noise is not None:
            self.noise.give_back(count)

    def rehearse(self) -> None:
        """Run a round that leaves the state of the round, and the generator, as they were before."""
        state = [self.root, self.position, *self.tree, self.length, self.context_length]
        saved = [tensor.clone() for tensor in state]
        if self.noise is not None:
            self.noise.begin()
        self.round()
        if self.noise is not None:
            self.noise.give_back(0)
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)

    def capture(self) -> None:
        """Record `round` as a CUDA graph."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles, and lets libraries allocate what they need
                self.rehearse()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.round()
        self.graph = graph

    @torch.no_grad()
    def round(self) -> None:
        """The algorithm, on the device alone."""
        # Verify the tree.
        ancestors, depths = self.find_ancestors(self.tree.parents, self.tree.depths)
        self.visible.copy_(ancestors)
        self.depths.copy_(depths)
        token_ids = torch.cat([self.root, self.tree.token_ids], dim=1)
        logits, features = self._verify(token_ids, torch.minimum(self.position + depths, self.last_position))
        # Walk from the root by the target's own choice.
        choices = choose(logits, depths.clamp(max=self.most - 1), self.root, self.processors, self.noise, self.most)
        rows, tokens = follow(choices, self.tree, ancestors, depths, self.most)
        count = (rows >= 0).sum(dim=1)  # (1,)
        # Keep the path.
        steps = torch.arange(self.most, device=self.device)[None]
        target = self.length[:, None] + steps
        self.cache.move(torch.where(rows >= 0, self.length[:, None] + rows, target), target)
        path = features.gather(1, rows.clamp(min=0)[..., None].expand(-1, -1, features.shape[-1]))
        # Draft the next block, and build the tree from its distributions.
        self.root.copy_(tokens.gather(1, count[:, None] - 1))
        hidden = self._draft(path, count, self.position + steps)
        token_ids, log_probs = best_candidates(draft_logits(self.target, hidden), self.candidates)
        tree = self.build_tree(token_ids, log_probs, self.nodes)
        for own, new in zip(self.tree, tree, strict=True):
            own.copy_(new)
        self.length.add_(count)
        self.context_length.add_(count)
        self.position.add_(count[:, None])
        self.result.copy_(torch.cat([count[:, None], rows, tokens], dim=1))

    def _verify(self, token_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `(1, N + 1, V)` and features `(1, N + 1, taps * H)` of a tree, root first."""
        unused = torch.zeros(1, 1, 1, 1, dtype=self.target.dtype, device=self.device)  # 4D masks are passed on as is
        kinds = dict(self.kinds)
        with self.taps.recording() as chunks, each_attends_once(decoder_layers(self.target)):
            output = self.target(
                input_ids=token_ids,
                position_ids=positions,
                attention_mask=dict.fromkeys(kinds, unused) if len(kinds) > 1 else unused,
                use_cache=False,
                return_dict=True,
            )
        return output.logits, torch.cat([parts[0] for parts in chunks.values()], dim=-1)

    def _draft(self, features: torch.Tensor, count: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states `(1, depth, H)` of the drafted places, behind the first `count` of the new context's rows."""
        places = torch.arange(self.block, device=self.device)[None]
        steps = torch.arange(self.most, device=self.device)[None]
        context = (steps < count[:, None])[:, None].expand(-1, self.block, -1)
        for causal, visible in self.block_visible.items():
            visible[:, :, : self.most] = context
            visible[:, :, self.most :] = (places[:, None] <= places[:, :, None]) if causal else True
        self.block_depths.copy_(count[:, None] + places)
        self.column_depths.copy_(torch.cat([steps, self.block_depths], dim=1))
        masks = torch.full_like(places[:, 1:], self.drafter.config.mask_token_id)
        output = self.drafter(
            noise_embeds=embed_tokens(self.target, torch.cat([self.root, masks], dim=1)).to(self.dtype),
            context_hidden_states=features.to(self.dtype),
            position_ids=torch.cat([positions, self.position + self.block_depths], dim=1),
            attention_mask=torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device),
        )
        hidden: torch.Tensor = output.last_hidden_state[:, 1 : self.depth + 1]
        return hidden


def tree_functions(kind: TreeKind, nodes: int, device: torch.device) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How to build a tree from candidates, and to find its ancestors and depths: one launch each where Triton runs."""
    if kind == "best_first" and device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from . import draft_tree_kernel as kernel

        if nodes <= kernel.MAX_BUDGET:
            return kernel.best_first_tree_triton, kernel.ancestors_triton

    def find_ancestors(parents: torch.Tensor, depths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ancestors = ancestor_matrix(parents, depths)
        return ancestors, node_depths(ancestors)

    return functools.partial(build_tree, kind), find_ancestors


def why_not_captured(
    buffers: Buffers,
    source: DDTreeCandidateGenerator,
    verifier: Verifier,
    rope: RopeSwitch,
    record: GenerationRecord,
    processors: LogitsProcessorList,
    do_sample: bool,
    position: torch.Tensor,
    synced_gpus: bool,
) -> str | None:
    """Why a call's rounds cannot be steps, or `None`. What has to look at every module comes last."""
    target, drafter = source.target, source.drafter
    if not buffers.kept:
        return "another call holds the buffers"
    if source.config.execution == "plain":
        return "asked for"
    if why := _on_one_gpu({tensor.device for model in (target, drafter) for tensor in model.parameters()}):
        return why
    if getattr(target, "hf_quantizer", None) is not None:
        return "weights are quantized"
    if type(drafter) is not DFlashDraftModel:
        return "the drafter is not a DFlashDraftModel"
    if record.needs_rows or not is_row_wise(processors):
        return "processors, criteria or outputs look at single tokens"
    if do_sample and record.input_ids.device != source.device:
        return "the prompt is on another device"
    if synced_gpus:
        return "ranks wait for each other"
    if position.dim() > 2:
        return "positions have several axes"
    if rope.at is not None:
        return "rotary frequencies switch"
    if _has_dynamic_rope(target) or _has_dynamic_rope(drafter):
        return "rotary frequencies follow the length"
    if torch.is_autocast_enabled(source.device.type):
        return "autocast is on"
    if record.room < 2:
        return "one token is left"
    if verifier.plain_only:
        return "steps have to be plain ones"
    if why := verifier.why_not_captured():
        return why
    if verifier.step_kwargs or verifier.step_types:
        return "the caller gives each step arguments of their own"
    if any(map(_hooked, target.modules())) or any(map(_hooked, drafter.modules())):
        return "a module has hooks"
    if any(type(module).__module__.startswith("peft.") for module in target.modules()):
        return "adapters may change between rounds"
    return None


def _on_one_gpu(devices: set[torch.device]) -> str | None:
    """What speaks against it, or `None`."""
    if devices == {torch.device("cpu")}:
        return "on a CPU it gains nothing"
    if len(devices) > 1:
        return "weights lie on several devices"
    return None if {device.type for device in devices} == {"cuda"} else "only CUDA graphs are captured"


def _has_dynamic_rope(model: Any) -> bool:
    config = model.config.get_text_config(decoder=True)
    return any(rope.get("rope_type") == "dynamic" for rope in rope_parameters(config))


def _hooked(module: nn.Module) -> bool:
    """Whether something runs around a module's forward that a graph would not repeat."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooks += [*_module._global_forward_hooks.values(), *_module._global_forward_pre_hooks.values()]
    own = ("transformers.utils.output_capturing", "hf_ddtree.verifier")  # which write what they were asked for only
    return "forward" in vars(module) or any(getattr(hook, "__module__", None) not in own for hook in hooks)


def find_step(
    buffers: Buffers,
    source: DDTreeCandidateGenerator,
    processors: LogitsProcessorList,
    do_sample: bool,
    room: int,
    begin: Callable[[Step], None],
) -> tuple[Step | None, str]:
    """The step for a call, captured now if no earlier call left it, and how it runs.

    Args:
        room: Tokens that the call may still commit.
        begin: Gives a step the state to start from.
    """
    rows = min(room, _MOST_AHEAD) + source.nodes + 1
    buffers.cache.reserve(buffers.cache.length + rows)
    buffers.context.reserve(buffers.context.length + rows + 2 * source.block_size)
    where = (
        _fingerprint(source.target), _fingerprint(source.drafter),
        *(layer.keys.data_ptr() for cache in (buffers.cache, buffers.context) for layer in cache.layers),
    )  # fmt: skip
    what = (
        source.config.tree, source.config.execution, source.nodes, source.max_depth, do_sample,
        tuple((type(processor), _values(processor)) for processor in processors),
    )  # fmt: skip
    for key in [key for key in buffers.steps if key[1] != where]:
        del buffers.steps[key]  # its weights or rows have moved
    step = buffers.steps.pop((what, where), None)
    if isinstance(step, Step):
        begin(step)
    elif step is None:
        step = _capture(source, buffers.cache, processors, do_sample, begin)
    buffers.steps[what, where] = step  # the last used is the last
    while len(buffers.steps) > _MOST_STEPS:
        del buffers.steps[next(iter(buffers.steps))]
    return (step, step.path) if isinstance(step, Step) else (None, step)


def _capture(
    source: DDTreeCandidateGenerator,
    cache: TreeCache,
    processors: LogitsProcessorList,
    do_sample: bool,
    begin: Callable[[Step], None],
) -> Step | str:
    """A new step, without compilation if that fails; or the path without one, where no graph can be had."""
    why = ""
    for compiled in (True, False) if source.config.execution == "auto" else (False,):
        step: Step | None = None
        try:
            # One capture at a time, as torch asks, and ordinary tensors, for calls outside of inference mode too.
            with _capturing, torch.inference_mode(False), _on(source.device):
                step = Step(source, cache, processors, do_sample)
                if step.noise is not None:
                    step.noise.begin()
                begin(step)
                with _NoHostReads():  # type: ignore[no-untyped-call]
                    step.rehearse()
                if compiled:
                    step.compile()
                step.capture()
        except Exception as error:
            if step is not None and step.noise is not None:
                step.noise.give_back(0)
            why, hopeless = _name(error), isinstance(error, torch.OutOfMemoryError)
        else:
            step.path = "compiled, in one CUDA graph" if compiled else "captured in one CUDA graph"
            step.path += f" (not compiled: {why})" if why else ""
            return step
        step = None  # behind the error, whose traceback holds it
        _release(source.device)
        if hopeless:
            break
    return f"plain: the capture failed ({why})"


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _release(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def _fingerprint(model: Any) -> int:
    """Changes with all that a graph has baked in: modules and their numbers, configs, and where weights lie."""
    modules = [(id(module), type(module), _numbers(module)) for module in model.modules()]
    tensors = itertools.chain(model.parameters(), model.buffers())
    places = [(id(tensor), tensor.data_ptr(), tensor.dtype) for tensor in tensors]
    return hash((str(model.config.to_dict()), *modules, *places))


def _numbers(module: nn.Module) -> tuple[Any, ...]:
    return tuple(value for value in vars(module).values() if isinstance(value, (bool, int, float, str)))


def _values(processor: Any) -> str:
    """What a processor holds, tensors to their last digit."""
    return str([(k, v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in sorted(vars(processor).items())])


class _NoHostReads(TorchDispatchMode):
    """Raises where a forward reads a tensor on the host: in a capture that would be too late."""

    _READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._READS and args[0].device.type != "cpu":
            raise NotImplementedError("a forward that reads tensors on the host")
        return func(*args, **(kwargs or {}))
