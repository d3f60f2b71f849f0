"""Operations that move FP8 rows: an ordinary operation on bytes, and a small one that puts scales together.

::

    current, row-wise:  | gather scales (float32, region "scales") | gather rows (uint8) + GEMM |
    delayed:            | gather rows (uint8) + GEMM | gather magnitudes, for the next step's scale |

The methods do not know of it: they move rows of bytes, and the GEMM task knows what the bytes mean. Region, flags,
credits and descriptors are those of any other operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch

from tpoverlap.comm.descriptor import digest64
from tpoverlap.comm.meter import PART_OF_A_CALL
from tpoverlap.config.honoured import FP8_SCATTERS
from tpoverlap.errors import CapacityError, ConfigError
from tpoverlap.gemm.fp8 import PackedPartialGemm, QuantizedTensor, Quantizer
from tpoverlap.gemm.fp8.quantize import ALIGNMENT
from tpoverlap.gemm.fp8.scale_notes import is_repeating
from tpoverlap.gemm.tasks import PartialGemm
from tpoverlap.overlap import fused
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.registry import gather_beside
from tpoverlap.tokens import TokenPartition

Result = TypeVar("Result")
SCALES_REGION = "scales"
METHODS = ("ring_exchange", "pipeline", "bulk", "fused", "sequential")
_TAGS = {torch.float8_e4m3fn: "/e4m3", torch.float8_e5m2: "/e5m2"}
_SCALES = PART_OF_A_CALL
FP8_TAGS = ("", _SCALES, *_TAGS.values(), *(f"{tag}-rows" for tag in _TAGS.values()))
"""What labels of operations can end with."""


def gather_operation(operation: OperationContext, quantizer: Quantizer) -> OperationContext:
    """``operation``, an all-gather, with the FP8 rows that ``quantizer`` makes.

    Ranks under different recipes, or delayed scaling's histories, would read one another's rows with the wrong scale:
    they have to agree on both.
    """
    _require_method(operation)
    return operation.variant(
        tag=_TAGS[quantizer.dtype], dtype=torch.uint8, detail=digest64(operation.detail, quantizer.agreement)
    )


def scatter_operation(
    operation: OperationContext, gemm: PartialGemm, dtype: torch.dtype
) -> tuple[OperationContext, PartialGemm]:
    """``operation``, a reduce-scatter of an FP8 GEMM's result, and the task to run in it.

    The result moves in the manager's dtype, or, with ``fp8_buf`` under a method that can, as FP8 rows of ``dtype``.
    (`fused` cannot: a row's scale is known when all its columns are, and its tiles are stored one by one.)
    """
    _require_method(operation)
    # Only where the name is configured as a reduce-scatter: the key of an all-gather name speaks of its gather.
    configured = operation.config.is_reduce_scatter and operation.config.fp8_buf
    if not configured or operation.method not in FP8_SCATTERS:
        return operation.variant(tag=_TAGS[dtype], column_granule=ALIGNMENT), gemm
    packed = operation.variant(
        tag=f"{_TAGS[dtype]}-rows",
        dtype=torch.uint8,
        column_granule=ALIGNMENT,
        packed_format=dtype,
    )
    return packed, PackedPartialGemm(gemm=gemm, packed_format=dtype)


def _require_method(operation: OperationContext) -> None:
    if operation.method not in METHODS:
        raise ConfigError(
            f"{operation.name}: method {operation.method!r} does not move FP8 rows in this version; use one of "
            f"{', '.join(METHODS)}, or run this layer without fp8"
        )
    if operation.method == "fused":
        fused.require_runnable(operation)  # now: scales are exchanged before it would say so itself


class QuantizedShard:
    """This rank's rows in FP8 under the scale that all ranks use: what an FP8 all-gather sends.

    Args:
        operation: of the all-gather, from `gather_operation`.
        quantizer: decides the scale.
        x_shard_t: [T_r, H].
        record: delayed scaling: `finish` remembers the magnitudes of all ranks.

    Attributes:
        local: the shard, [T_r, H]; its scale is the common one, or (row-wise) that of own rows.
        scale: float32 [1, 1], or [T, 1]: of the gathered tensor.
    """

    def __init__(
        self, operation: OperationContext, quantizer: Quantizer, x_shard_t: torch.Tensor, *, record: bool
    ) -> None:
        self._operation, self._quantizer = operation, quantizer
        self._maxima: torch.Tensor | None = None
        x_shard_t = x_shard_t.detach()
        if quantizer.is_delayed:
            self.local = quantizer.with_stored_scale(x_shard_t)
            self.scale = self.local.scale
            if record and not is_repeating():
                self._maxima = quantizer.magnitudes(x_shard_t)
            return
        if quantizer.is_rowwise:
            self.local = quantizer.local(x_shard_t, record=False)
            self.scale = put_together(operation, self.local.scale, operation.partition)
        else:
            own = quantizer.magnitudes(x_shard_t)
            self.local = read_together(
                operation, own, _alike(operation, own), lambda maxima: quantizer.by_maxima(x_shard_t, maxima)
            )
            self.scale = self.local.scale

    @property
    def dtype(self) -> torch.dtype:
        """The FP8 dtype."""
        return self.local.data.dtype

    def whole(self, gathered: torch.Tensor) -> QuantizedTensor:
        """The gathered bytes [T, H] as a tensor."""
        return QuantizedTensor(gathered.view(self.dtype), self.scale, self.local.dtype)

    def finish(self) -> None:
        """After the operation: let delayed scaling remember. All ranks then hold the same history."""
        if self._maxima is not None:
            operation, maxima = self._operation, self._maxima
            self._quantizer.record(put_together(operation, maxima, _alike(operation, maxima)))


def _alike(operation: OperationContext, values: torch.Tensor) -> TokenPartition:
    """The partition of as many rows a rank as ``values`` has."""
    return _even(values.shape[0], operation.partition.tp_size)


@lru_cache(maxsize=16)
def _even(rows: int, tp_size: int) -> TokenPartition:
    return TokenPartition.even(rows * tp_size, tp_size)


def put_together(operation: OperationContext, values: torch.Tensor, partition: TokenPartition) -> torch.Tensor:
    """`read_together`, kept."""
    if operation.channel is None:
        return values
    return read_together(operation, values, partition, torch.clone)


def read_together(
    operation: OperationContext, values: torch.Tensor, partition: TokenPartition, read: Callable[[torch.Tensor], Result]
) -> Result:
    """What ``read`` makes of the float32 ``values`` [n, 1] of every rank, gathered to [sum of n, 1].

    ``partition`` has the n's. ``read`` gets a view that later operations overwrite: it enqueues what reads it.

    Raises:
        CapacityError: more rows than the region has, before anything is sent.
    """
    if operation.channel is None:
        return read(values)
    region = operation.channel.regions[SCALES_REGION]
    if not operation.plain and partition.total * values.element_size() > region.slot_bytes:
        raise CapacityError(
            f"{operation.name}: row-wise scales of T={partition.total} do not fit the {region.slot_bytes} bytes that "
            "the manager's capacity gave them; use a larger capacity_shape, or a per-tensor recipe"
        )
    context = operation.variant(
        tag=_SCALES,
        # Nothing is beside it. Messages cost less by bulk: there, sequential would meet on the host.
        method="sequential" if operation.uses_buffers or operation.method == "sequential" else "bulk",
        region=SCALES_REGION,
        partition=partition,
        width=1,
        dtype=torch.float32,
    )
    results: list[Result] = []
    gather_beside(context, values, lambda: None, lambda whole: results.append(read(whole)))
    return results[0]
