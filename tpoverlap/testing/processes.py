"""One generation of spawned ranks: their processes, connections, logs and the store they meet at."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tpoverlap.testing.interrupts import starting_a_rank
from tpoverlap.testing.worker import STACK_SIGNAL, GroupSpec, rank_main


class RankProcesses:
    """``world_size`` processes running ``rank_main``; started by the constructor, ended by ``stop`` or ``kill``.

    The TCPStore lives in this process: its port is known before any rank starts, so there is no race for one, and it
    outlives a rank that dies.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str | None,
        device: str,
        env: Mapping[str, str | None],
        num_threads: int,
        group_timeout_s: float,
    ) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        device_count = torch.cuda.device_count() if device == "cuda" else 0
        if device == "cuda" and not device_count:
            raise RuntimeError("device='cuda' was asked for, but torch sees no GPU here")
        shared_gpus = device == "cuda" and world_size > device_count
        if backend is None:
            backend = "gloo" if device == "cpu" or shared_gpus else "cpu:gloo,cuda:nccl"
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory(prefix="tpoverlap-ranks-")
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        spec = GroupSpec(
            world_size=world_size,
            backend=backend,
            device=device,
            device_count=device_count,
            port=self._store.port,
            group_timeout_s=group_timeout_s,
            num_threads=num_threads,
            parent_pid=os.getpid(),
            started_by_main_thread=threading.current_thread() is threading.main_thread(),
        )
        child_env: dict[str, str | None] = {
            "OMP_NUM_THREADS": str(num_threads),
            "MKL_NUM_THREADS": str(num_threads),
            "GLOO_SOCKET_IFNAME": "lo",  # else gloo looks up the host's name, which containers often cannot resolve
        }
        if shared_gpus:
            child_env["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        with _environment({**child_env, **env}):
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=rank_main,
                    args=(rank, spec, theirs, str(self._log_path(rank))),
                    name=f"rank{rank}",
                    daemon=True,
                )
                with starting_a_rank():
                    process.start()
                theirs.close()  # else the end of the process would not read as the end of the stream
                self._connections.append(ours)
                self._processes.append(process)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes if process.pid is not None)

    def dead(self) -> list[int]:
        """Ranks whose process has ended."""
        return [rank for rank, process in enumerate(self._processes) if not process.is_alive()]

    def send(self, message: bytes) -> None:
        """To every rank. A rank that is gone is left to be found by ``answer``."""
        for connection in self._connections:
            try:
                connection.send_bytes(message)
            except OSError:
                continue

    def sources(self, rank: int) -> tuple[Connection, int]:
        """What to wait for: an answer, or the end of the process."""
        return self._connections[rank], self._processes[rank].sentinel

    def answer(self, rank: int) -> bytes | None:
        """The bytes that ``rank`` sent, None if there are none yet. Raises EOFError or OSError when it is gone."""
        if self._connections[rank].poll():
            return self._connections[rank].recv_bytes()
        if not self._processes[rank].is_alive():
            raise EOFError
        return None

    def exit_code(self, rank: int) -> int | None:
        """Exit code of a rank that has closed its connection; None if its process goes on all the same."""
        self._processes[rank].join(5.0)
        return self._processes[rank].exitcode

    def log(self, rank: int) -> str:
        """What faulthandler wrote: a fatal signal, or the stacks that ``stacks`` asked for."""
        try:
            return self._log_path(rank).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def stacks(self, ranks: Sequence[int], wait_s: float = 2.0) -> dict[int, str]:
        """The stack of every thread of each of ``ranks``; a note where a rank does not even answer the signal."""
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None and self._processes[rank].is_alive():
                os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + wait_s
        texts = {rank: self.log(rank) for rank in ranks}
        while time.monotonic() < deadline and not all("File " in text for text in texts.values()):
            time.sleep(0.05)
            texts = {rank: self.log(rank) for rank in ranks}
        time.sleep(0.1)  # the last lines of a dump that had only begun
        return {rank: self.log(rank) or f"(no stack within {wait_s:g} s)" for rank in ranks}

    def stop(self, timeout_s: float) -> None:
        """Let idle ranks leave on their own; kill what is left after ``timeout_s``."""
        self.send(b"")
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End every process at once and release what they used."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._directory.cleanup()

    def _log_path(self, rank: int) -> Path:
        return Path(self._directory.name) / f"rank{rank}.log"


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set for the processes started inside; a child reads these before its own first line of Python could set them."""
    before = {name: os.environ.get(name) for name in values}
    _apply(values)
    try:
        yield
    finally:
        _apply(before)


def _apply(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
