"""Runs ``python -m MODULE ARGUMENTS ...`` inside a process that is there already."""

from __future__ import annotations

import io
import runpy
import sys
import warnings
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
