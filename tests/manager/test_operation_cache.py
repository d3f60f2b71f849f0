"""What operations need is kept by T, whichever object says it; and an id is never mistaken for another partition's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.operation_cache import _MOST, OperationCache, OperationUse
from tpoverlap.testing import RankPool
from tpoverlap.tokens import TokenPartition

Pools = Callable[[int], RankPool]


def use_of(partition: TokenPartition, *, scatter: bool = False) -> OperationUse:
    return id(partition), scatter, False, None, 0, False


def context(name: str) -> Any:
    return cast(Any, name)


def test_equal_partitions_share_a_context() -> None:
    cache = OperationCache()
    first, same, other = (TokenPartition.from_counts(counts) for counts in ([3, 2], [3, 2], [2, 3]))
    assert cache.get(use_of(first)) is None and cache.again(first, use_of(first)) is None
    cache.keep(first, use_of(first), context("a"))
    assert cache.get(use_of(first)) == "a" and cache.get(use_of(same)) is None
    assert cache.again(same, use_of(same)) == "a" == cache.get(use_of(same))
    assert cache.again(other, use_of(other)) is None, "other counts of the same T"
    assert cache.again(same, use_of(same, scatter=True)) is None, "another use"
    cache.clear()
    assert cache.get(use_of(first)) is None and cache.again(first, use_of(first)) is None


def test_an_id_belongs_to_one_partition() -> None:
    """Partitions that were asked about are held, or a later one might be given their id and take their context."""
    cache, wrong = OperationCache(), []
    for number in range(3000):
        counts = [number % 700, 1]
        partition = TokenPartition.from_counts(counts)
        use = use_of(partition)
        found = cache.get(use) or cache.again(partition, use)
        if found is None:
            cache.keep(partition, use, context(str(counts)))
        elif found != str(counts):
            wrong.append((found, counts))
        del partition
    assert not wrong
    assert len(cache._by_object) <= _MOST and len(cache._by_counts) <= _MOST and len(cache._partitions) <= _MOST


def contexts_of_microbatches(rank: int, size: int) -> list[int]:
    """How many contexts have been made after each microbatch; the numbers are right in all of them."""
    made, counts = 0, []
    with tpo.UserBufferManager(dist.group.WORLD, (64, 8), torch.float32, "cpu", backend="shared") as mgr:
        real = mgr._new_operation

        def counting(*arguments: Any) -> Any:
            nonlocal made
            made += 1
            return real(*arguments)

        mgr._new_operation = counting  # type: ignore[method-assign]
        weight = torch.ones(6, 8)
        for num_tokens in (64, 64, 5, 64, 5):
            x = torch.arange(num_tokens * 8, dtype=torch.float32).view(num_tokens, 8)
            with mgr.microbatch(num_tokens) as partition:
                for _ in range(2):
                    y = tpo.all_gather_gemm(x[partition.rows(rank)], weight, mgr.layer("qkv"))
                    assert torch.equal(cast(torch.Tensor, y), x @ weight.t())
            counts.append(made)
    return counts


def test_a_repeated_T_is_not_worked_out_again(rank_pool: Pools) -> None:
    assert rank_pool(2).run(contexts_of_microbatches, timeout_s=60) == [[1, 1, 2, 2, 2]] * 2
