"""docs/api.md: every public name with its signature and docstring.

`python tests/test_api.py --write` writes the page.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hf_ddtree
from hf_ddtree import visualize

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# API

Every public name, from its docstring. `python tests/test_api.py --write` writes this page, and `tests/test_api.py`
fails where it is older than the code. Letters in shapes: B sequences (1 today), N nodes, D depths, K candidates, L ids
of the text, H hidden size, V vocabulary, P tokens of a path.
"""
_SECTIONS = ("Args", "Attributes", "Returns", "Raises")


def signature(name: str, thing: Any) -> str:
    """As it is written, without what transformers adds; of a config's own fields only those."""
    own = inspect.get_annotations(thing) if inspect.isclass(thing) else {}
    parameters = [p for p in inspect.signature(thing).parameters.values() if p.name not in ("self", "cls")]
    foreign = inspect.isclass(thing) and len(own) and any(p.name not in own for p in parameters)
    parts = []
    for parameter in parameters:
        if foreign and parameter.name not in own:
            continue
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {written(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}".replace("<factory>", "...")
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in "".join(parts):
            parts.append("*")
        parts.append(text)
    parts += ["..."] if foreign else []
    returned = "" if inspect.isclass(thing) else f" -> {written(inspect.signature(thing).return_annotation)}"
    line = f"{name}({', '.join(parts)}){returned}"
    return line if len(line) < 100 else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"


def written(annotation: Any) -> str:
    return annotation.strip('"') if isinstance(annotation, str) else inspect.formatannotation(annotation)


def markdown(docstring: str) -> str:
    """A docstring whose sections are lists."""
    lines: list[str] = []
    section = ""
    for line in inspect.cleandoc(docstring).splitlines():
        entry = re.match(r"    (\*{0,2}\w[\w, *]*)(?: \((.+)\))?: ?(.*)$", line)
        if line.rstrip(":") in _SECTIONS and line.endswith(":"):
            section = line[:-1]
            lines += [f"*{section}*", ""]
        elif section in ("Args", "Attributes", "Raises") and entry:
            kind = f" ({entry[2]})" if entry[2] else ""
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            lines.append(f"- {names}{kind}: {entry[3]}".rstrip())
        elif section and line.startswith("  "):
            lines.append(("  " if section != "Returns" else "") + line.strip())
        else:
            section = section if not line else ""
            lines.append(line)
    return re.sub(r"\[(`\w+(?:\.\w+)?`)\](?!\()", r"\1", "\n".join(lines))


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """What a class itself adds in public and explains, in the order of the code."""
    for name, value in vars(cls).items():
        thing = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        own = type(thing) is property or getattr(thing, "__module__", "").startswith("hf_ddtree")
        is_code = type(thing) is property or inspect.isfunction(thing)
        if own and is_code and thing.__doc__ and not name.startswith("_"):
            yield name, value


def entry(name: str, thing: Any, level: int = 2) -> str:
    doc = markdown(thing.__doc__)
    if isinstance(thing, property):
        return f"{'#' * level} `{name}`\n\n{doc}\n"
    function = thing.__func__ if isinstance(thing, classmethod) else thing
    text = f"{'#' * level} `{name}`\n\n```text\n{signature(name, function)}\n```\n\n{doc}\n"
    if inspect.isclass(thing):
        text += "".join("\n" + entry(f"{name}.{member}", value, level + 1) for member, value in members(thing))
    return text


def public() -> dict[str, Any]:
    """The package's names, and those of `hf_ddtree.visualize`."""
    names = {name: getattr(hf_ddtree, name) for name in hf_ddtree.__all__}
    own = getattr(visualize, "__all__", None) or [
        name for name, thing in vars(visualize).items() if getattr(thing, "__module__", "") == visualize.__name__
    ]
    return names | {f"visualize.{name}": getattr(visualize, name) for name in own if not name.startswith("_")}


def page() -> str:
    return HEAD + "".join("\n" + entry(name, thing) for name, thing in public().items())


def test_the_page_is_as_new_as_the_code() -> None:
    assert PAGE.read_text() == page(), "run python tests/test_api.py --write"


@pytest.mark.parametrize("name", public())
def test_docstrings_name_every_parameter(name: str) -> None:
    thing = public()[name]
    things = [(name, thing)] + [(f"{name}.{n}", m) for n, m in members(thing)] if inspect.isclass(thing) else []
    for full_name, value in things:
        function = value.__func__ if isinstance(value, classmethod) else value
        if isinstance(value, property):
            continue
        parameters = set(inspect.signature(function).parameters) - {"self", "cls", "args", "kwargs"}
        own = inspect.get_annotations(function) if inspect.isclass(function) else {}
        if own and not parameters <= set(own):  # the fields of a class of transformers, and ours
            parameters &= set(own)
        text = function.__doc__ + (thing.__doc__ or "")
        for other in re.findall(r"those of `(\w+)`", text):
            text += getattr(sys.modules[function.__module__], other).__doc__
        assert {p for p in parameters if not re.search(rf"\b{p}\b", text)} == set(), full_name


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        sys.exit(__doc__)
