"""A command that names everything required that is missing; click names one option a try."""

from __future__ import annotations

import click


class AllMissing(click.Command):
    """For ``click.command(cls=...)``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's."""
        given = list(args)  # click's takes them off
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            found, _, _ = self.make_parser(ctx).parse_args(given)
            missing = [one for one in self.params if _is_missing(one, ctx, found)]
            if len(missing) < 2:
                raise
            names = ", ".join(one.get_error_hint(ctx) for one in missing)
            raise click.UsageError(f"Missing: {names}.", ctx) from error


def _is_missing(parameter: click.Parameter, ctx: click.Context, found: dict[str, object]) -> bool:
    try:
        parameter.handle_parse_result(ctx, found, [])
    except click.MissingParameter:
        return True
    except click.BadParameter:  # given, but wrong: its turn comes when all are there
        return False
    return False
