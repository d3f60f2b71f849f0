"""Rows on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

Row = dict[str, Any]


def figure(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def gemm_table(rows: Sequence[Row]) -> Table:
    """One block a row: the parts alone, then every method, then what was refused."""
    table = Table(title="gemm: one GEMM with its collective", title_justify="left", pad_edge=False)
    table.add_column("T x K x N", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for heading in ("eager", "queued", "hidden", "of limit", "of seq.", "c"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("targets", no_wrap=True)
    for row in rows:
        label = row["label"]
        for name, times in row["alone"].items():
            c = figure(row["c"]) if name == "gemm alone" else ""
            cells = (figure(times["eager_us"], 1), figure(times["queued_us"], 1), "", "", "", c, "")
            table.add_row(label, name, *cells, style="dim")
            label = ""
        for name, one in row["methods"].items():
            table.add_row(label, name, *_method_cells(one), "", _verdict(row) if name == "auto" else "")
            label = ""
        for name, reason in row["errors"].items():
            table.add_row(label, name, f"ERROR: {reason}"[:60], *[""] * 6, style="red")
            label = ""
        table.add_section()
    return table


def _method_cells(one: Row) -> tuple[str, ...]:
    mode = "queued" if one["queued_us"] is not None else "eager"
    return (
        figure(one["eager_us"], 1),
        figure(one["queued_us"], 1),
        figure(one["hidden"].get(mode)),
        figure(one["of_limit"].get(mode)),
        figure(one["of_sequential"].get(mode)),
    )


def _verdict(row: Row) -> str:
    if not row["targets"]:
        return "not judged"
    num_missed = sum(not one["passed"] for one in row["targets"])
    return f"misses {num_missed} of {len(row['targets'])}" if num_missed else "pass"


def dynamic_table(rows: Sequence[Row]) -> Table:
    """One line a shape and walk."""
    table = Table(title="dynamic: time over a whole walk of T", title_justify="left", pad_edge=False)
    table.add_column("walk, C x K x N", no_wrap=True)
    for heading in ("auto ms", "plain ms", "padded ms", "C/mean T", "padded/auto", "plain/auto"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("T: auto / manager of capacity T")
    for row in rows:
        exact = ", ".join(f"{one['tokens']}: {figure(one['ratio'])}" for one in row["exact_capacity"])
        for name, walk in row["walks"].items():
            totals = walk["total_us"]
            cells = [figure(value and value / 1e3, 2) for value in (totals.get(label) for label in _WALK_VARIANTS)]
            ratios = [figure(walk[key]) for key in ("capacity_over_mean", "padded_speed_up", "sequential_speed_up")]
            table.add_row(f"{name}, {row['label']}", *cells, *ratios, exact)
            exact = ""
        for problem in row["problems"]:
            table.add_row(f"  ERROR: {problem}", *[""] * 7, style="red")
    return table


_WALK_VARIANTS = ("auto", "plain sequential", "padded to capacity")


def host_table(rows: Sequence[Row]) -> Table:
    """One line an operation."""
    table = Table(title="host: microseconds until a call returns", title_justify="left", pad_edge=False)
    table.add_column("operation", no_wrap=True)
    for heading in ("same T", "new T", "same T, autograd", "new T, autograd", "backward", "steps"):
        table.add_column(heading, justify="right")
    table.add_column("a step: same T, autograd", justify="right")
    for row in rows:
        host, steps, a_step = row["host_us"], row.get("steps"), row.get("host_us_a_step") or {}
        cells = (
            figure(host.get(key), 1)
            for key in ("no_grad_same", "no_grad_new", "autograd_same", "autograd_new", "backward_same")
        )
        per_step = ", ".join(figure(a_step[key], 1) for key in ("no_grad_same", "autograd_same") if key in a_step)
        shown = "" if steps is None else str(steps)
        table.add_row(row["label"], *cells, shown, per_step, style="red" if row["problems"] else "")
        for problem in row["problems"]:
            table.add_row(f"  ERROR: {problem}", *[""] * 7, style="red")
    return table


def layers_table(rows: Sequence[Row]) -> Table:
    """One block a row: every variant, then what was refused."""
    table = Table(title="layers: forward + backward", title_justify="left", pad_edge=False)
    table.add_column("layer, H x ffn, numbers, T", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    for heading in ("eager ms", "queued ms", "host ms", "of compute", "of no overlap", "off twin", "operations"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("targets", no_wrap=True)
    for row in rows:
        label = row["label"]
        for name, one in row["methods"].items():
            mode = "queued" if one["queued_us"] is not None else "eager"
            cells = (
                *(figure(one[key] and one[key] / 1e3) for key in ("eager_us", "queued_us", "host_us")),
                figure(one["of_compute_only"].get(mode)),
                figure(one["of_twin"].get(mode)),
                "-" if one["difference"] is None else f"{one['difference']:.1e}",
                str(sum(one["operations"].values())),
            )
            table.add_row(label, name, *cells, _verdict(row) if name == "auto" else "")
            label = ""
        for name, reason in (*row["errors"].items(), *row["skipped"].items()):
            table.add_row(label, name, reason[:60], *[""] * 7, style="red" if name in row["errors"] else "dim")
            label = ""
        table.add_section()
    return table
