"""How one tensor of a layer gets its scale: a quantizer a tensor, which for delayed scaling remembers magnitudes.

The order differs by recipe, and a caller that communicates needs to know it::

    delayed:   with_stored_scale(x) -> ... -> record(magnitudes of all ranks), off the critical path
    current:   magnitudes(x) -> those of all ranks -> by_maxima(x, magnitudes)
    row-wise:  local(x) -> scales of all ranks
"""

from __future__ import annotations

import torch

from tpoverlap.gemm.fp8 import plain
from tpoverlap.gemm.fp8.agreement import Agreement
from tpoverlap.gemm.fp8.quantize import (
    QuantizedTensor,
    quantize,
    quantize_by_maxima,
    quantize_local,
    quantize_rows,
    tensor_amax,
    tensor_maxima,
)
from tpoverlap.gemm.fp8.recipes import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Recipe, Role
from tpoverlap.gemm.fp8.scale_notes import is_repeating, note_scale, repeated_scale
from tpoverlap.gemm.fp8.scale_rule import ScaleRule


class Quantizer(torch.nn.Module):
    """One tensor's scales. Buffers of delayed scaling: ``amax_history`` [len] (newest first) and ``scale`` [1, 1].

    Args:
        recipe: where scales come from.
        role: "input", "weight" or "grad": which format.

    Attributes:
        is_delayed: the scale is known before the tensor.
        is_rowwise: scales are part of the tensor, one a row, not a common one.
        rule: how a magnitude becomes a scale.
    """

    amax_history: torch.Tensor
    scale: torch.Tensor

    def __init__(self, recipe: Recipe, role: Role, device: torch.device | None = None) -> None:
        super().__init__()
        self.recipe, self.role = recipe, role
        self.dtype = recipe.dtype(role)
        self.is_delayed = isinstance(recipe, DelayedScaling)
        self.is_rowwise = isinstance(recipe, Float8RowwiseScaling)
        self.rule = _rule(recipe, self.dtype)
        self._agreement = Agreement(recipe)
        if isinstance(recipe, DelayedScaling):
            history = torch.zeros(recipe.amax_history_len, dtype=torch.float32, device=device)
            self.register_buffer("amax_history", history)
            self.register_buffer("scale", torch.ones(1, 1, dtype=torch.float32, device=device))

    @property
    def agreement(self) -> int:
        """What ranks compare before they use the scale of a tensor that travels. See `Agreement`."""
        if self.is_delayed:
            return self._agreement.value(self.amax_history, self.scale)
        return self._agreement.value()

    def measure(self, x: torch.Tensor) -> torch.Tensor:
        """The magnitude of ``x``, for other ranks: float32 [1, 1]."""
        return tensor_amax(x)

    def magnitudes(self, x: torch.Tensor) -> torch.Tensor:
        """Those of parts of ``x``, for other ranks: float32 [n, 1], n the same for every tensor of the device. One
        kernel less than `measure`: `by_maxima` and `record` look for the largest anyway.
        """
        return tensor_maxima(x, shared=True)

    def by_maxima(self, x: torch.Tensor, maxima: torch.Tensor) -> QuantizedTensor:
        """``x`` under the scale of the largest of ``maxima``, float32 [n, 1] (current scaling)."""
        return quantize_by_maxima(x, maxima, self.rule)

    def local(self, x: torch.Tensor, *, record: bool, transposes: bool = False) -> QuantizedTensor:
        """``x`` quantised by this rank alone: weights, and what is never gathered.

        Delayed scaling without any history takes the scale of ``x`` itself: nobody has to agree to it.

        Args:
            x: [rows, columns].
            record: delayed scaling: remember this magnitude for later scales (training).
            transposes: make the transposed copy along, where there is one (not of row-wise scales).
        """
        if self.is_rowwise:
            return quantize_rows(x, self.dtype)
        if not self.is_delayed:
            return quantize_local(x, self.rule, transposes=transposes)
        repeated = repeated_scale(self)
        if repeated is not None:
            return quantize(x, repeated, self.dtype, transposes=transposes)
        amax = tensor_maxima(x).amax(0, keepdim=True)
        scale = torch.where(self.amax_history.max() > 0, self.scale, plain.scale_of(amax, self.rule))
        note_scale(self, scale)
        quantised = quantize(x, scale, self.dtype, transposes=transposes)
        if record and not is_repeating():
            self.record(amax)
        return quantised

    def with_stored_scale(self, x: torch.Tensor) -> QuantizedTensor:
        """Delayed scaling: quantise by what former steps left. The scale is copied: `record` changes the buffer."""
        scale = repeated_scale(self)
        if scale is None:
            scale = self.scale.clone()
            note_scale(self, scale)
        return quantize(x, scale, self.dtype)

    @torch.no_grad()
    def record(self, amax: torch.Tensor) -> None:
        """Delayed scaling: remember magnitudes (one a rank) and compute the next scale.

        One that is not finite is remembered as 0: an overflow must not hold the scale up for a whole history. A history
        of zeros keeps the scale as it is.
        """
        recipe = self.recipe
        assert isinstance(recipe, DelayedScaling), "only delayed scaling has a history"
        known = self._agreement.knows(self.amax_history, self.scale)
        newest = amax.max().reshape(1)
        newest = torch.where(torch.isfinite(newest), newest, torch.zeros_like(newest))
        self.amax_history.copy_(torch.cat([newest, self.amax_history[:-1]]))
        chosen = self.amax_history.max() if recipe.amax_compute_algo == "max" else self.amax_history[0]
        fresh = plain.scale_of(chosen.reshape(1, 1), self.rule)
        self.scale.copy_(torch.where(chosen > 0, fresh, self.scale))
        self._agreement.written(self.amax_history, self.scale, known=known)

    def _apply(self, fn: object, recurse: bool = True) -> Quantizer:
        """``module.to(bfloat16)`` moves the buffers, but keeps them float32."""
        before = {name: buffer for name, buffer in self.named_buffers(recurse=False)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype != torch.float32:
                setattr(self, name, before[name].to(buffer.device))
        return self

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.role}, {self.dtype}"


def _rule(recipe: Recipe, dtype: torch.dtype) -> ScaleRule:
    if isinstance(recipe, Float8CurrentScaling):
        return ScaleRule(dtype, power_of_2=recipe.use_power_2_scales, epsilon=recipe.amax_epsilon)
    return ScaleRule(dtype, margin=recipe.margin if isinstance(recipe, DelayedScaling) else 0)
