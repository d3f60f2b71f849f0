"""nn.Linear: a column- or row-parallel linear layer whose collectives overlap its GEMMs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.communicator import LayerCommunicators
from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import Recipe
from tpoverlap.nn.autograd import is_compiling, uncompiled
from tpoverlap.nn.fp8_context import Fp8Slot
from tpoverlap.nn.layer_view import OverlapFlags
from tpoverlap.nn.parallel_layer import GemmOptions, ParallelLayer
from tpoverlap.nn.parameters import (
    InitMethod,
    add_parameter,
    divided,
    draw_shard,
    require_sizes,
    resolve_manager,
    uniform_by_fan_in,
)
from tpoverlap.nn.shard_spec import ShardSpec
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager


class Linear(ParallelLayer):
    """y = x W^T + b with sequence-parallel input (column) or output (row).

    =======================  =======================================  ========================================
    ``parallel_mode``        forward                                  weight on this rank
    =======================  =======================================  ========================================
    "column"                 x_shard [T_r, in] -> y [T, out / R]      [out / R, in], rows r*out/R .. of the full
    "row"                    x [T, in / R] -> y_shard [T_r, out]      [out, in / R], columns r*in/R .. of it
    =======================  =======================================  ========================================

    Without ``sequence_parallel`` the shards are whole: [T, in] and [T, out].

    Which collective hides behind which GEMM, in fprop, dgrad and wgrad: the tables of `tpoverlap.nn.column`,
    `tpoverlap.nn.row` and `tpoverlap.nn.all_reduce`. A row bias is replicated and each rank sees only its rows'
    gradient, so it is marked ``sequence_parallel``: call `sync_replicated_grads`.

    Args:
        in_features, out_features: of the full layer.
        bias: whether to add one.
        parallel_mode: "column" or "row".
        manager: whose buffers to use; None: the default manager of `tpoverlap.te`.
        ub_name: "qkv", "proj", "fc1", "fc2" or a registered name; layers that share a name share its buffers.
        sequence_parallel: see above. (Transformer Engine's default is False.)
        tp_group, tp_size: Transformer Engine's; where given, they have to be the manager's.
        init_method: fills this rank's weight; None: as ``torch.nn.Linear``, by the full layer's fan-in.
        return_bias: return (y without bias, bias).
        device, dtype: of the parameters; None: the manager's. ``params_dtype`` is Transformer Engine's name of dtype.
        save_gathered: a column layer keeps the gathered input [T, in] for backward, and gathers once.
        fuse_wgrad_accumulation, delay_wgrad_compute: see `tpoverlap.nn.weight_grads`.
        ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad: see `tpoverlap.nn.layer_view`.
        fp8_recipe: run in FP8; None: only inside `fp8_autocast`.

    Raises:
        ConfigError: a size is no whole number of at least 1, the cut one is not divisible by R, the mode contradicts
            the name's configuration, or options contradict each other.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        parallel_mode: str,
        manager: UserBufferManager | None = None,
        ub_name: str | None = None,
        sequence_parallel: bool = True,
        tp_group: Any = None,
        tp_size: int | None = None,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        save_gathered: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        ub_overlap_ag: bool | None = None,
        ub_overlap_rs: bool | None = None,
        ub_overlap_rs_dgrad: bool | None = None,
        ub_bulk_dgrad: bool | None = None,
        ub_bulk_wgrad: bool | None = None,
        fp8_recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        if parallel_mode not in ("column", "row"):
            raise ConfigError(f"parallel_mode must be 'column' or 'row', got {parallel_mode!r}")
        require_sizes(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features, self.parallel_mode = in_features, out_features, parallel_mode
        self.manager, self.ub_name = resolve_manager(manager, tp_group, tp_size), ub_name
        self.sequence_parallel, self.return_bias, self._init_method = sequence_parallel, return_bias, init_method
        row = parallel_mode == "row"
        flags = OverlapFlags(ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad)
        options = GemmOptions(
            self.manager, sequence_parallel, flags, save_gathered, fuse_wgrad_accumulation, delay_wgrad_compute
        )
        self.fp8 = Fp8Slot(fp8_recipe, self.manager.device)
        self._gemms = (options.gemm(ub_name, row=row, fp8=self.fp8),)
        if row:
            divided(f"{ub_name}: in_features", in_features, self.manager)
        else:
            divided(f"{ub_name}: out_features", out_features, self.manager)
        made: tuple[Any, ...] = (self.manager, device, params_dtype if dtype is None else dtype)
        add_parameter(self, "weight", ShardSpec((out_features, in_features), 1 if row else 0), *made)
        self.register_parameter("bias", None)
        if bias:
            bias_spec = ShardSpec((out_features,), None if row else 0)
            add_parameter(self, "bias", bias_spec, *made, replicated=row and sequence_parallel)
        self.reset_parameters()

    @property
    def comm(self) -> LayerCommunicators:
        """The communicators of this layer, under its flags."""
        return self._gemms[0].comm

    def reset_parameters(self) -> None:
        """As ``torch.nn.Linear``, by the full layer's fan-in. Ranks draw different shards also from one seed."""
        draw_shard(self.weight, self.manager, self._init_method or uniform_by_fan_in(self.in_features))
        if self.bias is not None:
            # Zero: a row bias is replicated, and drawing it would give every rank another one.
            torch.nn.init.zeros_(self.bias)

    def forward(
        self, x: torch.Tensor, partition: TokenPartition | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """[T_r, in] -> [T, out/R] (column), or [T, in/R] -> [T_r, out] (row)."""
        if is_compiling():
            return uncompiled(Linear.forward, self, x, partition)
        own_bias = self.bias
        bias = None if self.return_bias else own_bias
        if self.parallel_mode == "row":
            y = self._gemms[0].row_parallel(x, self.weight, bias, partition)
        else:
            y, _ = self._gemms[0].column(x, self.weight, bias, partition)
        return (y, own_bias) if self.return_bias else y

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"parallel_mode={self.parallel_mode!r}, ub_name={self.ub_name!r}, tp_size={self.manager.tp_size}"
        )
