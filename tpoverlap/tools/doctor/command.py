"""``tpoverlap doctor``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from tpoverlap.tools.numbers import FiniteRange


@click.command()
@click.option(
    "--json",
    "json_path",
    is_flag=False,
    flag_value="-",
    metavar="[FILE|-]",
    help="Write the report as JSON to FILE; '-' or nothing: to standard output, instead of the table.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=1.0),
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    help="Kill a probe after this long (three times as long for probes that use a GPU).",
)
@click.pass_context
def doctor(context: click.Context, json_path: str | None, timeout_s: float) -> None:
    """Find out, by trying it, which backends and methods work on this machine.

    Every probe that could hang or crash runs in a process of its own. Exit code 0, or 1 when nothing works.
    """
    from rich.console import Console

    from tpoverlap.tools.doctor.probes import run_probes
    from tpoverlap.tools.doctor.report import render

    if json_path not in (None, "-"):
        _require_writable(Path(str(json_path)))
    progress = Console(stderr=True)
    with progress.status("probing") as status:
        report = run_probes(
            cpu_timeout_s=timeout_s, gpu_timeout_s=3 * timeout_s, say=lambda what: status.update(f"probing {what}")
        )
    if json_path is not None:
        text = json.dumps(report.to_dict(), indent=2)
        if json_path == "-":
            sys.stdout.write(text + "\n")
        else:
            try:
                Path(json_path).write_text(text + "\n")
            except OSError as error:
                raise click.ClickException(f"--json {json_path}: {error.strerror}") from error
    if json_path != "-":
        render(report, Console())
    context.exit(0 if report.works else 1)


def _require_writable(path: Path) -> None:
    """Refuse before the probes run, not after. Leaves an existing file as it is."""
    try:
        existed = path.exists()
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise click.BadParameter(f"cannot write {path}: {error.strerror}", param_hint="--json") from error
