"""The hooks that make `ddtree=` part of stock `generate`: in with `install`, out with `uninstall`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, GenerationConfig, PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.pipelines import base as pipelines_base

from .compat import CACHE_KEY, warn_if_untested
from .configuration_ddtree import DDTreeConfig
from .configuration_dflash import DFlashConfig
from .decoding import ddtree_decoding
from .drafter_families import family_of, load_drafter
from .modeling_dflash import DFlashDraftModel
from .outputs import longest
from .validation import (
    check_assistant,
    check_batch,
    check_cache,
    check_cross_attention,
    check_custom_generate,
    check_drafter_has_use,
    check_not_paged,
    check_options,
    check_pair,
    check_prompt,
    check_rope,
    check_target,
)
from .verifier import input_device


@dataclass
class _Call:
    """What a call of `generate` knows of itself until the decoding loop takes over."""

    explicit: bool  # whether `ddtree` was given to this very call, and not only found in a config
    inner: bool  # whether another call of `generate` makes it
    streamer: Any | None  # to be ended here should the call fail before the loop


_call: ContextVar[_Call | None] = ContextVar("hf_ddtree_call", default=None)

# (owner, name) -> (our hook, what stood there before, None if nothing did)
_installed: dict[tuple[Any, str], tuple[Any, Any]] = {}


class _DDTreeOption:
    """`GenerationConfig.ddtree`: makes the keyword legal; a value stands in the config's `__dict__` only when set."""

    def __get__(self, config: Any, owner: type | None = None) -> Any:
        return None if config is None else config.__dict__.get("ddtree")

    def __set__(self, config: Any, value: Any) -> None:
        if value is None:
            config.__dict__.pop("ddtree", None)
        else:
            config.__dict__["ddtree"] = value.to_dict() if isinstance(value, DDTreeConfig) else value

    def __delete__(self, config: Any) -> None:
        config.__dict__.pop("ddtree", None)


def install() -> None:
    """Put the hooks into transformers: `generate`, its config and pipelines then know `ddtree=`.

    `import hf_ddtree` does it, and a second time changes nothing. A version of transformers outside of the tested
    range is warned of.
    """
    if _installed:
        return
    warn_if_untested()
    _put(GenerationConfig, "ddtree", lambda _: _DDTreeOption())
    _put(GenerationConfig, "__init__", _config_init)
    _put(GenerationMixin, "generate", _generate)
    _put(GenerationMixin, "_validate_generation_mode", _validate_generation_mode)
    _put(GenerationMixin, "_assisted_decoding", _assisted_decoding)
    _put(pipelines_base, "load_assistant_model", _load_assistant_model)
    AutoConfig.register(DFlashConfig.model_type, DFlashConfig, exist_ok=True)
    AutoModel.register(DFlashConfig, DFlashDraftModel, exist_ok=True)


def uninstall() -> None:
    """Take the hooks out of transformers again, each only if it is still ours."""
    for (owner, name), (hook, original) in _installed.items():
        if owner.__dict__.get(name) is not hook:
            continue
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    _installed.clear()


def _put(owner: Any, name: str, make_hook: Callable[[Any], Any]) -> None:
    """Hook `owner.name`, in place of an older import's hook if there is one."""
    current = owner.__dict__.get(name)
    original = getattr(current, "_hf_ddtree_original", current)
    ours = make_hook(original)
    hook = ours if original is None else _while_installed(owner, name, ours, original)
    hook._hf_ddtree_original = original
    setattr(owner, name, hook)
    _installed[owner, name] = (hook, original)


def _while_installed(owner: Any, name: str, ours: Callable[..., Any], original: Callable[..., Any]) -> Any:
    """Our function while it is installed, else the original: others may have wrapped this hook and keep calling it."""

    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        installed = _installed.get((owner, name), (None, None))[0] is hook
        return (ours if installed else original)(*args, **kwargs)

    return hook


def _config_init(original: Callable[..., None]) -> Callable[..., None]:
    """`GenerationConfig.__init__` drops entries it does not know from files that say `_from_model_config`."""

    def __init__(self: GenerationConfig, **kwargs: Any) -> None:
        ddtree = kwargs.pop("ddtree", None)
        original(self, **kwargs)
        self.ddtree = ddtree

    return __init__


