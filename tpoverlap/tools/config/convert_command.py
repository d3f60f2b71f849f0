"""``tpoverlap config convert``."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

import click

from tpoverlap.errors import ConfigError
from tpoverlap.tools.config.text import printable

_SIZE = click.IntRange(1, 2**31 - 1)


@click.command()
@click.argument("source", metavar="FILE")
@click.option(
    "--to", "to", type=click.Choice(["te", "tpoverlap", "nemo"]), required=True, help="nemo: te, named NeMo's way."
)
@click.option(
    "-o", "--output", metavar="FILE|FOLDER", help="Default: standard output; a folder for --to nemo (default .)."
)
@click.option("--extract", is_flag=True, help="Only the options, out of the training file that embeds them.")
@click.option("--tp", "tp_size", type=click.IntRange(1, 65536), help="TP size; else the file's own, else its name's.")
@click.option("--dtype", type=click.Choice(["bf16", "fp8"]), help="For the name; else what the file says, else bf16.")
@click.option("--gpu", help="For the name, e.g. h100.")
@click.option("--hidden", type=_SIZE, help="For the name; else what the file says.")
@click.option("--mbs", type=_SIZE, help="For the name: micro batch size.")
@click.option("--seqlen", type=_SIZE, help="For the name: sequence length.")
@click.option("--cp", "cp_size", type=_SIZE, help="For the name: context-parallel size.")
@click.option("--lora", is_flag=True, help="For the name.")
@click.pass_context
def convert(
    context: click.Context,
    source: str,
    to: str,
    output: str | None,
    extract: bool,
    tp_size: int | None,
    dtype: Literal["bf16", "fp8"] | None,
    gpu: str | None,
    hidden: int | None,
    mbs: int | None,
    seqlen: int | None,
    cp_size: int | None,
    lora: bool,
) -> None:
    """Make a file for Transformer Engine mean the same here, or the other way round.

    The two fill in defaults differently; what differs is written out. Nothing is lost: converting back gives the file's
    own text again. Exit code 1: a file with errors; 2: one that cannot be read.
    """
    from tpoverlap.tools.config.convert_file import Wanted, converted, name_for

    wanted = Wanted(gpu, hidden, mbs, seqlen, cp_size, lora, dtype)
    try:
        done = converted(source, "tpoverlap" if to == "tpoverlap" else "te", tp_size, extract or to == "nemo")
        name = name_for(done, wanted) if to == "nemo" else None
    except ConfigError as error:
        click.echo(printable(f"Error: {error}"), err=True)
        context.exit(2 if getattr(error, "unreadable", False) else 1)
    for remark in done.remarks:
        click.echo(printable(f"note: {remark}"), err=True)
    target = None if output is None else Path(output)
    if name is not None:
        target = (target or Path()) / f"{name}.yaml"
    if target is None:
        click.echo(done.text, nl=False)
        return
    try:
        _write(target, done.text)
    except OSError as error:
        raise click.ClickException(f"cannot write {target}: {error.strerror or error}") from error
    click.echo(f"wrote {target}", err=True)


def _write(path: Path, text: str) -> None:
    """All of it or nothing: ``path`` may be the file that was read. Line ends stay as they are."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        Path(temporary).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
