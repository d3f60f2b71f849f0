"""What one exploration models: sizes, operations, who misbehaves, and which rule is broken on purpose."""

from __future__ import annotations

from dataclasses import dataclass

BROKEN = {
    "flag_before_data": "(a) the arrival flag is written before the data",
    "no_credit_wait": "(b) a source overwrites a slot without waiting for its credit",
    "credit_before_read": "(c) the credit is written before the last read of the slot",
    "no_compare": "(e) a waiter consumes without comparing descriptors",
    "late_descriptor": "(f) the descriptor is published after the operation's first flag",
    "no_watchdog": "(g) nobody releases the waiters of a dead rank",
    "plain_comparison": "(h) epochs are compared with a plain >= instead of cyclically",
    "record_before_digest": "(i) the descriptor's record, which waiters look for, is written before its digest",
    "poison_before_abort": "(j) a rank releases its own waiters before it has told its peers",
    "poison_once": "(k) waiters are poisoned once, although a late peer overwrites the poison with its genuine flag",
    "waiter_first": "(l) one hardware queue, and the waits of an operation are enqueued before its sends",
    "host_publishes": "(m) the host publishes descriptors when it issues, not in stream order",
    "grant_after_send": "(n) the credit of a held slot is enqueued after the sends of the operation that ends the hold",
    "deaf_check": "(o) a rank without unfinished work does not look at its abort words",
    "stale_flags": "(p) the flag of a piece that operations do not have is left alone for half of the epochs",
    "no_entered": "(q) fused AG: the kernel that fills the GPU starts before every peer has entered the operation",
    "no_computed": "(r) fused RS: the kernel that fills the GPU starts before the peers have computed its rows",
    "waits_before_pushing": "(s) one launch: programs wait for the peers' rows before they send their own",
    "no_reserve": "(t) one launch: the kernel leaves no multiprocessor to other libraries",
    "first_flags": "(v) one kernel's gather: who has copied its part first sets the flags, not the last program",
    "part_flag_first": "(z) one kernel: a program sets its part's flag before it has copied the part",
    "first_credits": "(w) one kernel: the program that is through first gives the credits, not the last one",
    "early_refresh": "(u) one launch: the refresh of all arrival flags does not wait for the kernel that sends rows",
    "late_credits": "(x) the caller's stream gives credits while the word stream may have yet to give earlier ones",
    "descriptors_ahead": "(y) one launch: the word stream tells descriptors however far the caller's stream is behind",
}
"""Broken variants. (d), depth 1 with the credit of two uses ago, is ``Config(depth=1, credit_lag=2)``."""

_ONE_STREAM = {"late_descriptor", "host_publishes", "waiter_first", "grant_after_send", "early_refresh"}
"""What `word_stream` has no broken form of."""


