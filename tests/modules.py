"""Runs ``python -m MODULE ARGUMENTS ...`` inside processes that are there already."""

from __future__ import annotations

import io
import runpy
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from unittest.mock import patch


def run(rank: int, world_size: int, module: str, arguments: tuple[str, ...]) -> str:
    """What it printed. A second run of a module starts with fresh globals; what the module imports is there."""
    shown = redirect_stdout(io.StringIO())
    with shown as printed, patch.object(sys, "argv", [module, *arguments]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:  # how commands of click end
            if end.code:
                raise RuntimeError(f"{module} {' '.join(arguments)} ended with {end.code}") from end
    return printed.getvalue()


def run_on_first(rank: int, world_size: int, module: str, arguments: tuple[str, ...]) -> str:
    """As `run`, on rank 0 alone."""
    return run(rank, world_size, module, arguments) if rank == 0 else ""


def run_share(rank: int, world_size: int, module: str, calls: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """What each call of this rank's share printed; of one that failed the traceback, so that the others go on."""
    printed: dict[tuple[str, ...], str] = {}
    for arguments in calls[rank::world_size]:
        try:
            printed[arguments] = run(rank, world_size, module, arguments)
        except Exception:
            printed[arguments] = traceback.format_exc()
    return printed
