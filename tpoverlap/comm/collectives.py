"""Plain, non-overlapped collectives over uneven shards: what `sequential` uses, and what overflow falls back to.

They go through ``torch.distributed`` and need no registered buffer. The reduce-scatter is an all-to-all followed by the
same float32 sum in rank order as everywhere else, so that a method and its twin differ by nothing but time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tpoverlap.comm.reduce import sum_in_rank_order
from tpoverlap.errors import PeerTimeoutError
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


FinishWork = Callable[[Any], None]


def wait_for_work(work: Any) -> None:
    """Wait as long as the group's own time-out allows."""
    work.wait()


def all_gather_rows(
    x_shard_t: torch.Tensor, partition: TokenPartition, group: ProcessGroup, finish: FinishWork = wait_for_work
) -> torch.Tensor:
    """[T_r, H] -> [T, H]. Uneven shards travel padded to the longest, because Gloo takes equal sizes only.

    ``finish`` waits for the collective; it may give up earlier than the group would.
    """
    if group.size() == 1:
        return x_shard_t
    width, longest = x_shard_t.shape[1], partition.max_count
    staged = _stage(x_shard_t.contiguous(), group)
    even = min(partition.counts) == longest
    if not even and staged.shape[0] < longest:
        staged = torch.cat([staged, staged.new_zeros(longest - staged.shape[0], width)])
    gathered = staged.new_empty(longest * group.size(), width)
    # Newer torch renames the function and warns about the old name.
    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    try:
        finish(gather(gathered, staged, group=group, async_op=True))
    except RuntimeError as error:
        raise _lost_peers(group, "all-gather", error) from error
    if not even:
        gathered = torch.cat([gathered[r * longest : r * longest + n] for r, n in enumerate(partition.counts)])
    return gathered.to(x_shard_t.device)


def reduce_scatter_rows(
    partial: torch.Tensor,
    partition: TokenPartition,
    group: ProcessGroup,
    out: torch.Tensor,
    finish: FinishWork = wait_for_work,
) -> None:
    """[T, N] partial sums -> ``out`` [T_r, N]: float32 sum in rank order, rounded once. ``finish`` as above."""
    rank, size = group.rank(), group.size()
    if size == 1:
        out.copy_(partial)
        return
    own_rows = partition.counts[rank]
    staged = _stage(partial.contiguous(), group)
    received = staged.new_empty(own_rows * size, staged.shape[1])
    try:
        work = dist.all_to_all_single(
            received,
            staged,
            output_split_sizes=[own_rows] * size,
            input_split_sizes=list(partition.counts),
            group=group,
            async_op=True,
        )
        finish(work)
    except RuntimeError as error:
        raise _lost_peers(group, "reduce-scatter", error) from error
    received = received.to(partial.device)
    sum_in_rank_order(received.view(size, own_rows, staged.shape[1]).unbind(0), out)


def _lost_peers(group: ProcessGroup, what: str, error: RuntimeError) -> PeerTimeoutError:
    """For "connection closed by peer" and the like."""
    return PeerTimeoutError(
        f"rank {group.rank()}: the plain {what} failed: {error}. A peer died or left the collective"
    )


def _stage(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    # Several ranks on one GPU have only Gloo, whose collectives do not take CUDA tensors in general.
    if tensor.is_cuda and "nccl" not in dist.get_backend(group):
        return tensor.cpu()
    return tensor
