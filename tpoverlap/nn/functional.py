"""The functions users call: argument checks, then the autograd functions of `column`, `row` and `bulk`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.communicator import CommOverlap, Communicators
from tpoverlap.errors import ActiveShapeError, TpOverlapError
from tpoverlap.gemm.fp8 import Fp8State
from tpoverlap.nn.autograd import apply, is_compiling, uncompiled
from tpoverlap.nn.bulk import BulkAllGather, BulkReduceScatter
from tpoverlap.nn.column import ColumnLinear
from tpoverlap.nn.fp8 import Fp8ColumnLinear, Fp8RowLinear, require_fp8_gemm, require_unquantised
from tpoverlap.nn.inputs import (
    as_layer,
    full_partition,
    note_refusal,
    require_communicator,
    require_matmul,
    require_output_width,
    shard_partition,
)
from tpoverlap.nn.layer_view import LayerView
from tpoverlap.nn.row import RowLinear
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager

Bias = torch.Tensor | Sequence[torch.Tensor | None] | None


def all_gather_gemm(
    x_shard_t: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    comm: Communicators,
    bias: Bias = None,
    partition: TokenPartition | None = None,
    return_gathered: bool = False,
    fp8: Fp8State | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Y = all_gather(x_shard_t) @ weight.T + bias, with the gather hidden behind the GEMM. Differentiable.

    Args:
        x_shard_t: [T_r, K], this rank's rows, in the manager's dtype.
        weight: [N, K], or several weights that share one gather (and one reduce-scatter in backward).
        comm: ``mgr.layer(name)``, or one of its communicators.
        bias: [N], or one (or None) a weight.
        partition: rows of each rank; None: the active shape, else T = R * T_r.
        return_gathered: also return the gathered x, an ordinary differentiable [T, K] tensor.
        fp8: this layer's FP8 state: the gather then moves FP8 rows, and all its GEMMs run in FP8 (`tpoverlap.nn.fp8`).

    Returns:
        [T, N]; a tuple of them for several weights; the gathered x comes last if asked for.

    Raises:
        ActiveShapeError: a tensor contradicts the active shape, the registered width, the dtype or the device.
        CapacityError: T does not fit. ConfigError: ``comm`` is for reduce-scatter, or FP8 is not to be had here.
        RankMismatchError, PeerTimeoutError: see docs/protocol.md.
    """
    if is_compiling():
        return uncompiled(all_gather_gemm, x_shard_t, weight, comm, bias, partition, return_gathered, fp8)
    layer = comm if comm.__class__ is LayerView else as_layer(comm, row=False)
    weights = [weight] if isinstance(weight, torch.Tensor) else list(weight)
    biases = [bias] * len(weights) if bias is None or isinstance(bias, torch.Tensor) else list(bias)
    if not weights or len(biases) != len(weights):
        raise ActiveShapeError(
            f"{layer.name}: {len(weights)} weights but {len(biases)} biases; give at least one weight, and one bias or "
            "None for each"
        )
    manager = layer.manager
    try:
        resolved = shard_partition(layer.fprop, x_shard_t, partition)
        require_matmul(layer.fprop, x_shard_t, weights)
        for index, (one_weight, one_bias) in enumerate(zip(weights, biases, strict=True)):
            if one_bias is not None:
                biases[index] = _checked_bias(layer.name, one_weight, one_bias)
    except TpOverlapError as error:
        note_refusal(manager, error)
        raise
    outputs: tuple[torch.Tensor, ...]
    if fp8 is None:
        if isinstance(comm, CommOverlap):
            require_unquantised(comm)
        outputs = _apply(
            manager, ColumnLinear, layer, resolved, return_gathered, x_shard_t, len(weights), *weights, *biases
        )
    else:
        require_fp8_gemm(layer, fp8, x_shard_t, weights)
        outputs = _apply(
            manager, Fp8ColumnLinear, layer, resolved, return_gathered, fp8, x_shard_t, len(weights), *weights, *biases
        )
    return outputs[0] if isinstance(weight, torch.Tensor) and not return_gathered else outputs


def gemm_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    comm: Communicators,
    bias: torch.Tensor | None = None,
    partition: TokenPartition | None = None,
    fp8: Fp8State | None = None,
) -> torch.Tensor:
    """y_shard = reduce_scatter(x @ weight.T) + bias, with the scatter hidden behind the GEMM. Differentiable.

    Args:
        x: [T, K], all tokens, this rank's features.
        weight: [N, K]; N is the communicated width.
        comm: ``mgr.layer(name)``, or one of its communicators.
        bias: [N], added once by the rank that owns the row. Its gradient covers own rows only: see
            `sync_replicated_grads`.
        partition: rows of each rank; None: the active shape, else balanced.
        fp8: this layer's FP8 state: all its GEMMs run in FP8, backward gathers FP8 rows, and with ``fp8_buf`` in the
            configuration the reduce-scatter moves FP8 rows, too.

    Returns:
        [T_r, N]: float32 sum in rank order of partial sums rounded once, rounded once.

    Raises:
        As `all_gather_gemm`.
    """
    if is_compiling():
        return uncompiled(gemm_reduce_scatter, x, weight, comm, bias, partition, fp8)
    layer = comm if comm.__class__ is LayerView else as_layer(comm, row=True)
    try:
        resolved = full_partition(layer.fprop, x, partition)
        require_matmul(layer.fprop, x, [weight])
        require_output_width(layer.fprop, weight.shape[0])
        if bias is not None:
            bias = _checked_bias(layer.name, weight, bias)
    except TpOverlapError as error:
        note_refusal(layer.manager, error)
        raise
    result: torch.Tensor
    if fp8 is None:
        if isinstance(comm, CommOverlap):
            require_unquantised(comm)
        result = _apply(layer.manager, RowLinear, layer, resolved, x, weight, bias)
    else:
        require_fp8_gemm(layer, fp8, x, [weight])
        result = _apply(layer.manager, Fp8RowLinear, layer, resolved, fp8, x, weight, bias)
    return result


