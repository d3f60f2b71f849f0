"""Processes: spawn one rank each and watch them, or be one rank under ``torchrun``."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from tpoverlap.errors import ConfigError, PeerTimeoutError, TpOverlapError
from tpoverlap.testing.interrupts import ignore_interrupts, starting_a_rank
from tpoverlap.tools.train.job import Progress, ProgressListener, TrainJob, TrainOutcome

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    import torch.distributed as dist

_GRACE_S = 5.0  # after one rank failed, the others may still say why; then they are killed


class RankFailedError(TpOverlapError):
    """A rank raised, died or hung; the other ranks were ended."""


@dataclass(frozen=True)
class _Failure:
    rank: int
    kind: str
    text: str


RankMain = Callable[[TrainJob, "dist.ProcessGroup", int, ProgressListener], TrainOutcome]


def train_on_rank(job: TrainJob, group: dist.ProcessGroup, rank: int, on_progress: ProgressListener) -> TrainOutcome:
    """The work of one rank in an initialised group; both ways of starting end up here."""
    from tpoverlap.tools.train.loop import train_rank

    return train_rank(job, group, rank, job.device(rank), on_progress)


# -- torchrun ---------------------------------------------------------------------------------------------------------


def torchrun_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """(rank, world size) when ``torchrun`` started this process, else None."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    try:
        return int(environ["RANK"]), int(environ["WORLD_SIZE"])
    except ValueError as error:
        raise ConfigError(
            f"RANK={environ['RANK']!r} and WORLD_SIZE={environ['WORLD_SIZE']!r} are not whole numbers; "
            "start with torchrun, or unset both to let this command spawn its ranks"
        ) from error


def run_under_torchrun(job: TrainJob, rank: int, on_progress: ProgressListener) -> TrainOutcome:
    """Run as ``rank`` of the world that torchrun made; its environment says where to meet."""
    _prepare_process(job, rank)
    import torch.distributed as dist

    dist.init_process_group(job.group_backend, timeout=timedelta(seconds=job.timeout_s))
    try:
        return train_on_rank(job, _world(), rank, on_progress if rank == 0 else _no_progress)
    finally:
        dist.destroy_process_group()


def _world() -> dist.ProcessGroup:
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None, "init_process_group was called just before"
    return world


def _no_progress(progress: Progress) -> None:
    """The other ranks' listener."""


# -- spawn ------------------------------------------------------------------------------------------------------------


def spawn(
    job: TrainJob, on_progress: ProgressListener, rank_main: RankMain = train_on_rank, silence_grace_s: float = 30.0
) -> TrainOutcome:
    """Start ``tp_size`` processes, pass rank 0's progress on and return its outcome.

    Raises:
        RankFailedError: a rank raised (its traceback is in the message), died (its exit code is), or nothing was heard
            of rank 0 for ``job.timeout_s + silence_grace_s`` (the ranks' own time-outs come first: they know more). All
            ranks have ended by then.
    """
    import multiprocessing

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The store lives here: its port is known before any rank starts, and it outlives a rank that dies.
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    try:
        for rank in range(job.tp_size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (job, rank, store.port, theirs, rank_main)
            process = context.Process(target=_rank_main, args=arguments, name=f"rank{rank}", daemon=True)
            with starting_a_rank():
                process.start()
            theirs.close()  # else the end of the process would not read as the end of the pipe
            processes.append(process)
            connections.append(ours)
        return _watch(job.timeout_s + silence_grace_s, processes, connections, on_progress)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join()
        for connection in connections:
            connection.close()


def _watch(
    silence_s: float, processes: list[SpawnProcess], connections: list[Connection], on_progress: ProgressListener
) -> TrainOutcome:
    """Read the ranks' messages until all have ended well or one has not."""
    outcome: TrainOutcome | None = None
    failures: list[_Failure] = []
    open_ranks = dict(enumerate(connections))
    deadline = time.monotonic() + silence_s
    while open_ranks and time.monotonic() < deadline:
        wait(list(open_ranks.values()), timeout=max(0.0, deadline - time.monotonic()))
        for rank, connection in list(open_ranks.items()):
            if not connection.poll():
                continue
            try:
                message = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                del open_ranks[rank]
                processes[rank].join(_GRACE_S)
                code = processes[rank].exitcode
                if code != 0 and all(failure.rank != rank for failure in failures):
                    ended = "does not end" if code is None else f"ended with exit code {code}"
                    failures.append(_Failure(rank, "died", f"its process {ended}{_signal_name(code)}"))
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                continue
            if isinstance(message, _Failure):
                failures.append(message)
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            elif isinstance(message, TrainOutcome):
                outcome = message
            elif not failures:
                on_progress(message)
                deadline = time.monotonic() + silence_s
    if failures:
        raise RankFailedError(_explain(failures, len(processes)))
    if outcome is None or open_ranks:
        raise RankFailedError(
            f"no progress for {silence_s:.0f} s; ranks {sorted(open_ranks)} were still running and have been ended; "
            "raise --timeout if steps take that long"
        )
    return outcome


def _explain(failures: list[_Failure], tp_size: int) -> str:
    """The cause first: a rank that waited for another in vain, or lost its connection to it, only reports a symptom."""

    def is_symptom(failure: _Failure) -> bool:
        return (
            failure.kind == PeerTimeoutError.__name__ or "onnection closed" in failure.text or "reset" in failure.text
        )

    cause, *others = sorted(failures, key=is_symptom)  # stable: among equals the first to be heard of
    lines = [f"rank {cause.rank} of {tp_size} failed: {cause.text.rstrip()}"]
    lines += [f"rank {other.rank} then: {other.text.rstrip().splitlines()[-1]}" for other in others]
    return "\n".join(lines)


def _signal_name(exit_code: int | None) -> str:
    return f" ({signal.Signals(-exit_code).name})" if exit_code is not None and exit_code < 0 else ""


def _rank_main(job: TrainJob, rank: int, port: int, connection: Connection, rank_main: RankMain) -> None:
    """A spawned process: meet at the parent's store, work, answer through ``connection``."""
    ignore_interrupts()
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo looks up a host name that containers often lack
        _prepare_process(job, rank)
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        timeout = timedelta(seconds=job.timeout_s)
        store = TCPStore("127.0.0.1", port, None, is_master=False, timeout=timeout)
        dist.init_process_group(job.group_backend, store=store, rank=rank, world_size=job.tp_size, timeout=timeout)

        def report(progress: Progress) -> None:
            connection.send_bytes(pickle.dumps(progress))

        outcome = rank_main(job, _world(), rank, report if rank == 0 else _no_progress)
        if rank == 0:
            connection.send_bytes(pickle.dumps(outcome))
        dist.destroy_process_group()
    except BaseException as error:
        connection.send_bytes(pickle.dumps(_Failure(rank, type(error).__name__, traceback.format_exc())))
        connection.close()
        # No clean-up: a collective one would wait for ranks that are about to be ended.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _prepare_process(job: TrainJob, rank: int) -> None:
    """Threads and device of this rank, before anything else is initialised."""
    if job.shares_gpus:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    import torch

    if job.device_type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(job.device(rank))
