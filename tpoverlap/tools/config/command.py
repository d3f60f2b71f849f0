"""The group ``tpoverlap config``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import click

from tpoverlap.tools.cli import LazyGroup

SUBCOMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "check": "tpoverlap.tools.config.check:check",
        "explain": "tpoverlap.tools.config.explain_command:explain",
        "convert": "tpoverlap.tools.config.convert_command:convert",
        "presets": "tpoverlap.tools.config.presets_command:presets",
    }
)


@click.group(cls=LazyGroup, subcommands=SUBCOMMANDS)
def config() -> None:
    """Check, explain, convert and look up overlap configurations. Needs no GPU."""
