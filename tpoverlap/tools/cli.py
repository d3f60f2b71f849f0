"""The ``tpoverlap`` command: a group whose subcommands are imported only when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

import click

# name on the command line -> "module:attribute" of its click command. A new tool is one line here.
SUBCOMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "train": "tpoverlap.tools.train.command:train",
        "bench": "tpoverlap.tools.bench.command:bench",
        "doctor": "tpoverlap.tools.doctor.command:doctor",
        "profile": "tpoverlap.tools.profile.command:profile",
        "config": "tpoverlap.tools.config.command:config",
        "predict": "tpoverlap.tools.predict.command:predict",
        "tune": "tpoverlap.tools.tune.command:tune",
    }
)


class LazyGroup(click.Group):
    """A click group that imports a subcommand's module on first use, so that ``tpoverlap X`` loads only X."""

    def __init__(self, *args: object, subcommands: Mapping[str, str] = SUBCOMMANDS, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._subcommands = subcommands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands, in the table's order."""
        return list(self._subcommands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand, imported now; None when there is none of that name."""
        target = self._subcommands.get(cmd_name)
        if target is None:
            return None
        module_name, _, attribute = target.partition(":")
        command: object = getattr(importlib.import_module(module_name), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{target} is a {type(command).__name__}, not a click command")
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tpoverlap")
def main() -> None:
    """Tensor-parallel communication hidden behind GEMMs, for token counts that change every microbatch."""
