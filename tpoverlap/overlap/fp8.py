"""Operations that move FP8 rows: an ordinary operation on bytes, and a small one that puts scales together.

::

    current, row-wise:  | gather scales (float32, region "scales") | gather rows (uint8) + GEMM |
    delayed:            | gather rows (uint8) + GEMM | gather magnitudes, for the next step's scale |

The methods do not know of it: they move rows of bytes, and the GEMM task knows what the bytes mean. Region, flags,
credits and descriptors are those of any other operation.
"""

from __future__ import annotations

import torch

from tpoverlap.comm.descriptor import digest64
from tpoverlap.config.honoured import FP8_SCATTERS
from tpoverlap.errors import CapacityError, ConfigError
from tpoverlap.gemm.fp8 import PackedPartialGemm, QuantizedTensor, Quantizer
from tpoverlap.gemm.fp8.quantize import ALIGNMENT
from tpoverlap.gemm.tasks import PartialGemm
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.registry import gather_beside
from tpoverlap.tokens import TokenPartition

SCALES_REGION = "scales"
METHODS = ("ring_exchange", "pipeline", "bulk", "sequential")
_TAGS = {torch.float8_e4m3fn: "/e4m3", torch.float8_e5m2: "/e5m2"}
_SCALES = "/fp8-scales"
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
        self._amax: torch.Tensor | None = None
        x_shard_t = x_shard_t.detach()
        if quantizer.is_delayed:
            self.local = quantizer.with_stored_scale(x_shard_t)
            self.scale = self.local.scale
            if record:
                self._amax = quantizer.measure(x_shard_t)
            return
        if quantizer.is_rowwise:
            self.local = quantizer.local(x_shard_t, record=False)
            self.scale = put_together(operation, self.local.scale, operation.partition)
        else:
            self.local = quantizer.by_maxima(x_shard_t, _of_all_ranks(operation, quantizer.measure(x_shard_t)))
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
        if self._amax is not None:
            self._quantizer.record(_of_all_ranks(self._operation, self._amax))


def _of_all_ranks(operation: OperationContext, amax: torch.Tensor) -> torch.Tensor:
    """The magnitudes [1, 1] of all ranks, [R, 1]."""
    size = operation.partition.tp_size
    return amax if size == 1 else put_together(operation, amax, TokenPartition.even(size, size))


def put_together(operation: OperationContext, values: torch.Tensor, partition: TokenPartition) -> torch.Tensor:
    """Float32 ``values`` [n, 1] of every rank, gathered to [sum of n, 1]; ``partition`` has the n's.

    Raises:
        CapacityError: more rows than the region has, before anything is sent.
    """
    if operation.channel is None:
        return values
    region = operation.channel.regions[SCALES_REGION]
    if not operation.plain and partition.total * values.element_size() > region.slot_bytes:
        raise CapacityError(
            f"{operation.name}: row-wise scales of T={partition.total} do not fit the {region.slot_bytes} bytes that "
            "the manager's capacity gave them; use a larger capacity_shape, or a per-tensor recipe"
        )
    context = operation.variant(
        tag=_SCALES,
        method="sequential" if operation.method == "sequential" else "bulk",
        region=SCALES_REGION,
        partition=partition,
        width=1,
        dtype=torch.float32,
    )
    gathered: list[torch.Tensor] = []
    gather_beside(context, values, lambda: None, lambda whole: gathered.append(whole.clone()))
    return gathered[0]
