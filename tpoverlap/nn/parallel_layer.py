"""What layers with tensor-parallel GEMMs share: their GEMMs' options, and delayed weight gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpoverlap.nn.fp8_context import Fp8Slot
from tpoverlap.nn.layer_view import OverlapFlags
from tpoverlap.nn.parallel_gemm import ParallelGemm
from tpoverlap.nn.shard_spec import ShardSpec

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager


Output = torch.Tensor | tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class GemmOptions:
    """The options that every GEMM of a layer has in common; see `ParallelGemm`."""

    manager: UserBufferManager
    sequence_parallel: bool
    flags: OverlapFlags
    save_gathered: bool
    fuse_wgrad_accumulation: bool
    delay_wgrad_compute: bool

    def gemm(self, ub_name: str | None, *, row: bool, fp8: Fp8Slot | None = None) -> ParallelGemm:
        """One GEMM under these options."""
        return ParallelGemm(
            self.manager,
            ub_name,
            row=row,
            sequence_parallel=self.sequence_parallel,
            flags=self.flags,
            save_gathered=self.save_gathered,
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
            delay_wgrad_compute=self.delay_wgrad_compute,
            fp8=fp8,
        )


class ParallelLayer(torch.nn.Module):
    """A module with `ParallelGemm`s of its own. Subclasses set ``manager`` and ``_gemms``, in forward's order."""

    manager: UserBufferManager
    shard_specs: dict[str, ShardSpec]
    """By parameter name: how it is cut over the ranks."""
    _gemms: tuple[ParallelGemm, ...]

    def need_backward_dw(self) -> bool:
        """Whether ``delay_wgrad_compute`` makes `backward_dw` necessary."""
        return any(gemm.delayed is not None for gemm in self._gemms)

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward pass that has not been asked for yet.

        Local: nothing is communicated. Without ``delay_wgrad_compute`` nothing happens.

        Raises:
            ConfigError: no backward pass is waiting.
        """
        for gemm in reversed(self._gemms):
            gemm.backward_dw()


class NormedLayer(ParallelLayer):
    """A layer whose first GEMM takes a norm's output, and which may return that, too."""

    return_bias: bool
    return_layernorm_output: bool
    return_layernorm_output_gathered: bool

    def _return_normed(self, *, local: bool, gathered: bool) -> None:
        self.return_layernorm_output = local or gathered
        self.return_layernorm_output_gathered = gathered

    def _outputs(
        self, y: torch.Tensor, bias: torch.Tensor | None, normed: torch.Tensor, gathered: torch.Tensor | None
    ) -> Output:
        """What forward returns: y, the bias that was not added, norm(x) of own or of all rows, as asked for."""
        extras: tuple[torch.Tensor | None, ...] = (bias,) if self.return_bias else ()
        if self.return_layernorm_output:
            extras = (*extras, gathered if self.return_layernorm_output_gathered else normed)
        return (y, *extras) if extras else y
