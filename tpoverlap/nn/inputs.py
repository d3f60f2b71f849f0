"""What every function of this layer does first: resolve the communicators and the partition, and refuse bad tensors.

Everything here runs before any rank waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

import torch

from tpoverlap.communicator import CommOverlap, Communicators, LayerCommunicators
from tpoverlap.errors import ActiveShapeError, ConfigError
from tpoverlap.nn.layer_view import LayerView
from tpoverlap.nn.recompute import note_shape, recording
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager


def as_layer(comm: Communicators, *, row: bool) -> LayerCommunicators:
    """The three communicators to use, from a layer or from one of its communicators.

    Raises:
        ConfigError: ``comm`` is something else, or communicates in the other direction.
    """
    if isinstance(comm, LayerView):
        return comm
    if isinstance(comm, LayerCommunicators):
        return comm.manager.layer(comm.name, row=row)
    if isinstance(comm, CommOverlap):
        base, _, phase = comm.name.rpartition("_")
        if phase == "fprop" and base:
            return comm.manager.layer(base, row=row)
        require_direction(comm, scatter=row)
        # No layer's name: its own options and regions serve backward too, whose widths are the same.
        return LayerCommunicators(comm.manager, comm.name, comm, comm, None)
    raise ConfigError(
        f"comm must be mgr.layer(...) or a communicator from mgr.get(...), got {type(comm).__name__} {comm!r}"
    )


def require_communicator(comm: CommOverlap, *, scatter: bool) -> None:
    """For functions that take one communicator: raise ConfigError unless it is one, and of this direction."""
    if not isinstance(comm, CommOverlap):
        raise ConfigError(f"comm must be one communicator, mgr.get('..._dgrad') for example, got {type(comm).__name__}")
    if comm.is_reduce_scatter != scatter and comm.manager.has_fixed_direction(comm.name):
        require_direction(comm, scatter=scatter)


def require_direction(comm: CommOverlap, *, scatter: bool) -> None:
    """Raise ConfigError when ``comm`` is configured for the other direction."""
    if comm.is_reduce_scatter != scatter:
        used = "reduce-scatter" if scatter else "all-gather"
        raise ConfigError(
            f"{comm.name} is configured for {comm.config.direction}, but it is used for {used}; "
            "use a name of that direction (is_reduce_scatter in ub_cfgs gives your own names one)"
        )


def shard_partition(
    comm: CommOverlap, x_shard_t: torch.Tensor, partition: TokenPartition | None, what: str = "x_shard_t"
) -> TokenPartition:
    """The partition whose own rows ``x_shard_t`` [T_r, H] holds: explicit, else active, else T = R * T_r.

    Raises:
        ActiveShapeError: the input contradicts it, or its width, dtype or device is wrong. CapacityError: too large.
    """
    manager = comm.manager
    manager.require_input(x_shard_t, what)
    rows, features = x_shard_t.shape
    if comm.registered and features != comm.width:  # a name without a buffer takes any width
        _refuse_width(comm, features, what)
    resolved = _active(comm, partition)
    if resolved is None:
        if rows == 0:
            raise ActiveShapeError(f"{comm.name}: T cannot be inferred from an empty shard; set the active shape")
        resolved = _even(rows, manager.tp_size)
    own = resolved.counts[manager.rank]
    if rows != own:
        raise ActiveShapeError(
            f"{comm.name}: {what} has {rows} rows, but rank {manager.rank} owns {own} of the active "
            f"T={resolved.total} (rows a rank: {list(resolved.counts)}); set the active shape of this microbatch"
        )
    if resolved.total > comm.max_tokens or resolved.max_count > comm.max_rows_per_rank:
        comm.require_capacity(resolved)
    if manager.channel is not None and manager.channel.holds(x_shard_t):
        _require_own_place(comm, x_shard_t, resolved)
    return resolved


def _require_own_place(comm: CommOverlap, x_shard_t: torch.Tensor, partition: TokenPartition) -> None:
    """Raise ActiveShapeError for an input in the coming slot that is not where this rank's rows go under ``partition``:
    peers are about to write over it.
    """
    channel, manager = comm.manager.channel, comm.manager
    if channel is None or x_shard_t.numel() == 0:
        return
    start, end, own = channel.next_slot_addresses(
        comm.gather_region, partition.rows(manager.rank).start * comm.width * x_shard_t.element_size()
    )
    if start <= x_shard_t.data_ptr() < end and x_shard_t.data_ptr() != own:
        raise ActiveShapeError(
            f"{comm.name}: the input lies in the communication buffer, but not where rank {manager.rank}'s rows of "
            f"{list(partition.counts)} go; take get_buffer(local_chunk=True) after setting the shape, or clone it"
        )


def full_partition(
    comm: CommOverlap, x: torch.Tensor, partition: TokenPartition | None, what: str = "x"
) -> TokenPartition:
    """The partition of ``x`` [T, ...]: explicit, else active, else balanced over its rows. Raises as above."""
    manager = comm.manager
    manager.require_input(x, what)
    resolved = _active(comm, partition)
    if resolved is None:
        if x.shape[0] == 0:
            raise ActiveShapeError(f"{comm.name}: {what} has no row, and T cannot be 0; set the active shape")
        resolved = _balanced(x.shape[0], manager.tp_size)
    if x.shape[0] != resolved.total:
        raise ActiveShapeError(
            f"{comm.name}: {what} has {x.shape[0]} rows, but the active shape says T={resolved.total}; "
            "set the active shape of this microbatch"
        )
    if resolved.total > comm.max_tokens or resolved.max_count > comm.max_rows_per_rank:
        comm.require_capacity(resolved)
    return resolved


def note_refusal(manager: UserBufferManager, error: BaseException) -> None:
    """``error`` is raised before this rank starts an operation: where peers wait for it, `close` says why."""
    if manager.channel is not None:
        manager.channel.diagnosis.refused(error)


def require_matmul(comm: CommOverlap, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """Raise ActiveShapeError unless every weight is [N, K] with the input's K, dtype and device."""
    manager, features = comm.manager, x.shape[1]
    for weight in weights:
        manager.require_input(weight, "weight", comm.name)
        if weight.shape[1] != features:
            raise ActiveShapeError(
                f"{comm.name}: x has {x.shape[1]} features, the weight {list(weight.shape)} takes {weight.shape[1]}"
            )


