"""``--method M`` as ``ub_cfgs``: M where it is legal, defaults elsewhere and said so; the variants of ``--compare``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

METHOD_CHOICES = ("auto", "ring_exchange", "pipeline", "bulk", "sequential")

LAYER_NAMES = ("qkv", "proj", "fc1", "fc2")

_GATHERED_INPUT = ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")
_SCATTERED_OUTPUT = ("proj_fprop", "fc2_fprop")
_COLUMN_DGRAD = ("qkv_dgrad", "fc1_dgrad")
_COLUMN_WGRAD = ("qkv_wgrad", "fc1_wgrad")

# GEMM names that the decoder uses and that each method may run; proj_wgrad and fc2_wgrad communicate nothing.
# ring_exchange and pipeline on a column layer's dgrad reduce-scatter it there, and then its wgrad has nothing to do.
_LEGAL: Mapping[str, tuple[str, ...]] = {
    "auto": (),
    "ring_exchange": (*_GATHERED_INPUT, *_SCATTERED_OUTPUT, *_COLUMN_DGRAD),
    "pipeline": (*_SCATTERED_OUTPUT, *_COLUMN_DGRAD),
    "bulk": (*_COLUMN_DGRAD, *_COLUMN_WGRAD),
    "sequential": (*_GATHERED_INPUT, *_SCATTERED_OUTPUT, *_COLUMN_DGRAD, *_COLUMN_WGRAD),
}
USED_NAMES = _LEGAL["sequential"]


@dataclass(frozen=True)
class MethodChoice:
    """``ub_cfgs`` for the manager (None: its defaults) and what to tell the user about names that M does not reach."""

    ub_cfgs: dict[str, dict[str, object]] | None
    note: str


def choose(method: str) -> MethodChoice:
    """``ub_cfgs`` of one of `METHOD_CHOICES`."""
    legal = _LEGAL[method]
    if not legal:
        return MethodChoice(None, "")
    # A reduce-scattered dgrad leaves nothing for the wgrad, so that name is then not "kept at a default".
    silent = _COLUMN_WGRAD if method in ("ring_exchange", "pipeline") else ()
    kept = [name for name in USED_NAMES if name not in legal and name not in silent]
    note = f"{method} is not legal for {', '.join(kept)}: these keep their default method" if kept else ""
    return MethodChoice({name: {"method": method} for name in legal}, note)


@dataclass(frozen=True)
class Variant:
    """One way of ``--compare`` to run the same step. ``method`` None: the run's own."""

    name: str
    method: str | None
    padded: bool


VARIANTS = (
    Variant("overlapped", None, padded=False),
    Variant("not overlapped", "sequential", padded=False),
    Variant("padded to C", None, padded=True),
)
