"""A native call that fails, wherever on a tape: the operation fails on its rank, the others are told, nobody hangs."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.comm import tape_failure_ranks as functions
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]
pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="tapes need a C compiler"
)


@pytest.mark.parametrize(
    ("world_size", "step"), [(2, 5), *[pytest.param(size, 1, marks=pytest.mark.slow) for size in (2, 3)]]
)
@pytest.mark.parametrize("kind", functions.KINDS)
def test_any_call_fails(rank_pool: Pools, kind: str, world_size: int, step: int) -> None:
    """``step``: of so many calls one fails, another one for each kind."""
    who = world_size - 1
    names = rank_pool(world_size).run(functions.calls_of, kind, timeout_s=60)[who]
    assert {"submit", "record", "wait", "copy"} <= set(names), names
    assert ("multiply" in names) == ("bulk" not in kind), names
    positions = list(range(functions.KINDS.index(kind) % step, len(names), step))
    for rank, found in enumerate(rank_pool(world_size).run(functions.fails, kind, positions, who, timeout_s=100)):
        for position, (outcome, check, close) in zip(positions, found, strict=True):
            name = names[position]
            where, wanted = f"rank {rank}, {name}: {outcome}, {check}, {close}", "BackendUnavailableError"
            if name == "multiply":
                wanted = "TpOverlapError"  # as without a tape: the driver knows nothing of cublasLt's numbers
            assert close.error == "ok" and check.seconds < 8.0, where
            if rank == who:
                assert outcome.error == check.error == wanted and "700" in outcome.message, where
            else:
                assert check.error == "PeerTimeoutError" and check.peer == who, where


@pytest.mark.parametrize(("kind", "position"), [("gather", 0), ("gather, read", 4), ("cut scatter", 3)])
def test_a_thread_without_a_context(rank_pool: Pools, kind: str, position: int) -> None:
    """What was called before is not called again, and the result is right."""
    (played, asked), (other, none) = rank_pool(2).run(functions.goes_on, kind, position, timeout_s=60)
    assert asked == 5 and none == 0 and played == other >= 7
