"""How much the host does for one FP8 layer's forward and backward on a GPU, beside transfers and GEMMs."""

from __future__ import annotations

from collections.abc import Callable

from tests.costs import fp8_layer_ranks
from tpoverlap.testing import RankPool

BOUNDS = {"with operations": (630, 620), "compute only": (465, 480)}
"""Upper bounds of Python and of C calls, launches of kernels, torch's own Python and autograd's included."""
LAUNCHES = 38


def test_calls_of_an_fp8_transformer_layer(rank_pool: Callable[[int], RankPool]) -> None:
    for rank, counted in enumerate(rank_pool(2).run(fp8_layer_ranks.fp8_layer_calls, timeout_s=60)):
        assert set(counted) == set(BOUNDS)
        for name, calls in counted.items():
            print(f"rank {rank}, {name}: {calls.python} Python and {calls.c} C calls, {calls.launches} launches")
            assert calls.launches == LAUNCHES, "28 of FP8, 10 of norms, activation and heads: each by address"
            for what, count, most in zip(("Python", "C"), (calls.python, calls.c), BOUNDS[name], strict=True):
                assert 0 < count <= most, f"{name}: {count} {what} calls, bound {most}"
