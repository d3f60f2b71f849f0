"""A rank that raises, stalls or dies: every other rank gets an error that names it, soon, and can close."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.comm import rank_functions as functions
from tests.comm.rank_functions import Failure, Outcome
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]
BACKENDS = ["shared", "process_group"]
TIMEOUT_S = 30.0
SOON_S = 8.0
"""Measured: 0.01 to 0.6 s. The machine may be busy, but this is far from TIMEOUT_S."""
NAMES = {
    "ring_ag": "qkv_fprop all-gather ring_exchange",
    "ring_rs": "fc2_fprop reduce-scatter ring_exchange",
    "pipeline_rs": "proj_fprop reduce-scatter pipeline/3",
    "bulk_ag": "qkv_dgrad all-gather bulk",
    "bulk_rs": "qkv_wgrad reduce-scatter bulk",
    "sequential_ag": "plain_ag_fprop all-gather sequential",
}


def _check_survivors(
    failures: Sequence[Failure | None], who: int, kind: str, within_s: float = SOON_S, *, may_finish: bool = False
) -> None:
    """``may_finish``: the failing rank had sent its rows already, so the others may notice in the next operation."""
    for rank, failure in enumerate(failures):
        if rank == who or failure is None:
            continue
        noticed_later = may_finish and failure.first.error == "ok"
        first, name = (failure.again, NAMES["ring_rs"]) if noticed_later else (failure.first, NAMES[kind])
        assert first.error == "PeerTimeoutError", f"rank {rank}: {first}"
        assert first.peer == who and f"rank {who}" in first.message, f"rank {rank} blames another: {first}"
        assert name in first.message and "T=30" in first.message, first.message
        assert first.seconds < within_s, f"rank {rank} took {first.seconds:.1f} s"
        _check_end(failure._replace(first=first), rank)


def _check_end(failure: Failure, rank: int) -> None:
    """The same error again, at once; close works, quickly; afterwards the manager is closed like any other."""
    for later in (failure.again, failure.check):
        assert later.error in (failure.first.error, "TpOverlapError"), f"rank {rank}: {later}"
        assert later.seconds < 1.0
        if failure.first.error == "PeerTimeoutError":
            assert later.message == failure.first.message and later.peer == failure.first.peer
    assert failure.close.error == "ok", f"rank {rank}: {failure.close}"
    assert failure.close.seconds < 3.0, f"rank {rank}: close took {failure.close.seconds:.1f} s"
    assert failure.after.error == "NotInitializedError", f"rank {rank}: {failure.after}"


@pytest.mark.parametrize(
    ("kind", "where", "world_size", "who"),
    [
        ("ring_ag", "gemm", 2, 0),
        ("ring_ag", "transfer", 3, 1),
        ("ring_rs", "gemm", 3, 2),
        ("ring_rs", "transfer", 2, 1),
        ("pipeline_rs", "gemm", 2, 1),
        ("pipeline_rs", "transfer", 3, 0),
        ("bulk_ag", "gemm", 3, 1),
        ("bulk_rs", "transfer", 2, 0),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_raises(rank_pool: Pools, backend: str, kind: str, where: str, world_size: int, who: int) -> None:
    failures = rank_pool(world_size).run(functions.fail_inside, backend, kind, where, who, TIMEOUT_S)
    _check_survivors(failures, who, kind, may_finish=where == "gemm" and kind in ("ring_ag", "bulk_ag"))
    culprit = failures[who]
    assert "something in the model" in culprit.first.message
    assert culprit.first.error in ("ValueError", "TpOverlapError")
    for later in (culprit.again, culprit.check):
        assert later.error == "TpOverlapError", "later calls refuse"
        assert f"rank {who} failed inside {NAMES[kind]}" in later.message and "something in the model" in later.message
    _check_end(culprit, who)


@pytest.mark.parametrize("kind", ["ring_ag", "sequential_ag"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_aborts_between_two_operations(rank_pool: Pools, backend: str, world_size: int, kind: str) -> None:
    who = world_size - 1
    failures = rank_pool(world_size).run(functions.fail_inside, backend, kind, "abort_between", who, TIMEOUT_S)
    _check_survivors(failures, who, kind)
    assert "closed its manager" in failures[0].first.message
    assert {outcome.error for outcome in failures[who] if outcome.error != "ok"} == {"NotInitializedError"}


@pytest.mark.parametrize(
    ("backend", "kind", "where", "world_size"),
    [
        ("shared", "ring_ag", "exit", 3),
        ("shared", "pipeline_rs", "exit_in_gemm", 2),
        ("shared", "sequential_ag", "exit_before", 2),
        ("shared", "bulk_rs", "kill_between", 3),
        ("process_group", "ring_rs", "kill", 3),
        ("process_group", "sequential_ag", "kill_between", 2),
    ],
)
def test_a_rank_dies(rank_pool: Pools, backend: str, kind: str, where: str, world_size: int) -> None:
    who = world_size - 1
    failures = rank_pool(world_size).run(
        functions.fail_inside, backend, kind, where, who, TIMEOUT_S, expect_dead={who}, timeout_s=45
    )
    _check_survivors(failures, who, kind)
    assert all("died" in failure.first.message for failure in failures if failure is not None)


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("ring_ag", 3), pytest.param("pipeline_rs", 2, marks=pytest.mark.slow)],  # waits for its time-outs
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_stalls_inside(rank_pool: Pools, backend: str, kind: str, world_size: int) -> None:
    """Longer than timeout_s=2: the others give up then, and the stalled rank learns it."""
    who = world_size - 1
    failures = rank_pool(world_size).run(functions.fail_inside, backend, kind, "stall", who, 2.0)
    _check_survivors(failures, who, kind, within_s=5.0)
    assert all(failure.first.seconds > 1.9 for failure in failures), "before the time-out it may still come"
    assert any("timeout_s=2" in failure.first.message for failure in failures), "the first one says why"
    assert failures[who].first.error == "PeerTimeoutError" and failures[who].again.error == "PeerTimeoutError"


@pytest.mark.parametrize(
    ("backend", "kind", "world_size"),
    [
        ("shared", "ring_rs", 2),
        # Where memory is mapped sequential trades rows as rings do, under the same waits.
        pytest.param("shared", "sequential_ag", 3, marks=pytest.mark.slow),
        ("process_group", "ring_rs", 2),
        ("process_group", "sequential_ag", 3),
    ],
)
def test_a_rank_skips_an_operation(rank_pool: Pools, backend: str, kind: str, world_size: int) -> None:
    """It does nothing for longer than timeout_s=2; when it comes at last, it gets an error at once, and no data."""
    who = world_size - 1
    failures = rank_pool(world_size).run(functions.idle_then_late, backend, kind, 2.0, 2.6)
    _check_survivors(failures, who, kind, within_s=5.0)
    assert "to start it" in failures[0].first.message or "gave up" in failures[0].first.message
    # What the others sent before they gave up is right, so this operation may end well (run_checked compared it), but
    # not the next one; and never a collective, which the others will not come to.
    late: Outcome = failures[who].again if failures[who].first.error == "ok" else failures[who].first
    assert late.error == "PeerTimeoutError" and late.seconds < 2.0, late
    assert f"this rank, {who}" in late.message, "the message must not blame a healthy rank"
    plain = kind.startswith("sequential") and backend == "process_group"
    assert failures[who].first.error != "ok" or not plain
    assert failures[who].close.error == "ok" and failures[who].check.message == late.message


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_aborts_while_the_others_close(rank_pool: Pools, backend: str, world_size: int) -> None:
    """Nobody waits for it until the time-out, and everything is freed although close raises."""
    results = rank_pool(world_size).run(functions.close_while_another_aborts, backend)
    for rank, (outcome, threads_left) in enumerate(results):
        assert threads_left == 0 and outcome.seconds < SOON_S
        if rank < world_size - 1:
            assert outcome.error == "PeerTimeoutError" and outcome.peer == world_size - 1, outcome
        else:
            assert outcome.error == "ok"


SCRIPT = """
import sys
from tests.comm import rank_functions as functions
from tpoverlap.testing import RankFailure, RankPool
if __name__ == "__main__":
    with RankPool(2) as pool:
        print(pool.run(functions.error_and_close, sys.argv[1]))
"""


def test_the_process_ends_quietly_after_an_error(tmp_path: Path) -> None:
    """A thread that still waits inside Gloo would end it with "terminate called without an active exception"."""
    root = Path(__file__).parent.parent.parent
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(backend: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(script), backend],
            env={"PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    with ThreadPoolExecutor(len(BACKENDS)) as side_by_side:
        ended = dict(zip(BACKENDS, side_by_side.map(run, BACKENDS), strict=True))
    for backend, one in ended.items():
        assert one.returncode == 0 and "PeerTimeoutError" in one.stdout, f"{backend}: {one.stdout}{one.stderr}"
        assert "terminate" not in one.stderr and "Traceback" not in one.stderr, f"{backend}: {one.stderr}"
