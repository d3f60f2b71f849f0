"""Faults put into the library on the ranks, for the time of one check, to see that the check notices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from tpoverlap.active_shape import ActiveShape
from tpoverlap.comm.exchange import Exchange
from tpoverlap.communicator import CommOverlap
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.manager import UserBufferManager
from tpoverlap.nn import column
from tpoverlap.testing.conformance import gemms, linear, microbatches
from tpoverlap.testing.conformance.setting import Setting


def _last_row_of_a_chunk_is_not_computed() -> AbstractContextManager[Any]:
    original = RowGemm.rows
    return mock.patch.object(RowGemm, "rows", lambda self, x, start: original(self, x[: max(1, len(x) - 1)], start))


def _waits_for_nobody() -> AbstractContextManager[Any]:
    """A flag that is not waited for: the rows of the peers are those of an earlier T."""
    return mock.patch.object(Exchange, "wait", lambda self, step, stream: None)


def _result_is_a_view() -> AbstractContextManager[Any]:
    """The gathered tensor that users get lies in the shared buffer."""
    return mock.patch.object(torch.Tensor, "clone", lambda self, **_: self)


def _bias_on_every_rank() -> AbstractContextManager[Any]:
    original = PartialGemm.rows
    return mock.patch.object(
        PartialGemm, "rows", lambda self, start, stop, out, owned=False: original(self, start, stop, out, owned=True)
    )


def _weight_grad_has_rolled_rows() -> AbstractContextManager[Any]:
    original = column._Backward._compute_weight_grads

    def compute(self: Any, gathered: torch.Tensor) -> None:
        original(self, gathered.roll(1, 0))

    return mock.patch.object(column._Backward, "_compute_weight_grads", compute)


def _runs_without_overlap() -> AbstractContextManager[Any]:
    original = UserBufferManager.operation

    def operation(self: Any, communicator: CommOverlap, partition: Any, **options: Any) -> Any:
        return original(self, communicator, partition, **(options | {"method": "sequential"}))

    return mock.patch.object(UserBufferManager, "operation", operation)


def _recomputation_sees_the_latest_shape() -> AbstractContextManager[Any]:
    """What `checkpoint_context_fn` puts back is ignored; an ActiveShapeError, turned into what a test sees."""
    original = ActiveShape.scope
    return mock.patch.object(ActiveShape, "scope", lambda self, partition: original(self, self._base))


FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[..., Any], tuple[Any, ...]]] = {
    "last row": (_last_row_of_a_chunk_is_not_computed, gemms.check_all_gather_gemm, ("ring_exchange",)),
    "no wait": (_waits_for_nobody, gemms.check_gemm_reduce_scatter, ("ring_exchange",)),
    "view": (_result_is_a_view, gemms.check_bulk, ("bulk",)),
    "bias twice": (_bias_on_every_rank, linear.check_linear, ("row", "ring")),
    "rolled rows": (_weight_grad_has_rolled_rows, linear.check_linear, ("column", "bulk")),
    "no overlap": (_runs_without_overlap, gemms.check_all_gather_gemm, ("ring_exchange",)),
    "recomputation": (_recomputation_sees_the_latest_shape, microbatches.check_microbatches_1f1b, (1, "full")),
}


def run_with(rank: int, size: int, fault: str) -> None:
    patch, check, args = FAULTS[fault]
    with patch():
        try:
            check(rank, size, Setting(), *args)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{fault}: {type(error).__name__}: {error}") from error