def require_output_width(comm: CommOverlap, num_features: int) -> None:
    """Raise ActiveShapeError unless a reduce-scattered output has the registered width."""
    if comm.registered and num_features != comm.width:
        raise ActiveShapeError(
            f"{comm.name}: the communicated output has {num_features} features, but width {comm.width} was registered; "
            "register another name with mgr.register(name, width=...)"
        )


def keepable(manager: UserBufferManager, tensor: torch.Tensor) -> torch.Tensor:
    """What autograd may save of ``tensor``: itself, or a copy if it is a view of memory that operations overwrite."""
    # An empty tensor has no address to look at, and may be a view of the buffer: its version changes with it.
    in_buffer = tensor.numel() == 0 or (manager.channel is not None and manager.channel.holds(tensor))
    return tensor.clone() if in_buffer else tensor


@lru_cache(maxsize=256)
def _even(rows: int, tp_size: int) -> TokenPartition:
    return TokenPartition.even(rows * tp_size, tp_size)


@lru_cache(maxsize=256)
def _balanced(num_tokens: int, tp_size: int) -> TokenPartition:
    return TokenPartition.balanced(num_tokens, tp_size)


def _refuse_width(comm: CommOverlap, features: int, what: str) -> NoReturn:
    raise ActiveShapeError(
        f"{comm.name}: {what} has {features} features, but width {comm.width} was registered; "
        "register another name with mgr.register(name, width=...)"
    )


def _active(comm: CommOverlap, partition: TokenPartition | None) -> TokenPartition | None:
    if recording.get():
        note_shape(comm.manager.active)
    if partition is not None:
        if isinstance(partition, TokenPartition) and len(partition.counts) == comm.manager.tp_size:
            return partition
        return comm.manager.active.parse(None, partition)  # which says what is wrong with it
    return comm.partition
