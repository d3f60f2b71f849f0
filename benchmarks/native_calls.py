"""What one call of the driver or of cublasLt costs the host when C makes it: tapes of many equal instructions.

``python -m benchmarks.native_calls --out F``: one process, one GPU. Each row is the least of several tapes, in
microseconds a call, beside a loop of Python that calls nothing; streams are waited for in between, so no queue is full.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.environment import environment
from tpoverlap.gemm.cublaslt import lt_products
from tpoverlap.memory.cuda_driver import CudaDriver
from tpoverlap.memory.driver import OPERATION_BYTES, PACK, WAIT_32, WAIT_GEQ, WRITE_32, WRITE_ORDERED, MemoryOperations
from tpoverlap.native import NativeCalls, Recording, Tape, player

CALLS, TURNS = 64, 15


def batch(operations: list[tuple[int, int, int]]) -> MemoryOperations:
    made = MemoryOperations(len(operations))
    made.count = len(operations)
    for number, (kind, address, value) in enumerate(operations):
        flags = WAIT_GEQ if kind == WAIT_32 else WRITE_ORDERED
        PACK.pack_into(made.buffer, number * OPERATION_BYTES, kind, address, value, flags, 0)
    return made


def least_us(work: Callable[[], object], calls: int) -> float:
    best = float("inf")
    for _ in range(TURNS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        best = min(best, 1e6 * (time.perf_counter() - started) / calls)
    return best


def measure() -> dict[str, float]:
    device = torch.device("cuda", torch.cuda.current_device())
    driver, products, play = CudaDriver(device), lt_products(device.index), player()
    assert products is not None and play is not None, "tapes cannot be played here"
    native = driver.native()
    calls = NativeCalls.from_buffer_copy(native.calls)
    library, calls.attribute, calls.multiply = products.native()
    comm = driver.create_stream("comm", high_priority=True)
    words = driver.create_stream("words", high_priority=True)
    caller = driver.caller_stream()
    memory = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
    word = memory.data_ptr()
    left, right = (torch.randn(64, 256, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(64, 64, device=device, dtype=torch.bfloat16)
    one, four = batch([(WRITE_32, word, 1)]), batch([(WRITE_32, word + 4 * n, 1) for n in range(4)])
    wait = batch([(WAIT_32, word, 0)])

    def tape(record: Callable[[Recording], Any]) -> Tape:
        recording = Recording(native.event)
        for _ in range(CALLS):
            record(recording)
        return Tape(play, calls, library, recording, 0, native.failed)

    operands = (right.data_ptr(), left.data_ptr(), out.data_ptr(), out.data_ptr())
    kinds: dict[str, Callable[[Recording], Any]] = {
        "nothing: a word of the host": lambda to: to.store(wait.address + 24, 0),
        "submit, 1 write": lambda to: to.submit(comm, one),
        "submit, 4 writes": lambda to: to.submit(comm, four),
        "submit, 1 wait": lambda to: to.submit(comm, wait),
        "follow: record on the caller's, wait on words": lambda to: to.follow(words, caller),
        "follow: record on words, wait on comm": lambda to: to.follow(comm, words),
        "copy, 16 KiB": lambda to: to.copy(comm, word + (1 << 19), word, 1 << 14),
        "copy, 256 KiB": lambda to: to.copy(comm, word + (1 << 19), word, 1 << 18),
        "product 64x256x64": lambda to: products.record(to, caller, left, right.t(), out, None, None, operands),
        "submit, then follow": lambda to: (to.submit(words, one), to.follow(caller, words)),
    }
    found = {}
    for name, record in kinds.items():
        made = tape(record)
        made.play()
        found[name] = least_us(made.play, CALLS)
    transposed = right.t()

    def loop(work: Callable[[], object]) -> None:
        for _ in range(CALLS):
            work()

    python: dict[str, Callable[[], object]] = {
        "Python: an empty loop": lambda: None,
        "Python: torch.mm of that": partial(torch.mm, left, transposed, out=out),
        "Python: torch.empty": partial(torch.empty, 64, 64, device=device, dtype=torch.bfloat16),
        "Python: torch.add": partial(torch.add, out, out, out=out),
        "Python: submit, 1 write": partial(driver.submit, comm, one),
        "Python: follow": partial(driver.follow, words, caller),
        "Python: a copy of 16 KiB": partial(driver.copy, comm, word + (1 << 19), word, 1 << 14),
        "Python: product": partial(products.multiply, left, transposed, out),
        "Python: a tape of nothing": tape(lambda to: None).play,
    }
    for name, work in python.items():
        loop(work)
        found[name] = least_us(partial(loop, work), CALLS)
    return found


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(out: Path) -> None:
    """See the module's text."""
    found = measure()
    for name, us in found.items():
        print(f"{name:50} {us:8.2f}")
    out.write_text(json.dumps({"environment": environment(), "us_a_call": found}, indent=1) + "\n")
    print("wrote", out)


if __name__ == "__main__":
    main()
