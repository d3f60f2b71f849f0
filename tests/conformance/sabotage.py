"""Faults put into the library on the ranks, for the time of one check, to see that the check notices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from tpoverlap.active_shape import ActiveShape
from tpoverlap.comm.exchange import Exchange
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.nn import column
from tpoverlap.testing.conformance import gemms, lifetime, linear, microbatches
from tpoverlap.testing.conformance.setting import Setting


def _last_row_of_a_chunk_is_not_computed() -> AbstractContextManager[Any]:
    original = RowGemm.rows
    return mock.patch.object(RowGemm, "rows", lambda self, x, start: original(self, x[: max(1, len(x) - 1)], start))


def _waits_for_nobody() -> AbstractContextManager[Any]:
    """A flag that is not waited for: the rows of the peers are those of an earlier T."""
    return mock.patch.object(Exchange, "wait", lambda self, step, stream: None)


def _result_is_a_view() -> AbstractContextManager[Any]:
    """The gathered tensor that users get lies in the shared buffer."""
    original = torch.Tensor.clone

    def clone(self: torch.Tensor, **options: Any) -> torch.Tensor:
        in_library = str(sys._getframe(1).f_globals["__name__"]).startswith("tpoverlap.nn.")
        return self if in_library else original(self, **options)

    return mock.patch.object(torch.Tensor, "clone", clone)


def _bias_on_every_rank() -> AbstractContextManager[Any]:
    original = PartialGemm.rows
    return mock.patch.object(
        PartialGemm, "rows", lambda self, start, stop, out, owned=False: original(self, start, stop, out, owned=True)
    )


def _weight_grad_has_rolled_rows() -> AbstractContextManager[Any]:
    original = column.ColumnBackward._compute_weight_grads

    def compute(self: Any, gathered: torch.Tensor) -> None:
        original(self, gathered.roll(1, 0))

    return mock.patch.object(column.ColumnBackward, "_compute_weight_grads", compute)


def _runs_without_overlap() -> AbstractContextManager[Any]:
    return mock.patch("tpoverlap.manager.method_for_use", lambda *_, **__: "sequential")


def _recomputation_sees_the_latest_shape() -> AbstractContextManager[Any]:
    """What `checkpoint_context_fn` puts back is ignored."""
    original = ActiveShape.scope
    return mock.patch.object(ActiveShape, "scope", lambda self, partition: original(self, self._base))


Fault = tuple[Callable[[], AbstractContextManager[Any]], Callable[..., Any], tuple[Any, ...], str]
FAULTS: dict[str, Fault] = {
    "last row": (
        _last_row_of_a_chunk_is_not_computed,
        gemms.check_all_gather_gemm,
        ("ring_exchange",),
        ": y: relative",
    ),
    "no wait": (
        _waits_for_nobody,
        gemms.check_gemm_reduce_scatter,
        ("ring_exchange",),
        ": y_shard(: relative| of the same call again)",
    ),
    "view": (_result_is_a_view, lifetime.check_results_stay, (), "round 0 after 5 more rounds: .* rows differ"),
    "bias twice": (_bias_on_every_rank, linear.check_linear, ("row", "ring"), ": y_shard: relative"),
    "rolled rows": (_weight_grad_has_rolled_rows, linear.check_linear, ("column", "bulk"), ": dW: relative"),
    "no overlap": (_runs_without_overlap, gemms.check_all_gather_gemm, ("ring_exchange",), "qkv_fprop ran"),
    "recomputation": (
        _recomputation_sees_the_latest_shape,
        microbatches.check_microbatches_1f1b,
        (1, "full"),
        "ActiveShapeError",
    ),
}
"""Name: the fault, the check that must notice it, the check's arguments, and what the check says (a pattern)."""


def run_with(rank: int, size: int, fault: str) -> str:
    """The error of this rank; returned, so that the ranks live on. A rank that noticed nothing says so."""
    patch, check, args, _ = FAULTS[fault]
    with patch():
        try:
            check(rank, size, Setting(), *args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing noticed"
