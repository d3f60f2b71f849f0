"""Run the ranks of a probe in processes of their own, with a deadline, and collect what each managed to say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpoverlap.tools.doctor.report import Status

WORKER = Path(__file__).with_name("worker.py")
MARK = "@tpoverlap-doctor "  # worker.py prints it before every message; everything else on stdout is noise
_AFTER_A_DEATH_S = 3.0  # a rank whose peer died gets this long to say so, before it is killed

# torchrun's variables would send the probe's process group to the job that the doctor was started in.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@dataclass
class ChildResult:
    """What one rank said before it ended, and how it ended."""

    rank: int
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    exit_code: int | None = None
    timed_out: bool = False
    stderr: str = ""

    @property
    def ok(self) -> bool:
        """Whether the rank ran to its end without an error."""
        return self.exit_code == 0 and not self.timed_out and "error" not in self.sections

    @property
    def status(self) -> Status:
        """OK, TIMEOUT or FAILED."""
        if self.ok:
            return Status.OK
        return Status.TIMEOUT if self.timed_out else Status.FAILED

    def why(self) -> str:
        """One line on what went wrong, and in which step; empty when nothing did."""
        if self.ok:
            return ""
        step = self.sections.get("step", {}).get("name", "start-up")
        if "error" in self.sections:
            cause = self.sections["error"]["message"]
        elif self.timed_out:
            cause = "no answer within the time limit; killed"
        elif self.exit_code is not None and self.exit_code < 0:
            cause = f"died of signal {_signal_name(-self.exit_code)}"
        else:
            last_line = self.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
            cause = f"exit code {self.exit_code}: {last_line[0][:300]}"
        return f"rank {self.rank}, in step '{step}': {cause}"


def run_ranks(
    task: str,
    num_ranks: int,
    *,
    timeout_s: float,
    settings: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    worker: Path = WORKER,
) -> list[ChildResult]:
    """Run ``task`` of the worker files on ``num_ranks`` processes; returns after at most ``timeout_s`` plus a moment.

    Every process gets ``settings`` plus ``task, rank, num_ranks, scratch, timeout_s``; ``scratch`` is a directory
    that they share and that is deleted afterwards. Nothing outlives the call: what still runs at the deadline is
    killed with everything it started.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    environment.update({"OMP_NUM_THREADS": "1", **(env or {})})
    with tempfile.TemporaryDirectory(prefix="tpoverlap-doctor-") as scratch:
        # Inside the time limit the workers' own waits end first, so that they can say what they waited for.
        common = {**(settings or {}), "num_ranks": num_ranks, "scratch": scratch, "timeout_s": 0.8 * timeout_s}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_ranks):
                message = json.dumps({**common, "task": task, "rank": rank})
                # Files, not pipes: a grandchild that outlives its parent would keep a pipe open for ever.
                with open(f"{scratch}/out{rank}", "wb") as out, open(f"{scratch}/err{rank}", "wb") as err:
                    # -P: else the worker's own directory would shadow installed modules of the same names.
                    command = [sys.executable, "-P", str(worker), message]
                    processes.append(
                        subprocess.Popen(
                            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment,
                            start_new_session=True,
                        )
                    )  # fmt: skip
            killed = _wait(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                _kill(process)
        return [_collect(rank, process, Path(scratch), rank in killed) for rank, process in enumerate(processes)]


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> set[int]:
    """Wait for all processes; returns the ranks that still ran at the deadline."""
    while True:
        codes = [process.poll() for process in processes]
        running = {rank for rank, code in enumerate(codes) if code is None}
        if not running or time.monotonic() > deadline:
            return running
        if any(code not in (None, 0) for code in codes):
            deadline = min(deadline, time.monotonic() + _AFTER_A_DEATH_S)
        time.sleep(0.02)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group that was started for this rank (only it: the pid is ours and not yet reaped)."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _collect(rank: int, process: subprocess.Popen[bytes], scratch: Path, timed_out: bool) -> ChildResult:
    result = ChildResult(rank, exit_code=process.returncode, timed_out=timed_out)
    result.stderr = (scratch / f"err{rank}").read_bytes()[-4000:].decode(errors="replace")
    for line in (scratch / f"out{rank}").read_text(errors="replace").splitlines():
        if line.startswith(MARK):
            try:
                name, content = json.loads(line.removeprefix(MARK))
            except ValueError:
                continue  # a line cut short by the process's death
            result.sections[name] = content
    return result


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def worst(results: list[ChildResult]) -> Status:
    """OK when every rank ran through; else FAILED before TIMEOUT, since the failure explains its peers' waiting."""
    statuses = {result.status for result in results}
    return next((s for s in (Status.FAILED, Status.TIMEOUT) if s in statuses), Status.OK)


def first_reason(results: list[ChildResult]) -> str:
    """The line that explains best why the ranks did not all run through."""
    failed = sorted((r for r in results if not r.ok), key=lambda r: (r.timed_out, r.rank))
    return failed[0].why() if failed else ""
