"""The child side of a RankPool: joins the process group once, then runs functions until it is told to stop."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

from tpoverlap.testing.failure import RankError
from tpoverlap.testing.interrupts import ignore_interrupts
from tpoverlap.testing.wire import dumps, loads

_PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stack of every thread into its log; works while it holds the GIL."""


@dataclass(frozen=True)
class GroupSpec:
    """What every rank needs to join the default process group; ``port`` is that of the parent's TCPStore."""

    world_size: int
    backend: str
    device: str
    device_count: int
    port: int
    group_timeout_s: float
    num_threads: int
    parent_pid: int
    started_by_main_thread: bool


def rank_main(rank: int, spec: GroupSpec, connection: Connection, log_path: str) -> None:
    """Entry point of a spawned rank. Sends ``("ready", None)``, then one ``("result" | "error", value)`` a call."""
    _die_with_parent(spec)
    ignore_interrupts()
    with open(log_path, "w") as log:  # has to stay open: faulthandler keeps the descriptor
        faulthandler.enable(log)
        faulthandler.register(STACK_SIGNAL, log, all_threads=True)
        try:
            _join_group(rank, spec)
        except BaseException as error:
            connection.send_bytes(dumps(("error", _describe(error))))
            return
        connection.send_bytes(dumps(("ready", None)))
        _serve(rank, spec.world_size, connection)
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _serve(rank: int, world_size: int, connection: Connection) -> None:
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        if not message:
            return
        try:
            sys_path, call = loads(message)
            sys.path[:] = sys_path  # test modules that the parent found later than this process started
            fn, args = loads(call)
            answer = dumps(("result", fn(rank, world_size, *args)))
        except BaseException as error:
            answer = dumps(("error", _describe(error)))
        connection.send_bytes(answer)


def _join_group(rank: int, spec: GroupSpec) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    torch.set_num_threads(spec.num_threads)
    if spec.device == "cuda":
        torch.cuda.set_device(rank % spec.device_count)
    timeout = timedelta(seconds=spec.group_timeout_s)
    store = TCPStore("127.0.0.1", spec.port, spec.world_size, is_master=False, timeout=timeout)
    dist.init_process_group(spec.backend, store=store, rank=rank, world_size=spec.world_size, timeout=timeout)


def _describe(error: BaseException) -> RankError:
    return RankError(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def _die_with_parent(spec: GroupSpec) -> None:
    """No orphan may go on spinning after its parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), name="parent-watch", daemon=True).start()
    # The thread cannot run while native code holds the GIL; the kernel's signal can. The kernel means the *thread*
    # that started us, hence only where that is the main thread, which lives as long as its process.
    if sys.platform == "linux" and spec.started_by_main_thread:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != spec.parent_pid:
            os._exit(1)


def _exit_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)
