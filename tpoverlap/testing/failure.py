"""What went wrong in spawned ranks, in a form that the parent can assert on."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RankError:
    """The end of one rank that did not return.

    ``type_name`` is the class name of what it raised (``"PeerTimeoutError"``), or one of
    ``RankDied`` (the process ended without an answer), ``RankHung`` (it was killed at the deadline) and
    ``RankSurvived`` (its death was expected, and it returned or raised).
    """

    type_name: str
    message: str
    traceback: str


class RankFailure(Exception):
    """At least one rank raised, died, hung, or lived on although its death was expected.

    Attributes:
        errors: what happened, by rank.
        results: what the other ranks returned, by rank.
        hung: the ranks that had to be killed; their ``traceback`` holds the stack of every thread.
        exit_codes: exit codes of the ranks that died, negative for a signal.
    """

    def __init__(
        self,
        what: str,
        errors: Mapping[int, RankError],
        results: Mapping[int, Any],
        exit_codes: Mapping[int, int | None],
    ) -> None:
        self.errors = dict(sorted(errors.items()))
        self.results = dict(results)
        self.exit_codes = dict(exit_codes)
        self.hung = tuple(rank for rank, error in self.errors.items() if error.type_name == "RankHung")
        lines = [f"{what}: {len(self.errors)} of {len(self.errors) + len(self.results)} ranks failed"]
        for rank, error in self.errors.items():
            lines.append(f"--- rank {rank}: {error.type_name}: {error.message}")
            if error.traceback:
                lines.append(error.traceback.rstrip())
        super().__init__("\n".join(lines))


def describe_exit(exit_code: int | None) -> str:
    """``exit code 3``, ``SIGKILL (exit code -9)``, or that the process is still there."""
    if exit_code is None:
        return "closed its connection but is still running"
    if exit_code < 0:
        try:
            return f"{signal.Signals(-exit_code).name} (exit code {exit_code})"
        except ValueError:
            pass
    return f"exit code {exit_code}"
