"""What a run leaves: where it was made, its rows, what was left out. Written whole after every row."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpoverlap.tools.bench.suite import Row
from tpoverlap.tools.bench.suites import load_suite
from tpoverlap.tools.train.outputs import write_json

SCHEMA = 1


@dataclass
class BenchReport:
    """``where``: environment and settings. ``left_out``: rows for which ``--minutes`` left no time."""

    where: dict[str, Any]
    rows: list[Row]
    left_out: list[str]

    def rows_of(self, suite: str) -> list[Row]:
        """Rows of one suite, in order."""
        return [row for row in self.rows if row["suite"] == suite]

    @property
    def suites(self) -> list[str]:
        """Suites that have rows."""
        return list(dict.fromkeys(row["suite"] for row in self.rows))

    @property
    def problems(self) -> list[str]:
        """What makes the run a failure: our wrong or failed operations, and a run that measured nothing."""
        found = [f"{row['suite']} {row['label']}: {problem}" for row in self.rows for problem in row["problems"]]
        if not any(row["measured"] for row in self.rows):
            found.insert(0, "nothing was measured")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "schema": SCHEMA,
            "environment": self.where,
            "summary": {name: load_suite(name).summary(self.rows_of(name)) for name in self.suites},
            "rows": self.rows,
            "left_out": self.left_out,
            "problems": self.problems,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BenchReport:
        """From `as_dict`'s content. Raises KeyError when it is something else."""
        return cls(dict(data["environment"]), list(data["rows"]), list(data["left_out"]))


def write_report(path: Path, report: BenchReport) -> None:
    """Replace ``path`` in one step: a run that is cut off while it writes leaves the former rows."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_json(beside, report.as_dict())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def headline(where: Mapping[str, Any]) -> list[str]:
    """What a reader has to know before the first figure."""
    shared = where["ranks_share_gpus"]
    hardware = ", ".join(f"{where['gpus'].count(gpu)} x {gpu}" for gpu in dict.fromkeys(where["gpus"]))
    on_cpu = where["device"] == "cpu"
    if on_cpu:
        hardware = f"{where['cpu']}, {where['cpu_cores']} cores"
    lines = [
        f"tpoverlap {where['tpoverlap']} ({where['commit']}), {where['date']}",
        f"{where['tp_size']} ranks on {hardware}, {where['dtype']}, torch {where['torch']}"
        + ("" if on_cpu else f", CUDA {where['cuda']}, NCCL {where['nccl']}, Triton {where['triton']}"),
        f"{where['rounds']} interleaved rounds, median, slowest rank; us an operation",
    ]
    if on_cpu:
        lines.append("A CPU run: it shows that everything works here; its figures say NOTHING about GPUs.")
    else:
        lines.append(
            "Ranks SHARE GPUs: these figures are no times of anything."
            if shared
            else "Every rank has a GPU of its own."
        )
    return lines
