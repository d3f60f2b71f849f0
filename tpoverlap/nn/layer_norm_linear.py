"""nn.LayerNormLinear: norm on the shard, then a column-parallel linear layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.communicator import LayerCommunicators
from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import Recipe
from tpoverlap.nn.autograd import is_compiling, uncompiled
from tpoverlap.nn.fp8_context import Fp8Slot
from tpoverlap.nn.layer_view import OverlapFlags
from tpoverlap.nn.norm import NormOptions
from tpoverlap.nn.parallel_layer import GemmOptions, NormedLayer, Output
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


class LayerNormLinear(NormedLayer):
    """y = norm(x) W^T + b: x_shard [T_r, in] -> y [T, out / R].

    ======================  ==============================  ===============================================
    parameter               shape on rank r
    ======================  ==============================  ===============================================
    ``layer_norm_weight``   [in]                            replicated: call `sync_replicated_grads`
    ``layer_norm_bias``     [in]; None for RMSNorm          replicated, as above
    ``weight``              [out / R, in]                   rows r * out/R .. of the full weight
    ``bias``                [out / R] or None
    ======================  ==============================  ===============================================

    What hides behind what: the table of `tpoverlap.nn.column`. The norm runs on the shard, before the gather.

    Args:
        eps: of the norm.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: the norm scales by 1 + weight.
        parallel_mode: only "column", the one that has a shard to normalise.
        return_layernorm_output: also return norm(x); ``return_layernorm_output_gathered``: that of all rows, [T, in]
            (for LoRA, MLA and routers: from the same gather), instead of own rows [T_r, in].
        Others: as `Linear`.

    Raises:
        ConfigError: as `Linear`, and for an unknown ``normalization``.
    """

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        parallel_mode: str = "column",
        sequence_parallel: bool = True,
        manager: UserBufferManager | None = None,
        ub_name: str | None = None,
        tp_group: Any = None,
        tp_size: int | None = None,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
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
        if parallel_mode != "column":
            raise ConfigError(
                f"LayerNormLinear is column-parallel, got parallel_mode={parallel_mode!r}; a norm before a row-parallel"
                " layer would need whole rows: use Linear(parallel_mode='row') after a norm of your own"
            )
        require_sizes(in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.manager, self.ub_name = resolve_manager(manager, tp_group, tp_size), ub_name
        self.return_bias, self._init_method = return_bias, init_method
        self._return_normed(local=return_layernorm_output, gathered=return_layernorm_output_gathered)
        self.norm_options = NormOptions(in_features, eps, normalization, zero_centered_gamma, self.manager, ub_name)
        flags = OverlapFlags(ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad)
        options = GemmOptions(
            self.manager, sequence_parallel, flags, save_gathered, fuse_wgrad_accumulation, delay_wgrad_compute
        )
        self.fp8 = Fp8Slot(fp8_recipe, self.manager.device)
        self._gemms = (options.gemm(ub_name, row=False, fp8=self.fp8),)
        divided(f"{ub_name}: out_features", out_features, self.manager)
        self.norm_options.add_parameters(self, device, params_dtype, sequence_parallel=sequence_parallel)
        add_parameter(self, "weight", ShardSpec((out_features, in_features), 0), self.manager, device, params_dtype)
        self.register_parameter("bias", None)
        if bias:
            add_parameter(self, "bias", ShardSpec((out_features,), 0), self.manager, device, params_dtype)
        self.reset_parameters()

    @property
    def comm(self) -> LayerCommunicators:
        """The communicators of this layer, under its flags."""
        return self._gemms[0].comm

    def reset_parameters(self) -> None:
        """The weight by ``init_method``, the norm the identity scale, the bias zero."""
        self.norm_options.reset(self)
        draw_shard(self.weight, self.manager, self._init_method or uniform_by_fan_in(self.in_features))
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, partition: TokenPartition | None = None) -> Output:
        """[T_r, in] -> [T, out/R]; with ``return_bias`` and ``return_layernorm_output`` (y, bias, norm(x))."""
        if is_compiling():
            return uncompiled(LayerNormLinear.forward, self, x, partition)
        bias = self.bias
        normed = self.norm_options(x, self.layer_norm_weight, self.layer_norm_bias)
        y, gathered = self._gemms[0].column(
            normed,
            self.weight,
            None if self.return_bias else bias,
            partition,
            return_gathered=self.return_layernorm_output_gathered,
        )
        return self._outputs(y, bias, normed, gathered)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"normalization={self.norm_options.normalization!r}, ub_name={self.ub_name!r}, "
            f"tp_size={self.manager.tp_size}"
        )