@dataclass(frozen=True)
class Config:
    """One model.

    Attributes:
        tp_size: R.
        ops: one letter an operation, in the order of the sequence numbers: A uses the all-gather region, R the
            reduce-scatter region; lower case: the slot is *held* (``get_buffer``), its last reader may run until
            this rank starts the next-but-one operation on the region; S only compares descriptors (the
            ``sequential`` method, which moves its rows with plain collectives). G and F are `fused` AG and RS by copy
            engine, L and M in one launch. T and U are AG and RS with nothing beside the transfers (order "at_once"), B
            an RS that publishes its descriptor with the first transfer (order "behind"). K and N are AG and RS whose
            exchange is one kernel of two programs (order "traded"): the second one has the pieces from the second on.
        depth: slots a region.
        credit_lag: a source waits for the credit of ``u - credit_lag``; None: ``depth``, as it must be.
        ring: descriptors kept for each source.
        modulus: epochs are stored modulo this (2**32 in the real words).
        first_epoch: epoch that all words start with; close to ``modulus`` makes a short run wrap around.
        pieces: pieces of a chunk in each operation, each with a flag; a single entry counts for all operations. A flag
            that an operation does not need is written all the same, after the data (see rule p).
        rowless: a rank that owns no row: no data is sent by it (AG) or to it (RS), and it waits for no credit.
        rowless_in: sequence numbers of the operations in which it owns none; (): in all.
        gated: an operation's sends start after the caller's stream has reached the operation (the engine does this).
            False frees the senders of every event, so that credits alone must protect slots.
        caller_streams: 2 gives each region a caller's stream of its own.
        one_queue: all work of a rank in one hardware queue, in the order in which the engine enqueues it.
        descriptor_wait: False models a consumer that looks at the descriptor only when the arrival flag is there.
        device: how errors work. False (CPU): waiters raise and the rank's remaining work is dropped. True (CUDA): a
            stream cannot be stopped; a mismatch stalls it, the watchdog poisons what it waits for, and everything
            that was enqueued still runs, on garbage.
        word_stream: the caller's words have a stream of their own, as on a device.
        comm_waits: with it: the comm stream waits for the peers' rows, behind its own sends.
        most_ahead: with it: operations that a descriptor of one launch may be ahead of the caller's stream.
        library: on another stream of every rank a kernel of another library waits for its like on all ranks. It holds
            multiprocessors while it does, and gets none where a kernel fills the GPU.
        behind: a rank whose caller's stream waits for that kernel before its first operation.
        dies: a rank of which every stream may stop for ever before any write.
        gives_up: ranks that may raise, abort or time out at any moment, not only when nothing else can happen.
        deviates: (rank, index of operation, what): "op", "T", "counts" or "skip".
        broken: keys of `BROKEN`.
    """

    tp_size: int = 2
    ops: str = "ARAR"
    depth: int = 2
    credit_lag: int | None = None
    ring: int = 16
    modulus: int = 16
    first_epoch: int = 13
    pieces: tuple[int, ...] = (1,)
    rowless: int | None = None
    rowless_in: tuple[int, ...] = ()
    gated: bool = True
    caller_streams: int = 1
    one_queue: bool = False
    descriptor_wait: bool = True
    device: bool = False
    word_stream: bool = False
    comm_waits: bool = False
    most_ahead: int = 1
    library: bool = False
    behind: int | None = None
    dies: int | None = None
    gives_up: tuple[int, ...] = ()
    deviates: tuple[int, int, str] | None = None
    broken: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = set(self.broken) - set(BROKEN)
        if unknown:
            raise ValueError(f"unknown broken rules {sorted(unknown)}; there are {sorted(BROKEN)}")
        if self.word_stream and not (self.device and self.gated and not self.one_queue):
            raise ValueError("word_stream: a device has one; in one hardware queue it is the caller's stream again")
        if self.word_stream and (ignored := set(self.broken) & _ONE_STREAM):
            raise ValueError(f"word_stream ignores {sorted(ignored)}")
        if self.device and self.modulus // 2 < len(self.ops) + self.depth:
            raise ValueError(
                f"modulus={self.modulus}: a poisoned rank runs through its whole queue, half of the epochs"
            )

    @property
    def reducible(self) -> bool:
        """Whether the reduction of `model` is sound: words are monotone and no stream is dropped early."""
        if self.word_stream and (self.dies is not None or set("TUNtu") & set(self.ops)):
            return False  # an event that a stream which stops had recorded; two streams write one credit
        # These break data, not words.
        if self.library:  # multiprocessors are taken and given back
            return False
        races = {"flag_before_data", "no_credit_wait", "credit_before_read", "poison_before_abort"}
        monotone = set(self.broken) <= races and self.ring >= len(self.ops) and self.descriptor_wait
        early = (self.gives_up or self.deviates) and not self.device
        return monotone and not early and not (self.gives_up and self.dies is not None)

    def num_pieces(self, seq: int, kind: str, source: int, destination: int) -> int:
        """Pieces that ``source`` sends to ``destination`` in operation number ``seq``."""
        if self.rowless == (source if kind == "A" else destination) and self.sends_nothing(seq):
            return 0
        return self.pieces[seq - 1] if len(self.pieces) > 1 else self.pieces[0]

    def sends_nothing(self, seq: int) -> bool:
        """Whether there is a rank without rows in operation number ``seq``."""
        return self.rowless is not None and (not self.rowless_in or seq in self.rowless_in)

    def rank_ops(self, rank: int) -> list[tuple[str, int]]:
        """(letter, variant) of each operation that ``rank`` issues; variant 1 is another T, 2 are other counts."""
        ops = [(letter, 0) for letter in self.ops]
        if self.deviates is not None and self.deviates[0] == rank:
            _, index, what = self.deviates
            letter = ops[index][0]
            if what == "skip":
                del ops[index]
            else:
                ops[index] = {
                    "op": ("R" if letter in "Aa" else "A", 0),
                    "T": (letter, 1),
                    "counts": (letter, 2),
                }[what]
        return ops