def bulk_all_gather(
    x_shard_t: torch.Tensor,
    comm: CommOverlap,
    gemm: tuple[torch.Tensor, torch.Tensor],
    partition: TokenPartition | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(all_gather(x_shard_t) [T, H], a @ b.T) for ``gemm=(a, b)``, the gather beside the independent GEMM."""
    if is_compiling():
        return uncompiled(bulk_all_gather, x_shard_t, comm, gemm, partition)
    require_communicator(comm, scatter=False)
    try:
        resolved = shard_partition(comm, x_shard_t, partition)
        a, b = _require_operands(comm, gemm)
    except TpOverlapError as error:
        note_refusal(comm.manager, error)
        raise
    gathered, product = _apply(comm.manager, BulkAllGather, comm, resolved, x_shard_t, a, b)
    return gathered, product


def bulk_reduce_scatter(
    y: torch.Tensor,
    comm: CommOverlap,
    gemm: tuple[torch.Tensor, torch.Tensor],
    partition: TokenPartition | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(reduce_scatter(y) [T_r, H], a @ b.T) for ``gemm=(a, b)``, the scatter beside the independent GEMM."""
    if is_compiling():
        return uncompiled(bulk_reduce_scatter, y, comm, gemm, partition)
    require_communicator(comm, scatter=True)
    try:
        resolved = full_partition(comm, y, partition, "y")
        require_output_width(comm, y.shape[1])
        a, b = _require_operands(comm, gemm)
    except TpOverlapError as error:
        note_refusal(comm.manager, error)
        raise
    shard, product = _apply(comm.manager, BulkReduceScatter, comm, resolved, y, a, b)
    return shard, product


class _Unrecorded:
    """The ``ctx`` of a forward that no backward follows: what is written to it goes nowhere, so all calls share one."""

    __slots__ = ("needs_input_grad",)
    needs_input_grad: tuple[bool, ...]

    def __init__(self, num_inputs: int) -> None:
        object.__setattr__(self, "needs_input_grad", (False,) * num_inputs)

    def __setattr__(self, name: str, value: object) -> None:
        pass

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Nothing: they live as long as the caller keeps them."""


_unrecorded: Callable[[int], _Unrecorded] = lru_cache(maxsize=64)(_Unrecorded)


def _apply(manager: UserBufferManager, function: type[torch.autograd.Function], *arguments: Any) -> Any:
    device_type = manager.device.type
    if torch.is_autocast_enabled(device_type):
        # The operands' dtype was checked against the manager's; a GEMM that casts its output would not fit the buffers.
        with torch.autocast(device_type, enabled=False):
            return _apply(manager, function, *arguments)
    if torch.is_grad_enabled():
        for argument in reversed(arguments):  # parameters come last, and nearly always train
            if isinstance(argument, torch.Tensor) and argument.requires_grad:
                return apply(function, *arguments)
    return function.forward(_unrecorded(len(arguments)), *arguments)  # `apply` costs as much as all checks together


def _require_operands(comm: CommOverlap, gemm: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = gemm
    for name, operand in (("a", a), ("b", b)):
        if operand.dim() != 2:
            raise ActiveShapeError(f"{comm.name}: gemm operand {name} must be 2-D, got {list(operand.shape)}")
        if operand.device != comm.manager.device:
            raise ActiveShapeError(
                f"{comm.name}: gemm operand {name} is on {operand.device}, but the manager is on "
                f"{comm.manager.device}; move it"
            )
    if a.shape[1] != b.shape[1] or a.dtype != b.dtype:
        raise ActiveShapeError(
            f"{comm.name}: gemm=(a, b) is for a @ b.T, but a is {list(a.shape)} {a.dtype}, b {list(b.shape)} {b.dtype}"
        )
    return a, b


def _checked_bias(name: str, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``bias``, contiguous: kernels read it by its address."""
    if bias.shape != weight.shape[:1] or bias.dtype != weight.dtype or bias.device != weight.device:
        raise ActiveShapeError(
            f"{name}: the bias is {list(bias.shape)} {bias.dtype} on {bias.device}, the weight {list(weight.shape)} "
            f"{weight.dtype} on {weight.device} needs [{weight.shape[0]}], with its dtype and device"
        )
    return bias.contiguous()
