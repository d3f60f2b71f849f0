"""``tpoverlap config presets``."""

from __future__ import annotations

import json
import re

import click

_SIZE = click.IntRange(1, 2**31 - 1)


@click.command()
@click.option("--hidden", type=_SIZE, help="H, the model's hidden size.")
@click.option("--ffn", type=_SIZE, help="F, the MLP's inner width.")
@click.option("--tp", "tp_size", type=_SIZE, help="R, ranks in the TP group.")
@click.option("--tokens", type=_SIZE, help="T, tokens of the TP group in one microbatch.")
@click.option("--gpu", help="Of one size those made for it first: h200, ...")
@click.option("--show", is_flag=True, help="Print the nearest preset's YAML instead of the table.")
@click.option("--json", "as_json", is_flag=True, help="The table as JSON.")
def presets(
    hidden: int | None,
    ffn: int | None,
    tp_size: int | None,
    tokens: int | None,
    gpu: str | None,
    show: bool,
    as_json: bool,
) -> None:
    """Look up the presets that ship with tpoverlap; without sizes, list all.

    "measured" says which were timed: one by tune, GEMM by GEMM over T, two as layers at one T. The others hold
    defaults, and "basis" says why. Each serves every T up to the capacity.
    """
    from rich.console import Console
    from rich.table import Table

    from tpoverlap.tools.config.presets import ranked, shipped

    if (hidden is None) != (tp_size is None):
        raise click.UsageError("give --hidden and --tp together, or neither")
    every = shipped()
    found = every if hidden is None or tp_size is None else ranked(every, hidden, tp_size, tokens, ffn, gpu)
    if not found:
        sizes = sorted({preset.said.tp_size for preset in every})
        raise click.ClickException(f"no preset for --tp {tp_size}; there are some for {', '.join(map(str, sizes))}")
    if show:
        click.echo(found[0].path.read_text(encoding="utf-8"), nl=False)
        return
    if as_json:
        click.echo(json.dumps([preset.to_dict() for preset in found], indent=2))
        return
    table = Table(title="presets, the nearest first" if hidden else "presets", title_justify="left", pad_edge=False)
    for heading in ("name", "model", "measured", "basis"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    bases = list(dict.fromkeys(preset.basis for preset in found))
    for preset in found:
        basis = str(bases.index(preset.basis) + 1)
        table.add_row(str(preset.said), preset.model, re.split(r":| \(", preset.measured)[0], basis)
    Console().print(table)
    for number, text in enumerate(bases, 1):
        click.echo(f"basis {number}: {text}")
    if hidden is not None and found[0].said.hidden != hidden:
        click.echo(f"none is made for hidden {hidden}; the first one's is {found[0].said.hidden}")
