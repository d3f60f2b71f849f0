"""How much the host does for one layer's forward and backward, in numbers that do not depend on the machine's load."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.costs import layer_ranks
from tpoverlap.testing import RankPool


class Bound(NamedTuple):
    """Upper bounds of one forward and backward; `layer_ranks.LayerCalls` says of what."""

    python: int
    dispatches: int
    nodes: int


BOUNDS = {
    "with operations": Bound(1250, 215, 34),
    "compute only": Bound(212, 180, 34),
    layer_ranks.CUDA: Bound(220, 47, 10),
}
"""On the CPU norms, positions and gates are several operations each; the last row has the calls that a GPU gets."""


def test_calls_of_a_transformer_layer(rank_pool: Callable[[int], RankPool]) -> None:
    for rank, counted in enumerate(rank_pool(2).run(layer_ranks.layer_calls, timeout_s=60)):
        assert set(counted) == set(BOUNDS)
        for name, calls in counted.items():
            bound, found = BOUNDS[name], Bound(calls.python, calls.dispatches, calls.nodes)
            print(f"rank {rank}, {name}: {found}, {calls.c} C calls")
            for what, most, count in zip(Bound._fields, bound, found, strict=True):
                assert 0 < count <= most, f"{name}: {count} {what}, bound {most}"
