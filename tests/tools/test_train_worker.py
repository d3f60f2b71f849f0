"""Spawning: results and progress come back; a rank that raises, dies or hangs ends the run with its reason."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.tools.train_job import made_up_outcome, small_job
from tpoverlap.errors import ConfigError, PeerTimeoutError
from tpoverlap.tools.train.job import Progress, ProgressListener, TrainJob, TrainOutcome
from tpoverlap.tools.train.worker import RankFailedError, spawn, torchrun_rank

LOSSES = [5.0, 4.0, 3.0, 2.0, 1.0]


def answer(job: TrainJob, group: dist.ProcessGroup, rank: int, report: ProgressListener) -> TrainOutcome:
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=group)
    report(Progress("train", 1, 5))
    return made_up_outcome(job, [total.item(), float(torch.get_num_threads()), *LOSSES[2:]])


def raise_on_rank_1(job: TrainJob, group: dist.ProcessGroup, rank: int, report: ProgressListener) -> TrainOutcome:
    if rank == 1:
        time.sleep(0.5)  # rank 0's complaint must not come out as the cause, not even when it is the first
        raise ValueError("the real reason")
    raise PeerTimeoutError("rank 1 did not answer")


def die_on_rank_1(job: TrainJob, group: dist.ProcessGroup, rank: int, report: ProgressListener) -> TrainOutcome:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group)
    raise AssertionError("not reached")


def hang(job: TrainJob, group: dist.ProcessGroup, rank: int, report: ProgressListener) -> TrainOutcome:
    time.sleep(1000)
    raise AssertionError("not reached")


def spawned() -> set[int]:
    """Processes that multiprocessing has started here and that still run."""
    children = psutil.Process().children()
    return {p.pid for p in children if p.is_running() and "spawn_main" in " ".join(p.cmdline())}


@pytest.fixture(autouse=True)
def no_children_left() -> Iterator[None]:
    """Every test ends its ranks; the session's pools of other tests may be running beside it."""
    before = spawned()
    yield
    assert spawned() <= before


def test_outcome_and_progress_of_rank_0_come_back() -> None:
    seen: list[Progress] = []
    outcome = spawn(small_job(), seen.append, answer)
    assert [record.loss for record in outcome.steps[:2]] == [3.0, 1.0]  # a collective worked; one thread a rank
    assert torch.equal(outcome.first_gradients["head"], torch.full((2, 2), 2.0))
    assert seen == [Progress("train", 1, 5)]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    with pytest.raises(RankFailedError) as error:
        spawn(small_job(), lambda progress: None, raise_on_rank_1)
    text = str(error.value)
    assert text.startswith("rank 1 of 2 failed: Traceback") and "ValueError: the real reason" in text
    assert "rank 0 then: " in text and "PeerTimeoutError: rank 1 did not answer" in text


def test_a_rank_that_dies_is_named_with_its_signal() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed: its process ended with exit code -9 \(SIGKILL\)"):
        spawn(small_job(), lambda progress: None, die_on_rank_1)
    assert time.monotonic() - started < 60


def test_ranks_that_hang_are_ended() -> None:
    with pytest.raises(RankFailedError, match=r"no progress for 5 s; ranks \[0, 1\] were still running"):
        spawn(small_job(timeout_s=4.0), lambda progress: None, hang, silence_grace_s=1.0)


def test_torchrun_is_recognised_by_its_environment() -> None:
    assert torchrun_rank({}) is None and torchrun_rank({"RANK": "0"}) is None
    assert torchrun_rank({"RANK": "1", "WORLD_SIZE": "4"}) == (1, 4)
    with pytest.raises(ConfigError, match="RANK='x'"):
        torchrun_rank({"RANK": "x", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("tp", "gpus", "hosts", "backend", "device"),
    [(2, 2, 1, "cpu:gloo,cuda:nccl", 1), (4, 2, 1, "gloo", 1), (4, 2, 2, "cpu:gloo,cuda:nccl", 1)],
)
def test_ranks_share_gpus_only_where_there_are_too_few(
    tp: int, gpus: int, hosts: int, backend: str, device: int
) -> None:
    job = small_job(tp_size=tp, ranks_per_host=tp // hosts, device_type="cuda", num_gpus=gpus)
    assert job.group_backend == backend
    assert job.device(tp - 1) == torch.device("cuda", device)


def test_this_file_can_be_imported_by_a_spawned_rank() -> None:
    assert __name__ == "tests.tools.test_train_worker", f"run pytest from {Path(__file__).parents[2]}"
