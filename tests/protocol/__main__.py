"""``python -m tests.protocol [--deep] [--traces]``: explore everything and print counts or counterexamples."""

from __future__ import annotations

import sys
import time

from .config import BROKEN
from .explorer import explore
from .scenarios import BROKEN_RULES, DEEP, HOLDS, REDUNDANT, Scenario


def _show(scenario: Scenario, traces: bool) -> None:
    started = time.perf_counter()
    result = explore(scenario.config, scenario.reduce, limit=20_000_000)
    seconds = time.perf_counter() - started
    if result.violation is None:
        print(f"{scenario.name:58s} R={scenario.config.tp_size}  {seconds:6.2f} s  {result.report()}")
        return
    for rule in scenario.config.broken:
        print(f"\n{BROKEN[rule]}")
    print(f"{scenario.name:58s} {len(result.trace)} steps, {seconds:.2f} s  => {result.violation}")
    if traces:
        print(result.report())


def main(arguments: list[str]) -> None:
    """Print every scenario's outcome."""
    for scenario in DEEP if "--deep" in arguments else [*HOLDS, *REDUNDANT, *BROKEN_RULES]:
        _show(scenario, "--traces" in arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
