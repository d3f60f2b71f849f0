"""The twelve GEMM names of Transformer Engine, what each communicates, and look-up of near misses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

RESERVED_SECTION: Final = "tpoverlap"
"""Top-level key of our own additions."""
PHASES: Final = ("_fprop", "_dgrad", "_wgrad")
"""Endings of GEMM names."""


@dataclass(frozen=True)
class GemmName:
    """What one of the twelve names communicates by default.

    ``te_method`` is Transformer Engine's default where it differs from ours. ``bulk_legal``: an independent GEMM runs
    beside this communication. ``fixed_direction``: no method changes the direction.
    """

    method: str
    is_reduce_scatter: bool
    te_method: str
    bulk_legal: bool = False
    fixed_direction: bool = True


_GATHER_INPUT: Final = GemmName("ring_exchange", False, "ring_exchange")
# Ours is not TE's pipeline: measured, TE's pipeline reduce-scatter is slower than no overlap at all.
_SCATTER_OUTPUT: Final = GemmName("ring_exchange", True, "pipeline")
_COLUMN_DGRAD: Final = GemmName("bulk", False, "bulk", bulk_legal=True, fixed_direction=False)
_COLUMN_WGRAD: Final = GemmName("bulk", True, "bulk", bulk_legal=True)
_ROW_WGRAD: Final = GemmName("external", False, "external")

KNOWN_NAMES: Final[Mapping[str, GemmName]] = {
    "qkv_fprop": _GATHER_INPUT,
    "qkv_dgrad": _COLUMN_DGRAD,
    "qkv_wgrad": _COLUMN_WGRAD,
    "proj_fprop": _SCATTER_OUTPUT,
    "proj_dgrad": _GATHER_INPUT,
    "proj_wgrad": _ROW_WGRAD,
    "fc1_fprop": _GATHER_INPUT,
    "fc1_dgrad": _COLUMN_DGRAD,
    "fc1_wgrad": _COLUMN_WGRAD,
    "fc2_fprop": _SCATTER_OUTPUT,
    "fc2_dgrad": _GATHER_INPUT,
    "fc2_wgrad": _ROW_WGRAD,
}

COLUMN_DGRADS: Final = ("qkv_dgrad", "fc1_dgrad")
COLUMN_WGRADS: Final = ("qkv_wgrad", "fc1_wgrad")
ROW_WGRADS: Final = ("proj_wgrad", "fc2_wgrad")


def sibling(name: str, phase: str) -> str:
    """The same layer's name in another phase: ``sibling("qkv_dgrad", "wgrad") == "qkv_wgrad"``."""
    return f"{name.rpartition('_')[0]}_{phase}"


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate that ``word`` was probably meant to be, or None. Case and dashes do not count."""
    by_plain = {candidate.lower(): candidate for candidate in candidates}
    plain = word.strip().lower().replace("-", "_")
    matches = get_close_matches(plain[:100], by_plain, n=1, cutoff=cutoff)
    if not matches and len(plain) >= 4:  # "ring" is no close match of "ring_exchange", but a plain abbreviation
        matches = [candidate for candidate in by_plain if candidate.startswith(plain)][:1]
    return by_plain[matches[0]] if matches else None


def nearest_layer(layer: str, gemm_names: Iterable[str]) -> str | None:
    """The layer among ``gemm_names`` that ``layer`` may be a slip of; None for a prefixed one such as ``mtp_proj``.

    ``layer`` may also be the name of one of a layer's GEMMs.
    """
    layers = dict.fromkeys(name.rpartition("_")[0] for name in gemm_names if name.endswith(PHASES))
    stem = layer.rpartition("_")[0] if layer.endswith(PHASES) else layer
    if any(stem.endswith((f"_{known}", f".{known}", f"/{known}")) for known in layers):
        return None
    match = nearest(stem, layers)
    return match if match != layer else None


def nearest_gemm(name: str, gemm_names: Collection[str]) -> str | None:
    """The one of ``gemm_names`` that ``name`` may be a slip of: near in its layer and in its phase."""
    layer, _, phase = name.rpartition("_")
    meant = nearest_layer(f"{layer}_fprop", gemm_names), nearest(phase, [one.removeprefix("_") for one in PHASES])
    match = f"{meant[0]}_{meant[1]}"
    return match if match in gemm_names and match != name else None


def nearest_name(name: str) -> str | None:
    """The known GEMM name that ``name`` may be a slip of; a prefixed name such as ``mtp_proj_fprop`` is none."""
    if any(name.endswith((f"_{known}", f".{known}", f"/{known}")) for known in KNOWN_NAMES):
        return None
    match = nearest(name, KNOWN_NAMES, cutoff=0.85)
    return match if match != name else None
