"""Where a measurement was made: what every results file begins with."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import tpoverlap
from tpoverlap.fused_form import MOST_TRADED_BYTES


def environment() -> dict[str, Any]:
    """Date, hardware, versions, commit and command of this run."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([_program(sys.argv[0]), *sys.argv[1:]]),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "cuda_device_max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "tpoverlap": tpoverlap.__version__,
        "most_traded_bytes": MOST_TRADED_BYTES,  # up to here `sequential` is one kernel and the GEMM
    }


def _program(path: str) -> str:
    """As a user types it, not where it lies on this machine."""
    return "python -m tpoverlap" if path.endswith("__main__.py") else Path(path).name


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _triton_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
