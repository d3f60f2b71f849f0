"""Rows about measured rates between ranks: each pair alone beside everybody at once, on the CPU and on GPUs."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tpoverlap.tools.doctor.children import ChildResult, first_reason, run_ranks, worst
from tpoverlap.tools.doctor.probes_cpu import SHM_DIRECTORY
from tpoverlap.tools.doctor.probes_cuda import SAFE_ENV
from tpoverlap.tools.doctor.report import Row, Status

GPU_ROW = "link bandwidth"
CPU_ROW = "memcpy bandwidth"
_CPU_PART_BYTES = 4 << 20
_GPU_PART_BYTES = 128 << 20
_PAGES_BYTES = 1 << 16  # of flags, more than any number of ranks needs


def cpu_bandwidth_row(timeout_s: float, directory: Path = SHM_DIRECTORY) -> Row:
    """Two to four processes copy into each other's part of one shared file."""
    num_ranks = max(2, min(4, len(os.sched_getaffinity(0))))
    how = (
        f"{num_ranks} processes, memcpy of {_CPU_PART_BYTES >> 20} MiB into each other's shared pages, median of 5: "
        "this machine's memory, not a link between GPUs"
    )
    path = directory / f"tpoverlap-doctor-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserve now: on a full tmpfs a plain store to a sparse page would kill the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, num_ranks**2 * _CPU_PART_BYTES + _PAGES_BYTES)
        finally:
            os.close(descriptor)
        settings = {"path": str(path), "part_bytes": _CPU_PART_BYTES}
        results = run_ranks("bandwidth:shared", num_ranks, timeout_s=timeout_s, settings=settings)
    except OSError as error:
        return Row("cpu", CPU_ROW, Status.FAILED, f"{path}: {error.strerror}", how, "see 'shared memory' and /dev/shm")
    finally:
        path.unlink(missing_ok=True)
    return bandwidth_row("cpu", CPU_ROW, results, how, "see 'shared memory'")


def gpu_bandwidth_row(count: int, timeout_s: float) -> Row:
    """One rank a GPU pushes by copy engine."""
    how = (
        f"{count} processes, symmetric memory, copy engine, {_GPU_PART_BYTES >> 20} MiB a peer, launch and "
        "synchronisation included, median of 5"
    )
    if count < 2:
        return Row("gpu", GPU_ROW, Status.SKIPPED, "one GPU: there is no link to measure", how)
    settings = {"part_bytes": _GPU_PART_BYTES}
    results = run_ranks("bandwidth:cuda", count, timeout_s=timeout_s, settings=settings, env=SAFE_ENV)
    return bandwidth_row("gpu", GPU_ROW, results, how, "see 'symmetric memory'")


def bandwidth_row(section: str, name: str, results: Sequence[ChildResult], how: str, remedy: str) -> Row:
    """``data``: ``pairs`` "0-1" -> GB/s from 0 to 1 alone, ``both_ways``, and ``all_at_once`` rank -> GB/s sent."""
    if worst(list(results)) is not Status.OK:
        return Row(section, name, worst(list(results)), first_reason(list(results)), how, remedy)
    found: dict[str, Any] = {"pairs": {}, "both_ways": {}, "all_at_once": {}}
    for result in results:
        mine = result.sections["bandwidth"]
        for key, table in (("pairs", "alone"), ("both_ways", "both")):
            found[key].update({f"{result.rank}-{peer}": round(rate, 2) for peer, rate in mine[table].items()})
        found["all_at_once"][str(result.rank)] = round(mine["all_at_once"], 2)
        found["part_bytes"] = mine["part_bytes"]
    pairs, both, everyone = (list(found[key].values()) for key in ("pairs", "both_ways", "all_at_once"))
    detail = (
        f"GB/s sent by a rank: one pair alone {_span(pairs)}, both ways at once {_span(both)}; "
        f"to all {len(results) - 1} peers while everybody does {_span(everyone)}, {sum(everyone):.1f} in all"
    )
    return Row(section, name, Status.OK, detail, how, data=found)


def _span(values: Sequence[float]) -> str:
    """``350.1``, or the median with the extremes where they differ by more than a tenth."""
    low, high = min(values), max(values)
    if high <= 1.1 * low:
        return f"{median(values):.1f}"
    return f"{median(values):.1f} ({low:.1f} to {high:.1f})"
