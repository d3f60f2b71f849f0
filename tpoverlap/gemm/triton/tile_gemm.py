"""One persistent GEMM kernel for `fused`: its tiles wait for rows, count themselves, or add what peers sent.

::

    program p:  PUSHES        copy a part of this rank's rows into a peer's slot, then flag them there (one-launch form)
                for each tile p, p + P, p + 2P, ... of the table
                    GATED     wait until the pieces that its rows overlap have arrived
                    multiply  sum over the terms of a[rows] @ b[:, columns], float32
                    epilogue  + addend + bias; + the peers' blocks, in rank order (SUM_GATED: as they arrive); round
                              once; store
                    SIGNALS   bump the counter of each piece that its rows overlap

The table lists tile rows in order (`TilePlan`). A first part of it may read its rows from another tensor ("own": the
caller's shard instead of the slot). Integers that change with T or from call to call are not specialised: one binary
for each combination of the constants, whatever T and the epoch are.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from tpoverlap.gemm.triton.products import sum_of_products
from tpoverlap.gemm.triton.push_rows import push_rows
from tpoverlap.gemm.triton.words import bump_words, wait_for_words


@triton.jit
def _sum_in_rank_order(own, blocks, offsets, mask, block_elements, NUM_RANKS: tl.constexpr, RANK: tl.constexpr):
    """The partial sums of ranks 0 .. R-1, this rank's being ``own``, added in that order in float32."""
    if RANK == 0:
        total = own
    else:
        total = tl.load(blocks + offsets, mask=mask, other=0.0).to(tl.float32)
    for source in tl.static_range(1, NUM_RANKS):
        if source == RANK:
            total += own
        elif source < RANK:
            total += tl.load(blocks + source * block_elements + offsets, mask=mask, other=0.0).to(tl.float32)
        else:
            total += tl.load(blocks + (source - 1) * block_elements + offsets, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _locate(number, table, table_rows, N, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """(first row, row after the last, first word, number of words, first column, table row) of tile ``number``, or of
    the last.

    L2: GROUP tile rows are walked column by column. The order of the rows is the table's, so that is not undone.
    """
    column_tiles = tl.cdiv(N, COLUMNS)
    number = tl.maximum(tl.minimum(number, table_rows * column_tiles - 1), 0)
    group_tiles = GROUP * column_tiles
    first = number // group_tiles * GROUP
    height = tl.maximum(tl.minimum(table_rows - first, GROUP), 1)
    within = number % group_tiles
    index = first + within % height
    entry = table + index * 4
    column = within // height * COLUMNS
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), column, index


@triton.jit
def _store(
    out,
    descriptor,
    row,
    stop,
    out_shift,
    column,
    N,
    value,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
):
    """Store [ROWS, WIDTH] at (row, column); of the rows only those before ``stop``."""
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, WIDTH)
    pointers = out + (rows - out_shift)[:, None].to(tl.int64) * N + columns[None, :]
    mask = (rows < stop)[:, None] & (columns < N)[None, :]
    if TMA:
        if stop - row == ROWS:
            descriptor.store([row - out_shift, column], value)
        else:  # a whole tile would write into the next block
            tl.store(pointers, value, mask=mask)
    else:
        tl.store(pointers, value, mask=mask)


