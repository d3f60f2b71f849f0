"""How one tensor of a layer gets its scale: a quantizer a tensor, which for delayed scaling remembers magnitudes.

The order differs by recipe, and a caller that communicates needs to know it::

    measure(x) -> numbers that all ranks put together (float32 rows)
    delayed:            quantize(x, stored scale) -> ... -> record(numbers of all ranks), off the critical path
    current, row-wise:  numbers of all ranks -> scale -> quantize(x, scale)
"""

from __future__ import annotations

import torch

from tpoverlap.gemm.fp8.agreement import Agreement
from tpoverlap.gemm.fp8.quantize import QuantizedTensor, quantize, row_amax, scale_of, tensor_amax
from tpoverlap.gemm.fp8.recipes import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Recipe, Role


class Quantizer(torch.nn.Module):
    """One tensor's scales. Buffers of delayed scaling: ``amax_history`` [len] (newest first) and ``scale`` [1, 1].

    Args:
        recipe: where scales come from.
        role: "input", "weight" or "grad": which format.
    """

    amax_history: torch.Tensor
    scale: torch.Tensor

    def __init__(self, recipe: Recipe, role: Role, device: torch.device | None = None) -> None:
        super().__init__()
        self.recipe, self.role = recipe, role
        self.dtype = recipe.dtype(role)
        self._agreement = Agreement(recipe)
        if isinstance(recipe, DelayedScaling):
            history = torch.zeros(recipe.amax_history_len, dtype=torch.float32, device=device)
            self.register_buffer("amax_history", history)
            self.register_buffer("scale", torch.ones(1, 1, dtype=torch.float32, device=device))

    @property
    def is_delayed(self) -> bool:
        """Whether the scale is known before the tensor."""
        return isinstance(self.recipe, DelayedScaling)

    @property
    def is_rowwise(self) -> bool:
        """Whether `measure` gives one number a row, which is part of the tensor, not of a common scale."""
        return isinstance(self.recipe, Float8RowwiseScaling)

    @property
    def agreement(self) -> int:
        """What ranks compare before they use the scale of a tensor that travels. See `Agreement`."""
        if self.is_delayed:
            return self._agreement.value(self.amax_history, self.scale)
        return self._agreement.value()

    def measure(self, x: torch.Tensor) -> torch.Tensor:
        """Magnitudes of ``x``: float32 [1, 1], or [rows, 1] for row-wise scaling."""
        return row_amax(x) if self.is_rowwise else tensor_amax(x)

    def scale_from(self, amax: torch.Tensor) -> torch.Tensor:
        """The scale for magnitudes (of current and row-wise scaling)."""
        if isinstance(self.recipe, Float8CurrentScaling):
            recipe = self.recipe
            return scale_of(amax, self.dtype, power_of_2=recipe.use_power_2_scales, epsilon=recipe.amax_epsilon)
        return scale_of(amax, self.dtype)

    def local(self, x: torch.Tensor, *, record: bool) -> QuantizedTensor:
        """``x`` quantised by this rank alone: weights, and what is never gathered.

        Delayed scaling without any history takes the scale of ``x`` itself: nobody has to agree to it.

        Args:
            x: [rows, columns].
            record: delayed scaling: remember this magnitude for later scales (training).
        """
        if not isinstance(self.recipe, DelayedScaling):
            return quantize(x, self.scale_from(self.measure(x)), self.dtype)
        amax = self.measure(x)
        known = self.amax_history.max() > 0
        scale = torch.where(known, self.scale, scale_of(amax, self.dtype, margin=self.recipe.margin))
        quantised = quantize(x, scale, self.dtype)
        if record:
            self.record(amax)
        return quantised

    def with_stored_scale(self, x: torch.Tensor) -> QuantizedTensor:
        """Delayed scaling: quantise by what former steps left. The scale is copied: `record` changes the buffer."""
        return quantize(x, self.scale.clone(), self.dtype)

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
        fresh = scale_of(chosen.reshape(1, 1), self.dtype, margin=recipe.margin)
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