def _generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """See what this very call asks for, and refuse what would never reach the decoding loop."""
    signature = inspect.signature(original)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        requested = kwargs.get("ddtree")
        explicit = requested is not None and requested is not False
        call = _Call(explicit, _call.get() is not None, kwargs.get("streamer") if explicit else None)
        token = _call.set(call)
        try:
            bound = signature.bind(self, *args, **kwargs)
            arguments = bound.arguments | bound.arguments.get("kwargs", {})
            requested, drafter = (
                _option(self, arguments, "ddtree"),
                family_of(arguments.get("assistant_model")) is not None,
            )
            if explicit or (requested and drafter):
                call.streamer = arguments.get("streamer")
            if explicit:
                _check_reaches_the_loop(self, arguments)
                if (config := arguments.get("generation_config")) is not None:
                    # Both side by side are deprecated for transformers' own options, and would warn.
                    config = bound.arguments["generation_config"] = copy.deepcopy(config)
                    config.ddtree = bound.arguments["kwargs"].pop("ddtree")
            if requested is False and drafter and _option(self, arguments, "speculation_type") != "dflash":
                bound.arguments["assistant_model"] = None  # whoever holds a drafter may decode without it
            return original(*bound.args, **bound.kwargs)
        except BaseException:
            if call.streamer is not None:
                with contextlib.suppress(Exception):
                    call.streamer.end()
            raise
        finally:
            _call.reset(token)

    return generate


def _option(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """The value that an option has in a call of `generate`: the call's own, its config's or the model's."""
    configs = arguments.get("generation_config"), getattr(model, "generation_config", None)
    given = (arguments.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in given if value is not None), None)


def _check_reaches_the_loop(model: Any, arguments: dict[str, Any]) -> None:
    """Raise on a call with `ddtree` that is malformed, or that would pass the decoding loop by."""
    DDTreeConfig.from_value(arguments["ddtree"])
    if (custom_generate := arguments.get("custom_generate")) is not None:
        if isinstance(custom_generate, str):
            hub_options = {"trust_remote_code": None, **arguments["kwargs"]}
            custom_generate = model.load_custom_generate(custom_generate, **hub_options)
        check_custom_generate(custom_generate)
        return
    check_not_paged(arguments.get("cache_implementation"))
    check_batch(_batch_size(arguments))


def _batch_size(arguments: dict[str, Any]) -> int:
    """The number of prompts, where the prompts are a batch of tensors as `generate` wants them."""
    for name, dimensions in (("inputs", 2), ("input_ids", 2), ("inputs_embeds", 3)):
        prompts = arguments.get(name)
        if isinstance(prompts, torch.Tensor) and prompts.dim() >= dimensions:
            return prompts.shape[0]
    return 1


def _validate_generation_mode(original: Callable[..., None]) -> Callable[..., None]:
    """All checks that need no input, before the first forward."""

    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        config = DDTreeConfig.from_value(generation_config.ddtree)
        assistant = generation_mode_kwargs.get("assistant_model")
        if config is None:
            family = family_of(assistant)
            if family is not None and family.model_class is not None:  # transformers knows its own
                check_drafter_has_use(generation_config)
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        call = _call.get()
        if (call is None or not call.explicit) and family_of(assistant) is None:
            if call is None or not call.inner:
                warnings.warn(
                    "The generation config asks for `ddtree`, but this call has no DFlash drafter as "
                    "`assistant_model`: it decodes without trees.",
                    stacklevel=4,
                )
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        check_assistant(assistant)
        check_options(generation_config, generation_mode)
        check_target(self)
        check_pair(self, assistant)
        # What is left to stock transformers is no concern of the drafter's: it shares the target's tokenizer.
        others = {key: value for key, value in generation_mode_kwargs.items() if key != "assistant_model"}
        return original(self, generation_mode, generation_config, others)

    return _validate_generation_mode


def _assisted_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Our loop for calls that asked for trees and have a drafter, transformers' own for all others."""

    def _assisted_decoding(
        self: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        config = DDTreeConfig.from_value(generation_config.ddtree)
        if config is None or family_of(kwargs.get("assistant_model")) is None:
            return original(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        room = longest(generation_config, stopping_criteria) - input_ids.shape[1]
        check_prompt(kwargs["position_ids"])
        check_cache(kwargs.get(CACHE_KEY))
        check_cross_attention(self, kwargs)
        check_rope(self, int(kwargs["position_ids"].max()) + 1 + room)
        for name in ("inputs_tensor", "assistant_tokenizer", "tokenizer"):
            kwargs.pop(name, None)
        if (call := _call.get()) is not None:
            call.streamer = None  # the loop ends it
        return ddtree_decoding(
            self,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            kwargs.pop("assistant_model"),
            config,
            **kwargs,
        )

    return _assisted_decoding


def _load_assistant_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pipelines take a drafter, or the path of one, as it is: it has no tokenizer of its own."""

    def load_assistant_model(model: Any, assistant_model: Any, assistant_tokenizer: Any) -> tuple[Any, Any]:
        if isinstance(assistant_model, str):
            config_dict, _ = PreTrainedConfig.get_config_dict(assistant_model)
            if family_of(config_dict) is not None:
                assistant_model = load_drafter(assistant_model)
                device = input_device(model.get_input_embeddings(), assistant_model.device)
                assistant_model = assistant_model.to(device=device, dtype=model.dtype)
        if family_of(assistant_model) is not None:
            return assistant_model, None
        return original(model, assistant_model, assistant_tokenizer)

    return load_assistant_model
