"""Numbers that are none are refused by every command, before it starts anything."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from tpoverlap.tools.cli import main


def _float_options(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], str]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        found = []
        for name in command.list_commands(context):
            one = command.get_command(context, name)
            assert one is not None, name
            found += _float_options(one, (*path, name))
        return found
    return [(path, param.opts[0]) for param in command.params if isinstance(param.type, click.FloatRange)]


OPTIONS = _float_options(main)


def test_there_are_such_options() -> None:
    assert {path[0] for path, _ in OPTIONS} == {"train", "bench", "tune", "profile", "predict", "doctor"}


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    ("path", "option"), OPTIONS, ids=lambda part: part if isinstance(part, str) else "-".join(part)
)
def test_no_number(path: tuple[str, ...], option: str, value: str) -> None:
    result = CliRunner().invoke(main, [*path, option, value])
    assert result.exit_code == 2 and f"{value} is not a finite number" in result.output, result.output
    assert option in result.output


@pytest.mark.parametrize(("option", "value"), [("--tokens", "99999999999999"), ("--shape", "8x99999999999x8")])
def test_more_than_any_machine_holds(option: str, value: str) -> None:
    result = CliRunner().invoke(main, ["bench", "--device", "cpu", option, value])
    assert result.exit_code == 2 and "16777216" in result.output, result.output