@triton.jit
def _tile(
    place,
    lefts,
    rights,
    depths,
    left_lds,
    right_lds,
    left_scales,
    right_scales,
    left_shift,
    N,
    target,
    addition,
    received,
    wait,
    given_up,
    waited_for,
    counters,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
    N_MAJOR: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALES: tl.constexpr,
    FAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    GATED: tl.constexpr,
    SIGNALS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK: tl.constexpr,
    SUM_GATED: tl.constexpr,
    PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The tile at ``place``; returns ``given_up``. ``waited_for``: words that need no second wait."""
    out, out_descriptor, out_shift = target
    bias, addend, addend_ld = addition
    row, stop, first_word, num_words, column, _ = place

    if GATED:
        flags, epoch, limit, error = wait
        seen_first, seen_number = waited_for
        seen = (first_word == seen_first) & (num_words == seen_number)
        num_new = tl.where(seen, 0, num_words)
        given_up = wait_for_words(flags, first_word, num_new, epoch, limit, error, given_up, INTERPRETED)

    total = sum_of_products(
        lefts, rights, depths, left_lds, right_lds, left_scales, right_scales, left_shift, row, stop, column, N,
        ROWS, COLUMNS, DEPTH, NUM_TERMS, TMA, N_MAJOR, PRECISION, SCALES, FAST, INTERPRETED,
    )  # fmt: skip
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    mask = (rows < stop)[:, None] & (columns < N)[None, :]
    offsets = (rows - out_shift)[:, None].to(tl.int64) * N + columns[None, :]
    if HAS_ADDEND:
        addends = addend + rows[:, None].to(tl.int64) * addend_ld + columns[None, :]
        total += tl.load(addends, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if NUM_RANKS > 1:
        address, block_rows, words_per_rank = received
        block_elements = block_rows.to(tl.int64) * N
        if SUM_GATED:
            flags, epoch, limit, error = wait
            for source in tl.static_range(0, NUM_RANKS):
                if source != RANK:
                    words = flags + source * words_per_rank * 4
                    given_up = wait_for_words(words, first_word, num_words, epoch, limit, error, given_up, INTERPRETED)
        blocks = address.to(tl.pointer_type(out.dtype.element_ty))
        total = _sum_in_rank_order(total, blocks, offsets, mask, block_elements, NUM_RANKS, RANK)
    if GATED or SUM_GATED:
        total = tl.where(given_up != 0, float("nan"), total)
    value = total.to(out.dtype.element_ty)
    if PARTS == 2:  # half the staging in shared memory, which leaves room for another stage of operands
        HALF: tl.constexpr = COLUMNS // 2
        halves = tl.permute(tl.reshape(value, (ROWS, 2, HALF)), (0, 2, 1))
        low, high = tl.split(halves)
        _store(out, out_descriptor, row, stop, out_shift, column, N, low, ROWS, HALF, TMA_STORE)
        _store(out, out_descriptor, row, stop, out_shift, column + HALF, N, high, ROWS, HALF, TMA_STORE)
    else:
        _store(out, out_descriptor, row, stop, out_shift, column, N, value, ROWS, COLUMNS, TMA_STORE)
    if SIGNALS:
        bump_words(counters, first_word, num_words, TMA_STORE, INTERPRETED)
    return given_up


_CHANGING = (
    "own_rows", "num_rows", "own_shift", "left_shift", "out_shift", "block_rows", "flags", "epoch", "limit", "error",
    "num_pushes", "pushers", "a0_scale", "a1_scale", "a2_scale", "b0_scale", "b1_scale", "b2_scale",
)  # fmt: skip


@triton.jit(do_not_specialize=_CHANGING)
def tile_gemm(
    table,
    own_rows,
    num_rows,
    own,
    own_ld,
    a0,
    a1,
    a2,
    b0,
    b1,
    b2,
    K0,
    K1,
    K2,
    a0_ld,
    a1_ld,
    a2_ld,
    b0_ld,
    b1_ld,
    b2_ld,
    a0_scale,
    a1_scale,
    a2_scale,
    b0_scale,
    b1_scale,
    b2_scale,
    N,
    own_shift,
    left_shift,
    out,
    out_descriptor,
    out_shift,
    bias,
    addend,
    addend_ld,
    received,
    block_rows,
    words_per_rank,
    flags,
    epoch,
    limit,
    error,
    counters,
    source,
    pushes,
    num_pushes,
    pushers,
    peers,
    done,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
    N_MAJOR: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALES: tl.constexpr,
    FAST: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    GATED: tl.constexpr,
    SIGNALS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK: tl.constexpr,
    SUM_GATED: tl.constexpr,
    ADDRESSED: tl.constexpr,
    PARTS: tl.constexpr,
    PUSHES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """See the module's text.

    Args:
        table: int32 [num_rows, 4], the rows of a `TilePlan`; its first ``own_rows`` entries read ``own``.
        own, a0 .. a2, b0 .. b2: operands of the terms; descriptors with TMA, else pointers. ADDRESSED: a0 is an int64
            address (the interpreter must not get a tensor whose storage peers write).
        own_ld, a0_ld, b0_ld, ...: elements from one row to the next, as stored. Read without TMA only.
        a0_scale, b0_scale, ...: see `sum_of_products`.
        own_shift, left_shift, out_shift: the activation's row that is row 0 of ``own``, of a0 .. a2, of ``out``.
        out, out_descriptor: [rows, N]; the descriptor is read with TMA_STORE only.
        received, block_rows: address of the peers' blocks [block_rows, N], in rank order.
        words_per_rank: with SUM_GATED each block is waited for: ``flags`` has that many words a source rank.
        flags, epoch, limit, error: see `wait_for_words`.
        counters: int32, see `bump_words`.
        source, pushes, peers, done: see `push_rows`. The first ``pushers`` programs share ``num_pushes`` of them.
    """
    column_tiles = tl.cdiv(N, COLUMNS)
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    if PUSHES:
        # By the programs that the GPU starts first, before they wait for anything. They get the last tiles.
        if program < pushers:
            for number in range(program, num_pushes, pushers):
                push_rows(source, K0, pushes + number * 8, peers, done, epoch)
        program -= pushers
        if program < 0:
            program += programs
    given_up = tl.full((), 0, tl.int32)
    own_tiles = own_rows * column_tiles
    target = (out, out_descriptor, out_shift)
    addition = (bias, addend, addend_ld)
    from_peers = (received, block_rows, words_per_rank)
    wait = (flags, epoch, limit, error)
    first = program
    if HAS_OWN:
        # The next tile's place is read while this one is multiplied.
        place = _locate(program, table, own_rows, N, COLUMNS, GROUP)
        for number in range(program, own_tiles, programs):
            following = _locate(number + programs, table, own_rows, N, COLUMNS, GROUP)
            _tile(
                place, (own,), (b0,), (K0,), (own_ld,), (b0_ld,), (a0_scale,), (b0_scale,), own_shift, N,
                target, addition, from_peers, wait, given_up, (0, 0), counters,
                ROWS, COLUMNS, DEPTH, 1, TMA, TMA_STORE, N_MAJOR, PRECISION, SCALES, FAST,
                HAS_BIAS, HAS_ADDEND, False, False, 1, 0, False, PARTS, INTERPRETED,
            )  # fmt: skip
            place = following
        # The next tile of this program in one common numbering, so that no program gets a tile more than it should.
        first = program + tl.cdiv(tl.maximum(own_tiles - program, 0), programs) * programs - own_tiles
    if ADDRESSED:
        a0 = a0.to(tl.pointer_type(own.dtype.element_ty))
    table += own_rows * 4
    rest = num_rows - own_rows
    seen_first = tl.full((), -1, tl.int32)
    seen_number = tl.full((), 0, tl.int32)
    place = _locate(first, table, rest, N, COLUMNS, GROUP)
    for number in range(first, rest * column_tiles, programs):
        following = _locate(number + programs, table, rest, N, COLUMNS, GROUP)
        given_up = _tile(
            place, (a0, a1, a2), (b0, b1, b2), (K0, K1, K2), (a0_ld, a1_ld, a2_ld),
            (b0_ld, b1_ld, b2_ld), (a0_scale, a1_scale, a2_scale), (b0_scale, b1_scale, b2_scale), left_shift, N,
            target, addition, from_peers, wait, given_up, (seen_first, seen_number), counters,
            ROWS, COLUMNS, DEPTH, NUM_TERMS, TMA, TMA_STORE, N_MAJOR, PRECISION, SCALES, FAST,
            HAS_BIAS, HAS_ADDEND, GATED, SIGNALS, NUM_RANKS, RANK, SUM_GATED, PARTS, INTERPRETED,
        )  # fmt: skip
        seen_first = place[2]
        seen_number = place[3]
        place = following
