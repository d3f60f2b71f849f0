"""``tpoverlap config check``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import click

from tpoverlap.tools.config.text import printable


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="FILE|FOLDER...")
@click.option("--tp", "tp_size", type=click.IntRange(1, 65536), help="TP size; else the file's own, else its name's.")
@click.option("--dtype", type=click.Choice(["bf16", "fp8"]), help="What the GEMMs run in, where the file does not say.")
@click.option(
    "--for",
    "target",
    type=click.Choice(["te", "tpoverlap", "both"]),
    default="both",
    show_default=True,
    help="Whose findings to show and to count: Transformer Engine's, this version's, or all.",
)
@click.option("--notes/--no-notes", default=True, show_default=True, help="Show what only informs.")
@click.option("--json", "as_json", is_flag=True, help="Every finding as JSON on standard output.")
@click.pass_context
def check(
    context: click.Context,
    paths: tuple[str, ...],
    tp_size: int | None,
    dtype: Literal["bf16", "fp8"] | None,
    target: str,
    notes: bool,
    as_json: bool,
) -> None:
    """Check overlap configurations: Transformer Engine's, Megatron-LM's, NeMo training files, ours.

    Of a folder it checks the *.yaml and *.yml that lie in it. Exit code 0: nothing worse than warnings; 1: errors; 2: a
    file that cannot be read.
    """
    from tpoverlap.config import check_file
    from tpoverlap.tools.config.check_report import exit_code, filtered, lines_of, summary_of, to_dict

    reports = [filtered(check_file(path, tp_size, dtype), target) for path in _files(paths)]
    code = exit_code(reports)
    if as_json:
        click.echo(json.dumps(to_dict(reports, code), indent=2))
    else:
        for report in reports:
            for line in lines_of(report, notes):
                click.echo(printable(line))
        click.echo(summary_of(reports))
    context.exit(code)


def _files(paths: tuple[str, ...]) -> Iterator[str]:
    """``paths`` with the YAML files of a folder in its place; one without any stays, and cannot be read."""
    for path in paths:
        inside = Path(path).glob("*") if os.path.isdir(path) else ()
        found = sorted(str(one) for one in inside if one.suffix in (".yaml", ".yml") and one.is_file())
        yield from found or (path,)
