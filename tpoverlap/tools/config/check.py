"""``tpoverlap config check``."""

from __future__ import annotations

import json
from typing import Literal

import click

from tpoverlap.tools.config.text import printable


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
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
    files: tuple[str, ...],
    tp_size: int | None,
    dtype: Literal["bf16", "fp8"] | None,
    target: str,
    notes: bool,
    as_json: bool,
) -> None:
    """Check overlap configurations: Transformer Engine's, Megatron-LM's, NeMo training files, ours.

    Exit code 0: nothing worse than warnings; 1: errors; 2: a file that cannot be read.
    """
    from tpoverlap.config import check_file
    from tpoverlap.tools.config.check_report import exit_code, filtered, lines_of, summary_of, to_dict

    reports = [filtered(check_file(path, tp_size, dtype), target) for path in files]
    code = exit_code(reports)
    if as_json:
        click.echo(json.dumps(to_dict(reports, code), indent=2))
    else:
        for report in reports:
            for line in lines_of(report, notes):
                click.echo(printable(line))
        click.echo(summary_of(reports))
    context.exit(code)
