"""The presets that ship with the package, looked up by sizes. They are YAML files in ``data/``, named NeMo's way."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tpoverlap.tools.config.preset_name import PresetName

FOLDER: Final = Path(__file__).parent / "data"
_FIELD: Final = re.compile(r"^# (model|basis|measured): (.*)$", re.MULTILINE)
_FFN: Final = re.compile(r"\bffn (\d+)")


@dataclass(frozen=True)
class Preset:
    """One file. ``basis`` says why it holds what it holds, ``measured`` what was timed with it."""

    path: Path
    said: PresetName
    model: str
    basis: str
    measured: str
    ffn: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON output."""
        return {
            "name": str(self.said),
            "path": str(self.path),
            "model": self.model,
            "hidden": self.said.hidden,
            "ffn": self.ffn,
            "tp_size": self.said.tp_size,
            "tokens": self.said.tokens,
            "dtype": self.said.dtype,
            "basis": self.basis,
            "measured": self.measured,
        }


def shipped() -> list[Preset]:
    """All presets, by name."""
    return [_read(path) for path in sorted(FOLDER.glob("*.yaml"))]


def find_preset(name: str) -> str | None:
    """The path of the preset called ``name``, with or without ``.yaml``; None where there is none of that name."""
    wanted = name.removesuffix(".yaml")
    return next((str(path) for path in FOLDER.glob("*.yaml") if path.stem == wanted), None)


def ranked(
    presets: Iterable[Preset],
    hidden: int,
    tp_size: int,
    tokens: int | None = None,
    ffn: int | None = None,
    gpu: str | None = None,
) -> list[Preset]:
    """Those for ``tp_size``, the nearest sizes first; a size that is twice as large is as far as one that is half. Of
    one size those made for ``gpu`` come first, then those for any.
    """

    def distance(preset: Preset) -> tuple[float, bool, bool]:
        pairs = [(preset.said.hidden, hidden, 4.0), (preset.ffn, ffn, 2.0), (preset.said.tokens, tokens, 1.0)]
        sizes = sum(weight * abs(math.log2(have / want)) for have, want, weight in pairs if want is not None)
        return sizes, preset.said.gpu != gpu, preset.said.gpu != "any"

    return sorted((preset for preset in presets if preset.said.tp_size == tp_size), key=distance)


def _read(path: Path) -> Preset:
    fields = dict(_FIELD.findall(path.read_text(encoding="utf-8")))
    ffn = _FFN.search(fields["model"])
    assert ffn is not None, f"{path} does not say its ffn"
    return Preset(path, PresetName.parse(path.stem), fields["model"], fields["basis"], fields["measured"], int(ffn[1]))
