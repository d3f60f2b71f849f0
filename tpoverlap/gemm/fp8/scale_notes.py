"""Recomputation under delayed scaling: a forward that runs again takes the scales of the first, and records nothing.

Between the two other microbatches have moved the scales on. By its own scales a second forward would give other numbers
than the first, and its magnitudes would stand in the history twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

ScaleNotes = dict[object, list[torch.Tensor]]
"""By quantizer: the scales of a forward, in the order of its calls."""


class _State(NamedTuple):
    noting: tuple[ScaleNotes, ...]
    """Of the forwards that are running: a checkpointed one may lie in another."""
    repeated: dict[object, Iterator[torch.Tensor]] | None
    """What is left of the first forward's scales; None: nothing is recomputed."""


_NOTHING = _State((), None)
_state: ContextVar[_State] = ContextVar("tpoverlap_scale_notes", default=_NOTHING)


@contextmanager
def noting_scales(notes: ScaleNotes) -> Iterator[None]:
    """Put the scales that this thread's forwards use in ``notes``."""
    state = _state.get()
    token = _state.set(_State((*state.noting, notes), state.repeated))
    try:
        yield
    finally:
        _state.reset(token)


@contextmanager
def repeating_scales(notes: ScaleNotes) -> Iterator[None]:
    """Use the scales of ``notes``, from the first on, and record nothing."""
    token = _state.set(_State((), {quantizer: iter(scales) for quantizer, scales in notes.items()}))
    try:
        yield
    finally:
        _state.reset(token)


def is_repeating() -> bool:
    """Whether a forward runs that has run before: its magnitudes are recorded already."""
    return _state.get().repeated is not None


def note_scale(quantizer: object, scale: torch.Tensor) -> None:
    """``quantizer`` uses ``scale``, which nobody will write to."""
    for notes in _state.get().noting:
        notes.setdefault(quantizer, []).append(scale)


def repeated_scale(quantizer: object) -> torch.Tensor | None:
    """The scale that the first forward used here; None: this is a first one, or it did not quantise this tensor."""
    repeated = _state.get().repeated
    scale = None if repeated is None else next(repeated.get(quantizer, iter(())), None)
    if scale is not None:
        note_scale(quantizer, scale)
    return scale
