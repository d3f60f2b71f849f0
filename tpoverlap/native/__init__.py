"""Tapes: the calls of one operation, written down once and played by one call of C (docs/design/0013-tapes.md)."""

from tpoverlap.native.library import NativeCalls, Player, player
from tpoverlap.native.tape import MOST_REGISTERS, PRODUCT_CALLS, Cell, Recording, Tape, register

__all__ = [
    "MOST_REGISTERS",
    "PRODUCT_CALLS",
    "Cell",
    "NativeCalls",
    "Player",
    "Recording",
    "Tape",
    "player",
    "register",
]
