"""One GEMM with its collective: what a row of the gemm suite is, and a step of the dynamic one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tpoverlap.tokens import TokenPartition
from tpoverlap.tools.bench.job import Direction, Numbers


@dataclass(frozen=True)
class GemmRow:
    """x [T, K] times weight [N, K]. An AG row gathers x, an RS row scatters y [T, N].

    ``capacity_tokens``: C that the buffers are registered at, and what "padded" pads to.
    """

    direction: Direction
    num_tokens: int
    in_features: int
    out_features: int
    capacity_tokens: int
    numbers: Numbers = "bfloat16"

    @property
    def is_fp8(self) -> bool:
        return self.numbers == "fp8"

    @property
    def label(self) -> str:
        """``ag 8192x8192x4096``, ``ag fp8 8192x8192x4096``."""
        fp8 = "fp8 " if self.is_fp8 else ""
        return f"{self.direction} {fp8}{self.num_tokens}x{self.in_features}x{self.out_features}"

    @property
    def width(self) -> int:
        """Columns of what travels."""
        return self.in_features if self.direction == "ag" else self.out_features

    @property
    def features(self) -> int:
        """Of the sharded side of the GEMM, on one rank."""
        return self.out_features if self.direction == "ag" else self.in_features

    def partition(self, tp_size: int) -> TokenPartition:
        """Rows of each rank."""
        return TokenPartition.balanced(self.num_tokens, tp_size)

    def comm_bytes(self, tp_size: int, itemsize_bytes: int) -> float:
        """Bytes that a rank receives: (R - 1) / R of the activation that travels; a byte a number in an FP8 gather."""
        if self.is_fp8 and self.direction == "ag":
            itemsize_bytes = 1
        return self.num_tokens * self.width * itemsize_bytes * (tp_size - 1) / tp_size

    def as_dict(self) -> dict[str, Any]:
        """The fields, for the JSON."""
        return asdict(self)
