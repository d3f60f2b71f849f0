"""nn.LayerNormMLP: norm on the shard, column-parallel fc1, activation, row-parallel fc2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.gemm.fp8 import Recipe
from tpoverlap.nn.activation import activate, is_gated, require_activation
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
    require_ub_names,
    resolve_manager,
    uniform_by_fan_in,
)
from tpoverlap.nn.shard_spec import ShardSpec
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager


class LayerNormMLP(NormedLayer):
    """y = act(norm(x) W1^T + b1) W2^T + b2: x_shard [T_r, H] -> y_shard [T_r, H]. F = ffn_hidden_size.

    ======================  ==============================  ==================================================
    parameter               shape on rank r
    ======================  ==============================  ==================================================
    ``layer_norm_weight``   [H]                             replicated: call `sync_replicated_grads`
    ``layer_norm_bias``     [H]; None for RMSNorm           replicated, as above
    ``fc1_weight``          [F / R, H]                      rows r * F/R .. of the full weight
    (gated activation)      [2 F / R, H]                    rows r * F/R .. of the gate, then those of up
    ``fc1_bias``            [F / R], [2 F / R] or None      as the weight's rows
    ``fc2_weight``          [H, F / R]                      columns r * F/R .. of the full weight
    ``fc2_bias``            [H] or None                     replicated, as above
    ======================  ==============================  ==================================================

    Gate and up are one weight: one GEMM instead of two behind the gather, one instead of two in dgrad and in wgrad.

    Args:
        hidden_size, ffn_hidden_size: H and F of the full layer.
        activation: see `tpoverlap.nn.activation`.
        init_method, output_layer_init_method: of fc1's and fc2's weight; None: as ``torch.nn.Linear``.
        return_bias: return (y without fc2's bias, that bias).
        ub_names: layer names of fc1 and fc2.
        Others: as `LayerNormLinear`.

    Raises:
        ConfigError: as `LayerNormLinear`; ``ffn_hidden_size`` is not divisible by R; unknown ``activation``.
    """

    layer_norm_weight: torch.nn.Parameter
    layer_norm_bias: torch.nn.Parameter | None
    fc1_weight: torch.nn.Parameter
    fc1_bias: torch.nn.Parameter | None
    fc2_weight: torch.nn.Parameter
    fc2_bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        zero_centered_gamma: bool = False,
        sequence_parallel: bool = True,
        manager: UserBufferManager | None = None,
        ub_names: tuple[str, str] = ("fc1", "fc2"),
        tp_group: Any = None,
        tp_size: int | None = None,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
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
        require_activation(activation)
        require_sizes(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        require_ub_names(ub_names, "fc1", "fc2")
        self.hidden_size, self.ffn_hidden_size, self.activation = hidden_size, ffn_hidden_size, activation
        self.manager = resolve_manager(manager, tp_group, tp_size)
        self.return_bias = return_bias
        self._return_normed(local=return_layernorm_output, gathered=return_layernorm_output_gathered)
        self._init_methods = (init_method, output_layer_init_method)
        self.norm_options = NormOptions(hidden_size, eps, normalization, zero_centered_gamma, self.manager, ub_names[0])
        flags = OverlapFlags(ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad)
        options = GemmOptions(
            self.manager, sequence_parallel, flags, save_gathered, fuse_wgrad_accumulation, delay_wgrad_compute
        )
        self.fc1_fp8, self.fc2_fp8 = (Fp8Slot(fp8_recipe, self.manager.device) for _ in range(2))
        self._gemms = (
            options.gemm(ub_names[0], row=False, fp8=self.fc1_fp8),
            options.gemm(ub_names[1], row=True, fp8=self.fc2_fp8),
        )
        divided(f"{ub_names[0]}: ffn_hidden_size", ffn_hidden_size, self.manager)
        parts = (("gate", ffn_hidden_size), ("up", ffn_hidden_size)) if is_gated(activation) else ()
        fc1_rows = len(parts or (1,)) * ffn_hidden_size
        made: tuple[Any, ...] = (self.manager, device, params_dtype)
        self.norm_options.add_parameters(self, device, params_dtype, sequence_parallel=sequence_parallel)
        for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"):  # the order of parameters()
            self.register_parameter(name, None)
        add_parameter(self, "fc1_weight", ShardSpec((fc1_rows, hidden_size), 0, parts), *made)
        add_parameter(self, "fc2_weight", ShardSpec((hidden_size, ffn_hidden_size), 1), *made)
        if bias:
            add_parameter(self, "fc1_bias", ShardSpec((fc1_rows,), 0, parts), *made)
            add_parameter(self, "fc2_bias", ShardSpec((hidden_size,)), *made, replicated=sequence_parallel)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weights by their init methods, the norm the identity scale, the biases zero."""
        fc1_init, fc2_init = self._init_methods
        self.norm_options.reset(self)
        draw_shard(self.fc1_weight, self.manager, fc1_init or uniform_by_fan_in(self.hidden_size))
        draw_shard(self.fc2_weight, self.manager, fc2_init or uniform_by_fan_in(self.ffn_hidden_size))
        for bias in (self.fc1_bias, self.fc2_bias):
            if bias is not None:
                torch.nn.init.zeros_(bias)

    def forward(self, x: torch.Tensor, partition: TokenPartition | None = None) -> Output:
        """[T_r, H] -> [T_r, H]; with ``return_bias`` and ``return_layernorm_output`` (y, bias, norm(x))."""
        if is_compiling():
            return uncompiled(LayerNormMLP.forward, self, x, partition)
        (fc1, fc2), fc2_bias = self._gemms, self.fc2_bias
        normed = self.norm_options(x, self.layer_norm_weight, self.layer_norm_bias)
        h, gathered = fc1.column(
            normed, self.fc1_weight, self.fc1_bias, partition, return_gathered=self.return_layernorm_output_gathered
        )
        activated = activate(self.activation, h)
        y = fc2.row_parallel(activated, self.fc2_weight, None if self.return_bias else fc2_bias, partition)
        return self._outputs(y, fc2_bias, normed, gathered)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        names = [gemm.ub_name for gemm in self._gemms]
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, activation={self.activation!r}, "
            f"bias={self.fc1_bias is not None}, normalization={self.norm_options.normalization!r}, ub_names={names}, "
            f"tp_size={self.manager.tp_size}"
        )
