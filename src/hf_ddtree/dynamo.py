"""What `torch.compile` has put in front of a model's forwards, and how to run what lies beneath.

A target's feature hooks cannot be traced, and a tree's shapes would be compiled one by one, in the caller's name.
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from .anatomy import modules_of

_COMPILERS = ("torch._dynamo.eval_frame", "torch._dynamo.external_utils")  # where torch makes its wrappers
_PLACES = ("forward", "_old_forward", "_forward")  # accelerate's hooks move a forward, lazy modules do
_FORWARDS = ("forward", "_call_impl", "_wrapped_call_impl")
_ABSENT = object()


class Aside(NamedTuple):
    """A compiled form that is not run for now."""

    attributes: dict[str, Any]  # of its module
    name: str
    compiled: Any  # `_ABSENT` where it is the class's
    bare: Any  # what stands in its place


def beneath(function: Any) -> Any:
    """What a function that `torch.compile` made runs; any other is returned as it is."""
    if isinstance(function, MethodType):
        bare = beneath(function.__func__)
        return function if bare is function.__func__ else MethodType(bare, function.__self__)
    if isinstance(function, functools.partial):
        bare = beneath(function.func)
        return function if bare is function.func else functools.partial(bare, *function.args, **function.keywords)
    # What torch notes on its wrapper is copied to any other around that: its globals are its own.
    while isinstance(function, FunctionType) and function.__globals__.get("__name__") in _COMPILERS:
        if (wrapped := getattr(function, "__wrapped__", None)) is None:
            break
        function = wrapped
    return function


def is_own_forward(module: nn.Module, forward: Any) -> bool:
    """Whether an instance's `forward` is that of its class, compiled or not."""
    bare = beneath(forward)
    return isinstance(bare, MethodType) and bare.__self__ is module and bare.__func__ is type(module).forward


def put_aside(model: nn.Module) -> list[Aside]:
    """Have a model and all modules in it run uncompiled, until `put_back`. Each call waits for this."""
    aside: list[Aside] = []
    bare_of: dict[Any, Any] = {}  # by class, of which there are few
    for module in modules_of(model):
        own, kind = vars(module), type(module)
        if kind not in bare_of:
            bare_of[kind] = beneath(kind.forward)
        if (call := own.get("_compiled_call_impl")) is not None:
            aside.append(Aside(own, "_compiled_call_impl", call, None))
        if not own.keys().isdisjoint(_PLACES):
            forms = [Aside(own, name, own[name], beneath(own[name])) for name in _PLACES if name in own]
            aside += [form for form in forms if form.bare is not form.compiled]
        if bare_of[kind] is not kind.forward and "forward" not in own:
            aside.append(Aside(own, "forward", _ABSENT, MethodType(bare_of[kind], module)))
    for own, name, _, bare in aside:
        own[name] = bare
    return aside


def put_back(aside: list[Aside]) -> None:
    """Undo `put_aside`."""
    for own, name, compiled, _ in aside:
        if compiled is _ABSENT:
            del own[name]
        else:
            own[name] = compiled


def hides_compiled(model: nn.Module, inner: nn.Module) -> str | None:
    """The class of `inner`, or of a module around it, with a compiled forward that cannot be put aside; or `None`."""
    for module in _path(model, inner):
        kind: Any = type(module)
        if beneath(kind.__call__) is not kind.__call__ or _hides(vars(module).get("forward", kind.forward), set()):
            return str(kind.__name__)
    return None


def _path(module: nn.Module, inner: nn.Module) -> list[nn.Module]:
    """The modules from one to another within it, both included; none where it is not within it."""
    if module is inner:
        return [module]
    below = next((path for child in module.children() if (path := _path(child, inner))), None)
    return [module, *below] if below else []


def _hides(function: Any, seen: set[int]) -> bool:
    """Whether a compiled forward is called by what a function closes over, by its arguments or by a global name."""
    if _is_made_ahead(function):
        return True
    function = beneath(function)
    known: list[Any] = []
    while isinstance(function, MethodType | functools.partial):
        known += [] if isinstance(function, MethodType) else function.args
        function = function.__func__ if isinstance(function, MethodType) else function.func
    called: list[Any] = []
    if isinstance(function, FunctionType) and id(function) not in seen:
        seen.add(id(function))
        names = inspect.getclosurevars(function)
        known += names.nonlocals.values()
        called += names.globals.values()
    return any(map(_is_compiled_forward, [*known, *called])) or any(_hides(value, seen) for value in known)


def _is_compiled_forward(value: Any) -> bool:
    bare = beneath(value)
    return _is_made_ahead(value) or (bare is not value and getattr(bare, "__name__", None) in _FORWARDS)


def _is_made_ahead(value: Any) -> bool:
    """Whether torch gave an object in a function's place, as when it compiles ahead of time, or a module."""
    return type(value).__module__.startswith("torch._dynamo.")
