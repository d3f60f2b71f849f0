"""``--method M`` as ``ub_cfgs``: M where it is legal, defaults elsewhere and said so; the variants of ``--compare``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpoverlap.errors import ConfigError

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
_SCATTERING = ("ring_exchange", "pipeline")
"""On a column layer's dgrad they reduce-scatter."""
USED_NAMES = _LEGAL["sequential"]


@dataclass(frozen=True)
class MethodChoice:
    """``ub_cfgs`` for the manager (None: its defaults) and what to tell the user about names that M does not reach."""

    ub_cfgs: dict[str, dict[str, object]] | None
    note: str


def choose(method: str, backward_mode: str = "auto") -> MethodChoice:
    """``ub_cfgs`` of one of `METHOD_CHOICES`.

    ``backward_mode`` says where column layers scatter their input gradient: "bulk" (beside wgrad), "rs_dgrad" (in
    dgrad), or "auto": as ``method`` has it, bulk by default.

    Raises:
        ConfigError: the two contradict each other.
    """
    if method == "bulk" and backward_mode == "rs_dgrad":
        raise ConfigError("--method bulk and --backward-mode rs_dgrad contradict each other: give one of them")
    legal = _LEGAL[method]
    options: dict[str, dict[str, object]] = {name: {"method": method} for name in legal}
    if backward_mode == "bulk" and method in _SCATTERING:
        options = {name: option for name, option in options.items() if name not in _COLUMN_DGRAD}
    elif backward_mode == "rs_dgrad":
        options = {name: option for name, option in options.items() if name not in _COLUMN_WGRAD}
        dgrad: dict[str, object] = {"method": method if method in _SCATTERING else "ring_exchange"}
        if method == "sequential":
            dgrad = {"method": "sequential", "is_reduce_scatter": True}
        options |= {name: dgrad for name in _COLUMN_DGRAD}
    if not options:
        return MethodChoice(None, "")
    # A reduce-scattered dgrad leaves nothing for the wgrad, so that name is then not "kept at a default".
    silent = _COLUMN_WGRAD if method in _SCATTERING or backward_mode == "rs_dgrad" else ()
    kept = [name for name in USED_NAMES if name not in options and name not in silent]
    if method == "auto" or not kept:
        return MethodChoice(options, "")
    why = "not legal for" if backward_mode != "bulk" else f"not legal, or not --backward-mode {backward_mode}, for"
    return MethodChoice(options, f"{method} is {why} {', '.join(kept)}: these keep their default method")


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
