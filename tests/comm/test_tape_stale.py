"""A tape is played for what it was written for; everything else gives the right result without it."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.comm import tape_stale_ranks as functions
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]
pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="tapes need a C compiler"
)


def test_what_changes_between_operations(rank_pool: Pools) -> None:
    """Results are compared inside. Addresses alone are no change."""
    for found in rank_pool(2).run(functions.changes, timeout_s=60):
        for what, taped in found.items():
            wanted = (True, True) if what.startswith("nothing") or what == "weights elsewhere" else (False, False)
            assert taped == wanted, f"{what}: {taped}"


def test_no_more_kinds_than_are_kept(rank_pool: Pools) -> None:
    for played, most in rank_pool(2).run(functions.many_kinds, 4, timeout_s=60):
        assert played >= 16 and most <= 6, f"{played} tapes, {most} at a time"


def test_fp8_operands(rank_pool: Pools) -> None:
    for found in rank_pool(2).run(functions.fp8, timeout_s=60):
        for what, played in found.items():
            assert (played == 0) if "rowwise" in what else (played >= 5), f"{what}: {played} tapes"


def test_more_matrices_than_registers(rank_pool: Pools) -> None:
    assert rank_pool(2).run(functions.many_matrices, timeout_s=60) == [0, 0]
