"""Options of `benchmarks.tails` for few candidates at many shapes: which shapes, and a line a shape."""

from __future__ import annotations

from typing import Any

import click

Item = tuple[str, int, int, int]
"""Direction, T, K, N as in `tpoverlap bench --suite gemm`."""


def scatters(context: click.Context | None, option: click.Parameter | None, text: str) -> tuple[Item, ...]:
    """Of "TxKxN,...", the callback of an option; T is even, as both ranks have as many rows.

    Raises:
        click.BadParameter: it is something else.
    """
    try:
        sizes = [tuple(map(int, shape.split("x"))) for shape in text.split(",") if shape]
        if any(t % 2 for t, _, _ in sizes):
            raise ValueError
    except ValueError:
        raise click.BadParameter(f"wanted are TxKxN,... with an even T, got {text!r}") from None
    return tuple(("rs", t, k, n) for t, k, n in sizes)


def line(row: dict[str, Any]) -> str:
    """A row's times, of one whole GEMM's."""
    parts = [f"{name} {part:.3f}" for name, part in row["of_whole"].items() if name != "mm"]
    today = ":".join(map(str, row.get("today", []))) or "not cut"
    whole = row["times_us"].get("mm") or float("nan")
    return " | ".join([f"{row['T']}x{row['K']}x{row['N']}", f"mm {whole:.1f} us", f"today {today}", *parts])
