"""The shared words of the model: one byte each, addressed by name, together one immutable ``bytes`` a state.

Ghost bits (a record's ``READ`` bit, a datum's ``taint``) are the model's book-keeping: no real word holds them and no
guard of a step looks at them, only the checks do.
"""

from __future__ import annotations

POISON = 255  # stands for "epoch + 2**30": satisfies every wait that can be queued
STOPPED = 254  # program counter of a stream that will never move again

# Phases of one datum: a (destination, region, slot, source, piece) cell of a slot.
FREE, WRITING, WRITTEN = 0, 1, 2

# A record keeps this bit once its reader has compared it (ghost).
READ = 0x80

# Kinds of words that no peer can see: program counters, events and what a rank's own process remembers.
LOCAL = (
    *("pc", "started", "made", "sent", "error", "watchdog", "released", "raised", "taint"),
    *("full", "tentative", "library starts", "library ends"),
)

# Error codes of a rank; `abort` words carry them to the peers.
OK, TIMEOUT, MISMATCH = 0, 1, 2


class Words:
    """Allocates a byte for each name on first use and remembers its value before the first step."""

    def __init__(self) -> None:
        self.index: dict[tuple[object, ...], int] = {}
        self.initial = bytearray()

    def sorted_by_owner(self) -> Words:
        """The same words, those in the memory of one rank next to each other (their names are (kind, owner, ...))."""
        other = Words()
        for name in sorted(self.index, key=lambda name: (name[0] in LOCAL, name[1])):
            other.at(*name, initial=self.initial[self.index[name]])
        return other

    def memory_of(self, rank: int) -> tuple[int, int]:
        """Range of the words that lie in the arena of ``rank``; only after `sorted_by_owner`."""
        own = [index for name, index in self.index.items() if name[0] not in LOCAL and name[1] == rank]
        return min(own), max(own) + 1

    def at(self, *name: object, initial: int = 0) -> int:
        """Index of the word ``name``; ``initial`` counts at the first mention."""
        if name not in self.index:
            self.index[name] = len(self.initial)
            self.initial.append(initial)
        return self.index[name]


def datum(use: int, variant: int, taint: int, phase: int) -> int:
    """Contents of one cell. ``use`` counts from the first modelled use of the region; ``variant`` is the writer's T."""
    if not (0 <= use < 8 and 0 <= variant < 4 and taint in (0, 1)):
        raise ValueError(f"use={use}, variant={variant}, taint={taint} do not fit the model's byte")
    return use << 5 | variant << 3 | taint << 2 | phase


def describe(cell: int) -> str:
    """A cell's contents for a trace."""
    if cell == 0:
        return "nothing"
    phase = ("consumed", "half-written", "written")[cell & 3]
    variant = f", variant {cell >> 3 & 3}" if cell >> 3 & 3 else ""
    return f"use {(cell >> 5) + 1} ({phase}{', tainted' if cell & 4 else ''}{variant})"


def record(seq: int, kind: str, variant: int) -> int:
    """First descriptor word: sequence number, operation, T (variant 1 is another T, variant 2 only other counts)."""
    if not 0 < seq < 16:
        raise ValueError(f"seq={seq} does not fit the model's record")
    return seq << 3 | "ARS".index(kind) << 1 | (variant == 1)


def seq_of(record_word: int) -> int:
    """The sequence number of a record; 0 while nothing was written."""
    return (record_word & ~READ) >> 3


def digest(kind: str, use: int, variant: int) -> int:
    """Second descriptor word: hash of counts, dtype, region and use. Injective here: collisions are not modelled."""
    return 1 + (use << 4 | variant << 2 | "ARS".index(kind))
