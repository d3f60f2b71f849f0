"""How much Python an operation on a device still runs where C plays its tape, whatever the machine's load."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable

import pytest

from tests.costs import tape_call_ranks
from tpoverlap.testing import RankPool

PYTHON = {
    "ring all-gather": 44,
    "ring all-gather, read": 48,
    "ring reduce-scatter": 48,
    "ring reduce-scatter, two pieces": 46,
    "bulk all-gather": 58,
    "bulk reduce-scatter": 61,
    "sequential all-gather": 48,
    "sequential reduce-scatter": 45,
    "fused all-gather": 39,
    "fused reduce-scatter": 40,
}
"""Upper bounds of Python calls at R = 2, all checks, torch's own Python and GEMMs beside it included."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="tapes need a C compiler")
def test_calls_of_an_operation(rank_pool: Callable[[int], RankPool]) -> None:
    for rank, counted in enumerate(rank_pool(2).run(tape_call_ranks.tape_calls, 100, timeout_s=60)):
        for name, calls in counted.items():
            print(f"rank {rank}, {name}: {calls}")
            assert not calls.driver, f"{name}: {calls.driver} from Python"
            assert calls.python <= PYTHON[name], f"{name}: {calls.python} Python calls"
