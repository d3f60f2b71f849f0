"""Where a measurement was made: what every file in ``benchmarks/results`` begins with."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import torch

import tpoverlap


def environment() -> dict[str, Any]:
    """Date, hardware, versions, commit and command of this run."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "tpoverlap": tpoverlap.__version__,
    }


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
