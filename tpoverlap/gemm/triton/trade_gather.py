"""All-gather of few rows in one small kernel: own rows to every rank, then wait for everybody's.

::

    each program:       has one part of own rows; the first one also publishes the descriptor   written by: this rank
                        wait for the peers' credits                                             written by: the peer
                        copy the part into the own slot and every peer's; count it
    who counts last:    arrival flag at every peer (release)                                    written by: this rank
                        wait for every peer's descriptor to be equal, and for its arrival flag  written by: the peer

So the descriptor and all rows come before the flag (the counter is passed on with acquire and release order), and only
one program waits for rows, when nothing is left to send: however few programs the GPU has room for, they end one after
the other, and all ranks' rows are on their way before any rank waits. The waits are bounded; after one that was given
up this rank sends nothing more, and its slot is NaN.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tpoverlap.gemm.triton.words import GIVEN_UP, set_pair, set_word, wait_for_pair, wait_for_words


@triton.jit
def _spread(
    value, units, bound, datas, place, rank, keeps, NUM_RANKS: tl.constexpr, UNIT: tl.constexpr, MULTIPLE: tl.constexpr
):
    """Store ``value`` into every rank's slot; into this rank's only if it ``keeps`` it."""
    for target in tl.static_range(NUM_RANKS):
        if (target != rank) | keeps:
            units_out = datas[target].to(tl.pointer_type(UNIT))
            if MULTIPLE > 1:
                units_out = tl.multiple_of(units_out, 16)
            tl.store(units_out + place + units, value, mask=units < bound)


@triton.jit(
    do_not_specialize=[
        "source", "epoch", "record", "digest", "entry", "place", "count", "parts", "depth", "rows", "senders", "rank",
        "arrivals", "credits", "descriptors", "ring_bytes", "flags_bytes", "counters", "limit", "error",
        "data0", "data1", "data2", "data3", "data4", "data5", "data6", "data7",
        "flag0", "flag1", "flag2", "flag3", "flag4", "flag5", "flag6", "flag7",
        "told0", "told1", "told2", "told3", "told4", "told5", "told6", "told7",
    ]
)  # fmt: skip
def trade_gather(
    source: tl.int64,
    epoch: tl.int64,
    record: tl.int64,
    digest: tl.int64,
    entry: tl.int64,
    place: tl.int64,
    count: tl.int64,
    parts: tl.int64,
    depth: tl.int64,
    rows: tl.int64,
    senders: tl.int64,
    rank: tl.int64,
    arrivals: tl.int64,
    credits: tl.int64,
    descriptors: tl.int64,
    ring_bytes: tl.int64,
    flags_bytes: tl.int64,
    counters: tl.int64,
    limit: tl.int64,
    error: tl.int64,
    data0: tl.int64,
    data1: tl.int64,
    data2: tl.int64,
    data3: tl.int64,
    data4: tl.int64,
    data5: tl.int64,
    data6: tl.int64,
    data7: tl.int64,
    flag0: tl.int64,
    flag1: tl.int64,
    flag2: tl.int64,
    flag3: tl.int64,
    flag4: tl.int64,
    flag5: tl.int64,
    flag6: tl.int64,
    flag7: tl.int64,
    told0: tl.int64,
    told1: tl.int64,
    told2: tl.int64,
    told3: tl.int64,
    told4: tl.int64,
    told5: tl.int64,
    told6: tl.int64,
    told7: tl.int64,
    NUM_RANKS: tl.constexpr,
    UNIT: tl.constexpr,
    MULTIPLE: tl.constexpr,
    UNITS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """See the module's text. Everything is int64; lengths count groups of MULTIPLE units of type UNIT.

    Args:
        source: address of own rows.
        epoch, record, digest, entry: of this operation; ``entry`` is the descriptor's byte offset in its ring.
        place: where own rows begin in every slot. count: how many groups they are. rows: groups of all ranks.
        parts: own rows are cut into, one for each program; 0: do nothing.
        senders: bit r: rank r owns rows.
        arrivals, credits, descriptors: what peers write here, of rank 0; the next rank's are ``flags_bytes``, 4 and
            ``ring_bytes`` further.
        counters: address of an int32, 0 before the launch and after it: parts that are copied.
        limit, error: see `wait_for_word`.
        data0 ..: the slot on each rank. flag0 ..: this rank's arrival flag there. told0 ..: its descriptors there.
    """
    if AHEAD:
        gdc_wait()  # nothing is touched before the kernel ahead is done: it made the rows, and may still read the slot
    datas = (data0, data1, data2, data3, data4, data5, data6, data7)
    flags = (flag0, flag1, flag2, flag3, flag4, flag5, flag6, flag7)
    tolds = (told0, told1, told2, told3, told4, told5, told6, told7)
    done = counters.to(tl.pointer_type(tl.int32))
    given_up = tl.full((), 0, tl.int32)
    stamp = epoch.to(tl.int32)
    own_slot = tl.full((), 0, tl.int64)
    for peer in tl.static_range(NUM_RANKS):
        own_slot = tl.where(peer == rank, datas[peer], own_slot)
    keeps = own_slot + place * (MULTIPLE * UNIT.primitive_bitwidth // 8) != source
    units_in = source.to(tl.int64).to(tl.pointer_type(UNIT))  # the interpreter takes a small number for 32 bits
    if MULTIPLE > 1:
        units_in = tl.multiple_of(units_in, 16)
    number = tl.program_id(0).to(tl.int64)
    if number < parts:
        first = count * number // parts * MULTIPLE
        stop = count * (number + 1) // parts * MULTIPLE
        units = tl.multiple_of(first, MULTIPLE) + tl.arange(0, UNITS)
        value = tl.load(units_in + units, mask=units < stop)  # on its way while this waits for the credits
        if number == 0:
            for peer in tl.static_range(NUM_RANKS):
                if peer != rank:
                    set_pair(tolds[peer] + entry, record, digest)
        if count > 0:
            for peer in tl.static_range(NUM_RANKS):
                if peer != rank:
                    due = (epoch - depth).to(tl.int32)
                    given_up = wait_for_words(credits + peer * 4, 0, 1, due, limit, error, given_up, INTERPRETED)
        bound = tl.where(given_up != 0, 0, stop)  # without the credits nothing may be overwritten
        _spread(value, units, bound, datas, place * MULTIPLE, rank, keeps, NUM_RANKS, UNIT, MULTIPLE)
        first += UNITS
        while first < stop:
            units = tl.multiple_of(first, MULTIPLE) + tl.arange(0, UNITS)
            value = tl.load(units_in + units, mask=units < stop)
            _spread(value, units, bound, datas, place * MULTIPLE, rank, keeps, NUM_RANKS, UNIT, MULTIPLE)
            first += UNITS
        tl.debug_barrier()  # the counter's release is one thread's: the other threads' stores have to come before it
        mine = 1 + given_up * GIVEN_UP
        copied = tl.atomic_add(done, mine, sem="acq_rel", scope="sys") + mine
        if copied % GIVEN_UP == parts:
            given_up = tl.where(copied >= GIVEN_UP, 1, given_up)  # any program's rows may be missing
            tl.store(done, 0)  # nobody else touches it before the next launch
            if count > 0:
                for peer in tl.static_range(NUM_RANKS):
                    if peer != rank:
                        set_word(flags[peer], tl.where(given_up != 0, stamp - 1, stamp))  # a value that nobody awaits
            for peer in tl.static_range(NUM_RANKS):
                if peer != rank:
                    told = descriptors + peer * ring_bytes + entry
                    given_up = wait_for_pair(told, record, digest, limit, error, given_up, INTERPRETED)
                    sends = ((senders >> peer) & 1).to(tl.int32)
                    words = arrivals + peer * flags_bytes
                    given_up = wait_for_words(words, 0, sends, stamp, limit, error, given_up, INTERPRETED)
            if given_up != 0:  # no number may come of what is not there; 0xFF is NaN in every floating dtype
                units_out = own_slot.to(tl.pointer_type(UNIT))
                first = rows * 0
                while first < rows * MULTIPLE:
                    units = first + tl.arange(0, UNITS)
                    tl.store(units_out + units, tl.full((UNITS,), -1, UNIT), mask=units < rows * MULTIPLE)
                    first += UNITS
