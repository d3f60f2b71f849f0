"""Our methods on one manager: every method and width is a name of its own, registered once for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch

import tpoverlap as tpo
from tpoverlap.config.rules import SUPPORTED
from tpoverlap.explanation import UNDER_RECIPE
from tpoverlap.tokens import TokenPartition
from tpoverlap.tools.bench.job import Direction
from tpoverlap.tools.bench.rows import GemmRow
from tpoverlap.tools.bench.session import Session

AUTO: Final = "auto"
"""What the dispatcher picks: what users get, and what the targets are about."""

_OPTIONS: Final[Mapping[str, Mapping[Direction, dict[str, Any]]]] = {
    AUTO: {"ag": {"method": "auto"}, "rs": {"method": "auto"}},
    "ring_exchange": {"ag": {"method": "ring_exchange"}, "rs": {"method": "ring_exchange"}},
    "ring aggregate": {"ag": {"method": "ring_exchange", "aggregate": True}},
    "pipeline 2": {"rs": {"method": "pipeline", "num_splits": 2}},
    "pipeline 4": {"rs": {"method": "pipeline", "num_splits": 4}},
    "fused": {"ag": {"method": "fused"}, "rs": {"method": "fused"}},
    "sequential": {"ag": {"method": "sequential"}, "rs": {"method": "sequential"}},
}


def method_labels(direction: Direction, tp_size: int, supported: frozenset[str] = SUPPORTED) -> tuple[str, ...]:
    """Our methods for one direction, `AUTO` first. ``aggregate`` pairs chunks, so with two ranks it is sequential."""
    return tuple(
        label
        for label, options in _OPTIONS.items()
        if direction in options
        and options[direction]["method"] in supported
        and (label != "ring aggregate" or tp_size > 2)
    )


def why_no_kernels(device_type: str) -> str | None:
    """Why `fused` cannot run; None where it can."""
    return None if device_type == "cuda" else "fused needs a GPU: the CPU runs Triton kernels in the interpreter only"


def runnable(device_type: str) -> frozenset[str]:
    """The methods of this release that run on ``device_type``."""
    return SUPPORTED if why_no_kernels(device_type) is None else SUPPORTED - {"fused"}


def _layer_name(label: str, direction: Direction, width: int) -> str:
    return f"{label.replace(' ', '_')}_{direction}_{width}"


class Methods:
    """A manager with a name for each (method, direction, width). Construction is collective; so are `renew`, `close`.

    Args:
        session: gives group, device, dtype and time-out.
        max_tokens: (direction, width) -> the most tokens of that width.
        labels: methods to register; None: all that this release runs.
        fp8: whether FP8 rows run, too.
    """

    def __init__(
        self,
        session: Session,
        max_tokens: Mapping[tuple[Direction, int], int],
        labels: tuple[str, ...] | None = None,
        fp8: bool = False,
    ) -> None:
        self._session = session
        self._max_tokens = dict(max_tokens)
        self._labels, self._fp8 = labels, fp8
        self.manager = self._make()

    def _make(self) -> tpo.UserBufferManager:
        session = self._session
        names = [
            (label, direction, width, tokens)
            for (direction, width), tokens in sorted(self._max_tokens.items())
            for label in method_labels(direction, session.tp_size, runnable(session.device.type))
            if self._labels is None or label in self._labels
        ]
        capacity = max(self._max_tokens.values())
        most = max(tokens * width for (_, width), tokens in self._max_tokens.items())
        configs = {
            f"{_layer_name(label, direction, width)}_fprop": {
                **_OPTIONS[label][direction],
                "is_reduce_scatter": direction == "rs",
            }
            for label, direction, width, _ in names
        }
        manager = tpo.UserBufferManager(
            session.group,
            (capacity, -(-most // capacity)),
            dtype=session.job.dtype,
            device=session.device,
            ub_cfgs=configs,
            timeout_s=session.job.timeout_s,
            quantization_modes=["none", "fp8"] if self._fp8 else None,
        )
        for label, direction, width, tokens in names:
            manager.register(_layer_name(label, direction, width), width, max_tokens=tokens)
        return manager

    def layer(self, label: str, direction: Direction, width: int) -> Any:
        """The layer's communicators, for ``all_gather_gemm`` and ``gemm_reduce_scatter``."""
        return self.manager.layer(_layer_name(label, direction, width), row=direction == "rs")

    def prepare(
        self,
        label: str,
        row: GemmRow,
        x: torch.Tensor,
        weight: torch.Tensor,
        partition: TokenPartition,
        fp8: tpo.Fp8State | None = None,
    ) -> Callable[[], torch.Tensor]:
        """One operation as users write it, and nothing else: ``x`` is [T_r, K] of an AG row, [T, K] of an RS row.

        It belongs to the manager of now: prepare it again after `renew`.
        """
        layer = self.layer(label, row.direction, row.width)
        if row.direction == "rs":
            return lambda: tpo.gemm_reduce_scatter(x, weight, layer, partition=partition, fp8=fp8)
        return lambda: cast("torch.Tensor", tpo.all_gather_gemm(x, weight, layer, partition=partition, fp8=fp8))

    def explain(self, label: str, row: GemmRow) -> str:
        """What the manager says about this name at this T, for this row's GEMM; of an FP8 row about FP8 first."""
        name = f"{_layer_name(label, row.direction, row.width)}_fprop"
        text = self.manager.explain(name, row.num_tokens, row.features)
        return text[text.index(UNDER_RECIPE) :] if row.is_fp8 else text

    def renew(self) -> None:
        """A new manager in place of one that a failed operation left unusable. Collective."""
        self.manager.abort()
        self.manager = self._make()

    def close(self) -> None:
        self.manager.close()
