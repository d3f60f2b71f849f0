"""Tapes: the calls of one operation, written down once and played by one call of C (docs/design/0013-tapes.md)."""

from tpoverlap.native.library import NativeCalls, Player, player
from tpoverlap.native.tape import Cell, Recording, Tape, register

__all__ = ["Cell", "NativeCalls", "Player", "Recording", "Tape", "player", "register"]
