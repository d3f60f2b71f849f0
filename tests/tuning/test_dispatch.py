"""The order of the sources, and that nothing but the agreed inputs enters a choice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.manager.set_ups import a_plan
from tpoverlap.config import default_config, resolve
from tpoverlap.dispatch import Decision, TokenDecisions, choose
from tpoverlap.errors import ConfigError
from tpoverlap.method_tables import MethodTables
from tpoverlap.plan import make_plan, pinned_evidence, pinned_methods, plan_hash
from tpoverlap.tuning import (
    Candidate,
    Evidence,
    Problem,
    Row,
    cache_file,
    cache_folder,
    entry_key,
    load_device,
    read_entries,
    write_entries,
)

BY_TOKENS = TokenDecisions((8, 24), (Decision("sequential", "cost model", "small"), Decision("fused", "x", "large")))
MACHINE = {"device": "toy", "torch": "1"}
ROWS = [Row(8, Candidate("sequential"), 1.0, 1.0), Row(24, Candidate("pipeline", num_splits=2), 2.0, 3.0)]
H200 = replace(load_device("h200"), host_us={})


def decide(method: str = "ring_exchange", **options: Any) -> Decision:
    config = replace(default_config("fc2_fprop", True, 2), method=method)
    given: dict[str, Any] = {"config_source": "default", "tp_size": 2, "num_tokens": 9, "max_tokens": 24}
    return choose(config, name="fc2_fprop", **(given | options))


def test_the_order_of_the_sources() -> None:
    assert decide(tp_size=1, by_tokens=BY_TOKENS).source == "default"
    assert decide(overflow=True, by_tokens=BY_TOKENS, planned_method="pipeline").source == "overflow"
    assert decide(planned_method="pipeline", by_tokens=BY_TOKENS) == Decision("pipeline", "plan", "pinned by plan=")
    assert decide(by_tokens=BY_TOKENS).method == "fused"
    assert decide(planned_method="auto", by_tokens=BY_TOKENS, num_tokens=8).method == "sequential"
    assert decide(num_tokens=None, by_tokens=BY_TOKENS).source == "default", "a plan asks without T"
    assert decide(planned_method="auto").source == "default", "nothing known about this shape"


def communicator(name: str = "fc2_fprop", **options: Any) -> Any:
    scatter = options.pop("scatter", name in ("fc2_fprop", "proj_fprop"))
    config = options.pop("config", None) or default_config(name, scatter, 2)
    given = {
        "registered": True,
        "overrides": False,
        "width": 8192,
        "max_tokens": 8192,
        "is_reduce_scatter": config.is_reduce_scatter,
        "hint": "",
    }
    return SimpleNamespace(name=name, config=config, **(given | options))


def tables(ub_cfgs: Any = None, evidence: Evidence | None = None, **planned: str) -> MethodTables:
    return MethodTables(evidence or Evidence(device=H200), resolve(ub_cfgs, 2), planned, 2, torch.bfloat16)


def find(made: MethodTables, one: Any, *, scatter: bool = True, features: int | None = 3584) -> TokenDecisions | None:
    return made.find(one, scatter=scatter, beside=False, features=features)


@pytest.mark.parametrize(
    ("written", "free"),
    [
        (None, True),
        ({"fc2_fprop": {}}, True),
        ({"fc2_fprop": {"num_splits": 2}}, True),
        ({"fc2_fprop": {"method": "auto"}}, True),
        ({"fc2_fprop": {"method": "ring_exchange"}}, False),
        ({"fc2_fprop": {"method": "sequential"}}, False),
        ({"fc2_fprop": {"method": "pipeline", "num_splits": 4}}, False),
    ],
)
def test_what_is_written_is_never_overridden(written: Any, free: bool) -> None:
    made = tables(written)
    config = resolve(written, 2).names["fc2_fprop"]
    one = communicator(config=config)
    assert made.is_by_tokens(one) == free
    assert (find(made, one) is not None) == free
    assert made.planned(one) == ("auto" if free else config.method)


def test_written_options_stay_in_what_is_chosen() -> None:
    written = {"fc2_fprop": {"num_max_streams": 2, "num_splits": 3}}
    slow = replace(H200, copy=replace(H200.copy, gb_s=30.0))
    found = find(tables(written, Evidence(device=slow)), communicator(config=resolve(written, 2).names["fc2_fprop"]))
    assert found is not None
    for decision in found.decisions:
        assert decision.config is not None and decision.config.num_max_streams == 2
        assert decision.config.is_reduce_scatter and decision.for_use
        assert decision.method != "pipeline" or decision.config.num_splits == 3


def test_choices_are_pure() -> None:
    """Two managers with the same evidence, asked in another order, with other T before: the same decisions."""
    first, second = tables(), tables()
    uses = [(name, features) for name in ("fc2_fprop", "proj_fprop") for features in (1280, 3584, 14336)]
    ours = {use: find(first, communicator(use[0]), features=use[1]) for use in uses}
    theirs = {use: find(second, communicator(use[0]), features=use[1]) for use in reversed(uses)}
    assert ours == theirs and None not in ours.values()
    assert find(first, communicator(), features=3584) is ours["fc2_fprop", 3584], "made once"
    methods = {one.method for found in ours.values() if found for one in found.decisions}
    assert {"sequential", "ring_exchange"} <= methods, "else these tables say nothing about T"


def test_rows_for_another_shape_are_told() -> None:
    rows = {
        "features": 64,
        "width": 8192,
        "instead_of": "ring_exchange",
        "rows": [{"up_to": 512, "method": "sequential"}],
    }
    given = {"fc2_fprop": {"method": "ring_exchange"}, "tpoverlap": {"by_tokens": {"fc2_fprop": rows}}}
    found = tables(given)
    for features, said in ((None, "pass features="), (65, "none for features 65 at width 8192")):
        by_tokens, remark = found.explained(communicator("fc2_fprop"), features)
        assert by_tokens is None and "rows for features 64 at width 8192" in remark and said in remark


def test_nothing_known_leaves_the_default() -> None:
    assert find(tables(evidence=Evidence()), communicator()) is None
    assert find(tables(), communicator(), features=None) is None
    assert find(tables(), communicator(registered=False)) is None
    assert tables().decide(communicator(registered=False), 9).source == "unregistered"
    made = tables()
    made.decide(communicator(), 9)
    atomic = replace(default_config("fc2_fprop", True, 2), atomic_gemm=True)
    assert not made.is_by_tokens(communicator(config=atomic)), "atomic_gemm asks for fused"


def test_order_within_the_evidence() -> None:
    problem = Problem("scatter", 1, 8192, 3584, 2)
    rows = [row.to_dict() for row in ROWS]
    entry = {"features": 3584, "width": 8192, "rows": [{"up_to": 8192, "method": "ring_exchange"}]}
    legal = ("ring_exchange", "pipeline", "sequential")
    full = Evidence({"fc2_fprop": entry}, {entry_key(problem): rows}, H200, "measured")

    def source(evidence: Evidence, name: str = "fc2_fprop", at: Problem = problem, **fixed: Any) -> str | None:
        found = evidence.table(name, at, 8192, legal, fixed)
        return None if found is None else found.source

    assert source(full) == "by_tokens"
    assert source(full, "proj_fprop") == "tuned cache", "the section is by name, the cache by shape"
    assert source(full, at=replace(problem, features=8)) == "cost model"
    assert source(full, at=replace(problem, width=64)) == "cost model"
    assert source(replace(full, device=None), at=replace(problem, features=8)) is None
    assert source(full, "proj_fprop", num_splits=4) == "cost model", "measured with another number of splits"
    assert full.table("proj_fprop", problem, 8192, ("ring_exchange",), {}).source == "cost model"  # type: ignore[union-attr]
    assert Evidence.from_dict(json.loads(json.dumps(full.to_dict()))).to_dict() == full.to_dict()


def test_plans_carry_the_evidence() -> None:
    evidence = Evidence(device=H200)
    plan = make_plan({"fc2_fprop": ("auto", True), "qkv_fprop": ("sequential", False)}, 2, (64, 32), evidence)
    read = json.loads(json.dumps(plan))
    assert read["hash"] == plan_hash(read) != make_plan({"fc2_fprop": ("auto", True)}, 2, (64, 32))["hash"]
    assert pinned_methods(read, 2, resolve(None, 2)) == {"fc2_fprop": "auto", "qkv_fprop": "sequential"}
    pinned = pinned_evidence(read)
    assert pinned is not None and pinned.device == H200
    assert pinned_evidence(None) is None
    bare = pinned_evidence(a_plan(2, fc2_fprop=("pipeline", True)))
    assert bare is not None and bare.is_empty, "a plan without evidence pins its methods, nothing else enters"
    made = MethodTables(pinned, resolve(None, 2), {"fc2_fprop": "auto", "qkv_fprop": "sequential"}, 2, torch.bfloat16)
    assert find(made, communicator()) == find(tables(), communicator())
    assert not made.is_by_tokens(communicator("qkv_fprop"))
    for broken in ({}, {**evidence.to_dict(), "device": {"name": "x"}}, {**evidence.to_dict(), "cached": {"a": [{}]}}):
        with pytest.raises(ConfigError):
            pinned_evidence({**read, "by_tokens": broken})


def test_cache_round_trip(tmp_path: Path) -> None:
    assert read_entries(tmp_path / "none", MACHINE) == {}
    path = write_entries(tmp_path / "new", MACHINE, {"a": ROWS})
    write_entries(tmp_path / "new", MACHINE, {"b": ROWS[:1]})
    entries = read_entries(tmp_path / "new", MACHINE)
    assert set(entries) == {"a", "b"} and [Row.from_dict(row) for row in entries["a"]] == ROWS
    assert read_entries(tmp_path / "new", MACHINE | {"torch": "2"}) == {}, "another version is another machine"
    assert path == cache_file(tmp_path / "new", MACHINE) and list((tmp_path / "new").iterdir()) == [path]
    for text in ("{", "[]", "{}", json.dumps({"format": 1, "machine": MACHINE, "entries": {"a": [{"up_to": 0}]}})):
        path.write_text(text)
        with pytest.raises(ConfigError, match="tune again"):
            read_entries(tmp_path / "new", MACHINE)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TPOVERLAP_CACHE_DIR", raising=False)
    assert cache_folder() == tmp_path / "tpoverlap"
    monkeypatch.setenv("TPOVERLAP_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine" and cache_folder("given") == Path("given")
    monkeypatch.delenv("TPOVERLAP_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "tpoverlap"
