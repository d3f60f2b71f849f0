"""The catalogue leaves nothing out, and the checks themselves can fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from tests.conformance import sabotage
from tpoverlap.config import legal_methods
from tpoverlap.testing import RankFailure, RankPool
from tpoverlap.testing.conformance import Setting, all_cases, catalogue, gemms, microbatches
from tpoverlap.testing.conformance.comparison import Comparison
from tpoverlap.testing.conformance.microbatches import one_forward_one_backward
from tpoverlap.testing.conformance.setting import strided


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_legal_method_is_covered(size: int) -> None:
    others = {method for method, _ in catalogue.KERNEL_METHODS} | set(catalogue.BESIDE_METHODS)
    gathers = {method for method, _ in catalogue.GATHER_METHODS} | others
    scatters = {method for method, _ in catalogue.SCATTER_METHODS} | others
    assert set(legal_methods("own_name", False, size)) <= gathers
    assert set(legal_methods("own_name", True, size)) <= scatters
    splits = {options.get("num_splits") for _, options in catalogue.SCATTER_METHODS}
    assert {1, 2, 4, 7} <= splits


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_partitions_have_what_the_specification_names(size: int) -> None:
    setting = Setting()
    partitions = setting.partitions(size)
    totals = {partition.total for partition in partitions}
    assert {1, size + 1, 129, setting.capacity // 8, setting.capacity - 1, setting.capacity} <= totals
    assert size == 1 or size - 1 in totals
    assert size == 1 or any(0 in partition.counts for partition in partitions)
    assert len(set(partitions)) == len(partitions)
    steps = [b.total - a.total for a, b in pairwise(partitions)]
    assert min(steps) < 0 < max(steps), "T must grow and shrink"


def test_ids_are_unique() -> None:
    cases = all_cases(Setting(), 4)
    assert len({case.id for case in cases}) == len(cases)
    assert {case.number for case in cases} == {1, 2, 3, 4, 5, 6, 7, 9, 11, 13}


def test_one_forward_one_backward() -> None:
    assert one_forward_one_backward(3, 0) == [("F", 0), ("B", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 2)]
    assert one_forward_one_backward(4, 2) == [
        ("F", 0), ("F", 1), ("F", 2), ("B", 0), ("F", 3), ("B", 1), ("B", 2), ("B", 3),
    ]  # fmt: skip
    assert one_forward_one_backward(2, 5) == [("F", 0), ("F", 1), ("B", 0), ("B", 1)]


def test_strided() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(strided(x), x)
    assert not strided(x).is_contiguous()


def test_a_comparison_can_fail() -> None:
    comparison, x = Comparison("here"), torch.randn(5, 3)
    with pytest.raises(AssertionError, match="nothing was compared"):
        comparison.summary()
    comparison.same("x", x, x.clone())
    with pytest.raises(AssertionError, match=r"here: x: 1 of 5 rows differ: \[2\]"):
        comparison.same("x", x, x + torch.tensor([0.0, 0, 1, 0, 0])[:, None])
    with pytest.raises(AssertionError, match="here: y"):
        comparison.close("y", x + 1e-3, x, x.double())
    with pytest.raises(AssertionError, match="missing"):
        comparison.close("y", None, x, x.double())
    with pytest.raises(AssertionError, match="frozen"):
        comparison.absent("w", x)
    comparison.close("y", x, x, x.double())
    assert comparison.summary()["comparisons"] == 4


@pytest.mark.parametrize("fault", sabotage.FAULTS)
def test_the_checks_notice(fault: str, rank_pool: Callable[[int], RankPool]) -> None:
    """Each fault is a bug that one of the hazards in shared/FACTS.md would be."""
    errors = rank_pool(2).run(sabotage.run_with, fault, timeout_s=60)
    assert any(re.search(sabotage.FAULTS[fault][-1], error) for error in errors), errors


def test_nobody_recomputes_with_wrong_rows(rank_pool: Callable[[int], RankPool]) -> None:
    errors = rank_pool(3).run(microbatches.check_forgotten_context_seen_by_one, Setting(), timeout_s=60)
    assert errors == ["ActiveShapeError", "PeerTimeoutError", "PeerTimeoutError"]


def test_a_check_needs_its_method(rank_pool: Callable[[int], RankPool]) -> None:
    with pytest.raises(RankFailure, match="pipeline"):
        rank_pool(2).run(gemms.check_all_gather_gemm, Setting(), "pipeline", timeout_s=60)
