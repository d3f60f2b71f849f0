"""Activation recomputation re-enters the forward's partition.

A checkpointed block runs its forward a second time, inside backward, when the manager already holds a later
microbatch's T. `checkpoint_context_fn` notes the active shape that each manager had at the first forward, and puts it
back, in that thread only, around the second. The same holds for `fp8_autocast`, and for delayed scaling's scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar

from tpoverlap.active_shape import ActiveShape
from tpoverlap.gemm.fp8 import Recipe
from tpoverlap.gemm.fp8.scale_notes import ScaleNotes, noting_scales, repeating_scales
from tpoverlap.nn.fp8_context import as_noted, note_autocast
from tpoverlap.tokens import TokenPartition

_Notes = dict[ActiveShape, TokenPartition | None]
recording: ContextVar[tuple[_Notes, ...]] = ContextVar("tpoverlap_recording", default=())
"""Of the checkpointed forwards that are running in this thread."""


def note_shape(active: ActiveShape) -> None:
    """Called by every operation: if a checkpointed forward is running, remember what shape this manager has."""
    for notes in recording.get():
        notes.setdefault(active, active.partition)


def checkpoint_context_fn(
    inner: Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]] | None = None,
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """``context_fn`` for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

    Args:
        inner: another context_fn to combine with, such as a selective-checkpoint policy:
            ``partial(tpo.checkpoint_context_fn, partial(create_selective_checkpoint_contexts, policy))``.

    Returns:
        The contexts of the first forward and of the recomputation.
    """
    notes: _Notes = {}
    scales: ScaleNotes = {}
    fp8 = note_autocast()
    inner_forward, inner_recompute = inner() if inner is not None else (None, None)
    return _forward(notes, scales, inner_forward), _recompute(notes, scales, fp8, inner_recompute)


@contextmanager
def _forward(notes: _Notes, scales: ScaleNotes, inner: AbstractContextManager[object] | None) -> Iterator[None]:
    token = recording.set((*recording.get(), notes))
    try:
        with ExitStack() as stack:
            stack.enter_context(noting_scales(scales))
            if inner is not None:
                stack.enter_context(inner)
            yield
    finally:
        recording.reset(token)


@contextmanager
def _recompute(
    notes: _Notes,
    scales: ScaleNotes,
    fp8: tuple[bool, Recipe | None],
    inner: AbstractContextManager[object] | None,
) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(repeating_scales(scales))
        stack.enter_context(as_noted(fp8))
        for active, partition in notes.items():
            stack.enter_context(active.scope(partition))
        if inner is not None:
            stack.enter_context(inner)
        yield
