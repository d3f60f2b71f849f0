"""What programs are made of: atomic steps, streams and operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .words import Words

State = bytes | bytearray
Guard = Callable[[State], bool]
Effect = Callable[[bytearray], str | None]


@dataclass(frozen=True)
class Step:
    """An atomic step of a stream.

    Attributes:
        guard: whether it is enabled; None: always.
        effect: changes the words; returns the check that it violates.
        eager: see `model`.
        eager_when: a word; once it is set the step is eager too.
        shows: another stream could tell that it happened (so a rank may stop before it).
        waits: words that a watchdog poisons to let it go on.
    """

    label: str
    guard: Guard | None = None
    effect: Effect | None = None
    eager: bool = False
    eager_when: int | None = None
    shows: bool = False
    waits: tuple[int, ...] = ()


@dataclass(eq=False)
class Thread:
    """A stream of a rank, and the word that holds its program counter."""

    rank: int
    name: str
    pc: int
    steps: list[Step] = field(default_factory=list)


@dataclass
class Code:
    """All programs of a model, with what its watchdogs need to know."""

    words: Words
    threads: list[Thread]
    waited: list[set[int]]
    differs: list[list[Callable[[State], bool]]]


@dataclass(frozen=True)
class Op:
    """One operation of one rank."""

    rank: int
    seq: int
    kind: str  # A or R: also its region; S uses none
    use: int  # 1, 2, ... within the region
    variant: int
    held: bool
    form: str = ""  # of fused: engine or launch

    def __str__(self) -> str:
        names = {"A": f"AG, use {self.use}", "R": f"RS, use {self.use}", "S": "sequential"}
        return f"op {self.seq} ({'fused ' if self.form else ''}{names[self.kind]})"
