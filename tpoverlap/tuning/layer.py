"""The communicating GEMMs of a transformer layer as problems: what `predict` asks about and `tune` measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tpoverlap.config.names import COLUMN_DGRADS, KNOWN_NAMES, ROW_WGRADS
from tpoverlap.errors import ConfigError
from tpoverlap.tuning.problem import Kind, Problem

ITEM_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}
FP8_ALIGNMENT: Final = 16
"""FP8 tensor cores want both feature sizes of a GEMM in multiples of this."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer. ``ffn``: the MLP's inner width F; ``gated``: fc1 has a gate beside it (SwiGLU).

    ``heads``, ``kv_heads``: None for as many keys and values as queries. ``dtype``: a key of `ITEM_BYTES`. ``fp8``,
    ``fp8_buf``: as in `Problem`.
    """

    hidden: int
    ffn: int
    tp_size: int
    heads: int | None = None
    kv_heads: int | None = None
    gated: bool = False
    dtype: str = "bf16"
    fp8: bool = False
    fp8_buf: bool = False

    def __post_init__(self) -> None:
        if self.kv_heads is not None and self.heads is None:
            raise ConfigError(f"kv_heads={self.kv_heads} says nothing without heads; give both")
        heads = self.heads or 1
        if self.hidden % heads:
            raise ConfigError(f"hidden={self.hidden} is not divisible by heads={heads}")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"dtype {self.dtype!r} is not in the cost model; it has {', '.join(ITEM_BYTES)}")
        if self.fp8_buf and not self.fp8:
            raise ConfigError("fp8_buf is about reduce-scatters of FP8 GEMMs; give fp8 as well")
        if self.fp8:
            self._require_fp8()

    def _require_fp8(self) -> None:
        if self.dtype == "fp32":
            raise ConfigError("fp8 with dtype fp32 is not in the cost model; take bf16 or fp16")
        for what, size in (("hidden", self.hidden), *self.widths.items()):
            if size % FP8_ALIGNMENT:
                raise ConfigError(
                    f"FP8 GEMMs need features in multiples of {FP8_ALIGNMENT} on each rank; {what} comes to {size} at "
                    f"TP {self.tp_size}: change the sizes, or ask without fp8"
                )

    @property
    def numbers(self) -> str:
        """In words: ``bf16``, ``FP8 in bf16``, ``FP8 in bf16, fp8_buf``."""
        return (f"FP8 in {self.dtype}" if self.fp8 else self.dtype) + (", fp8_buf" if self.fp8_buf else "")

    @property
    def itemsize_bytes(self) -> int:
        """Of one element of the communicated activation."""
        return ITEM_BYTES[self.dtype]

    @property
    def widths(self) -> dict[str, int]:
        """Features of the sharded side of each block's GEMMs on one rank, rounded up."""
        heads = self.heads or 1
        kv_heads = heads if self.kv_heads is None else self.kv_heads
        whole = {
            "qkv": self.hidden + 2 * kv_heads * (self.hidden // heads),
            "proj": self.hidden,
            "fc1": self.ffn * (2 if self.gated else 1),
            "fc2": self.ffn,
        }
        return {block: -(-width // self.tp_size) for block, width in whole.items()}

    def problems(self, num_tokens: int = 1) -> dict[str, Problem]:
        """Name -> problem of the ten that communicate, in the order of `KNOWN_NAMES`."""
        return {
            name: Problem(
                kind_of(name),
                num_tokens,
                self.hidden,
                self.widths[name.rpartition("_")[0]],
                self.tp_size,
                self.itemsize_bytes,
                fp8=self.fp8,
                fp8_buf=self.fp8_buf,
            )
            for name in KNOWN_NAMES
            if name not in ROW_WGRADS
        }


def kind_of(name: str) -> Kind:
    """What a layer does under one of the twelve names, by default."""
    known = KNOWN_NAMES[name]
    if name in COLUMN_DGRADS:
        return "beside-gather"
    if known.bulk_legal:
        return "beside-scatter"
    return "scatter" if known.is_reduce_scatter else "gather"
