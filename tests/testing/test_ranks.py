"""run_ranks and RankPool: results come back, and every way in which a rank can fail is told from the others."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.testing import rank_functions as functions
from tpoverlap.testing import RankFailure, RankPool, run_ranks
from tpoverlap.testing.interrupts import starting_a_rank

Pools = Callable[[int], RankPool]


@pytest.fixture
def two(rank_pool: Pools) -> RankPool:
    return rank_pool(2)


def _gone(pids: tuple[int, ...], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_run_ranks_returns_in_rank_order_and_leaves_nothing() -> None:
    results = run_ranks(functions.describe, 2, "a", 7)
    assert [result[:3] for result in results] == [(0, 2, ("a", 7)), (1, 2, ("a", 7))]
    assert _gone(tuple(result[3] for result in results))


def test_environment_threads_and_backend() -> None:
    (result,) = run_ranks(functions.settings, 1, env={"TPO_TEST": "7", "OMP_NUM_THREADS": None})
    assert result == {
        "rank": 0,
        "world_size": 1,
        "backend": "gloo",
        "threads": 1,
        "OMP_NUM_THREADS": None,
        "TPO_TEST": "7",
    }


def test_pools_that_start_side_by_side_have_their_own_environments() -> None:
    pools = [RankPool(1, env={"TPO_TEST": value}) for value in ("7", None)]
    for pool in pools:
        pool.start()
    started = [pool.pids for pool in pools]
    assert all(len(pids) == 1 for pids in started), "nobody waited, and both run"
    found = [pool.run(functions.settings)[0]["TPO_TEST"] for pool in pools]
    assert found == ["7", None] and [pool.pids for pool in pools] == started
    for pool in pools:
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            pool.start()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives_of_the_default_group(rank_pool: Pools, world_size: int) -> None:
    expected = world_size * (world_size + 1) / 2
    assert rank_pool(world_size).run(functions.all_reduce) == [expected] * world_size


def test_processes_stay_between_runs(two: RankPool) -> None:
    pids = [result[3] for result in two.run(functions.describe)]
    assert [result[3] for result in two.run(functions.describe)] == pids == list(two.pids)


def test_tensors_travel_by_value(two: RankPool) -> None:
    given = torch.arange(1 << 20, dtype=torch.float32)[5:7]
    for rank, result in enumerate(two.run(functions.tensors, given)):
        assert result["view"].tolist() == [rank, rank + 1, rank + 2]
        assert result["view"].untyped_storage().nbytes() == 12, "the whole storage came along"
        assert result["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert result["bf16"].dtype == torch.bfloat16 and result["bf16"].tolist() == [rank, 1.5]
        assert not result["non_leaf"].requires_grad and result["non_leaf"].tolist() == [[2] * 3] * 2
        assert result["empty"].shape == (0,)
        assert result["given"].tolist() == [5 + rank, 6 + rank]
        assert not result["view"].is_shared()


def test_a_raising_rank(two: RankPool) -> None:
    pids = two.pids
    with pytest.raises(RankFailure) as caught:
        two.run(functions.raise_on, 1)
    failure = caught.value
    assert list(failure.errors) == [1] and failure.results == {0: "fine 0"}
    assert failure.errors[1].type_name == "TooFewRows"
    assert failure.errors[1].message == "rank 1 has no rows"
    assert "raise TooFewRows" in failure.errors[1].traceback, "the line that raised"
    assert "raise_on on 2 ranks: 1 of 2" in str(failure) and "rank_functions.py" in str(failure)
    assert failure.hung == () and failure.exit_codes == {}
    assert two.run(functions.all_reduce) == [3.0, 3.0], "a fresh generation"
    assert not set(two.pids) & set(pids)


def test_all_ranks_raise(two: RankPool) -> None:
    with pytest.raises(RankFailure) as caught:
        two.run(functions.raise_on)  # the argument is missing
    assert {error.type_name for error in caught.value.errors.values()} == {"TypeError"}
    assert list(caught.value.errors) == [0, 1]


@pytest.mark.parametrize(
    ("how", "exit_code", "text"), [("exit", 3, "exit code 3"), ("kill", -9, "SIGKILL"), ("segfault", -11, "SIGSEGV")]
)
def test_a_dying_rank(two: RankPool, how: str, exit_code: int, text: str) -> None:
    with pytest.raises(RankFailure) as caught:
        two.run(functions.die_on, 0, how)
    failure = caught.value
    assert failure.errors[0].type_name == "RankDied" and text in failure.errors[0].message
    assert failure.exit_codes == {0: exit_code} and failure.results == {1: "fine 1"}
    if how == "segfault":
        assert "die_on" in failure.errors[0].traceback, "faulthandler says where"


def test_an_expected_death(two: RankPool) -> None:
    assert two.run(functions.die_on, 1, "kill", expect_dead={1}) == ["fine 0", None]
    assert two.run(functions.all_reduce) == [3.0, 3.0]


def test_a_rank_that_should_have_died(two: RankPool) -> None:
    with pytest.raises(RankFailure, match="expected to die, but returned 'fine 1'") as caught:
        two.run(functions.die_on, -1, "kill", expect_dead={1})
    assert caught.value.errors[1].type_name == "RankSurvived"


def test_a_hanging_rank_is_killed_in_time(two: RankPool) -> None:
    two.run(functions.describe)
    pids, start = two.pids, time.monotonic()
    with pytest.raises(RankFailure, match=r"no answer within 1\.5 s") as caught:
        two.run(functions.hang_on, 1, timeout_s=1.5)
    assert 1.5 <= time.monotonic() - start < 8.0
    failure = caught.value
    assert failure.hung == (1,) and failure.results == {0: "fine 0"}
    assert "the_call_that_hangs" in failure.errors[1].traceback, "the stack says where it hangs"
    assert _gone(pids)
    assert two.run(functions.all_reduce) == [3.0, 3.0]


def test_a_rank_that_keeps_the_gil() -> None:
    """Where no Python thread can run any more, the stack is still written and the process still dies."""
    with pytest.raises(RankFailure) as caught:
        run_ranks(functions.hang_without_releasing_the_gil, 1, timeout_s=1.0)
    assert "hang_without_releasing_the_gil" in caught.value.errors[0].traceback


def test_others_do_not_wait_for_the_time_out_after_a_failure() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(functions.raise_while_others_wait, 2, timeout_s=100.0, grace_s=1.0)
    assert time.monotonic() - start < 60.0
    assert caught.value.errors[0].type_name == "TooFewRows"
    assert caught.value.hung == (1,) and "1 s after another rank had failed" in caught.value.errors[1].message
    assert "barrier" in caught.value.errors[1].traceback


def test_a_death_between_runs_is_not_hidden() -> None:
    with RankPool(1) as pool:
        pid = pool.run(functions.die_later)[0]
        assert _gone((pid,))
        time.sleep(0.5)  # a zombie's last thread may still be leaving, and until then it cannot be waited for
        with pytest.warns(RuntimeWarning, match=r"ranks \[0\] died after they had answered"):
            assert pool.run(functions.all_reduce) == [1.0]


def test_what_cannot_be_sent(two: RankPool) -> None:
    two.run(functions.describe)
    pids = two.pids
    with pytest.raises(TypeError, match="module-level function"):
        two.run(lambda rank, world_size: rank)
    assert two.pids == pids, "nothing was sent, so the ranks are as good as before"
    with pytest.raises(RankFailure) as caught:
        two.run(functions.return_a_lock)
    assert "pickle" in caught.value.errors[0].message


def test_misuse(two: RankPool) -> None:
    with pytest.raises(ValueError, match=r"expect_dead names ranks \[2\]"):
        two.run(functions.describe, expect_dead=[2])
    with pytest.raises(ValueError, match="world_size"):
        RankPool(0)
    with pytest.raises(ValueError, match="'cpu' or 'cuda'"):
        RankPool(1, device="tpu")
    pool = RankPool(1)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(functions.describe)


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(RankFailure, match="start of 1 ranks") as caught:
        run_ranks(functions.describe, 1, backend="no_such_backend")
    assert "no_such_backend" in caught.value.errors[0].message


def test_failure_can_be_pickled_by_its_parts() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(functions.raise_on, 1, 0)
    error = caught.value.errors[0]
    assert pickle.loads(pickle.dumps(error)) == error


PARENT = """
import time
from tests.testing import rank_functions as functions
from tpoverlap.testing import RankPool
if __name__ == "__main__":
    pool = RankPool(2)
    pool.run(functions.describe)
    print(*pool.pids, flush=True)
    pool.run(functions.hang_on, 1, timeout_s=600)
