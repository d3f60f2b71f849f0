"""Dispatch of FP8 operations by T: by rows of their own, alike on every rank, the bits of the default methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tuning import fp8_dispatch_ranks
from tests.tuning.test_dispatch import communicator, find, tables
from tpoverlap import method_tables
from tpoverlap.config import resolve
from tpoverlap.overlap.fp8 import METHODS
from tpoverlap.testing import RankPool
from tpoverlap.tuning import Evidence, Problem, load_device
from tpoverlap.tuning.device import OneKernel

Pools = Callable[[int], RankPool]
H200 = replace(load_device("h200"), host_us={})


@pytest.fixture(scope="module")
def by_section(rank_pool: Pools) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rank_pool(2).run(fp8_dispatch_ranks.by_section, timeout_s=60.0)
    return found


def test_fp8_rows_decide_under_a_recipe(by_section: list[dict[str, Any]]) -> None:
    for result in by_section:
        for small in (result["small"], result["pinned"]):
            assert small == {
                "qkv_fprop": "sequential",
                "qkv_dgrad": "bulk",  # its rows are not about FP8
                "qkv_wgrad": "sequential",
                "proj_fprop": "pipeline",
                "proj_dgrad": "sequential",
            }
        assert result["large"] == small | dict.fromkeys(("qkv_fprop", "proj_fprop", "proj_dgrad"), "ring_exchange")
        ring = dict.fromkeys(("qkv_fprop", "proj_fprop", "proj_dgrad"), "ring_exchange")
        assert result["nothing known"] == ring | {"qkv_dgrad": "bulk", "qkv_wgrad": "bulk"}
        assert result["wide"] == ring | {"qkv_dgrad": "sequential", "qkv_wgrad": "bulk"}, "rows beside a recipe"
        assert result["written"]["qkv_fprop"] == "ring_exchange", "what is written stays"


def test_explain_and_labels_know_both(by_section: list[dict[str, Any]]) -> None:
    for result in by_section:
        wide, _, fp8 = result["explain"].partition("under an FP8 recipe")
        assert "at T=6: ring_exchange" in wide and "up to T 24: ring_exchange" in wide
        assert "by sequential, chosen by: by_tokens: for T up to 8" in fp8
        assert "up to T 8: sequential, 24: ring_exchange" in fp8
        assert "proj_fprop reduce-scatter pipeline/4/e4m3" in result["labels"], "else a peer's error has no name"


def test_cache_entries_of_fp8_are_for_fp8(rank_pool: Pools, tmp_path: Path) -> None:
    for result in rank_pool(2).run(fp8_dispatch_ranks.by_cache, str(tmp_path), timeout_s=60.0):
        assert result["fp8"]["qkv_fprop"] == "sequential" and result["wide"]["qkv_fprop"] == "ring_exchange"


def test_the_model_knows_fp8_or_leaves_the_default(rank_pool: Pools) -> None:
    for result in rank_pool(2).run(fp8_dispatch_ranks.by_model, timeout_s=60.0):
        assert result["slow launches in FP8"]["qkv_fprop"] == "sequential", "two GEMMs are two launches"
        assert result["slow launches in FP8 wide"]["qkv_fprop"] == "ring_exchange"
        fp8 = result["slow launches in FP8 explain"].partition("under an FP8 recipe")[2]
        assert "cost model" in fp8 and "% off whole ones in the median" in fp8
        assert result["no FP8"]["qkv_fprop"] == "ring_exchange" and result["no FP8 wide"]["qkv_fprop"] == "sequential"
        fp8 = result["no FP8 explain"].partition("under an FP8 recipe")[2]
        assert "by ring_exchange, chosen by: default" in fp8 and "the cost model knows no FP8 on h200" in fp8


def test_methods_that_are_legal_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """`METHODS` says which; fused is one of them or not."""
    assert H200.fp8 is not None
    timed = replace(H200.fp8, fused=OneKernel(0.0, 1.0), one_launch=OneKernel(0.0, 1.0))
    for methods, expected in ((METHODS[:1], False), ((*METHODS, "fused"), True)):
        monkeypatch.setattr(method_tables, "FP8_METHODS", methods)
        made = tables(evidence=Evidence(device=replace(H200, fp8=timed)))
        made._has_kernels = True
        found = made.find(communicator(), scatter=True, beside=False, features=3584, fp8=True)
        assert found is not None and ("fused" in {one.method for one in found.decisions}) == expected


def test_fp8_buf_is_read_as_the_operation_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a name's own direction only: for the other one the key speaks of other rows."""
    asked: list[Problem] = []
    original = Evidence.table

    def table(self: Evidence, name: str, problem: Problem, *rest: Any) -> Any:
        asked.append(problem)
        return original(self, name, problem, *rest)

    monkeypatch.setattr(Evidence, "table", table)
    for name, scatter, packed in (("fc2_fprop", True, True), ("fc1_fprop", True, False), ("fc1_fprop", False, False)):
        written = {name: {"fp8_buf": True}}
        config = resolve(written, 2, fp8=True).names[name]
        made = tables(written, Evidence(device=H200))
        found = made.find(communicator(name, config=config), scatter=scatter, beside=False, features=3584, fp8=True)
        assert asked[-1].fp8 and asked[-1].is_packed == packed, name
        assert found is not None and found.decisions[0].config is not None
        assert found.decisions[0].config.fp8_buf == (packed or not scatter)


def test_tables_of_both_are_kept_apart() -> None:
    made = tables(evidence=Evidence(device=H200))
    one = communicator()
    wide = find(made, one)
    fp8 = made.find(one, scatter=True, beside=False, features=3584, fp8=True)
    assert wide is not None and fp8 is not None and wide != fp8 and find(made, one) is wide
