"""What the tests of run_ranks and RankPool run on ranks: sent by reference, so at the top level of a module."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tpoverlap.testing.interrupts import ignore_interrupts


class TooFewRows(ValueError):
    pass


def describe(rank: int, world_size: int, *args: Any) -> tuple[int, int, tuple[Any, ...], int]:
    return rank, world_size, args, os.getpid()


def all_reduce(rank: int, world_size: int) -> float:
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return float(total)


def settings(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "TPO_TEST": os.environ.get("TPO_TEST"),
    }


def tensors(rank: int, world_size: int, given: torch.Tensor) -> dict[str, Any]:
    """A narrow view of a large tensor, bf16, requires_grad, an empty one, and what came from the parent."""
    large = torch.arange(1 << 22, dtype=torch.float32)
    weight = torch.ones(2, 3, requires_grad=True)
    return {
        "view": large[rank : rank + 3],
        "transposed": large[:6].view(2, 3).t(),
        "bf16": torch.tensor([rank, 1.5], dtype=torch.bfloat16),
        "non_leaf": weight * 2,
        "empty": large[:0],
        "given": given + rank,
    }


def raise_on(rank: int, world_size: int, bad: int) -> str:
    if rank == bad:
        raise TooFewRows(f"rank {rank} has no rows")
    return f"fine {rank}"


def raise_while_others_wait(rank: int, world_size: int) -> None:
    if rank == 0:
        raise TooFewRows("rank 0 never comes")
    dist.barrier()


def die_on(rank: int, world_size: int, dying: int, how: str) -> str:
    if rank == dying:
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            ctypes.string_at(0)
    return f"fine {rank}"


def hang_on(rank: int, world_size: int, hanging: int) -> str:
    if rank == hanging:
        the_call_that_hangs()
    return f"fine {rank}"


def the_call_that_hangs() -> None:
    time.sleep(3600)


def hang_without_releasing_the_gil(rank: int, world_size: int) -> None:
    ctypes.PyDLL(None).sleep(3600)


def return_a_lock(rank: int, world_size: int) -> Any:
    return threading.Lock()


def die_later(rank: int, world_size: int) -> int:
    """Answers first: the death belongs to no run."""
    threading.Timer(0.3, os._exit, (9,)).start()
    return os.getpid()


def on_gpu(rank: int, world_size: int) -> dict[str, Any]:
    """Current device, backend, the variable for shared GPUs, a sum over the CPU group, and a tensor on the GPU."""
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return {
        "device": torch.cuda.current_device(),
        "backend": dist.get_backend_config(),
        "overlapping": os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"),
        "total": float(total),
        "tensor": torch.full((2,), float(rank), device="cuda"),
    }


def all_reduce_on_gpu(rank: int, world_size: int) -> float:
    total = torch.tensor([rank + 1.0], device="cuda")
    dist.all_reduce(total)
    return float(total)


def interrupted_at_its_start(connection: Connection) -> None:
    """Not a rank's function but its process: SIGINT comes first. Sends whether it was blocked before and after."""
    os.kill(os.getpid(), signal.SIGINT)
    before = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ignore_interrupts()
    connection.send((before, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())))