"""


def test_ranks_die_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    root = Path(__file__).parent.parent.parent
    with subprocess.Popen(
        [sys.executable, str(script)], env={"PYTHONPATH": str(root)}, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = tuple(int(pid) for pid in parent.stdout.readline().split())
        assert len(pids) == 2 and not _gone(pids, within_s=0.0)
        time.sleep(0.5)  # into the run: rank 0 idle, rank 1 inside the call
        parent.kill()
    assert _gone(pids)


def test_an_interrupt_waits_until_a_rank_has_its_arguments() -> None:
    finished = False
    with pytest.raises(KeyboardInterrupt), starting_a_rank():
        signal.raise_signal(signal.SIGINT)
        finished = True
    assert finished and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_an_interrupt_does_nothing_to_a_rank_that_starts(in_a_thread: bool) -> None:
    """Until it ignores SIGINT it has it blocked; the one that comes meanwhile is forgotten."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=functions.interrupted_at_its_start, args=(theirs,), daemon=True)

    def start() -> None:
        with starting_a_rank():
            process.start()

    if in_a_thread:
        starter = threading.Thread(target=start)
        starter.start()
        starter.join()
    else:
        start()
    theirs.close()
    assert ours.poll(60.0), "the rank said nothing"
    assert ours.recv() == (True, False), "blocked, then ignored"
    process.join()
    assert process.exitcode == 0
