"""Rank functions of `test_misuses`."""

from __future__ import annotations

from tests.manager.misuses import MISUSES
from tests.manager.ranks import CAPACITY, Outcome, assert_right, make_manager, outcome_of
from tpoverlap.tokens import TokenPartition


def commit(rank: int, size: int, backend: str, offender: int | None) -> dict[str, Outcome]:
    """Every misuse, on rank ``offender`` or on all; after each, an operation of every rank gives right numbers.

    For a rank that tried a wrong input this is the retry, while its peers are in the operation already.
    """
    outcomes: dict[str, Outcome] = {}
    partitions = [TokenPartition.balanced(num_tokens, size) for num_tokens in (7, CAPACITY, 1)]
    with make_manager(backend=backend) as manager:
        for number, (name, misuse) in enumerate(MISUSES.items()):
            manager.set_active_shape()
            calls_before = manager.stats()
            if offender is None or rank == offender:
                outcomes[name] = outcome_of(lambda call=misuse.call: call(manager))  # type: ignore[misc]
            assert manager.partition is None, f"{name}: left the shape {manager.partition}"
            assert manager.stats() == calls_before, f"{name}: was counted as an operation"
            partition = partitions[number % len(partitions)]
            manager.set_active_shape(partition)
            assert_right(manager, partition)
            manager.check()
    return outcomes
