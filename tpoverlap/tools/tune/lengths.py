"""``--tokens-from``: the T of a recorded run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tpoverlap.errors import ConfigError


def read_lengths(path: Path) -> tuple[int, ...]:
    """T by step: a JSON list of whole numbers, or what ``tpoverlap train --json`` wrote.

    Raises:
        ConfigError: the file cannot be read or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no JSON, or not UTF-8
        raise ConfigError(f"cannot read --tokens-from {path}: {error}") from error
    if isinstance(data, dict):
        steps = data.get("steps")
        data = (
            [step.get("active_tokens") for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
        )
    if not isinstance(data, list) or not data or not all(_is_count(value) for value in data):
        raise ConfigError(
            f"--tokens-from {path} must hold a list of token counts, [812, 2048, ...], or be what "
            "tpoverlap train --json writes"
        )
    return tuple(data)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**24
