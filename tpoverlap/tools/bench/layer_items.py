"""What the layers suite measures: one layer, its sizes, its numbers and T; and the variants of each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import accumulate, cycle
from typing import Any, Final, Literal

from tpoverlap.errors import ConfigError
from tpoverlap.tools.bench.job import DIRECTIONS, BenchJob
from tpoverlap.tools.bench.methods import AUTO
from tpoverlap.tools.bench.variants import PADDED

Kind = Literal["transformer", "mlp"]

AUTO_RS: Final = "auto, RS in dgrad"
RING_BULK: Final = "ring, bulk"
RING_RS: Final = "ring, RS in dgrad"
TWIN: Final = "no overlap"
COMPUTE_ONLY: Final = "compute only"
FP8: Final = "fp8"

_SEQUENCE_UNITS: Final = (7, 1, 5, 3)
"""Lengths of the packed sequences in units, again and again; the last one is cut at T."""


@dataclass(frozen=True)
class LayerSize:
    """Of the full layer: H, its feed-forward width, heads, key-value groups and the width of a head."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int


@dataclass(frozen=True)
class LayerItem:
    """One row. ``numbers``: "bfloat16", "float32" or `FP8`; ``sequence_unit``: rows, see `sequence_offsets`."""

    kind: Kind
    size: LayerSize
    numbers: str
    num_tokens: int
    capacity_tokens: int
    sequence_unit: int

    @property
    def is_fp8(self) -> bool:
        """Whether its GEMMs run in FP8, with current scaling."""
        return self.numbers == FP8

    @property
    def label(self) -> str:
        """``transformer 4096x14336 bfloat16 T=8192``."""
        return f"{self.kind} {self.size.hidden}x{self.size.ffn} {self.numbers} T={self.num_tokens}"

    @property
    def variants(self) -> tuple[str, ...]:
        """Labels in order."""
        padded = (PADDED,) if self.num_tokens < self.capacity_tokens else ()
        return (AUTO, AUTO_RS, RING_BULK, RING_RS, TWIN, *padded, COMPUTE_ONLY)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "kind": self.kind,
            **asdict(self.size),
            "numbers": self.numbers,
            "num_tokens": self.num_tokens,
            "capacity_tokens": self.capacity_tokens,
            "cu_seqlens": list(sequence_offsets(self.num_tokens, self.sequence_unit)),
        }


def sequence_offsets(num_tokens: int, unit: int) -> tuple[int, ...]:
    """``cu_seqlens`` of T rows: sequences of 7, 1, 5 and 3 units in turn."""
    offsets = [0]
    for end in accumulate(unit * count for count in cycle(_SEQUENCE_UNITS)):
        offsets.append(min(end, num_tokens))
        if end >= num_tokens:
            return tuple(offsets)
    raise AssertionError("the lengths never end")


_CAPACITY: Final = 8192
_SIZES: Final = (LayerSize(4096, 14336, 32, 8, 128), LayerSize(8192, 28672, 64, 8, 128))
_KINDS: Final[tuple[Kind, ...]] = ("transformer", "mlp")


def layer_items(job: BenchJob) -> list[LayerItem]:
    """The rows of a run. Raises ConfigError for options that mean nothing here, or a T that cannot be."""
    if job.shapes or job.directions != DIRECTIONS:
        raise ConfigError("--shape and --only-direction mean nothing to the suite layers: run it by itself")
    on_gpu, tp_size = job.device_type == "cuda", job.tp_size
    capacity, unit = (_CAPACITY, 256) if on_gpu else (96, 4)
    sizes = _SIZES if on_gpu else (LayerSize(64, 64 * tp_size, 2 * tp_size, tp_size, 16),)
    tokens = job.tokens or ((capacity, capacity // 2, 1024, 256) if on_gpu else (capacity, 37))
    kinds = _KINDS
    if job.quick:
        sizes, kinds, tokens = sizes[:1], _KINDS[:1], job.tokens or tokens[:2]
    if min(tokens) < tp_size or max(tokens) > capacity:
        raise ConfigError(f"--tokens of the suite layers lie between R = {tp_size} and its capacity of {capacity} rows")
    for size in sizes:
        for what, count in (("ffn", size.ffn), ("heads", size.heads), ("groups", size.groups)):
            if count % tp_size:
                raise ConfigError(f"{what}={count} of the suite layers is not divisible by {tp_size} ranks; use --tp 2")
    return [
        LayerItem(kind, size, numbers, num_tokens, capacity, unit)
        for size in sizes
        for kind in kinds
        for numbers in (str(job.dtype).removeprefix("torch."), FP8)
        for num_tokens in sorted(tokens, reverse=True)
    ]
