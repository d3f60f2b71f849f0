"""What a suite is: a list of items, a runner that turns an item into a row on every rank, and how rows are shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tpoverlap.tools.bench.job import BenchJob

if TYPE_CHECKING:
    from rich.table import Table

    from tpoverlap.tools.bench.session import Session

Row = dict[str, Any]
"""Plain JSON. Always there: ``suite``, ``label``, ``measured`` (False where nothing could be timed), ``problems``."""


class Runner(ABC):
    """A suite at work on one rank. Everything is collective."""

    @abstractmethod
    def measure(self, item: Any) -> Row:
        """One row; the same on every rank."""

    @abstractmethod
    def close(self) -> None:
        """Free what the suite holds."""


class Suite(ABC):
    """One kind of measurement.

    Attributes:
        name: on the command line.
    """

    name: str

    @abstractmethod
    def items(self, job: BenchJob) -> Sequence[Any]:
        """What to measure, in order; each has a ``label``. Pure: the same on every rank. ConfigError if illegal."""

    @abstractmethod
    def start(self, session: Session, items: Sequence[Any]) -> Runner:
        """Allocate for all ``items`` at once. Collective."""

    @abstractmethod
    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        """What the rows say together, targets included. Pure."""

    @abstractmethod
    def table(self, rows: Sequence[Row]) -> Table:
        """The rows for a terminal."""

    def conclusions(self, rows: Sequence[Row]) -> list[str]:
        """Lines below the table: what the targets say of all rows together."""
        return []
