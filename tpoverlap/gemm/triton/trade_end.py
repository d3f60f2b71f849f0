"""The end of an all-gather whose rows `trade_gather` moved, behind the last reader of the slot: one program's work.

A batch of stream memory operations does the same, but the device takes longer to begin with one than with a kernel.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from tpoverlap.gemm.triton.words import set_word


@triton.jit(
    do_not_specialize=[
        "epoch", "done", "number", "credit0", "credit1", "credit2", "credit3", "credit4", "credit5", "credit6",
        "credit7",
    ]
)  # fmt: skip
def trade_end(
    epoch: tl.int64,
    done: tl.int64,
    number: tl.int64,
    credit0: tl.int64,
    credit1: tl.int64,
    credit2: tl.int64,
    credit3: tl.int64,
    credit4: tl.int64,
    credit5: tl.int64,
    credit6: tl.int64,
    credit7: tl.int64,
    NUM_RANKS: tl.constexpr,
):
    """Credit ``epoch`` to every peer, then ``number`` into the host's word.

    Args:
        done: address of that word; 0: do nothing.
        credit0 ..: address of this rank's credit on each rank; 0: none.
    """
    grants = (credit0, credit1, credit2, credit3, credit4, credit5, credit6, credit7)
    for peer in tl.static_range(NUM_RANKS):
        if grants[peer] != 0:
            set_word(grants[peer], epoch)
    if done != 0:  # no atomic: this one may lie in host memory
        tl.store(done.to(tl.pointer_type(tl.int32)), number.to(tl.int32))
