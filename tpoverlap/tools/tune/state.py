"""The state file: results by bucket, written after each one, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tpoverlap.errors import ConfigError
from tpoverlap.tools.tune.decide import Result

FORMAT: Final = 1


class State:
    """Results of one tuning run in a file beside its output.

    Raises:
        ConfigError: the file is there, but belongs to another run or is not a state file.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path = path
        self._key = json.loads(json.dumps(key))
        self.results: dict[str, Result] = {}
        if path.exists() and not restart:
            self.results = self._read()

    def add(self, key: str, result: Result) -> None:
        """File the result of one bucket, on disk too."""
        self.results[key] = result
        results = {name: one.to_dict() for name, one in self.results.items()}
        part = self.path.with_name(self.path.name + ".part")
        text = json.dumps({"format": FORMAT, "key": self._key, "results": results}, indent=1)
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, self.path)

    def forget(self) -> None:
        """Remove the file: everything is measured and written."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Result]:
        advice = "tune with --restart to begin anew, or give another -o"
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}")
            key, results = dict(data["key"]), {name: Result.from_dict(one) for name, one in data["results"].items()}
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{self.path} is no state file of tpoverlap tune ({error!r}); {advice}") from error
        other = [name for name in {**key, **self._key} if key.get(name) != self._key.get(name)]
        if other:
            was, now = ({name: one.get(name) for name in other} for one in (key, self._key))
            raise ConfigError(f"{self.path} belongs to another tuning run: it has {was}, asked for is {now}; {advice}")
        return results
