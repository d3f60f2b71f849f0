"""Which calls of the CUDA driver wait for a stream that waits for a word, and what they keep waiting: one GPU.

``python -m benchmarks.blocked_driver --out FILE`` takes 20 s. In a process each, a stream waits for a word that nobody
writes (or sleeps for some seconds); a thread then makes the call in question; the main thread tries to copy on a stream
of its own, then in a second context, each within 1.5 s. `tpoverlap.memory.cuda_rescue` is for what is found here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment

BEHIND = ("a wait for a word", "a kernel of some seconds")
CALLS = (
    "first use of a kernel",
    "first use of a product",
    "memory is freed",
    "memory is allocated",
    "host memory is pinned",
    "an event is recorded",
)
_LIMIT_S = 1.5
_SLEEP_CYCLES = 10_000_000_000


def _call(what: str) -> Callable[[], object]:
    """Set up for the call, then the call."""
    device = torch.device("cuda", 0)
    numbers, x = torch.rand(1000, device=device), torch.rand(256, 256, device=device).bfloat16()
    out, spare = torch.empty_like(x), torch.empty(64 << 20, dtype=torch.uint8, device=device)
    if what == CALLS[2]:
        del spare
    calls: list[Callable[[], object]] = [
        lambda: torch.special.bessel_j0(numbers),
        lambda: torch.mm(x, x, out=out),
        torch.cuda.empty_cache,
        lambda: torch.empty(256 << 20, dtype=torch.uint8, device=device),
        lambda: torch.empty(1 << 20, dtype=torch.uint8).pin_memory(),
        lambda: torch.cuda.Event().record(),
    ]
    return calls[CALLS.index(what)]


def case(behind: str, what: str) -> dict[str, Any]:
    """In this process, which is of no use afterwards."""
    from cuda.bindings import driver

    def done(result: Any) -> Any:
        assert result[0] == driver.CUresult.CUDA_SUCCESS, result
        return result[1] if len(result) > 1 else None

    word, call = torch.zeros(1, dtype=torch.int32, device="cuda"), _call(what)
    host = torch.zeros(1, dtype=torch.int32).pin_memory()
    waits, beside, own = (torch.cuda.Stream() for _ in range(3))
    torch.cuda.synchronize()
    if behind == BEHIND[0]:
        done(driver.cuStreamWaitValue32(waits.cuda_stream, word.data_ptr(), 1, 0))
    else:
        with torch.cuda.stream(waits):
            torch.cuda._sleep(_SLEEP_CYCLES)

    def returns(function: Callable[[], object]) -> bool:
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        thread.join(_LIMIT_S)
        return not thread.is_alive()

    def make_call() -> None:
        with torch.cuda.stream(beside):
            call()

    def copy() -> None:
        torch.cuda.set_device(0)
        done(driver.cuMemcpyDtoHAsync(host.data_ptr(), word.data_ptr(), 4, driver.CUstream(own.cuda_stream)))

    context: list[Any] = []

    def copy_there() -> None:
        done(driver.cuCtxSetCurrent(context[0]))
        done(driver.cuMemcpyDtoH(host.data_ptr(), word.data_ptr(), 4))

    found: dict[str, Any] = {"behind": behind, "call": what, "returns": returns(make_call)}
    found["copy_returns"] = returns(copy)
    found["second_context_returns"] = returns(lambda: context.append(done(driver.cuCtxCreate(None, 0, 0))))
    found["copy_there_returns"] = bool(context) and returns(copy_there)
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Run all cases, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs=2, help="one of them, in this process")
    arguments = parser.parse_args(given)
    if arguments.case:
        print(json.dumps(case(*arguments.case)), flush=True)
        os._exit(0)  # its end would wait as well
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.blocked_driver", "--case"]
    processes = [
        subprocess.Popen([*command, behind, what], stdout=subprocess.PIPE, text=True)
        for behind in BEHIND
        for what in CALLS
    ]
    rows = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    for row in rows:
        print(row)
    content = {"format": "blocked driver", "environment": environment(), "limit_s": _LIMIT_S, "rows": rows}
    content["seconds"] = round(time.monotonic() - started, 1)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(content, indent=1, default=str))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
