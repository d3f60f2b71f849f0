"""The prediction for a terminal: one table a layer, then memory, topology and how far to trust it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tpoverlap.tools.predict.prediction import Prediction, Row

if TYPE_CHECKING:
    from rich.console import Console


_WIDTH, _FP8_WIDTH = 132, 160


def show(console: Console, answer: Prediction) -> None:
    """Print everything; times in microseconds."""
    from rich.table import Table

    layer = answer.layer
    title = (
        f"{answer.label}: hidden {layer.hidden}, ffn {layer.ffn}, TP {layer.tp_size}, {layer.numbers} "
        f"on {answer.device.name}, capacity {answer.capacity_tokens}"
    )
    table = Table(title=title, title_justify="left", pad_edge=False)
    for heading in (
        "GEMM",
        "T",
        "best method",
        "us",
        "GEMM alone",
        *(["quantising"] if layer.fp8 else []),
        "exposed",
        *([layer.dtype, "gain"] if layer.fp8 else []),
        "NCCL",
        "gain",
        "our seq.",
        "gain",
        "vs padded",
    ):
        table.add_column(heading, justify="left" if heading in ("GEMM", "best method") else "right", no_wrap=True)
    table.add_column("pays from T", justify="right", no_wrap=True)
    for gemm in answer.gemms:
        table.add_section()
        pays = "nowhere" if gemm.break_even_tokens is None else str(gemm.break_even_tokens)
        for number, row in enumerate(gemm.rows):
            first = number == 0
            table.add_row(gemm.name if first else "", *_cells(row), pays if first else "")
    console.width = max(
        console.width, _FP8_WIDTH if layer.fp8 else _WIDTH
    )  # a pipe is 80 columns wide and would hide the figures
    console.print(table)
    if any(row.host_bound for gemm in answer.gemms for row in gemm.rows):
        console.print(
            "*: the processor's launches are the limit, not the GPU; --launches hidden leaves them out. The method is "
            "the best in a layer, whose other work hides part of its launches; the times are of the operation alone, "
            "so that our seq. may look faster: see --launches hidden"
        )
    console.print(
        "NCCL: plain cuBLAS, then NCCL's collective, without tpoverlap; our seq.: tpoverlap's own method sequential. "
        "Each with the best method's gain over it"
    )
    if any(row.gain_over_plain < 1.0 for gemm in answer.gemms for row in gemm.rows):
        console.print(
            "a gain over NCCL below 1: plain NCCL and cuBLAS are estimated to be faster than the method named"
        )
    if layer.fp8:
        console.print(
            f"{layer.dtype}: the best method at the same T without FP8. quantising: of activations, in every call. "
            "Weights are quantised once a forward, or once a version if they are cached; that is not in the table: "
            + ", ".join(f"{gemm.name} {gemm.weight_us:.0f} us" for gemm in answer.gemms if gemm.weight_us)
        )
    memory = answer.memory
    console.print(
        f"buffers: {_size(memory['symmetric_bytes'])} registered a rank, {_size(memory['staging_bytes'])} staging "
        f"while a reduce-scatter runs (Transformer Engine's twelve: {_size(memory['transformer_engine_bytes'])})"
    )
    inside = min(layer.tp_size, answer.topology.nvlink_domain)
    console.print(
        f"NVLink domain of {answer.topology.nvlink_domain} ({answer.topology.basis}: {answer.topology.source}): "
        f"{inside} of {layer.tp_size} ranks inside, {answer.ranks_outside} outside"
    )
    for reason in answer.why:
        console.print(f"estimate, because {reason}")
    if layer.fp8 and answer.device.fp8 is not None and (fp8 := answer.device.fp8.error):
        console.print(
            f"FP8 on {answer.device.name}: median error of GEMMs {fp8['gemm_median_percent']} % (nine in ten within "
            f"{fp8['gemm_nine_in_ten_within_percent']} %) and of quantising {fp8['kernels_median_percent']} %, on "
            "features and widths left out of the fit"
        )
    error = answer.device.error
    if error:
        console.print(
            f"the model of {answer.device.name}: median error {error['median_percent']} %, nine in ten rows within "
            f"{error['nine_in_ten_within_percent']} %, on shapes left out of its calibration; of plain cuBLAS, then "
            "NCCL: " + ", ".join(f"{what} {value} %" for what, value in plain_errors(error).items())
        )
    console.print("measure instead of predicting: tpoverlap tune")


def plain_errors(error: Mapping[str, Any]) -> dict[str, float]:
    """Median error, in percent, of the baseline by direction: ``{"ag": .., "rs": ..}``."""
    by_kind = error["median_percent_by_kind"]
    return {kind.partition(" ")[0]: float(value) for kind, value in by_kind.items() if kind.endswith(", then NCCL")}


def _cells(row: Row) -> list[str]:
    tokens = str(row.tokens) if row.tokens - row.above == 1 else f"{row.above + 1}..{row.tokens}"
    options = "".join(f" {value if value is not True else key}" for key, value in row.options.items())
    return [
        tokens,
        row.method + options,
        f"{row.time_us:.0f}" + "*" * row.host_bound,
        f"{row.gemm_us:.0f}",
        *([] if row.wide_us is None else [f"{row.quantise_us:.0f}"]),
        f"{row.exposed_us:.0f}",
        *([] if row.wide_us is None else [f"{row.wide_us:.0f}", f"{row.gain_over_wide:.2f}"]),
        f"{row.plain_us:.0f}",
        f"{row.gain_over_plain:.2f}",
        f"{row.sequential_us:.0f}",
        f"{row.gain_over_sequential:.2f}",
        f"{row.gain_over_padding:.2f}",
    ]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
