"""Rows that need no GPU: cores, shared memory, container limits, handle exchange, the gloo process group."""

from __future__ import annotations

import os
import resource
import secrets
from collections.abc import Iterable
from pathlib import Path

from tpoverlap.tools.doctor.children import ChildResult, first_reason, run_ranks, worst
from tpoverlap.tools.doctor.container import may_ptrace
from tpoverlap.tools.doctor.report import Row, Status

SHM_DIRECTORY = Path("/dev/shm")
_PROBE_BYTES = 1 << 20
_SMALL_SHM_BYTES = 256 << 20


def cpu_row() -> Row:
    """Cores that this process may use, and memory."""
    online = os.cpu_count() or 0
    allowed = len(os.sched_getaffinity(0))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    detail = f"{allowed} of {online} cores usable, {memory_bytes / 2**30:.1f} GiB memory"
    data = {"cores_online": online, "cores_usable": allowed, "memory_bytes": memory_bytes}
    return Row("machine", "cpu", Status.OK, detail, "sched_getaffinity, sysconf", data=data)


def shm_row(directory: Path = SHM_DIRECTORY) -> Row:
    """Size of /dev/shm: containers often get 64 MiB."""
    how = f"statvfs({directory})"
    remedy = "containers: docker run --shm-size=8g, or an emptyDir with medium: Memory mounted there"
    try:
        stat = os.statvfs(directory)
    except OSError as error:
        return Row("machine", str(directory), Status.FAILED, str(error.strerror), how, remedy)
    size_bytes, free_bytes = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    data = {"size_bytes": size_bytes, "free_bytes": free_bytes}
    detail = f"{free_bytes / 2**20:,.0f} MiB free of {size_bytes / 2**20:,.0f} MiB"
    if free_bytes < _SMALL_SHM_BYTES:
        detail += ": small; tpo.memory_estimate() says what a manager needs"
    else:
        remedy = ""
    return Row("machine", str(directory), Status.OK, detail, how, remedy, data)


def limits_row(root: Path = Path("/")) -> Row:
    """Limits that a container or the shell put on this process, where they are visible (cgroup v1 and v2, rlimits)."""
    cgroup = root / "sys/fs/cgroup"
    quota = _first_text(cgroup / "cpu.max", cgroup / "cpu/cpu.cfs_quota_us")
    memory = _first_text(cgroup / "memory.max", cgroup / "memory/memory.limit_in_bytes")
    pids = _first_text(cgroup / "pids.max", cgroup / "pids/pids.max")
    ptrace_scope = _first_text(root / "proc/sys/kernel/yama/ptrace_scope")
    status = dict(line.split(":", 1) for line in _first_text(root / "proc/self/status").splitlines() if ":" in line)
    data = {
        "cgroup_cpu": quota,
        "cgroup_memory": memory,
        "cgroup_pids": pids,
        "memlock_bytes": _rlimit(resource.RLIMIT_MEMLOCK),
        "open_files": _rlimit(resource.RLIMIT_NOFILE),
        "yama_ptrace_scope": ptrace_scope,
        "may_ptrace": may_ptrace(status),
        "seccomp": {"0": "off", "1": "strict", "2": "filter"}.get(status.get("Seccomp", "").strip(), ""),
        "container": (root / ".dockerenv").exists() or "container" in os.environ,
    }
    # cgroup v1 says "no limit" with a number near 2**63, v2 with "max", the CPU quota of v1 with -1.
    seen = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in data.items()
        if value not in ("", None, False) and not str(value).startswith(("max", "-1", "9223372036854"))
    ]
    detail = ", ".join(seen) or "none visible"
    return Row("machine", "limits", Status.OK, detail, "cgroup files, getrlimit, /proc/self/status", data=data)


def shared_memory_row(timeout_s: float, directory: Path = SHM_DIRECTORY) -> Row:
    """Two processes map one file of /dev/shm and see each other's writes while both run."""
    section, name = "cpu", "shared memory"
    how = f"two processes mapped one file of 1 MiB in {directory}: bytes and flags both ways, 3 rounds"
    remedy = f"make {directory} a writable tmpfs (containers: --shm-size=8g), or use backend='process_group'"
    path = directory / f"tpoverlap-doctor-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserve now: on a full tmpfs a plain store to a sparse page would kill the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, _PROBE_BYTES)
        finally:
            os.close(descriptor)
        settings = {"path": str(path), "size_bytes": _PROBE_BYTES}
        results = run_ranks("cpu:shared_memory", 2, timeout_s=timeout_s, settings=settings)
    except OSError as error:
        return Row(section, name, Status.FAILED, f"{path}: {error.strerror}", how, remedy)
    finally:
        path.unlink(missing_ok=True)
    detail = "both processes saw each other's bytes"
    return outcome_row(section, name, results, detail, how, remedy)


def handle_exchange_row(timeout_s: float) -> Row:
    """Siblings pass an open file on, as ranks that map each other's GPU memory must."""
    how = "two sibling processes passed a memfd over a unix datagram socket in $TMPDIR, and by pidfd_getfd"
    remedy = "set TMPDIR to a short writable path that all ranks share; allow unix sockets in the sandbox"
    results = run_ranks("cpu:handle_exchange", 2, timeout_s=timeout_s)
    refused = next((r.sections["pidfd_getfd"]["error"] for r in results if "pidfd_getfd" in r.sections), None)
    # A refusal is no failure: torch passes handles over the socket. It is shown because other libraries do not.
    # It needs the permission to ptrace; row 'limits' says what stands in its way.
    pidfd = (
        "allowed"
        if refused is None
        else f"refused ({refused}), which matters only to libraries that use it: docker run --cap-add SYS_PTRACE, or "
        "kernel.yama.ptrace_scope=0, allows it"
    )
    return outcome_row("cpu", "handle exchange", results, f"unix socket ok; pidfd_getfd {pidfd}", how, remedy)


def gloo_row(timeout_s: float) -> Row:
    """Point-to-point and a collective over gloo between two processes."""
    how = "two processes: init_process_group('gloo'), batch_isend_irecv around the ring, all_gather_into_tensor"
    remedy = "the host name must resolve (check /etc/hosts), or set GLOO_SOCKET_IFNAME to an interface, e.g. lo"
    results = run_ranks("cpu:process_group", 2, timeout_s=timeout_s, settings={"backend": "gloo"})
    return outcome_row("cpu", "process group (gloo)", results, "2 ranks exchanged and gathered tensors", how, remedy)


def outcome_row(section: str, name: str, results: list[ChildResult], detail: str, how: str, remedy: str) -> Row:
    """The row of a probe that ran on several ranks: ``detail`` when all ran through, else the reason and ``remedy``."""
    status = worst(results)
    data = {"ranks": len(results), **_merge(result.sections for result in results)}
    if status is Status.OK:
        return Row(section, name, status, detail, how, data=data)
    return Row(section, name, status, first_reason(results), how, remedy, data)


def _merge(sections: Iterable[dict[str, dict[str, object]]]) -> dict[str, object]:
    merged: dict[str, object] = {}
    for one in sections:
        merged.update({name: content for name, content in one.items() if name not in ("step", "error")})
    return merged


def _first_text(*paths: Path) -> str:
    for path in paths:
        try:
            return path.read_text().strip()
        except OSError:
            continue
    return ""


def _rlimit(which: int) -> int | None:
    """The soft limit; None when there is none."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
