"""Rows that a program of a GEMM kernel copies into mapped memory of a peer: the one-launch forms' way to send."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finish_part(done, word, parts, flag, epoch):
    """One more part of what ``word`` stands for is stored; the last one flags it at the peer.

    Args:
        done: int32 counters in local memory, 0 before the launch and after it.
        parts: how many there are.
        flag: address (int64) of the peer's int32 arrival word.
    """
    tl.debug_barrier()  # the counter's release is one thread's: the other threads' stores have to come before it
    finished = tl.atomic_add(done + word, 1, sem="acq_rel", scope="sys") + 1
    if finished == parts:
        tl.store(done + word, 0)  # nobody else touches it before the next launch
        tl.atomic_xchg(flag.to(tl.pointer_type(tl.int32)), epoch, sem="release", scope="sys")


@triton.jit
def push_rows(source, width, item, peers, done, epoch):
    """Copy the rows of one ``item`` to a peer and count it.

    Args:
        source: [rows, width], contiguous.
        item: int32 [8], a row of a `PushPlan`.
        peers: int64 [R, 2]: for each rank the address of its slot, and of this rank's arrival words there.
    """
    UNITS: tl.constexpr = 32768 * 8 // source.dtype.element_ty.primitive_bitwidth
    peer = tl.load(item)
    start = tl.load(item + 1)
    stop = tl.load(item + 2)
    slot = tl.load(peers + peer * 2).to(tl.pointer_type(source.dtype.element_ty))
    slot = tl.multiple_of(slot, 16)
    target = slot + tl.load(item + 3).to(tl.int64) * width
    source += start.to(tl.int64) * width
    count = (stop - start) * width
    for first in range(0, count, UNITS):
        units = first + tl.arange(0, UNITS)
        tl.store(target + units, tl.load(source + units, mask=units < count), mask=units < count)
    piece = tl.load(item + 5)
    finish_part(done, tl.load(item + 4), tl.load(item + 6), tl.load(peers + peer * 2 + 1) + piece * 4, epoch)
