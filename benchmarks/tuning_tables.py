"""The tables of docs/tuning.md, from the JSON files of ``tune``, ``profile``, ``doctor`` and ``meter_cost``.

python -m benchmarks.tuning_tables            # exit 1 if docs/tuning.md holds other tables than the files give
python -m benchmarks.tuning_tables --write    # put them there

A place in the document is a pair of comments; the first names what is shown and from which file::

    <!-- table: tune benchmarks/results/2026-11-30_h200x2_tune.json -->
    <!-- table: end -->

A file that is not there gives a line that says so, and no number.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import markdown

ROOT = Path(__file__).parents[1]
PLACE = re.compile(r"(<!-- table: (?P<what>\w+) (?P<file>\S+) -->\n)(?P<held>.*?)(<!-- table: end -->)", re.DOTALL)
Data = dict[str, Any]


def tune(data: Data) -> str:
    """A line a GEMM and bucket: the choice beside the default at the bucket's largest T."""
    layer, machine = data["layer"], data["machine"]
    head = (
        f"Hidden {layer['hidden']}, ffn {layer['ffn']}, TP {layer['tp_size']}, {layer['dtype']} on "
        f"{layer['tp_size']} x {machine['device']}; {data['took_s'] / 60:.1f} of {data['budget_s'] / 60:g} minutes."
    )
    rows = []
    for bucket in data["buckets"]:
        times = bucket["times_us"] or {}
        at_end = {label: values[-1] for label, values in times.items()}
        overlaps = {label: value for label, value in at_end.items() if label != "sequential"}
        best = min(overlaps, key=lambda label: overlaps[label], default=None)
        rows.append(
            [
                ", ".join(bucket["names"]),
                f"{bucket['above'] + 1}..{bucket['up_to']}",
                bucket["choice"],
                _us(at_end.get(bucket["choice"])),
                f"{bucket['default']} {_us(at_end.get(bucket['default']))}",
                _us(at_end.get("sequential")),
                "-" if best is None else f"{best} {_us(overlaps[best])}",
                bucket["verdict"],
            ]
        )
    heads = ["GEMM", "T", "choice", "us", "default, us", "sequential, us", "best overlap, us", "verdict"]
    return f"{head}\n\n{_table(heads, rows)}"


def profile(data: Data) -> str:
    """A line a GEMM; then the advice, and what trying it gave."""
    rows = [
        [
            one["name"],
            one["method"],
            *(_us(one[key]) for key in ("wall_us", "compute_us", "compute_alone_us", "comm_us", "comm_alone_us")),
            _us(one["overlapped_us"]),
            _us(one["exposed_us"]),
            f"{one['exposed_percent']:.1f}",
        ]
        for one in data["gemms"]
    ]
    heads = ["GEMM", "method", "wall", "compute", "alone", "comm", "alone", "overlapped", "exposed", "exposed %"]
    lines = [f"{data['title']}, us, {data['rounds']} rounds.", "", _table(heads, rows), ""]
    for advice in data["advice"]:
        change = f" `{'; '.join(advice['change'])}`" if advice["change"] else ""
        lines.append(f"- {advice['name']}: {advice['text']}.{change}")
    if not data["advice"]:
        lines.append("- No advice.")
    tried = data.get("try")
    if tried is not None:
        percent = 100.0 * (tried["after_us"] / tried["before_us"] - 1.0)
        lines.append(
            f"- **Tried**: {tried['verdict']}. Step {tried['before_us']:.0f} us before, {tried['after_us']:.0f} after "
            f"({percent:+.1f} %), faster in {tried['faster_rounds']} of {tried['rounds']} rounds."
        )
    return "\n".join(lines)


def doctor(data: Data) -> str:
    """The measured links and what follows from them."""
    rows = {row["name"]: row for row in data["rows"]}
    names = [name for name in ("link bandwidth", "memcpy bandwidth", "largest TP") if name in rows]
    return _table(["probe", "status", "found"], [[name, rows[name]["status"], rows[name]["detail"]] for name in names])


def meter(data: Data) -> str:
    """A line a T: overhead of the whole step, of the host, and of the meter's own calls."""
    rows = [
        [
            str(row["num_tokens"]),
            *(
                f"{row[key]['overhead_percent']:+.2f} ({row[key]['interval_percent'][0]:+.2f} to "
                f"{row[key]['interval_percent'][1]:+.2f})"
                for key in ("step", "host")
            ),
            f"{row['direct_percent']:.2f}",
            row["step"]["verdict"],
        ]
        for row in data["rows"]
    ]
    return _table(["T", "step, %", "host, %", "the meter's own calls, %", "step"], rows)


MAKERS: dict[str, Callable[[Data], str]] = {"tune": tune, "profile": profile, "doctor": doctor, "meter": meter}


def filled(text: str, root: Path = ROOT) -> str:
    """``text`` with every place filled from its file below ``root``."""

    def fill(found: re.Match[str]) -> str:
        what, file = found["what"], found["file"]
        if what not in MAKERS:
            raise click.ClickException(f"no table is called {what!r}; known: {', '.join(MAKERS)}")
        path = root / file
        made = MAKERS[what](json.loads(path.read_text(encoding="utf-8"))) if path.exists() else _missing(file)
        return f"{found[1]}{made}\n{found[5]}"

    return PLACE.sub(fill, text)


def _missing(file: str) -> str:
    return f"*Not measured yet: there is no `{file}`.*"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown.table(heads, [[cell.replace("|", "\\|") for cell in row] for row in rows])


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


@click.command()
@click.option("--write", is_flag=True, help="Put the tables into the document.")
@click.option("--document", type=click.Path(exists=True, path_type=Path), default=ROOT / "docs" / "tuning.md")
def main(write: bool, document: Path) -> None:
    """Compare the tables of docs/tuning.md with their files, or write them."""
    text = document.read_text(encoding="utf-8")
    wanted = filled(text)
    if write:
        document.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        click.echo(f"{document}: tables differ from their files; python -m benchmarks.tuning_tables --write", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
