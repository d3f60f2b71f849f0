"""The communicating GEMMs of a transformer layer as problems: what `predict` asks about and `tune` measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tpoverlap.config.names import COLUMN_DGRADS, KNOWN_NAMES, ROW_WGRADS
from tpoverlap.errors import ConfigError
from tpoverlap.tuning.problem import Kind, Problem

ITEM_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer. ``ffn``: the MLP's inner width F; ``gated``: fc1 has a gate beside it (SwiGLU).

    ``heads``, ``kv_heads``: None for as many keys and values as queries. ``dtype``: a key of `ITEM_BYTES`.
    """

    hidden: int
    ffn: int
    tp_size: int
    heads: int | None = None
    kv_heads: int | None = None
    gated: bool = False
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.kv_heads is not None and self.heads is None:
            raise ConfigError(f"kv_heads={self.kv_heads} says nothing without heads; give both")
        heads = self.heads or 1
        if self.hidden % heads:
            raise ConfigError(f"hidden={self.hidden} is not divisible by heads={heads}")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(
                f"dtype {self.dtype!r} is not in the cost model; it has {', '.join(ITEM_BYTES)} (FP8 is not calibrated)"
            )

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
