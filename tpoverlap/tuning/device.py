"""What the cost model knows about one kind of device: numbers with their source, read from ``devices/*.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from tpoverlap.errors import ConfigError

FOLDER: Final = Path(__file__).parent / "devices"

_TOO_LARGE: Final = 1e9  # of microseconds or GB/s
_TOO_LARGE_EXPONENT: Final = 8.0  # a time of that many microseconds to this power is still a number

MEASURED: Final = "measured"
ESTIMATE: Final = "estimate"


@dataclass(frozen=True)
class GemmRates:
    """A GEMM is waves of output tiles over the multiprocessors.

    ``tile_us_per_k``: one tile of 128 x 256 for each of its K, ``tile_fixed_us``: its prologue and epilogue;
    ``small_tile_exponent``: a tile of a share s of that area takes s ** (1 - exponent) of the time;
    ``quantisation``: 1 charges the last wave in full, 0 only the part of it that has work;
    ``sustained_exponent``: GEMMs above 1 ms slow down with (time / ms) ** exponent, the clock follows the power.
    """

    launch_us: float
    tile_us_per_k: float
    tile_fixed_us: float
    small_tile_exponent: float
    quantisation: float
    sustained_exponent: float


@dataclass(frozen=True)
class Rate:
    """Time of ``size_bytes``: ``latency_us + size_bytes / gb_s``; small sizes therefore get less of the bandwidth."""

    latency_us: float
    gb_s: float

    def time_us(self, size_bytes: float) -> float:
        """Microseconds for so many bytes; nothing for none."""
        return self.latency_us + size_bytes / self.gb_s * 1e-3 if size_bytes > 0 else 0.0


@dataclass(frozen=True)
class OneKernel:
    """A form of ``fused``: the GEMM ``gemm_factor`` times as long, and ``fixed_us`` to enter, wait and end."""

    fixed_us: float
    gemm_factor: float


@dataclass(frozen=True)
class Fp8Rates:
    """What FP8 changes; everything else is the device's.

    ``gemm``: as in the device, of FP8 operands; ``pass_over``: of one kernel that quantises, packs or turns a tensor,
    by the bytes that it reads and writes; ``host_us``: of such a kernel's launch; ``fused``, ``one_launch``: None
    where that method has not been timed in FP8, and then nobody chooses it; ``source``: what was measured, and what was
    not; ``error``: as the device's.
    """

    gemm: GemmRates
    pass_over: Rate
    host_us: float
    source: str
    fused: OneKernel | None = None
    one_launch: OneKernel | None = None
    error: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fp8Rates:
        """The inverse of ``asdict``; raises KeyError, TypeError or ValueError for anything else."""
        values = dict(data)
        values["gemm"] = GemmRates(**{key: float(value) for key, value in values["gemm"].items()})
        values["pass_over"] = Rate(**{key: float(value) for key, value in values["pass_over"].items()})
        for key in ("fused", "one_launch"):
            form = values.get(key)
            values[key] = None if form is None else OneKernel(**{part: float(value) for part, value in form.items()})
        values |= {"host_us": float(values["host_us"]), "error": dict(values.get("error", {}))}
        return cls(**values)


@dataclass(frozen=True)
class DeviceModel:
    """One kind of device and the links between several of them.

    Attributes:
        name: as ``--gpu`` takes it.
        basis: "measured" (fitted to results in this repository) or "estimate" (from data sheets).
        source: where the numbers come from.
        multiprocessors, memory_gb_s: of one device; the memory's rate is what a kernel reaches, not the peak.
        nvlink_domain: devices that reach each other over NVLink, as such machines are usually built.
        gemm, copy (copy engine, one direction), gather and scatter (the library's collectives), add (summing
            received blocks), fused and one_launch (what that method's two forms add to the GEMM).
        step_us: one wait for a flag and the launch behind it, on the device.
        hop_us: what a collective's latency grows with each rank above two.
        host_us: processor time of one operation by "direction method", where the launches are the limit; "plain": of
            torch's GEMM and the library's collective.
        match: capability, multiprocessors and range of memory by which ``recognise`` knows it.
        error: of the calibration, as `benchmarks/calibrate.py` wrote it; empty for an estimate.
        fp8: None where there are no FP8 tensor cores, or nothing is known about them.
        trade: the kernel that exchanges few rows (`tpoverlap.fused_form`); None: not measured, see `exchange`.
    """

    name: str
    basis: str
    source: str
    multiprocessors: int
    memory_gb_s: float
    nvlink_domain: int
    gemm: GemmRates
    copy: Rate
    gather: Rate
    scatter: Rate
    add: Rate
    fused: OneKernel
    one_launch: OneKernel
    step_us: float
    hop_us: float
    host_us: Mapping[str, float]
    match: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, Any] = field(default_factory=dict)
    fp8: Fp8Rates | None = None
    trade: Rate | None = None

    @property
    def exchange(self) -> Rate:
        """`trade`, or an estimate: two launches, the rows' way and the flag's, the link's rate."""
        return self.trade or Rate(2 * self.gemm.launch_us + 2 * self.hop_us, self.copy.gb_s)

    @property
    def is_measured(self) -> bool:
        """Whether its numbers were fitted to measurements on such a device."""
        return self.basis == MEASURED

    @cached_property
    def in_fp8(self) -> DeviceModel:
        """The same device whose GEMMs read FP8.

        Raises:
            ConfigError: nothing is known about FP8 on it.
        """
        if self.fp8 is None:
            raise ConfigError(
                f"the cost model knows no FP8 tensor cores on {self.name}; ask without FP8, or about "
                f"{', '.join(name for name in known_devices() if load_device(name).fp8)}"
            )
        return replace(
            self,
            gemm=self.fp8.gemm,
            fused=self.fp8.fused or self.fused,
            one_launch=self.fp8.one_launch or self.one_launch,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a file or a plan."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceModel:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: a key is missing, unknown or no number.
        """
        try:
            values = dict(data)
            values["gemm"] = GemmRates(**{key: float(value) for key, value in values["gemm"].items()})
            for key in ("fused", "one_launch"):
                values[key] = OneKernel(**{part: float(value) for part, value in values[key].items()})
            for key in ("copy", "gather", "scatter", "add"):
                values[key] = Rate(**{part: float(value) for part, value in values[key].items()})
            if values.get("trade") is not None:
                values["trade"] = Rate(**{part: float(value) for part, value in values["trade"].items()})
            for key in ("memory_gb_s", "step_us", "hop_us"):
                values[key] = float(values[key])
            for key in ("multiprocessors", "nvlink_domain"):
                values[key] = int(values[key])
            values["host_us"] = {str(key): float(value) for key, value in dict(values["host_us"]).items()}
            values |= {key: dict(values.get(key, {})) for key in ("match", "error")}
            values["fp8"] = None if values.get("fp8") is None else Fp8Rates.from_dict(values["fp8"])
            device = cls(**values)
            _require_finite(device)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            names = ", ".join(one.name for one in fields(cls))
            raise ConfigError(f"these are not the parameters of a device: {error}; it has {names}") from error
        rates = [device.copy, device.gather, device.scatter, device.add, device.exchange]
        rates += [] if device.fp8 is None else [device.fp8.pass_over]
        if device.multiprocessors < 1 or not min(*(rate.gb_s for rate in rates), device.memory_gb_s) > 0:
            raise ConfigError(f"device {device.name!r}: counts and rates must be positive")
        return device


def _require_finite(device: DeviceModel) -> None:
    """Raise ValueError for a number that is none, or so large that arithmetic with it fails."""
    kernels = (device.fused, device.one_launch, device.exchange)
    parts = [asdict(part) for part in (device.gemm, device.copy, device.gather, device.scatter, device.add, *kernels)]
    if device.fp8 is not None:
        known = (device.fp8.gemm, device.fp8.pass_over, device.fp8.fused, device.fp8.one_launch)
        parts += [*(asdict(part) for part in known if part is not None), {"fp8 host_us": device.fp8.host_us}]
    for values in (*parts, dict(device.host_us), {"step_us": device.step_us, "hop_us": device.hop_us}):
        for key, value in values.items():
            if not 0.0 <= value < (_TOO_LARGE_EXPONENT if key.endswith("_exponent") else _TOO_LARGE):
                raise ValueError(f"{key} is {value!r}")


def known_devices() -> tuple[str, ...]:
    """Names of the devices that ship with the package, the measured one first."""
    return tuple(sorted((path.stem for path in FOLDER.glob("*.json")), key=lambda name: (name != "h200", name)))


@cache
def load_device(name: str) -> DeviceModel:
    """The device called ``name``.

    Raises:
        ConfigError: there is none of that name; lists those there are.
    """
    path = FOLDER / f"{name.lower()}.json"
    if name.lower() not in known_devices():
        raise ConfigError(f"no device is called {name!r}; known: {', '.join(known_devices())}")
    return DeviceModel.from_dict(json.loads(path.read_text(encoding="utf-8")))


def recognise(capability: tuple[int, int], multiprocessors: int, memory_bytes: int) -> DeviceModel | None:
    """The device with these properties, or None. No name is looked at: vendors' names say little about memory."""
    gib = memory_bytes / 2**30
    for name in known_devices():
        device = load_device(name)
        match = device.match
        if (
            match
            and tuple(match["capability"]) == tuple(capability)
            and match["multiprocessors"] == multiprocessors
            and match["memory_gib"][0] <= gib <= match["memory_gib"][1]
        ):
            return device
    return None
