"""GEMM + reduce-scatter in one launch: peers' rows are stored straight into their slots, own rows add what comes back.

::

    each program:  take the next tile; the peers' rows come first
                   a peer's rows   multiply; round; store into the peer's slot; the last tile of a piece flags it there
                   own rows        multiply; wait for the peers' pieces; add them in rank order; round once; store

Tiles are handed out by a counter, not by the program's number: whatever part of the grid the GPU has room for, all
tiles of the peers are taken by programs that wait for nothing before any program waits.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from tpoverlap.gemm.triton.products import sum_of_products
from tpoverlap.gemm.triton.push_rows import finish_part
from tpoverlap.gemm.triton.tile_gemm import _locate, _store, _sum_in_rank_order
from tpoverlap.gemm.triton.words import wait_for_words

_CHANGING = (
    "remote_rows", "num_rows", "out_shift", "block_rows", "flags", "epoch", "limit", "error",
    "a0_scale", "a1_scale", "a2_scale", "b0_scale", "b1_scale", "b2_scale",
)  # fmt: skip


@triton.jit(do_not_specialize=_CHANGING)
def scatter_gemm(
    table,
    remote_rows,
    num_rows,
    places,
    parts,
    peers,
    done,
    ticket,
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
    HAS_BIAS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """See the module's text.

    Args:
        table: int32 [num_rows, 4], the rows of a `TilePlan`: first ``remote_rows`` of peers, then own ones.
        places: int32 [remote_rows, 2]: the peer of each tile row, and its row in that peer's slot [., N].
        parts: int32: how many tiles bump each word of ``done``.
        peers, done: see `push_rows` and `finish_part`.
        ticket: int32, the next tile; 0 before the launch and after it.
        a0 .. a2, b0 .. b2, K0 .. K2, out and so on: as in `tile_gemm`.
    """
    column_tiles = tl.cdiv(N, COLUMNS)
    remote_tiles = remote_rows * column_tiles
    tiles = num_rows * column_tiles
    given_up = tl.full((), 0, tl.int32)
    lefts = (a0, a1, a2)
    rights = (b0, b1, b2)
    depths = (K0, K1, K2)
    left_lds = (a0_ld, a1_ld, a2_ld)
    right_lds = (b0_ld, b1_ld, b2_ld)
    left_scales = (a0_scale, a1_scale, a2_scale)
    right_scales = (b0_scale, b1_scale, b2_scale)
    block_elements = block_rows.to(tl.int64) * N
    blocks = received.to(tl.pointer_type(out.dtype.element_ty))
    number = tl.atomic_add(ticket, 1, sem="relaxed")
    while number < tiles:
        is_remote = number < remote_tiles
        within = tl.where(is_remote, number, number - remote_tiles)
        part = table + tl.where(is_remote, 0, remote_rows * 4)
        part_rows = tl.where(is_remote, remote_rows, num_rows - remote_rows)
        row, stop, first_word, num_words, column, index = _locate(within, part, part_rows, N, COLUMNS, GROUP)
        total = sum_of_products(
            lefts, rights, depths, left_lds, right_lds, left_scales, right_scales, 0, row, stop, column, N,
            ROWS, COLUMNS, DEPTH, NUM_TERMS, TMA, N_MAJOR, PRECISION, SCALES, FAST, INTERPRETED,
        )  # fmt: skip
        # Not earlier: with as many programs as tiles, one that starts first would take two, and another none.
        following = tl.atomic_add(ticket, 1, sem="relaxed")
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        mask = (rows < stop)[:, None] & (columns < N)[None, :]
        if HAS_ADDEND:
            addends = addend + rows[:, None].to(tl.int64) * addend_ld + columns[None, :]
            total += tl.load(addends, mask=mask, other=0.0).to(tl.float32)
        if is_remote:
            peer = tl.load(places + index * 2)
            slot_rows = tl.load(places + index * 2 + 1) + tl.arange(0, ROWS)
            slot = tl.load(peers + peer * 2).to(tl.pointer_type(out.dtype.element_ty))
            slot = tl.multiple_of(slot, 16)
            pointers = slot + slot_rows[:, None].to(tl.int64) * N + columns[None, :]
            tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)
            their_flags = tl.load(peers + peer * 2 + 1) - peer * words_per_rank * 4
            word = first_word
            while word < first_word + num_words:  # no `for`: see bump_words
                finish_part(done, word, tl.load(parts + word), their_flags + word * 4, epoch)
                word += 1
        else:
            if HAS_BIAS:
                total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
            for source in tl.static_range(0, NUM_RANKS):
                if source != RANK:
                    words = flags + source * words_per_rank * 4
                    given_up = wait_for_words(words, first_word, num_words, epoch, limit, error, given_up, INTERPRETED)
            offsets = (rows - out_shift)[:, None].to(tl.int64) * N + columns[None, :]
            total = _sum_in_rank_order(total, blocks, offsets, mask, block_elements, NUM_RANKS, RANK)
            total = tl.where(given_up != 0, float("nan"), total)
            value = total.to(out.dtype.element_ty)
            _store(out, out_descriptor, row, stop, out_shift, column, N, value, ROWS, COLUMNS, TMA_STORE)
        number = following
    if number == tiles + tl.num_programs(0) - 1:  # nobody takes a ticket after this one
        tl.store(ticket, 0)
