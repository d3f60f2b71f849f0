"""The plan: the same on every rank, through JSON and back, pinned and honoured, logged once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.manager import report_ranks
from tests.manager.set_ups import a_plan
from tpoverlap.config import resolve
from tpoverlap.errors import ConfigError
from tpoverlap.plan import pinned_evidence, pinned_methods, plan_hash
from tpoverlap.testing import RankPool
from tpoverlap.tuning import Problem, load_device


def test_round_trip(rank_pool: Callable[[int], RankPool]) -> None:
    results = rank_pool(2).run(report_ranks.plan_round_trip, timeout_s=60.0)
    for rank, result in enumerate(results):
        plan = result["plan"]
        assert plan == results[0]["plan"], "every rank has the same"
        assert plan["methods"]["proj_fprop"] == {"method": "pipeline", "is_reduce_scatter": True}
        assert plan["hash"] == plan_hash(plan) != result["default plan"]["hash"]
        assert len(result["lines"]) == (1 if rank == 0 else 0), "logged once, by rank 0"
        if rank == 0:
            assert plan["hash"] in result["lines"][0] and "pipeline" in result["lines"][0]
        stats = result["stats"]
        assert stats["proj_fprop"]["method_pipeline"] == 1
        for name in ("fc1_fprop", "qkv_dgrad", "qkv_wgrad"):
            assert stats[name]["method_sequential"] == stats[name]["calls"] == 1, (name, stats[name])
        assert stats["fc1_dgrad"]["method_bulk"] == 1, "not pinned to anything but its default"
        assert "pipeline" in result["explain"] and "plan" in result["explain"] and "plan=" in result["explain"]
        assert result["later"]["method_sequential"] == 1


def test_hash_covers_everything_but_itself() -> None:
    plan = a_plan(2, proj_fprop=("pipeline", True))
    for key, value in {"version": 2, "tp_size": 3, "capacity_shape": [1, 1], "methods": {}}.items():
        assert plan_hash(plan | {key: value}) != plan["hash"], key
    assert plan_hash(plan | {"hash": "something else"}) == plan["hash"]


ODD = (
    None, True, -1, 1.5, float("nan"), float("inf"), "x", b"y", [], [1], {}, {"a": 1}, (1, 2), object(), {1, 2}, 2**70,
    {1: 2, "b": 3}, [{}], 1j, "ring_exchange",
)  # fmt: skip
BY_TOKENS = {
    "fc1_fprop": {
        "features": 14336,
        "width": 8192,
        "instead_of": "ring_exchange",
        "rows": [{"up_to": 512, "method": "sequential"}, {"up_to": 8192, "method": "ring_exchange", "time_us": 1.5}],
    }
}


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _places(value[key], (*path, key))


def _with(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = _with(value[path[0]], path[1:], odd)
    return changed


def _use(plan: Any) -> None:
    """What a manager does with ``plan=``, up to the first look-up."""
    pinned_methods(plan, 2, resolve({}, 2))
    evidence = pinned_evidence(plan)
    if evidence is not None:
        evidence.table("fc1_fprop", Problem("gather", 1, 8192, 14336, 2), 8192, ("ring_exchange",), {})


@pytest.mark.parametrize("rehashed", [True, False])
def test_odd_types_in_a_plan_are_config_errors(rehashed: bool) -> None:
    """Every value of a plan with choices by T replaced by every odd one: accepted or a ConfigError, nothing else."""
    device = load_device("h200").to_dict()
    evidence = {
        "section": BY_TOKENS, "cached": {"k": [{"up_to": 3, "method": "sequential"}]}, "device": device,
        "cache_basis": "",
    }  # fmt: skip
    plan = a_plan(2, fc1_fprop=("auto", False)) | {"by_tokens": evidence}
    refused, generator = 0, random.Random(0)
    places = [path for path in _places(plan) if path]
    for path in places:
        for odd in ODD if len(path) < 4 else generator.sample(ODD, 6):
            changed = _with(plan, path, odd)
            if rehashed:
                with suppress(TypeError, ValueError):  # what JSON cannot hold has no hash: the old one stays
                    changed["hash"] = plan_hash(changed)
            try:
                _use(changed)
            except ConfigError as error:
                refused += 1
                assert "plan" in str(error) or "device" in str(error), (path, odd)
    assert refused > 3 * len(places)


@pytest.mark.parametrize("key", ["features", "width", "rows"])
def test_choices_by_t_without_their_shape_are_refused(key: str) -> None:
    """They would be looked up at the first operation, long after set-up."""
    entry = {name: value for name, value in BY_TOKENS["fc1_fprop"].items() if name != key}
    evidence = {"section": {"fc1_fprop": entry}, "cached": {}, "device": None, "cache_basis": ""}
    plan = a_plan(2, fc1_fprop=("auto", False)) | {"by_tokens": evidence}
    with pytest.raises(ConfigError, match=f"fc1_fprop.{key}"):
        _use(plan | {"hash": plan_hash(plan)})


@pytest.mark.parametrize(
    ("path", "odd", "says"),
    [
        (("capacity_shape", 0), object(), "plan['capacity_shape'][0] is <object"),
        (("methods", "fc1_fprop"), {1: 2}, "plan['methods']['fc1_fprop'] has the key 1, a int and no text"),
        (("tp_size",), float("nan"), "plan['tp_size'] is nan, no finite number"),
    ],
)
def test_an_odd_value_is_named(path: tuple[Any, ...], odd: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _use(_with(a_plan(2, fc1_fprop=("auto", False)), path, odd))
    assert says in str(caught.value) and "what mgr.plan() returned" in str(caught.value)


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_odd_types_in_by_tokens_are_config_errors(odd: Any) -> None:
    for path in _places(BY_TOKENS):
        try:
            resolve({"tpoverlap": {"by_tokens": _with(BY_TOKENS, path, odd)}}, 2)
        except ConfigError as error:
            assert "by_tokens" in str(error), error


def test_a_plan_without_methods_is_told_so() -> None:
    plan = {key: value for key, value in a_plan(2, fc1_fprop=("auto", False)).items() if key != "methods"}
    with pytest.raises(ConfigError, match="got version 1 without its 'methods'"):
        _use(plan)
