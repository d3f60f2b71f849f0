"""``use_ce: false``: a few programs copy bytes into mapped memory, and the last one to finish sets a flag there."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count", "flag", "epoch", "done_target"])
def copy_and_flag(
    target,
    source,
    count,
    done,
    done_target,
    flag,
    epoch,
    UNITS: tl.constexpr,
    MULTIPLE: tl.constexpr,
    ADDRESSED: tl.constexpr,
):
    """Copy ``count * MULTIPLE`` units, then store ``epoch`` at the address ``flag`` with release order.

    Args:
        target, source: pointers to the units, whose type is their size (ADDRESSED: int64 addresses of bytes).
        MULTIPLE: 4 for int32: the compiler then knows that whole 16-byte vectors are copied.
        done: int32 counter of programs that have finished; it goes up by the number of programs a launch.
        done_target: its value (mod 2**32) once all programs of this launch have.
    """
    if ADDRESSED:
        target = target.to(tl.pointer_type(tl.int8))
        source = source.to(tl.pointer_type(tl.int8))
    num_units = count.to(tl.int64) * MULTIPLE
    steps = tl.cdiv(num_units, UNITS)
    for step in range(tl.program_id(0), steps, tl.num_programs(0)):
        units = step * UNITS + tl.arange(0, UNITS)
        inside = units < num_units
        tl.store(target + units, tl.load(source + units, mask=inside), mask=inside)
    tl.debug_barrier()  # the counter's release is one thread's: the other threads' stores have to come before it
    finished = tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") + 1
    if finished == done_target:
        tl.atomic_xchg(flag.to(tl.pointer_type(tl.int32)), epoch, sem="release", scope="sys")
