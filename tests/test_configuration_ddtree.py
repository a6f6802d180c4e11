"""The options of `ddtree=`: what they mean, what is refused, and the way through JSON and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hf_ddtree import DDTreeConfig

OPTIONS = ["budget", "tree", "max_depth", "execution", "record_trees", "record_times"]
CONFIGS = [
    DDTreeConfig(),
    DDTreeConfig(budget=1),
    DDTreeConfig(budget=[15, 0, 63]),
    DDTreeConfig(budget=1024, tree="chain"),
    DDTreeConfig(budget="auto", tree="static", max_depth=1),
    DDTreeConfig(budget=63, tree="best_first", max_depth=15, record_trees=True, record_times=True),
]


def test_the_defaults_are_a_best_first_tree_of_the_documented_size() -> None:
    config = DDTreeConfig()
    assert config.to_dict() == {
        "budget": "auto",
        "tree": "best_first",
        "max_depth": None,
        "execution": "auto",
        "record_trees": False,
        "record_times": False,
    }
    assert config.sizes("cpu") == (0, 7)
    assert config.sizes("cuda") == config.sizes("mps") == (0, 63)


@pytest.mark.parametrize("budget", [0, 1, 15, 16, 255, 1024])
def test_a_number_is_the_number_of_nodes_on_every_device(budget: int) -> None:
    config = DDTreeConfig(budget=budget)
    assert config.budget == budget
    assert config.sizes("cpu") == config.sizes("cuda") == (budget,)


@pytest.mark.parametrize("tree", ["best_first", "chain", "static"])
def test_trees_are_chosen_by_name(tree: Any) -> None:
    assert DDTreeConfig(tree=tree).tree == tree


@pytest.mark.parametrize("execution", ["auto", "captured", "plain"])
def test_executions_are_chosen_by_name(execution: Any) -> None:
    assert DDTreeConfig(execution=execution).execution == execution
    with pytest.raises(ValueError, match="`execution` must be one of auto, captured, plain"):
        DDTreeConfig(execution=execution.upper())


@pytest.mark.parametrize(("name", "least"), [("budget", 0), ("max_depth", 1)])
@pytest.mark.parametrize("below", [1, 2, 1024, -1025, -(10**9)])
def test_a_number_out_of_range_is_refused_with_its_name_and_the_range(name: str, least: int, below: int) -> None:
    value = least - below
    with pytest.raises(ValueError, match=rf"`{name}` must be between {least} and 1024, got {value}\."):
        DDTreeConfig(**{name: value})


@pytest.mark.parametrize("name", ["budget", "max_depth"])
@pytest.mark.parametrize("value", [True, False, 15.0, 1.5, float("nan"), "63", "AUTO", "", [15.0], ["auto"], {}])
def test_what_is_not_an_int_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must be an int"):
        DDTreeConfig(**{name: value})


def test_a_sequence_is_a_schedule() -> None:
    config = DDTreeConfig(budget=[15, 0, 63, 15])
    assert config == DDTreeConfig(budget=(15, 0, 63, 15))
    assert hash(config)
    assert config.sizes("cpu") == config.sizes("cuda") == (0, 15, 63)
    assert json.loads(json.dumps(config.to_dict()))["budget"] == [15, 0, 63, 15]
    assert DDTreeConfig(budget=range(3)).budget == (0, 1, 2)
    for empty in ([], ()):
        with pytest.raises(ValueError, match="`budget` is an empty sequence"):
            DDTreeConfig(budget=empty)


def test_auto_is_a_budget_and_no_depth_and_none_a_depth_and_no_budget() -> None:
    with pytest.raises(TypeError, match="`max_depth` must be an int or None, got 'auto'"):
        DDTreeConfig(max_depth="auto")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match='`budget` must be an int, "auto" or a sequence of ints, got None'):
        DDTreeConfig(budget=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("tree", ["", "Chain", "bestfirst", "best_first ", None, 1, True, ["chain"]])
def test_a_wrong_tree_is_refused_with_the_names_of_the_right_ones(tree: Any) -> None:
    with pytest.raises(ValueError, match="`tree` must be one of best_first, chain, static, got"):
        DDTreeConfig(tree=tree)


@pytest.mark.parametrize("name", ["record_trees", "record_times"])
@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_a_switch_is_a_bool(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must be a bool"):
        DDTreeConfig(**{name: value})


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_configs_come_back_equal_from_their_dict_and_from_json(config: DDTreeConfig) -> None:
    options = config.to_dict()
    assert list(options) == OPTIONS
    assert DDTreeConfig.from_dict(options) == config
    assert DDTreeConfig.from_dict(json.loads(json.dumps(options))) == config
    assert DDTreeConfig.from_value(options) == config


@pytest.mark.parametrize("name", OPTIONS)
def test_missing_keys_take_their_defaults(name: str) -> None:
    value = CONFIGS[-1].to_dict()[name]
    config = DDTreeConfig.from_dict({name: value})
    assert config.to_dict() == DDTreeConfig().to_dict() | {name: value}


def test_unknown_keys_are_refused_by_name_beside_the_known_ones() -> None:
    options = {"budget": 15, "width": 4, "depth": 3}
    with pytest.raises(ValueError, match="unknown option depth, width; the options are " + ", ".join(OPTIONS)):
        DDTreeConfig.from_dict(options)
    with pytest.raises(ValueError, match="unknown option depth, width"):
        DDTreeConfig.from_value(options)
    with pytest.raises(TypeError, match="width"):
        DDTreeConfig(width=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"budget": -1}, ValueError, "budget"),
        ({"budget": True}, TypeError, "budget"),
        ({"tree": "heap"}, ValueError, "tree"),
        ({"max_depth": 2.0}, TypeError, "max_depth"),
    ],
)
def test_a_dict_is_checked_like_the_arguments(options: dict[str, Any], error: type[Exception], name: str) -> None:
    for make in (DDTreeConfig.from_dict, DDTreeConfig.from_value):
        with pytest.raises(error, match=f"`{name}`"):
            make(options)


def test_true_asks_for_the_defaults_and_false_or_none_for_no_trees() -> None:
    config = DDTreeConfig(budget=7)
    assert DDTreeConfig.from_value(True) == DDTreeConfig()
    assert DDTreeConfig.from_value({}) == DDTreeConfig()
    assert DDTreeConfig.from_value(config) is config
    assert DDTreeConfig.from_value(False) is None
    assert DDTreeConfig.from_value(None) is None


@pytest.mark.parametrize("value", [1, 0, "auto", "best_first", 63, [("budget", 63)]])
def test_other_values_of_ddtree_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="`ddtree` must be True, False, a DDTreeConfig or a dict"):
        DDTreeConfig.from_value(value)


def test_a_config_cannot_be_changed_past_its_checks_and_its_dict_is_a_copy() -> None:
    config = DDTreeConfig(budget=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = -1  # type: ignore[misc]
    config.to_dict()["budget"] = -1
    assert config.budget == 7
    with pytest.raises(ValueError, match="`budget`"):
        dataclasses.replace(config, budget=-1)
