"""CONFORMANCE.md 1, 2, 4 and 10 in FP8, on the CPU: every method, recipe and backward mode, every T.

Cases come in pairs, a mode in current scaling and in another recipe. One and two ranks take all in shared memory; three
ranks take one of each pair, in turn, and four ranks the other one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tpoverlap.testing.conformance import Case, Setting, fp8
from tpoverlap.testing.conformance.catalogue_fp8 import fp8_cases

RunCases = Callable[[int, list[Case]], None]
MODES = {"column": fp8.COLUMN_MODES, "row": fp8.ROW_MODES}
SETTINGS = [
    (1, torch.float32, "shared"),
    (2, torch.float32, "shared"),
    (3, torch.bfloat16, "shared"),
    # 16 bits change no schedule: a 16-bit type runs every case on one rank, and on two and three with --slow.
    (1, torch.float16, "shared"),
    pytest.param(2, torch.bfloat16, "shared", marks=pytest.mark.slow),
    pytest.param(3, torch.float16, "shared", marks=pytest.mark.slow),
    (4, torch.float32, "shared"),
    (2, torch.bfloat16, "process_group"),
]


@pytest.mark.parametrize(("size", "dtype", "backend"), SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["column", "row", "mixed"])
def test_fp8(size: int, dtype: torch.dtype, backend: str, kind: str, run_cases: RunCases) -> None:
    setting = Setting(dtype=dtype, backend=backend, hidden=112, features=32, capacity=132)
    cases = [case for case in fp8_cases(setting, size) if case.id.startswith(f"fp8-{kind}")]
    if (size > 2 or backend == "process_group") and kind != "mixed":
        turn = (1, 2) if size == 3 else (0, 3)
        cases = [case for number, case in enumerate(cases) if number % 4 in turn]
        recipes = {case.args[1] for case in cases}
        assert len(recipes) > 1 and {case.args[2] for case in cases} == set(MODES[kind])
    assert cases
    run_cases(size, cases)
