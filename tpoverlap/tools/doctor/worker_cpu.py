"""Probe processes that need no GPU driver: shared pages, handle exchange between siblings, process groups.

Standalone (see worker.py): each task is ``task(settings, emit)`` and raises when what it probes does not work.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

Emit = Callable[[str, dict[str, Any]], None]
Settings = dict[str, Any]

_SYS_PIDFD_GETFD = 438  # the same number on every architecture that Linux has had since 5.6


def shared_memory(settings: Settings, emit: Emit) -> None:
    """Two ranks map ``path`` and, three times over, see what the other one wrote while both run."""
    rank, path, size_bytes = settings["rank"], settings["path"], settings["size_bytes"]
    half = size_bytes // 2 - mmap.PAGESIZE  # the last pages hold the flags
    with open(path, "r+b") as file:
        pages = mmap.mmap(file.fileno(), size_bytes)
    flag_at = [size_bytes - mmap.PAGESIZE * (2 - r) for r in range(2)]
    for epoch in range(1, 4):
        emit("step", {"name": f"wait for the other rank's bytes, round {epoch}"})
        pages[rank * half : (rank + 1) * half] = bytes([10 * epoch + rank]) * half
        pages[flag_at[rank]] = epoch
        _wait_for_byte(pages, flag_at[1 - rank], epoch, settings["timeout_s"])
        theirs = pages[(1 - rank) * half : (2 - rank) * half]
        if theirs != bytes([10 * epoch + 1 - rank]) * half:
            raise RuntimeError(f"round {epoch}: the flag is there but the bytes are not those that were written")
        pages[flag_at[rank] + 1] = epoch  # have read: the other one may overwrite
        _wait_for_byte(pages, flag_at[1 - rank] + 1, epoch, settings["timeout_s"])
    emit("shared_memory", {"size_bytes": size_bytes})


def handle_exchange(settings: Settings, emit: Emit) -> None:
    """Two siblings pass each other an open file, over a unix datagram socket and by ``pidfd_getfd``.

    That is how memory handles travel between ranks: torch binds a datagram socket in $TMPDIR.
    """
    rank, scratch, timeout_s = settings["rank"], Path(settings["scratch"]), settings["timeout_s"]
    file = os.memfd_create(f"rank{rank}")
    os.write(file, b"token of rank %d" % rank)
    expected = b"token of rank %d" % (1 - rank)
    emit("step", {"name": "bind a unix datagram socket"})
    path = os.path.join(tempfile.gettempdir(), f"tpoverlap-doctor-{os.getpid()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mine:
        try:
            mine.bind(path)
            mine.settimeout(timeout_s)
            emit("step", {"name": "meet the other rank"})
            _publish(scratch / f"meet{rank}", {"pid": os.getpid(), "fd": file, "socket": path})
            peer = _await_json(scratch / f"meet{1 - rank}", timeout_s)
            emit("step", {"name": "send a file descriptor over a unix socket"})
            mine.connect(peer["socket"])
            socket.send_fds(mine, [b"fd"], [file])
            _, received, _, _ = socket.recv_fds(mine, 16, 1)
        finally:
            if os.path.exists(path):
                os.unlink(path)
    if not received or os.pread(received[0], 100, 0) != expected:
        raise RuntimeError("the descriptor that arrived does not open the other rank's file")
    emit("unix_socket", {"directory": os.path.dirname(path)})
    emit("pidfd_getfd", {"error": _pidfd_getfd(peer["pid"], peer["fd"], expected)})
    _publish(scratch / f"done{rank}", {})
    _await_json(scratch / f"done{1 - rank}", timeout_s)  # its descriptors must live until the other one has read


def process_group(settings: Settings, emit: Emit) -> None:
    """Ranks of one host exchange a tensor point to point around a ring, then gather one."""
    import torch
    import torch.distributed as dist

    rank, num_ranks, backend = settings["rank"], settings["num_ranks"], settings["backend"]
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    emit("step", {"name": f"init_process_group({backend!r})"})
    store = torch._C._distributed_c10d.FileStore(f"{settings['scratch']}/store", num_ranks)
    timeout = timedelta(seconds=settings["timeout_s"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    emit("step", {"name": "send to the next rank, receive from the one before"})
    before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
    sent = torch.arange(4096, dtype=torch.float32, device=device) + 10_000 * rank
    received = torch.full_like(sent, -1.0)
    transfers = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    expected = sent + 10_000 * (before - rank)
    if not torch.equal(received, expected):
        raise RuntimeError(f"rank {before} sent {expected[:3].tolist()}.., {received[:3].tolist()}.. arrived")
    emit("step", {"name": "all_gather_into_tensor"})
    gathered = torch.empty(num_ranks * sent.numel(), device=device)
    dist.all_gather_into_tensor(gathered, sent)
    starts = gathered.view(num_ranks, -1)[:, 0].tolist()
    if starts != [10_000.0 * r for r in range(num_ranks)]:
        raise RuntimeError(f"all-gather returned rows that start with {starts}")
    emit("process_group", {"backend": backend, "num_ranks": num_ranks})


def _pidfd_getfd(pid: int, descriptor: int, expected: bytes) -> str | None:
    """None when ``descriptor`` of process ``pid`` could be taken and holds ``expected``, else why not."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        return f"pidfd_open: {error.strerror}"
    libc = ctypes.CDLL(None, use_errno=True)
    taken = libc.syscall(_SYS_PIDFD_GETFD, pidfd, descriptor, 0)
    if taken < 0:
        return f"pidfd_getfd: {os.strerror(ctypes.get_errno())}"
    return None if os.pread(taken, 100, 0) == expected else "pidfd_getfd returned another file"


def _wait_for_byte(pages: mmap.mmap, index: int, value: int, timeout_s: float) -> None:
    _wait_until(lambda: pages[index] >= value, timeout_s, f"byte {index} did not become {value}")


def _wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} within {timeout_s:.0f} s")
        time.sleep(0.001)


def _publish(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.rename(path)  # readers see all of it or nothing


def _await_json(path: Path, timeout_s: float) -> dict[str, Any]:
    _wait_until(path.exists, timeout_s, f"the other rank's {path.name} did not appear")
    content: dict[str, Any] = json.loads(path.read_text())
    return content
