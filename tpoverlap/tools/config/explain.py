"""A configuration in words: for each GEMM what moves, how much, behind what, by what, and what each line does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tpoverlap.config import OverlapConfig, ResolvedConfig
from tpoverlap.config.by_tokens import BY_TOKENS, rows_key
from tpoverlap.config.honoured import is_honoured, why_ignored
from tpoverlap.config.options import OptionValue
from tpoverlap.tools.config.picture import lanes
from tpoverlap.tools.config.rates import Rates
from tpoverlap.tools.config.sizes import Layer, Work, work_of
from tpoverlap.tools.config.timeline import Timeline, timeline

# One clause a key: what it does where it is read. ``docs/configuration.md`` says more.
MEANING: Final[Mapping[str, str]] = {
    "method": "how computing and moving are interleaved",
    "is_reduce_scatter": "which way the rows go",
    "num_sm": "multiprocessors that copy",
    "cga_size": "copy blocks that start as one cluster",
    "set_sm_margin": "whether the GEMM leaves num_sm multiprocessors free",
    "num_splits": "pieces that the GEMM is cut into",
    "aggregate": "whether two ranks' rows are multiplied at once",
    "atomic_gemm": "one GEMM whose tiles wait for flags, instead of many small ones",
    "use_ce": "whether the copy engine moves the rows",
    "fp8_buf": "whether the buffer holds FP8",
    "comm_priority": "CUDA stream priority of the copies",
    "gemm_priority": "CUDA stream priority of the GEMMs",
    "pipeline_rs_overlap_first_gemm": "whether the first piece travels at once",
    "num_max_streams": "streams over which the pieces' GEMMs go round",
}
_METHODS: Final[Mapping[str, str]] = {
    "bulk": "the whole tensor travels while an unrelated GEMM runs",
    "sequential": "nothing overlaps: one after the other",
    "external": "nothing here: these rows were gathered already",
    "auto": "the dispatcher chooses; drawn as ring_exchange",
    "fused": "one kernel computes and moves; drawn as ring_exchange",
}


@dataclass(frozen=True)
class Explained:
    """One GEMM: its options, sizes (None where nobody knows them) and ideal timeline."""

    name: str
    config: OverlapConfig
    written: Mapping[str, OptionValue]
    work: Work | None
    drawn: Timeline
    by_tokens: Mapping[str, Any] | None = None
    """The file's rows by T for it."""


def explained(config: ResolvedConfig, layer: Layer, rates: Rates | None) -> list[Explained]:
    """Every name that communicates, in the order of the layer."""
    section = config.extras.get(BY_TOKENS)
    rows = section if isinstance(section, Mapping) else {}
    return [
        replace(_one(name, options, config.explicit.get(name, {}), layer, rates), by_tokens=rows.get(name))
        for name, options in config.names.items()
    ]


def _one(
    name: str, config: OverlapConfig, written: Mapping[str, OptionValue], layer: Layer, rates: Rates | None
) -> Explained:
    work = work_of(name, config, layer)
    gemm, copy = 1.0, 0.7  # a picture of the order only
    if rates is not None and work is not None:
        gemm, copy = rates.gemm_us(work.flops), rates.copy_us(work.bytes_sent)
    return Explained(name, config, written, work, timeline(_as_run(config), layer.tp_size, gemm, copy))


def _as_run(config: OverlapConfig) -> OverlapConfig:
    """As the dispatcher has it."""
    return replace(config, method="fused") if config.atomic_selects_fused else config


def paragraph(one: Explained, layer: Layer, rates: Rates | None, line_of: Callable[[str, str], int]) -> Iterator[str]:
    """The lines about one GEMM. ``line_of(name, key)``: where an option stands in the file, 0 where nowhere."""
    config, work = one.config, one.work
    runs = _as_run(config)
    changed = "" if runs is config else f"; {runs.method} here, as atomic_gemm asks"
    yield f"{one.name}: {config.direction}, {config.method}{changed}" + ("" if one.written else "  (default)")
    if one.by_tokens is not None:
        yield f"  by T     {_at(one.by_tokens, layer)}"
    yield f"  how      {_how(runs, layer)}"
    if work is None:
        yield "  sizes    known to the program only, which registers the width of this name"
    else:
        shape = f"[T {layer.tokens}, H {layer.hidden}]"
        yield f"  moves    {work.moved} {shape}, {_size(work.tensor_bytes)}; never the {_expanded(one.name, layer)}"
        yield f"           each of the {layer.tp_size} ranks sends and receives {_size(work.bytes_sent)}"
        yield (
            f"  behind   a GEMM of {work.rows} x {work.inner} x {work.columns} (rows, inner, columns) a rank, "
            f"{work.flops / 1e9:.1f} GFLOP; {work.depends}"
        )
    yield f"  by       {_means(config)}"
    for key, value in one.written.items():
        yield f"  {_place(line_of(one.name, key))} {key}: {_value(value)} -- {_key(config, key, layer.dtype == 'fp8')}"
    scale = "not to scale" if rates is None or work is None else f"{one.drawn.total:.0f} us"
    for text in lanes(one.drawn):
        yield f"  {text} {scale}"
        scale = ""
    if rates is not None and work is not None:
        yield (
            f"  exposed  {one.drawn.exposed:.0f} us of {one.drawn.copy:.0f} us communication (GEMM "
            f"{one.drawn.gemm:.0f} us); computed from {rates.gemm_tflops:g} TFLOP/s and {rates.link_gb_s:g} GB/s "
            f"({rates.source})"
        )
    else:
        yield f"  exposed  {_exposed(runs, layer, work)}"


