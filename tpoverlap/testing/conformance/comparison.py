"""Comparing a result with its twin and its reference, and remembering how near the worst one was."""

from __future__ import annotations

from typing import Any

import torch

from tpoverlap.testing.numeric import assert_close_to_twin, assert_elementwise, relative_error


class Comparison:
    """The comparisons of one check on one rank.

    Attributes:
        where: put before every message; set it anew for every T.
    """

    def __init__(self, where: str = "") -> None:
        self.where = where
        self._count = 0
        self._worst: dict[str, tuple[float, float]] = {}

    def close(
        self,
        what: str,
        actual: torch.Tensor | None,
        twin: torch.Tensor,
        reference: torch.Tensor,
        *,
        roundings: int = 2,
    ) -> None:
        """``actual`` is as near the reference as the twin; element by element too if it was rounded only once.

        (A sum of terms that were rounded before may lose all its digits where they cancel, in the twin as well.)

        Raises:
            AssertionError: it is not, or there is no result at all.
        """
        label = f"{self.where}: {what}"
        assert actual is not None, f"{label} is missing"
        assert_close_to_twin(actual, twin, reference, what=label)
        if roundings == 1:
            assert_elementwise(actual, reference, what=label)
        self._count += 1
        found = relative_error(actual, reference), relative_error(twin, reference)
        if found >= self._worst.get(what, (-1.0, 0.0)):
            self._worst[what] = found

    def same(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Every bit equal: rows that only travelled, or an operation repeated.

        Raises:
            AssertionError: they differ, with the rows that do.
        """
        self._count += 1
        if torch.equal(actual, expected):
            return
        label = f"{self.where}: {what}"
        assert actual.shape == expected.shape, f"{label}: shape {list(actual.shape)}, expected {list(expected.shape)}"
        rows = (actual != expected).reshape(actual.shape[0], -1).any(1).nonzero().flatten().tolist()
        raise AssertionError(f"{label}: {len(rows)} of {actual.shape[0]} rows differ: {rows[:10]}")

    def absent(self, what: str, gradient: torch.Tensor | None) -> None:
        """What was frozen got no gradient."""
        self._count += 1
        assert gradient is None, f"{self.where}: {what} is frozen but got a gradient"

    def true(self, what: str, condition: bool) -> None:
        """Anything else that must hold."""
        self._count += 1
        assert condition, f"{self.where}: {what}"

    def summary(self) -> dict[str, Any]:
        """``comparisons``: how many; ``worst``: per tensor, relative error of the result and of its twin."""
        assert self._count, f"{self.where}: nothing was compared"
        return {"comparisons": self._count, "worst": dict(self._worst)}
