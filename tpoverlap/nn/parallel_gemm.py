"""ParallelGemm: one GEMM of a layer, column or row, with or without sequence parallelism, under the layer's flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.communicator import LayerCommunicators
from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import Fp8State
from tpoverlap.nn.all_reduce import ColumnWhole, RowWhole
from tpoverlap.nn.autograd import apply
from tpoverlap.nn.fp8 import Fp8ColumnWhole, Fp8RowWhole, require_fp8_gemm
from tpoverlap.nn.fp8_context import Fp8Slot
from tpoverlap.nn.functional import all_gather_gemm, gemm_reduce_scatter
from tpoverlap.nn.inputs import full_partition, require_matmul, require_output_width
from tpoverlap.nn.layer_view import LayerView, OverlapFlags, view_of
from tpoverlap.nn.weight_grads import DelayedWork, WeightGrads
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager


class ParallelGemm:
    """What a layer does between its parameters and the functions of this package. Holds no parameter.

    Args:
        manager: whose buffers to use.
        ub_name: layer name; layers that share a name share its buffers.
        row: "row" parallel; else "column".
        sequence_parallel: activations outside are shards [T_r, H]; else they are whole, and the GEMM meets an
            all-reduce (`tpoverlap.nn.all_reduce`).
        flags: Transformer Engine's ``ub_*``.
        save_gathered, fuse_wgrad_accumulation, delay_wgrad_compute: see `LayerView` and `WeightGrads`.
        fp8: whether, and how, a forward runs in FP8; a submodule of the layer.

    Raises:
        ConfigError: no name, flags that contradict each other, or a mode that contradicts the name's configuration.
    """

    def __init__(
        self,
        manager: UserBufferManager,
        ub_name: str | None,
        *,
        row: bool,
        sequence_parallel: bool = True,
        flags: OverlapFlags | None = None,
        save_gathered: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        fp8: Fp8Slot | None = None,
    ) -> None:
        if not ub_name or not isinstance(ub_name, str):
            raise ConfigError(
                f"ub_name is needed: 'qkv', 'proj', 'fc1', 'fc2' or a name for mgr.register (an unregistered one runs "
                f"without overlap), got {ub_name!r}"
            )
        self.manager, self.ub_name, self.row, self.sequence_parallel = manager, ub_name, row, sequence_parallel
        self.delayed = DelayedWork() if delay_wgrad_compute else None
        self._flags = OverlapFlags() if flags is None else flags
        self._flags.require_consistent(delay_wgrad_compute=delay_wgrad_compute)
        self._save_gathered, self._fp8 = save_gathered, fp8
        self._weight_grads = WeightGrads(fuse_wgrad_accumulation, self.delayed)
        self._base: LayerCommunicators | None = None
        self._views: tuple[LayerView, LayerView]
        self._resolve()

    @property
    def comm(self) -> LayerCommunicators:
        """The communicators under this layer's flags."""
        self._resolve()
        return self._views[0]

    def column(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        partition: TokenPartition | None,
        *,
        return_gathered: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(y [T, N], the gathered x [T, K] or None) of x [T_r, K], or of x [T, K] without sequence parallelism.

        Either way a rank's gradient of the gathered x is its part of the sum over ranks.
        """
        view = self._view(weight)
        if not self.sequence_parallel:
            full_partition(view.fprop, x, partition)
            require_matmul(view.fprop, x, [weight])
            require_output_width(view.dgrad, weight.shape[1])
            result = _apply(ColumnWhole, Fp8ColumnWhole, view, self._fp8_state(), x, weight, bias, return_gathered)
        else:
            result = all_gather_gemm(x, weight, view, bias, partition, return_gathered, self._fp8_state())
        return (result, None) if isinstance(result, torch.Tensor) else (result[0], result[1])

    def row_parallel(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, partition: TokenPartition | None
    ) -> torch.Tensor:
        """Y [T_r, N], or [T, N] without sequence parallelism, of x [T, K]."""
        view = self._view(weight)
        if not self.sequence_parallel:
            full_partition(view.fprop, x, partition)
            require_matmul(view.fprop, x, [weight])
            require_output_width(view.fprop, weight.shape[0])
            y: torch.Tensor = _apply(RowWhole, Fp8RowWhole, view, self._fp8_state(), x, weight, bias)
            return y
        return gemm_reduce_scatter(x, weight, view, bias, partition, self._fp8_state())

    def backward_dw(self) -> None:
        """Compute the oldest delayed weight gradient; nothing unless ``delay_wgrad_compute``.

        Raises:
            ConfigError: no backward pass waits for it.
        """
        if self.delayed is not None:
            self.delayed.run_oldest(self.ub_name)

    def _fp8_state(self) -> Fp8State | None:
        return None if self._fp8 is None else self._fp8.current()

    def _view(self, weight: torch.Tensor) -> LayerView:
        if self._weight_grads.accumulate:
            self._weight_grads.require_target(self.ub_name, weight)
        self._resolve()
        # Without autograd nothing is saved, so nothing is copied to be saved.
        return self._views[0] if torch.is_grad_enabled() else self._views[1]

    def _resolve(self) -> None:
        """Follow the manager: a name may be registered after the layer was made."""
        base = self.manager.layer(self.ub_name, row=self.row)
        if base is not self._base:
            with_grad, without = (
                view_of(base, self.row, self._flags, saves, self._weight_grads)
                for saves in (self._save_gathered, False)
            )
            self._base, self._views = base, (with_grad, without)


def _apply(
    function: type[ColumnWhole | RowWhole],
    in_fp8: type[Fp8ColumnWhole | Fp8RowWhole],
    view: LayerView,
    state: Fp8State | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *options: bool,
) -> Any:
    # The operands' dtype was checked against the manager's; a GEMM that casts its output would not fit the buffers.
    if torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return _apply(function, in_fp8, view, state, x, weight, bias, *options)
    if bias is not None:
        bias = bias.contiguous()  # kernels read it by its address
    if state is None:
        return apply(function, view, x, weight, bias, *options)
    require_fp8_gemm(view, state, x, [weight])
    return apply(in_fp8, view, state, x, weight, bias, *options)
