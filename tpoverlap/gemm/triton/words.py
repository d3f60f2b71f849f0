"""Device functions on 32-bit words that other GPUs write: bounded waits and bumps. See docs/protocol.md."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

GIVEN_UP: tl.constexpr = tl.constexpr(1 << 16)
"""What a program that gave up a wait adds to a counter of parts, besides those."""


@triton.jit
def load_acquire(address, INTERPRETED: tl.constexpr):
    """The word at ``address`` (int64), acquired at system scope: what was written before it is visible after."""
    if INTERPRETED:
        word = tl.atomic_add(address.to(tl.pointer_type(tl.int32)), 0, sem="acquire", scope="sys")
    else:
        word = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )
    return word


@triton.jit
def wait_for_word(address, other, epoch, limit, error, given_up, INTERPRETED: tl.constexpr):
    """Spin until the word at ``address``, or that at ``other``, has reached ``epoch`` (cyclically).

    ``other`` is looked at now and then only; it may be ``address``. Bounded: after ``limit`` (nanoseconds; polls in the
    interpreter) it stores 1 at the address ``error`` and gives up. Threads may leave the spin at different turns, so
    ``given_up`` must steer data only, never a branch with a barrier.

    Returns:
        ``given_up``, 1 once any wait of this program was given up; later waits then return at once.
    """
    behind = load_acquire(address, INTERPRETED) - epoch
    if behind < 0:
        begin = tl.full((), 0, tl.int64)
        now = begin
        turn = tl.full((), 0, tl.int32)
        if not INTERPRETED:
            begin = globaltimer()
            now = begin
        while (behind < 0) & (given_up == 0):
            if INTERPRETED:
                now += 1
            else:
                now = globaltimer()
            turn += 1
            behind = load_acquire(tl.where(turn % 8 == 0, other, address), INTERPRETED) - epoch
            given_up = tl.where((behind < 0) & (now - begin > limit), 1, given_up)
        if given_up != 0:
            tl.store(error.to(tl.pointer_type(tl.int32)), 1)
    return given_up


@triton.jit
def wait_for_words(base, first, count, epoch, limit, error, given_up, INTERPRETED: tl.constexpr):
    """`wait_for_word` for words ``first .. first + count - 1`` at ``base``; what came with them may be read by TMA."""
    word = first
    while word < first + count:  # no `for`: see bump_words
        address = base + word * 4
        given_up = wait_for_word(address, address, epoch, limit, error, given_up, INTERPRETED)
        word += 1
    if not INTERPRETED and count > 0:
        # The rows may be read through the async proxy (TMA) next; the acquire above ordered the generic one only.
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    return given_up


@triton.jit
def load_pair(address, INTERPRETED: tl.constexpr):
    """The two 64-bit words at ``address`` (a multiple of 16), in one load that nothing is ordered by."""
    if INTERPRETED:
        words = address.to(tl.pointer_type(tl.int64))
        first = tl.atomic_add(words, 0, sem="relaxed", scope="sys")
        second = tl.atomic_add(words + 1, 0, sem="relaxed", scope="sys")
    else:
        first, second = tl.inline_asm_elementwise(
            "ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];",
            "=l,=l,l",
            [address],
            dtype=(tl.int64, tl.int64),
            is_pure=False,
            pack=1,
        )
    return first, second


@triton.jit
def wait_for_pair(address, first, second, limit, error, given_up, INTERPRETED: tl.constexpr):
    """Spin until the 64-bit words at ``address`` and after it are ``first`` and ``second``. See `wait_for_words`.

    It orders nothing: what is read depends on the flags that are waited for as well.
    """
    record, digest = load_pair(address, INTERPRETED)
    differs = (record != first) | (digest != second)
    if differs:
        begin = tl.full((), 0, tl.int64)
        now = begin
        if not INTERPRETED:
            begin = globaltimer()
            now = begin
        while differs & (given_up == 0):
            if INTERPRETED:
                now += 1
            else:
                now = globaltimer()
            record, digest = load_pair(address, INTERPRETED)
            differs = (record != first) | (digest != second)
            given_up = tl.where(differs & (now - begin > limit), 1, given_up)
        if given_up != 0:
            tl.store(error.to(tl.pointer_type(tl.int32)), 1)
    return given_up


@triton.jit
def set_word(address, value):
    """The 32-bit word at ``address`` (int64) becomes ``value``, with release order at system scope."""
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int32)), value.to(tl.int32), sem="release", scope="sys")


@triton.jit
def fence_system(INTERPRETED: tl.constexpr):
    """What this thread has seen or written comes before what it puts later, for every GPU: a release for many words."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put_word(address, value):
    """The 32-bit word at ``address`` (int64) becomes ``value``; nothing is ordered by it but by a fence before."""
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int32)), value.to(tl.int32), sem="relaxed", scope="sys")


@triton.jit
def set_pair(address, first, second):
    """The 64-bit word at ``address + 8`` becomes ``second``, then that at ``address`` ``first``."""
    words = address.to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(words + 1, second, sem="relaxed", scope="sys")
    tl.atomic_xchg(words, first, sem="release", scope="sys")


@triton.jit
def bump_words(counters, first, count, AFTER_TMA: tl.constexpr, INTERPRETED: tl.constexpr):
    """After this program's stores: add one to words ``first .. first + count - 1``.

    System scope, because the reader is no thread of this GPU but a stream memory operation and a copy engine.
    """
    if AFTER_TMA:
        if not INTERPRETED:  # Triton waits until a bulk store has read its source, not until its writes are there
            tl.inline_asm_elementwise(
                "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, 0;",
                "=r",
                [],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    tl.debug_barrier()  # the release below is one thread's: the other threads' stores have to come before it
    # No `for`: Triton 3.6 drops what an outer loop carries if it is only a bound of an inner loop without results, and
    # every later tile would bump the words of the program's first one.
    word = first
    while word < first + count:
        tl.atomic_add(counters + word, 1, sem="release", scope="sys")
        word += 1
