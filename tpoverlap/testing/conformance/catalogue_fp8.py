"""The list of FP8 checks. Feature sizes of the setting must be multiples of 16."""

from __future__ import annotations

from collections.abc import Iterator

from tpoverlap.testing.conformance import fp8
from tpoverlap.testing.conformance.catalogue import Case
from tpoverlap.testing.conformance.setting import Setting


def fp8_cases(setting: Setting, size: int) -> Iterator[Case]:
    """Cases 1, 2, 4 and 10; on GPUs in bf16, since tensor cores add FP8 products with fewer digits than float32 has.

    Every mode once by current scaling; the other recipes take turns on them.
    """
    others = [name for name in fp8.RECIPES if name != "current"]
    for number, mode in enumerate(fp8.COLUMN_MODES):
        for recipe in ("current", others[number % len(others)]):
            count = 1 + number % 2
            yield Case(f"fp8-column-{mode}-{recipe}-{count}", 1, fp8.check_column, (setting, recipe, mode, count))
    for number, mode in enumerate(fp8.ROW_MODES):
        for recipe in ("current", others[number % len(others)]):
            yield Case(f"fp8-row-{mode}-{recipe}", 2, fp8.check_row, (setting, recipe, mode))
    yield Case("fp8-mixed", 10, fp8.check_mixed, (setting,))


def fp8_kernel_cases(setting: Setting, size: int) -> Iterator[Case]:
    """Cases 1, 2 and 4 under `fused`: every recipe where the copy engine copies, one where programs do."""
    for mode in fp8.KERNEL_COLUMN_MODES:
        for number, recipe in enumerate(fp8.RECIPES if mode == "fused" else ("current",)):
            count = 1 + number % 2
            yield Case(f"fp8-column-{mode}-{recipe}-{count}", 1, fp8.check_column, (setting, recipe, mode, count))
    for mode in fp8.KERNEL_ROW_MODES:
        for recipe in fp8.RECIPES if mode == "fused" else ("current",):
            yield Case(f"fp8-row-{mode}-{recipe}", 2, fp8.check_row, (setting, recipe, mode))
