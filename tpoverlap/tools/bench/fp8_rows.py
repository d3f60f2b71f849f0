"""FP8 rows of the gemm suite: operands in FP8, what they are judged by, and the baseline of plain torch.

Scaling is current scaling, per tensor, as `Float8CurrentScaling` has it. Weights are quantised once for everybody: the
rows are about activations. An activation is quantised in every call, ours and the baseline's alike, under the magnitude
that all ranks agree on (`ag`) or this rank's (`rs`); "quantisation alone" says what that costs beside "gemm alone",
which multiplies what is in FP8 already. An all-gather moves FP8 bytes, a reduce-scatter sums in the original dtype.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tpoverlap.gemm.fp8 import Float8CurrentScaling, Fp8State, QuantizedTensor, Quantizer, scaled_mm
from tpoverlap.tools.bench import baselines
from tpoverlap.tools.bench.baselines import Run
from tpoverlap.tools.bench.rows import GemmRow
from tpoverlap.tools.bench.session import Session

NO_ASYNC_TP = "torch async-TP is timed in bfloat16 only"


class Fp8Row:
    """One row's operands on this rank, in FP8.

    Args:
        x_all: [T, K]: of an AG row the whole activation, the same on every rank; of an RS row this rank's own.
        weight: [N, K]; calls of ours take this very tensor, or it would be quantised anew.
    """

    def __init__(self, x_all: torch.Tensor, weight: torch.Tensor) -> None:
        recipe, self.weight = Float8CurrentScaling(), weight
        self._quantizer = Quantizer(recipe, "input", x_all.device)
        self.state = Fp8State(recipe, 1, x_all.device, cache_weights=True)
        self.x8 = self._quantizer.local(x_all, record=False)
        self.weight8 = self.state.quantized_weight(0, weight).weight

    def multiplied(self, x8: QuantizedTensor | None = None) -> torch.Tensor:
        """[T, N] in the original dtype: the FP8 GEMM alone, of ``x8`` or of the whole activation."""
        x8 = self.x8 if x8 is None else x8
        out = torch.empty(x8.data.shape[0], self.weight8.data.shape[0], dtype=self.x8.dtype, device=self.x8.data.device)
        scaled_mm(x8.data, self.weight8.data.t(), x8.scale, self.weight8.scale, out, fast_accumulation=True)
        return out

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        """[T, N]: the product of the numbers that FP8 stands for, in ``dtype``."""
        scale = self.x8.scale.to(dtype) * self.weight8.scale.to(dtype)
        return torch.mm(self.x8.data.to(dtype), self.weight8.data.to(dtype).t()).mul_(scale)

    def quantisation(self, x: torch.Tensor) -> Run:
        """What every call does to its activation before anything can be sent or multiplied."""
        return lambda: self._quantizer.local(x, record=False).data

    def plain_sequential(self, session: Session, row: GemmRow, x: torch.Tensor) -> Run:
        """NCCL and `torch._scaled_mm` one after the other; the magnitude of an AG row is reduced over the group."""
        quantizer, group, size = self._quantizer, session.group, session.tp_size

        def gather_then_gemm() -> torch.Tensor:
            amax = quantizer.measure(x)
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
            shard = quantizer.by_maxima(x, amax)
            whole = shard.bytes.new_empty(x.shape[0] * size, x.shape[1])
            baselines.gather(whole, shard.bytes, group=group)
            return self.multiplied(QuantizedTensor(whole.view(shard.data.dtype), shard.scale, x.dtype))

        def gemm_then_scatter() -> torch.Tensor:
            summand = self.multiplied(quantizer.local(x, record=False))
            own = summand.new_empty(summand.shape[0] // size, summand.shape[1])
            baselines.scatter(own, summand, group=group)
            return own

        return gather_then_gemm if row.direction == "ag" else gemm_then_scatter

    def sent(self, row: GemmRow, x: torch.Tensor) -> torch.Tensor:
        """``x`` as it travels: FP8 bytes of an AG row, itself of an RS row."""
        return self._quantizer.local(x, record=False).bytes if row.direction == "ag" else x
