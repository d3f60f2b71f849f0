"""The norm in front of a column-parallel GEMM: LayerNorm or RMSNorm of a shard's rows, each row for itself.

It runs on the shard [T_r, H], before the gather: 1 / R of the work, and what is gathered is what the GEMM reads. Its
weight and bias are replicated and see own rows only: `sync_replicated_grads`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.errors import ActiveShapeError, ConfigError
from tpoverlap.nn.autograd import apply, differentiable_once
from tpoverlap.nn.elementwise import NormKind, norm_backward, norm_forward, norm_twin, pays
from tpoverlap.nn.inputs import note_refusal
from tpoverlap.nn.parameters import add_parameter, require_positive
from tpoverlap.nn.shard_spec import ShardSpec

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class NormOptions:
    """Which norm, and its numbers.

    Args:
        width: H.
        eps, normalization, zero_centered_gamma: see `LayerNormLinear`.
        manager: whose dtype and device rows have.
        ub_name: of the layer, for messages.

    Raises:
        ConfigError: ``normalization`` is neither "LayerNorm" nor "RMSNorm", or ``eps`` is not above 0 and finite.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        manager: UserBufferManager,
        ub_name: str | None,
    ) -> None:
        if normalization not in NORMALIZATIONS:
            raise ConfigError(f"normalization={normalization!r} is not known; use one of {', '.join(NORMALIZATIONS)}")
        require_positive("the norm's eps", eps)
        self.width, self.eps, self.normalization = width, eps, normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.kind = NormKind(normalization == "LayerNorm", zero_centered_gamma, eps)
        self._manager, self._ub_name = manager, ub_name

    def add_parameters(
        self,
        module: torch.nn.Module,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        *,
        sequence_parallel: bool,
    ) -> None:
        """``layer_norm_weight`` [H], and ``layer_norm_bias`` [H] (None for RMSNorm), on ``module``."""
        for name in ("layer_norm_weight", "layer_norm_bias"):
            module.register_parameter(name, None)
            if name == "layer_norm_weight" or self.normalization == "LayerNorm":
                spec = ShardSpec((self.width,))
                add_parameter(module, name, spec, self._manager, device, dtype, replicated=sequence_parallel)

    def reset(self, module: torch.nn.Module) -> None:
        """The identity scale: ones, or zeros where the scale is 1 + weight; no shift."""
        weight, bias = module.layer_norm_weight, module.layer_norm_bias
        assert isinstance(weight, torch.Tensor), "made by add_parameters"
        torch.nn.init.constant_(weight, 0.0 if self.zero_centered_gamma else 1.0)
        if isinstance(bias, torch.Tensor):
            torch.nn.init.zeros_(bias)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Normalise the rows of x [t, H]; ``zero_centered_gamma`` scales by 1 + weight.

        Raises:
            ActiveShapeError: x has another width, dtype or device. The GEMM behind would say so, but torch's norm comes
                first with words of its own, and a kernel would read weights that are not there.
        """
        if not (
            isinstance(x, torch.Tensor)
            and x.ndim == 2
            and x.shape[1] == self.width
            and x.dtype == self._manager.dtype
            and x.device == self._manager.device
        ):
            try:
                self._require_input(x)
            except ActiveShapeError as error:
                note_refusal(self._manager, error)
                raise
        return normalise(x, weight, bias, self.kind)

    def _require_input(self, x: torch.Tensor) -> None:
        manager = self._manager
        at_most_dtype = isinstance(x, torch.Tensor) and x.ndim == 2 and x.device == manager.device
        # Autocast's norms give float32 on GPUs, whatever they are given: there the GEMM looks at what comes out.
        if not (at_most_dtype and manager.dtype == torch.float32 and torch.is_autocast_enabled(manager.device.type)):
            manager.require_input(x, "the input", self._ub_name)
        if x.shape[1] != self.width:
            raise ActiveShapeError(
                f"{self._ub_name}: the input has {x.shape[1]} features, but this layer normalises {self.width}; "
                f"give it rows of that width, or make the layer with {x.shape[1]}"
            )


def normalise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: NormKind) -> torch.Tensor:
    """The norm of rows x [t, H]: the kernels of `tpoverlap.nn.elementwise.norms` for large x, else torch's."""
    if not pays(x, weight, bias):
        return norm_twin(x, weight, bias, kind)
    if not torch.is_grad_enabled():
        return norm_forward(x, weight, bias, kind)[0]
    y: torch.Tensor = apply(_Norm, x, weight, bias, kind)
    return y


class _Norm(torch.autograd.Function):
    """See `tpoverlap.nn.elementwise.norms`. Saved: x, the weight, one or two float32 a row."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: NormKind
    ) -> torch.Tensor:
        y, mean, rstd = norm_forward(x, weight, bias, kind)
        ctx.kind = kind
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        found = norm_backward(grads[0], x, weight, mean, rstd, ctx.kind, needs_weight=needs_weight or needs_bias)
        return (*found, None)