def _at(entry: Mapping[str, Any], layer: Layer) -> str:
    """What the file's ``tpoverlap: by_tokens:`` makes of it."""
    rows = entry.get(rows_key(layer.dtype == "fp8")) or entry.get(rows_key(False)) or ()
    row = next((one for one in rows if one["up_to"] >= layer.tokens), rows[-1] if rows else None)
    where = f"where the GEMM has {entry.get('features')} features a rank and H is {entry.get('width')}"
    if row is None:
        return f"by_tokens has no row {where}"
    told = f"by_tokens: tpoverlap runs {row['method']} at T {layer.tokens}, {where}"
    return f"{told}; what follows is the method above, which Transformer Engine runs at every T"


def _exposed(config: OverlapConfig, layer: Layer, work: Work | None) -> str:
    """What sticks out of the ideal picture, where no rates say how long it is."""
    size = "" if work is None else f" ({_size(work.bytes_sent)} a rank)"
    others = max(1, layer.tp_size - 1)
    chunk = "" if work is None else f", {_size(work.bytes_sent // others)},"
    if layer.tp_size == 1 or config.method == "external":
        return "nothing"
    if config.method == "sequential":
        return f"all of it{size}"
    if config.method == "bulk":
        return f"what the transfer{size} takes longer than the GEMM"
    if config.method == "pipeline":
        last = "" if work is None else f", {_size(work.bytes_sent // config.num_splits)},"
        return f"the last of {config.num_splits} pieces{last} and what a piece takes longer to travel than to compute"
    if config.aggregate and not config.is_reduce_scatter:
        return f"the first chunk{chunk} and what two chunks take longer to travel than to compute"
    times = f", {others} times" if others > 1 else ""
    return f"what a chunk{chunk} takes longer to travel than to compute{times}"


def _how(config: OverlapConfig, layer: Layer) -> str:
    if layer.tp_size == 1:
        return "one rank only: nothing travels"
    if config.method == "pipeline":
        return f"the GEMM is cut along its columns in {config.num_splits}; each piece travels while the next computes"
    if config.method == "ring_exchange" and config.is_reduce_scatter:
        return f"other ranks' rows first, one chunk a rank ({layer.tp_size}); each travels while the next computes"
    if config.method == "ring_exchange":
        two = ", two chunks at a time" if config.aggregate else ""
        others = f"the {layer.tp_size - 1} others arrive" if layer.tp_size > 2 else "the other arrives"
        return f"own rows first, then chunk by chunk as {others}{two}"
    return _METHODS[config.method]


def _means(config: OverlapConfig) -> str:
    here = "here the copy engine (no multiprocessor)" if config.use_ce else f"here {config.num_sm} multiprocessors"
    if config.method in ("pipeline", "bulk"):
        there = f"{config.num_sm} multiprocessors"
        there += ", which the GEMM leaves free" if config.set_sm_margin else ", which the GEMM competes for"
    elif config.method == "ring_exchange":
        there = "the copy engine" if config.use_ce else f"{config.num_sm} multiprocessors"
        if config.set_sm_margin and config.use_ce:
            there += f", and the GEMM gives up {config.num_sm} multiprocessor(s) for nothing"
    else:
        return here
    return f"{here}; in Transformer Engine {there}"


def _expanded(name: str, layer: Layer) -> str:
    block = name.rpartition("_")[0]
    width = layer.widths.get(block, 0) * layer.tp_size
    return f"[T, {width}] on the GEMM's sharded side" if width else "other tensor"


def _key(config: OverlapConfig, key: str, fp8: bool) -> str:
    if is_honoured(config, key, fp8):
        return MEANING[key]
    return f"{MEANING[key]}; ignored here: {why_ignored(config, key)}"


def _place(line: int) -> str:
    return f"line {line:<4}" if line else "option   "[:9]


def _value(value: OptionValue) -> str:
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:.1f} KiB"
