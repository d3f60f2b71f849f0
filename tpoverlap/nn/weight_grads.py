"""Where a weight's gradient goes, and when: autograd, ``main_grad``, or a queue that `backward_dw` empties.

==================================  ===================================================================================
option                              dW = dy^T x
==================================  ===================================================================================
none                                is returned to autograd
``fuse_wgrad_accumulation``         is added to ``weight.main_grad`` (float32, or the weight's dtype)
``delay_wgrad_compute``             waits, with dy and x, until ``backward_dw()``; then goes to ``weight.grad``
both                                waits, then is added to ``weight.main_grad``
==================================  ===================================================================================

What autograd gets under ``fuse_wgrad_accumulation`` is Megatron's convention: None, unless the weight has the attribute
``grad_added_to_main_grad``. That is then set to True and a tensor is returned, so that hooks which wait for a gradient
fire: zeros if ``weight.zero_out_wgrad``, else uninitialised memory that its reader drops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.gemm import weight_grad


class DelayedWork:
    """First in, first out: one entry a backward pass, whether or not anything had to be computed."""

    def __init__(self) -> None:
        self._pending: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def __deepcopy__(self, memo: dict[int, object]) -> DelayedWork:
        """A copied layer has no backward pass behind it."""
        return DelayedWork()

    def push(self, work: Callable[[], None]) -> None:
        """Keep ``work`` for later."""
        self._pending.append(work)

    def run_oldest(self, name: str) -> None:
        """Do the oldest entry. Raises ConfigError when there is none."""
        if not self._pending:
            raise ConfigError(f"{name}: backward_dw() was called, but no backward pass waits for it")
        with torch.no_grad():
            self._pending.popleft()()


@dataclass(frozen=True)
class WeightGrads:
    """What one layer does with its weight gradients; see the table above.

    Attributes:
        accumulate: add to ``main_grad``.
        delayed: the queue; None: at once.
        needs_parameters: whether gradients are written to the parameters themselves.
    """

    accumulate: bool = False
    delayed: DelayedWork | None = None
    needs_parameters: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_parameters", self.accumulate or self.delayed is not None)

    def require_target(self, name: str, weight: torch.Tensor) -> None:
        """Before a forward that will be differentiated: raise ConfigError unless ``main_grad`` fits."""
        if not self.accumulate or not weight.requires_grad or not torch.is_grad_enabled():
            return
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            raise ConfigError(
                f"{name}: fuse_wgrad_accumulation=True needs weight.main_grad, a {list(weight.shape)} tensor of "
                "float32 or the weight's dtype; set it before forward (Megatron's DDP does)"
            )
        if main_grad.shape != weight.shape or main_grad.dtype not in (torch.float32, weight.dtype):
            raise ConfigError(
                f"{name}: main_grad is {list(main_grad.shape)} {main_grad.dtype}, the weight {list(weight.shape)} "
                f"{weight.dtype} needs its own shape, in float32 or its own dtype"
            )

    def compute(
        self,
        parameters: Sequence[torch.Tensor],
        needed: Sequence[bool],
        output_grads: Sequence[torch.Tensor],
        x: torch.Tensor,
        multiply: Multiply | None = None,
    ) -> list[torch.Tensor | None]:
        """What autograd gets for each weight.

        Args:
            parameters: the weights themselves, [N_i, K]; used only if `needs_parameters`.
            needed: whether each trains.
            output_grads: dy, [T, N_i] each, contiguous.
            x: [T, K], the input that all of them share. A delayed GEMM reads it later: not a view of a buffer then.
            multiply: gives dW of weight number i; None: ``output_grads[i]^T @ x``.

        Raises:
            ConfigError: of a delayed GEMM, when it is done: dy or x was written to meanwhile.
        """
        if self.delayed is not None:
            read = () if multiply is not None else (*output_grads, x)  # FP8 has copies of its own
            versions = [tensor._version for tensor in read]

            def write() -> None:
                _require_unwritten(read, versions)
                self._write(parameters, needed, output_grads, x, multiply)

            self.delayed.push(write)
            return [None] * len(needed)
        if self.accumulate:
            self._write(parameters, needed, output_grads, x, multiply)
            return [_dummy(weight) if one else None for weight, one in zip(parameters, needed, strict=True)]
        if multiply is not None:
            return [multiply(index) if one else None for index, one in enumerate(needed)]
        return [weight_grad(dy, x) if one else None for dy, one in zip(output_grads, needed, strict=True)]

    def skip(self, num_weights: int) -> list[torch.Tensor | None]:
        """No weight trains: nothing to gather, but `backward_dw` still finds its entry."""
        if self.delayed is not None:
            self.delayed.push(lambda: None)
        return [None] * num_weights

    def _write(
        self,
        parameters: Sequence[torch.Tensor],
        needed: Sequence[bool],
        output_grads: Sequence[torch.Tensor],
        x: torch.Tensor,
        multiply: Multiply | None,
    ) -> None:
        for index, (weight, one, dy) in enumerate(zip(parameters, needed, output_grads, strict=True)):
            if not one or not weight.requires_grad:  # frozen since its forward: as autograd, no gradient
                continue
            if multiply is not None:
                grad = multiply(index)
                if self.accumulate:
                    weight.main_grad.add_(grad)  # type: ignore[attr-defined]  # Megatron's attribute
                else:
                    weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
            elif self.accumulate:
                _add_weight_grad(weight.main_grad, dy, x)  # type: ignore[attr-defined]  # Megatron's attribute
            elif weight.grad is None:
                weight.grad = weight_grad(dy, x)
            else:
                _add_weight_grad(weight.grad, dy, x)


Multiply = Callable[[int], torch.Tensor]

PLAIN: Final = WeightGrads()
"""What functions do that were called without a layer."""


def _add_weight_grad(total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    if total.dtype == dy.dtype:
        total.addmm_(dy.t(), x)
    else:
        total.add_(weight_grad(dy, x))  # no GEMM of torch's adds to another dtype than its operands' on every device


def _require_unwritten(tensors: Sequence[torch.Tensor], versions: list[int]) -> None:
    """What autograd checks when backward reads a saved tensor; a delayed GEMM reads the caller's later still."""
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise ConfigError(
                f"delay_wgrad_compute=True keeps the layer's input and the gradient of its output until backward_dw(), "
                f"but one of them, {list(tensor.shape)} {tensor.dtype}, was written to in place since backward (it is "
                f"at version {tensor._version}, not {version}); call backward_dw() before, or give backward a copy"
            )


def _dummy(weight: torch.Tensor) -> torch.Tensor | None:
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, memory_format=torch.contiguous_format, requires_grad=False)
