"""What each of the ten communicating GEMMs of a transformer layer multiplies and moves, a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tpoverlap.config import OverlapConfig

ITEM_BYTES: Final[Mapping[str, int]] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer. ``ffn``: the MLP's inner width; ``gated``: fc1 has a gate beside it (SwiGLU).

    ``qkv_width``: all of Q, K and V together, None for 3 * hidden (no grouped queries).
    """

    hidden: int
    ffn: int
    tp_size: int
    tokens: int
    dtype: str = "bf16"
    gated: bool = False
    qkv_width: int | None = None

    @property
    def widths(self) -> dict[str, int]:
        """Features of the sharded side of each GEMM on one rank, rounded up."""
        total = {
            "qkv": 3 * self.hidden if self.qkv_width is None else self.qkv_width,
            "proj": self.hidden,
            "fc1": self.ffn * (2 if self.gated else 1),
            "fc2": self.ffn,
        }
        return {block: -(-width // self.tp_size) for block, width in total.items()}

    @property
    def rows_per_rank(self) -> int:
        """Rows of the ranks that own most, under a balanced partition."""
        return -(-self.tokens // self.tp_size)


@dataclass(frozen=True)
class Work:
    """One named GEMM on one rank: ``rows x inner`` times ``inner x columns``, and the tensor that travels beside it."""

    name: str
    rows: int
    inner: int
    columns: int
    moved: str
    bytes_sent: int
    """By the rank that sends most, over the whole operation; it receives as many."""
    tensor_bytes: int
    depends: str
    """How the GEMM and the communication depend on each other."""

    @property
    def flops(self) -> int:
        """Multiplications and additions of the GEMM on one rank."""
        return 2 * self.rows * self.inner * self.columns


def work_of(name: str, config: OverlapConfig, layer: Layer) -> Work | None:
    """Sizes of ``name`` under ``config``; None for a name of the user's own, whose width only the program knows."""
    block, _, phase = name.rpartition("_")
    if block not in layer.widths or phase not in ("fprop", "dgrad", "wgrad"):
        return None
    tokens, hidden, shard = layer.tokens, layer.hidden, layer.widths[block]
    column = block in ("qkv", "fc1")
    if phase == "wgrad":
        rows, inner, columns = shard, tokens, hidden
    elif (phase == "fprop") == column:
        rows, inner, columns = tokens, hidden, shard
    else:
        rows, inner, columns = tokens, shard, hidden
    moved, depends = _what_moves(phase, column, config)
    one_byte = layer.dtype == "fp8" and config.fp8_buf
    item = 1 if one_byte else max(2, ITEM_BYTES[layer.dtype])
    sent = (layer.tp_size - 1) * layer.rows_per_rank * hidden * item
    return Work(name, rows, inner, columns, moved, sent, tokens * hidden * item, depends)


def _what_moves(phase: str, column: bool, config: OverlapConfig) -> tuple[str, str]:
    if phase == "wgrad":
        return "dgrad's output dx", "independent: this GEMM computes the weight gradient meanwhile"
    if phase == "dgrad" and column:
        if config.is_reduce_scatter:
            return "its own output dx", "the GEMM's rows travel as they are finished"
        return "the saved input x, which wgrad will need", "independent: this GEMM computes dx meanwhile"
    if column:
        return "its input x", "the GEMM needs the rows that arrive"
    if phase == "fprop":
        return "its own output y, partial sums", "the GEMM's rows travel as they are finished"
    return "its input dy", "the GEMM needs the rows that arrive"
