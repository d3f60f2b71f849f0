"""Where a measurement was made; the package's own, under the name that the scripts here always used."""

from __future__ import annotations

from tpoverlap.tools.bench.environment import environment

__all__ = ["environment"]
