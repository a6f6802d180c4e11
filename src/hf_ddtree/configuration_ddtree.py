"""What a user may ask of `ddtree=`. Imports nothing of the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

MAX_BUDGET = 1024
TREES = ["best_first", "chain", "static"]  # and what is registered besides
EXECUTIONS = ("auto", "captured", "plain")

# Nodes of the trees of "auto": a CPU pays for each in compute, a GPU reads the weights anyway. One less than a power
# of two, since the root takes a row as well.
_AUTO, _AUTO_CPU = 63, 7


@dataclass(frozen=True)
class DDTreeConfig:
    """
    Options of tree decoding, for `generate(..., ddtree=DDTreeConfig(...))` or a dict of the same keys.

    Args:
        budget (`int`, `"auto"` or a sequence of `int`):
            Nodes of a tree besides its root, 0 to 1024; without any, a round gives one token. `"auto"` is 7 on a
            CPU and 63 elsewhere. Where 32 rounds with trees have given fewer than 2 tokens in the mean on a CPU, or
            1.25 elsewhere, the call goes on with single tokens for 64 rounds, and then tries trees again; the next
            time it is twice as many. Under `torch.use_deterministic_algorithms`, and where ranks share one target,
            trees are never given up. A sequence, such as another call's `ddtree_stats.budgets`, is replayed, its last
            number for all further rounds.
        tree (`"best_first"`, `"chain"`, `"static"` or the name of a registered policy):
            DDTree's most probable prefixes, DFlash's single most probable continuation, a tree of fixed shape, or what
            [`register_policy`] knows by that name.
        max_depth (`int`, *optional*):
            Deepest node; at most (and by default) the drafter's block size minus one.
        execution (`"auto"`, `"captured"` or `"plain"`):
            How rounds run on a GPU: layers compiled and the whole round in one CUDA graph, the graph without
            compilation (less to wait for in the first call), or one operation after another. `layers`, `compiled`
            and `launch` of `ddtree_stats` say how they ran and why.
        record_trees (`bool`):
            Keep each round's tree and accepted path in `ddtree_stats.trees`.
        record_times (`bool`):
            Measure each stage of the rounds in `ddtree_stats.times` (synchronises the device after each).

    Raises:
        ValueError: A value is out of range.
        TypeError: A value has the wrong type.
    """

    budget: int | Literal["auto"] | Sequence[int] = "auto"
    tree: str = "best_first"
    max_depth: int | None = None
    execution: Literal["auto", "captured", "plain"] = "auto"
    record_trees: bool = False
    record_times: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.budget, Sequence) and not isinstance(self.budget, str):
            object.__setattr__(self, "budget", tuple(self.budget))
            if not self.budget:
                raise ValueError("ddtree: `budget` is an empty sequence.")
        given = self.budget if isinstance(self.budget, tuple) else (self.budget,)
        if not (isinstance(self.budget, str) and self.budget == "auto"):
            for budget in given:
                _check_int("budget", budget, 0, MAX_BUDGET, 'an int, "auto" or a sequence of ints')
        if self.tree not in TREES:
            raise ValueError(f"ddtree: `tree` must be one of {', '.join(TREES)}, got {self.tree!r}.")
        if self.execution not in EXECUTIONS:
            raise ValueError(f"ddtree: `execution` must be one of {', '.join(EXECUTIONS)}, got {self.execution!r}.")
        if self.max_depth is not None:
            _check_int("max_depth", self.max_depth, 1, MAX_BUDGET, "an int or None")
        for name in ("record_trees", "record_times"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"ddtree: `{name}` must be a bool, got {getattr(self, name)!r}.")

    def to_dict(self) -> dict[str, Any]:
        """The options as a JSON-serialisable dict."""
        options = asdict(self)
        return options | {"budget": list(self.budget)} if isinstance(self.budget, tuple) else options

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> DDTreeConfig:
        """The inverse of `to_dict`: missing keys of `options` take their defaults.

        Raises:
            ValueError: A key is unknown, or a value out of range.
            TypeError: A value has the wrong type.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(map(str, options)) - set(known)):
            raise ValueError(f"ddtree: unknown option {', '.join(unknown)}; the options are {', '.join(known)}.")
        return cls(**options)

    @classmethod
    def from_value(cls, value: Any) -> DDTreeConfig | None:
        """What `ddtree=value` asks for: `None` when trees are off.

        Raises:
            TypeError: `value` is neither a bool, a dict nor a `DDTreeConfig`.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise TypeError(f"`ddtree` must be True, False, a DDTreeConfig or a dict of its options, got {value!r}.")

    def sizes(self, device_type: str) -> tuple[int, ...]:
        """The numbers of nodes that rounds may have on a device of this type ("cpu", "cuda"), ascending.

        Args:
            device_type: `torch.device.type` of the target.
        """
        if self.budget == "auto":
            return (0, _AUTO_CPU if device_type == "cpu" else _AUTO)
        return (self.budget,) if isinstance(self.budget, int) else tuple(sorted(set(self.budget)))


def _check_int(name: str, value: Any, low: int, high: int, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"ddtree: `{name}` must be {expected}, got {value!r}.")
    if not low <= value <= high:
        raise ValueError(f"ddtree: `{name}` must be between {low} and {high}, got {value}.")
