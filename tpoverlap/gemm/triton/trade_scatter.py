"""The end of a reduce-scatter of few rows in one small kernel: partial sums to their owners, then own rows are added.

::

    each program:       load its share of own rows
                        take the next part of the peers' rows; wait for that peer's credit      written by: the peer
                        copy the part into the peer's slot, then set the part's flag there      written by: this rank
                        take another part; ...
    who finds none      publish the descriptor                                                  written by: this rank
    left first:
    each program:       wait for every peer's descriptor to be equal, and for its flags of the
                        parts that this program's share is in                                   written by: the peer
                        add its share in rank order, in float32; round once; count itself
    who counts last:    arrival flag of the whole, and credit, to every peer; then the word that
                        tells the host                                                          written by: this rank

Parts are handed out by a counter, not by the program's number: all of them are taken by programs that run, before one
of these waits for a peer's rows. The waits are bounded; a sum of something that never came is NaN.

Flags: piece 0 of a slot's arrival flags stands for all of a rank's rows, as everywhere; pieces 1 to ``parts`` for one
part each, so nobody waits until the slowest program has sent, or for a counter. Ranks need not agree on who sets those
of parts: whoever waits for one takes piece 0 instead. Addresses that are no multiples of 16 bytes are cut at other
places (MULTIPLE is 1): then there are no flags of parts, a counter of parts says when piece 0 may be set, and that is
before anything is added. So nobody waits for a flag that is set behind a wait for one's own.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tpoverlap.gemm.triton.words import (
    GIVEN_UP,
    fence_system,
    put_word,
    set_pair,
    set_word,
    wait_for_pair,
    wait_for_word,
)


@triton.jit(
    do_not_specialize=[
        "source", "out", "bias", "epoch", "record", "digest", "entry", "done", "number", "ends", "parts", "depth",
        "width", "rank", "received", "arrivals", "credits", "descriptors", "ring_bytes", "flags_bytes", "counters",
        "limit", "error",
        "count0", "count1", "count2", "count3", "count4", "count5", "count6", "count7",
        "data0", "data1", "data2", "data3", "data4", "data5", "data6", "data7",
        "flag0", "flag1", "flag2", "flag3", "flag4", "flag5", "flag6", "flag7",
        "told0", "told1", "told2", "told3", "told4", "told5", "told6", "told7",
        "credit0", "credit1", "credit2", "credit3", "credit4", "credit5", "credit6", "credit7",
    ]
)  # fmt: skip
def trade_scatter(
    source: tl.int64,
    out: tl.int64,
    bias: tl.int64,
    epoch: tl.int64,
    record: tl.int64,
    digest: tl.int64,
    entry: tl.int64,
    done: tl.int64,
    number: tl.int64,
    ends: tl.int64,
    parts: tl.int64,
    depth: tl.int64,
    width: tl.int64,
    rank: tl.int64,
    received: tl.int64,
    arrivals: tl.int64,
    credits: tl.int64,
    descriptors: tl.int64,
    ring_bytes: tl.int64,
    flags_bytes: tl.int64,
    counters: tl.int64,
    limit: tl.int64,
    error: tl.int64,
    count0: tl.int64,
    count1: tl.int64,
    count2: tl.int64,
    count3: tl.int64,
    count4: tl.int64,
    count5: tl.int64,
    count6: tl.int64,
    count7: tl.int64,
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
    credit0: tl.int64,
    credit1: tl.int64,
    credit2: tl.int64,
    credit3: tl.int64,
    credit4: tl.int64,
    credit5: tl.int64,
    credit6: tl.int64,
    credit7: tl.int64,
    NUM_RANKS: tl.constexpr,
    DTYPE: tl.constexpr,
    MULTIPLE: tl.constexpr,
    UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """See the module's text. Everything is int64; lengths count groups of MULTIPLE elements.

    Args:
        source: address of the partial sums [T, width]. out: of own rows' sum. bias: [width], added to own partial sums,
            which are rounded once more, as `torch.Tensor.add_` does.
        epoch, record, digest, entry: of this operation; ``entry`` is the descriptor's byte offset in its ring.
        done, number: address and value of the word that tells the host. ends: 1: give credits and tell the host.
        parts: the rows of each peer are cut into; 0: do nothing.
        received: this rank's slot: one block a peer, in rank order, this rank left out.
        count0 ..: groups of each rank's rows.
        data0 ..: this rank's block in the slot of each rank.
        credit0 ..: this rank's credit on each rank.
        counters: address of three int32, 0 before the launch and after it: the next part, parts that are copied where
            they have no flags, programs that are through.
        The rest is as in `trade_gather`.
    """
    if AHEAD:
        gdc_wait()  # nothing is touched before the kernel ahead is done: it made the rows, and may still read the slot
    counts = (count0, count1, count2, count3, count4, count5, count6, count7)
    datas = (data0, data1, data2, data3, data4, data5, data6, data7)
    flags = (flag0, flag1, flag2, flag3, flag4, flag5, flag6, flag7)
    tolds = (told0, told1, told2, told3, told4, told5, told6, told7)
    grants = (credit0, credit1, credit2, credit3, credit4, credit5, credit6, credit7)
    PARTWISE: tl.constexpr = MULTIPLE > 1
    ticket = counters.to(tl.pointer_type(tl.int32))
    partials = source.to(tl.int64).to(tl.pointer_type(DTYPE))  # the interpreter takes a small number for 32 bits
    if MULTIPLE > 1:
        partials = tl.multiple_of(partials, 16)
    given_up = tl.full((), 0, tl.int32)
    stamp = epoch.to(tl.int32)
    own_start = tl.full((), 0, tl.int64)
    own_count = tl.full((), 0, tl.int64)
    for peer in tl.static_range(NUM_RANKS):
        own_start += tl.where(peer < rank, counts[peer], 0)
        own_count = tl.where(peer == rank, counts[peer], own_count)
    share = own_count * tl.program_id(0) // tl.num_programs(0)
    share_end = own_count * (tl.program_id(0) + 1) // tl.num_programs(0)
    own_partials = partials + own_start * MULTIPLE
    own_units = tl.multiple_of(share * MULTIPLE, MULTIPLE) + tl.arange(0, UNITS)
    # On its way while this sends and waits.
    own_next = tl.load(own_partials + own_units, mask=own_units < share_end * MULTIPLE, other=0.0)

    items = parts * (NUM_RANKS - 1)
    item = tl.atomic_add(ticket, 1, sem="relaxed")
    while item < items:
        # Another peer each time, and not every rank the same one first.
        destination = (rank + 1 + item % (NUM_RANKS - 1)) % NUM_RANKS
        part = item // (NUM_RANKS - 1)
        rows_before = tl.full((), 0, tl.int64)
        count = tl.full((), 0, tl.int64)
        start = tl.full((), 0, tl.int64)
        slot = tl.full((), 0, tl.int64)
        flag = tl.full((), 0, tl.int64)
        for peer in tl.static_range(NUM_RANKS):
            start = tl.where(peer == destination, rows_before, start)
            count = tl.where(peer == destination, counts[peer], count)
            slot = tl.where(peer == destination, datas[peer], slot)
            flag = tl.where(peer == destination, flags[peer], flag)
            rows_before += counts[peer]
        first = count * part // parts * MULTIPLE
        stop = count * (part + 1) // parts * MULTIPLE
        rows = partials + start * MULTIPLE
        units = tl.multiple_of(first, MULTIPLE) + tl.arange(0, UNITS)
        value = tl.load(rows + units, mask=units < stop)  # on its way while this waits for the credit
        if count > 0:
            due, credit = (epoch - depth).to(tl.int32), credits + destination * 4
            given_up = wait_for_word(credit, credit, due, limit, error, given_up, INTERPRETED)
        target = slot.to(tl.pointer_type(DTYPE))
        if MULTIPLE > 1:
            target = tl.multiple_of(target, 16)
        bound = tl.where(given_up != 0, 0, stop)  # without the credit nothing may be overwritten
        tl.store(target + units, value, mask=units < bound)
        first += UNITS
        while first < stop:
            units = tl.multiple_of(first, MULTIPLE) + tl.arange(0, UNITS)
            tl.store(target + units, tl.load(rows + units, mask=units < stop), mask=units < bound)
            first += UNITS
        tl.debug_barrier()  # what releases is one thread's: the other threads' stores have to come before it
        if PARTWISE:
            if count > 0:
                set_word(flag + 4 * (1 + part), tl.where(given_up != 0, stamp - 1, stamp))  # a value nobody awaits
        else:
            mine = 1 + given_up * GIVEN_UP
            copied = tl.atomic_add(ticket + 1, mine, sem="acq_rel", scope="sys") + mine
            if copied % GIVEN_UP == items:
                tl.store(ticket + 1, 0)  # nobody else touches it before the next launch
                for peer in tl.static_range(NUM_RANKS):
                    if (peer != rank) & (counts[peer] > 0):
                        set_word(flags[peer], tl.where(copied >= GIVEN_UP, stamp - 1, stamp))
        item = tl.atomic_add(ticket, 1, sem="relaxed")
    unsent = given_up
    if (item == items) & (parts > 0):
        for peer in tl.static_range(NUM_RANKS):
            if peer != rank:
                set_pair(tolds[peer] + entry, record, digest)
    if item == items + tl.num_programs(0) - 1:  # nobody takes a part after this one
        tl.store(ticket, 0)
    if parts > 0:
        # Which parts its share is in: part p begins at the group own_count * p // parts.
        piece = tl.full((), 0, tl.int64)
        pieces_end = tl.where(own_count > 0, 1, piece)
        if PARTWISE:
            if own_count > 0:
                piece = 1 + ((share + 1) * parts - 1) // own_count
                pieces_end = tl.where(share < share_end, 2 + (share_end * parts - 1) // own_count, piece)
        for peer in tl.static_range(NUM_RANKS):
            if peer != rank:
                told = descriptors + peer * ring_bytes + entry
                given_up = wait_for_pair(told, record, digest, limit, error, given_up, INTERPRETED)
                words, word = arrivals + peer * flags_bytes, piece
                while word < pieces_end:
                    given_up = wait_for_word(words + word * 4, words, stamp, limit, error, given_up, INTERPRETED)
                    word += 1
        blocks = received.to(tl.pointer_type(DTYPE))
        results = out.to(tl.int64).to(tl.pointer_type(DTYPE))
        if MULTIPLE > 1:
            blocks = tl.multiple_of(blocks, 16)
            results = tl.multiple_of(results, 16)
        elements = own_count * MULTIPLE
        first = share * MULTIPLE
        stop = share_end * MULTIPLE
        while first < stop:
            units = tl.multiple_of(first, MULTIPLE) + tl.arange(0, UNITS)
            inside = units < stop
            own = own_next.to(tl.float32)
            own_next = tl.load(own_partials + units + UNITS, mask=units + UNITS < stop, other=0.0)
            if HAS_BIAS:
                biases = bias.to(tl.int64).to(tl.pointer_type(DTYPE)) + units % width
                own += tl.load(biases, mask=inside, other=0.0).to(tl.float32)
                own = own.to(DTYPE).to(tl.float32)
            total = own
            for summand in tl.static_range(NUM_RANKS):
                index = summand - tl.where(summand > rank, 1, 0)
                others = units < tl.where(summand == rank, 0, stop)
                other = tl.load(blocks + index * elements + units, mask=others, other=0.0).to(tl.float32)
                term = tl.where(summand == rank, own, other)
                if summand == 0:
                    total = term
                else:
                    total += term
            total = tl.where(given_up != 0, float("nan"), total)
            tl.store(results + units, total.to(DTYPE), mask=inside)
            first += UNITS
        tl.debug_barrier()  # as above, for the reads of the slot and the stores to `out`
        ended = 1 + unsent * GIVEN_UP
        through = tl.atomic_add(ticket + 2, ended, sem="acq_rel", scope="sys") + ended
        if through % GIVEN_UP == tl.num_programs(0):
            tl.store(ticket + 2, 0)
            fence_system(INTERPRETED)
            for peer in tl.static_range(NUM_RANKS):
                if peer != rank:
                    if PARTWISE:  # any program's rows may be missing
                        if counts[peer] > 0:
                            put_word(flags[peer], tl.where(through >= GIVEN_UP, stamp - 1, stamp))
                    if ends != 0:
                        put_word(grants[peer], stamp)
            if ends != 0:  # the host's word by no atomic: it may lie in host memory
                tl.store(done.to(tl.pointer_type(tl.int32)), number.to(tl.int32))
