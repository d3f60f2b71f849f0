"""What to change, in words: rules over `Figures`, each with the figures it rests on and the option to write.

At most one advice a name: the first rule that fires, in the order of `RULES`, because the later ones would explain
time that the earlier one has explained. A well-hidden GEMM gets none. The thresholds are judgements, not measurements:
``profile run --try`` measures whether a change helps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from tpoverlap.config import OverlapConfig
from tpoverlap.config.options import OptionValue
from tpoverlap.tools.profile.figures import Figures

EXPOSED_PERCENT: Final = 5.0
"""Less than this is within what one run differs from the next."""
SLOWED: Final = 1.10
"""Computing that takes so many times what it takes alone is being disturbed or cut too small."""
SMALL_US: Final = 100.0
"""Work of one call below which launching its pieces costs more than hiding them saves."""
ROWS_FOR_A_CHUNK: Final = 512
"""Rows a rank from which a chunk's own GEMM fills a GPU at usual widths."""
MIN_PIECE_US: Final = 100.0
"""Least GEMM time a split is worth cutting to."""
MIN_WAIT_US: Final = 20.0
SLOWER: Final = 1.05
"""Than the plain twin, in the same run; less may be chance."""
LEAST_CALLS: Final = 3
"""Of a name, before a rank is blamed: what was seen once or twice may be anything."""
STEADY: Final = 0.75
"""Part of the calls in which the same rank has to be the late one."""
BLAMED_SHARE: Final = MappingProxyType({2: 0.75})
_BLAMED_SHARE_OF_MANY: Final = 0.6


@dataclass(frozen=True)
class Setting:
    """What the figures were measured under. A name missing from ``configs`` has unknown options."""

    tp_size: int
    configs: Mapping[str, OverlapConfig] = field(default_factory=dict)
    library: Literal["tpoverlap", "te"] = "tpoverlap"

    def config(self, name: str) -> OverlapConfig | None:
        """Options of ``name``."""
        return self.configs.get(name)


@dataclass(frozen=True)
class Advice:
    """One change. ``options`` are written below ``name``, ``remove`` names are taken out; both empty: not an option."""

    name: str
    rule: str
    text: str
    figures: Mapping[str, float]
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    target: str = ""
    remove: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The configuration lines to change, as YAML."""
        if not self.options:
            return []
        written = ", ".join(f"{key}: {_yaml(value)}" for key, value in self.options.items())
        return [f"{self.target or self.name}: {{{written}}}", *(f"# remove: {name}" for name in self.remove)]

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        figures = {key: round(value, 1) for key, value in self.figures.items()}
        return {"name": self.name, "rule": self.rule, "text": self.text, "figures": figures, "change": self.lines}


Rule = Callable[[Figures, OverlapConfig | None, Setting], Advice | None]


def advise(figures: Sequence[Figures], setting: Setting) -> list[Advice]:
    """Advice for each name that has any."""
    found = []
    for row in figures:
        for rule in RULES:
            advice = rule(row, setting.config(row.name), setting)
            if advice is not None:
                found.append(advice)
                break
    return found


# -- rules: what is not a matter of how to overlap -----------------------------------------------------------------


def _host_bound(row: Figures, config: OverlapConfig | None, setting: Setting) -> Advice | None:
    work = row.compute_us + row.comm_us
    if row.idle_us <= work:
        return None
    text = (
        f"host-bound: for {row.idle_us:.0f} us of {row.wall_us:.0f} nothing ran or waited, more than the work itself "
        f"({work:.0f} us). Give each call a larger T, or run this name without "
        "overlap, which launches least"
    )
    options = {} if row.method == "sequential" else _sequential()
    return Advice(row.name, "host-bound", text, _pick(row, "idle_us", "compute_us", "comm_us"), options)


def _too_small(row: Figures, config: OverlapConfig | None, setting: Setting) -> Advice | None:
    work = row.compute_us + row.comm_us
    if row.method in ("sequential", "") or work >= SMALL_US or row.exposed_us < row.comm_us:
        return None
    text = (
        f"too small to overlap: {row.compute_us:.0f} us of GEMM and {row.comm_us:.0f} us of communication, yet "
        f"{row.exposed_us:.0f} us are exposed; one collective and one GEMM launch less"
    )
    return Advice(row.name, "too-small", text, _pick(row, "compute_us", "comm_us", "exposed_us"), _sequential())


def _late_rank(row: Figures, config: OverlapConfig | None, setting: Setting) -> Advice | None:
    total, late = sum(row.wait_us.values()), row.waited_for_rank
    if late is None or setting.tp_size < 2 or row.calls < LEAST_CALLS:
        return None
    # Noise delays now this rank, now that one: a late rank is late in nearly every call, by more than calls differ.
    spread, times = row.wait_spread_us.get(late, 0.0), row.late_calls.get(late, row.calls)
    if row.wait_us[late] <= spread or times < STEADY * row.calls:
        return None
    share = row.wait_us[late] / total
    needed = BLAMED_SHARE.get(setting.tp_size, _BLAMED_SHARE_OF_MANY)
    # One rank's wait is at most the wall's; its sum over waiting ranks is compared a waiting rank.
    wait_of_one = row.wait_us[late] / (setting.tp_size - 1)
    if share < needed or wait_of_one < max(MIN_WAIT_US, EXPOSED_PERCENT / 100 * row.wall_us, row.idle_us):
        return None
    text = (
        f"rank {late} is late: {100 * share:.0f} % of all waiting is for it, {wait_of_one:.0f} us a call and waiting "
        f"rank of {row.wall_us:.0f}, in {times} of {row.calls} calls. No option helps: give that rank fewer rows (a "
        "TokenPartition), or look for what else it does or what slows its GPU"
    )
    figures = {"late_rank": float(late), "share_percent": 100 * share, "wait_us": wait_of_one, "wall_us": row.wall_us}
    return Advice(row.name, "late-rank", text, figures)


# -- rules: another method --------------------------------------------------------------------------------------------


def _overlap_pays(row: Figures, config: OverlapConfig | None, setting: Setting) -> Advice | None:
    hidden_us = min(row.compute_us, row.comm_us)
    if row.method != "sequential" or hidden_us < max(SMALL_US, EXPOSED_PERCENT / 100 * row.wall_us):
        return None
    block, _, phase = row.name.partition("_")
    beside = block in ("qkv", "fc1") and phase in ("dgrad", "wgrad")  # an independent GEMM hides it
    text = (
        f"nothing is overlapped: {row.comm_us:.0f} us of communication beside {row.compute_us:.0f} us of GEMM could "
        f"hide up to {hidden_us:.0f} us"
    )
    options: dict[str, OptionValue] = {"method": "bulk" if beside else "ring_exchange"}
    return Advice(row.name, "overlap-pays", text, _pick(row, "comm_us", "compute_us", "wall_us"), options)


def _pipeline_to_ring(row: Figures, config: OverlapConfig | None, setting: Setting) -> Advice | None:
    rows_a_rank = row.tokens[0] / setting.tp_size
    if row.method != "pipeline" or row.exposed_percent < EXPOSED_PERCENT or rows_a_rank < ROWS_FOR_A_CHUNK:
        return None
    text = (
        f"pipeline leaves {row.exposed_us:.0f} us exposed ({row.exposed_percent:.0f} %): its last piece travels after "
        f"the GEMM. With {rows_a_rank:.0f} rows a rank ring_exchange keeps own rows for the end, and they need not "
        "travel"
    )
    figures = _pick(row, "exposed_us", "exposed_percent", "tail_us") | {"rows_a_rank": rows_a_rank}
    return Advice(row.name, "pipeline-to-ring", text, figures, {"method": "ring_exchange"})


def _scatter_in_dgrad(row: Figures, config: OverlapConfig | None, setting: Setting) -> Advice | None:
    block, _, phase = row.name.partition("_")
    if row.method != "bulk" or phase != "wgrad" or block not in ("qkv", "fc1"):
        return None
    if row.exposed_percent < EXPOSED_PERCENT or row.comm_us <= row.compute_us:
        return None
    text = (
        f"the wgrad GEMM ({row.compute_us:.0f} us) is too short to hide the reduce-scatter beside it "
        f"({row.comm_us:.0f} us): scatter inside {block}_dgrad instead, behind the GEMM that makes those rows"
    )
    return Advice(
        row.name,
        "scatter-in-dgrad",
        text,
        _pick(row, "compute_us", "comm_us", "exposed_us"),
        {"method": "ring_exchange"},
        f"{block}_dgrad",
        (row.name,),
    )


def _slower_than_sequential(row: Figures, config: OverlapConfig | None, setting: Setting) -> Advice | None:
    alone = row.sequential_us
    if row.method in ("sequential", "") or alone is None or row.wall_us <= SLOWER * alone:
        return None
    text = (
        f"slower than no overlap: {row.wall_us:.0f} us, against {alone:.0f} us for the same GEMM and the plain "
        "collective one after the other"
    )
    figures = _pick(row, "wall_us", "sequential_us")
    return Advice(row.name, "slower-than-sequential", text, figures, _sequential())


# -- rules: the method's own options ---------------------------------------------------------------------------------


def _num_splits(row: Figures, config: OverlapConfig | None, setting: Setting) -> Advice | None:
    if row.method != "pipeline" or config is None:
        return None
    splits, alone = config.num_splits, row.compute_alone_us
    if alone is not None and splits > 2 and row.compute_us > SLOWED * alone:
        text = (
            f"the GEMM takes {row.compute_us:.0f} us in {splits} pieces and {alone:.0f} us whole: they are too small. "
            "Fewer, larger pieces"
        )
        figures = _pick(row, "compute_us", "compute_alone_us") | {"num_splits": float(splits)}
        return Advice(row.name, "fewer-splits", text, figures, {"num_splits": splits // 2})
    piece_us = row.compute_us / (2 * splits)
    if row.exposed_percent >= EXPOSED_PERCENT and row.tail_us > 0.5 * row.exposed_us and piece_us >= MIN_PIECE_US:
        text = (
            f"of {row.exposed_us:.0f} us exposed, {row.tail_us:.0f} come after the last piece's GEMM: with "
            f"{2 * splits} pieces the last one is half as large, and each still computes for {piece_us:.0f} us"
        )
        figures = _pick(row, "tail_us", "exposed_us", "compute_us") | {"num_splits": float(splits)}
        return Advice(row.name, "more-splits", text, figures, {"num_splits": 2 * splits})
    return None


def _aggregate(row: Figures, config: OverlapConfig | None, setting: Setting) -> Advice | None:
    if row.method != "ring_exchange" or row.direction != "all-gather" or config is None:
        return None
    alone = row.compute_alone_us
    if config.aggregate:
        if row.exposed_percent < EXPOSED_PERCENT or sum(row.wait_us.values()) / setting.tp_size < 0.5 * row.exposed_us:
            return None
        text = (
            f"{row.exposed_us:.0f} us of {row.wall_us:.0f} are exposed, mostly waiting: aggregate multiplies two "
            "chunks at once and so waits for both. Take one at a time"
        )
        return Advice(row.name, "no-aggregate", text, _pick(row, "exposed_us", "wall_us"), {"aggregate": False})
    if setting.tp_size < 4 or alone is None or row.compute_us <= SLOWED * alone:
        return None
    text = (
        f"the GEMM takes {row.compute_us:.0f} us in {setting.tp_size} chunks and {alone:.0f} us whole: one chunk is "
        "too small. Two at a time"
    )
    return Advice(row.name, "aggregate", text, _pick(row, "compute_us", "compute_alone_us"), {"aggregate": True})


def _num_sm(row: Figures, config: OverlapConfig | None, setting: Setting) -> Advice | None:
    if config is None or not copies_by_multiprocessors(config, row.method, setting.library):
        return None
    alone, num_sm = row.compute_alone_us, config.num_sm
    if row.exposed_percent >= EXPOSED_PERCENT and row.comm_us > 0.9 * row.compute_us:
        text = (
            f"the copies take {row.comm_us:.0f} us beside {row.compute_us:.0f} us of GEMM and {row.exposed_us:.0f} us "
            f"stick out: let more than {num_sm} multiprocessors copy"
        )
        figures = _pick(row, "comm_us", "compute_us", "exposed_us") | {"num_sm": float(num_sm)}
        return Advice(row.name, "more-sm", text, figures, {"num_sm": 2 * num_sm})
    if alone is not None and num_sm > 1 and row.compute_us > SLOWED * alone and row.comm_us < 0.7 * row.compute_us:
        text = (
            f"the GEMM takes {row.compute_us:.0f} us beside the copies and {alone:.0f} us alone, and the copies are "
            f"done after {row.comm_us:.0f} us: {num_sm} multiprocessors are more than they need"
        )
        figures = _pick(row, "compute_us", "compute_alone_us", "comm_us") | {"num_sm": float(num_sm)}
        return Advice(row.name, "fewer-sm", text, figures, {"num_sm": num_sm // 2})
    return None


def _link_bound(row: Figures, config: OverlapConfig | None, setting: Setting) -> Advice | None:
    if row.method == "sequential" or row.exposed_percent < EXPOSED_PERCENT or row.comm_us <= row.compute_us:
        return None
    text = (
        f"more communication ({row.comm_us:.0f} us) than GEMM ({row.compute_us:.0f} us): at least "
        f"{row.comm_us - row.compute_us:.0f} us show, however it is overlapped. A smaller TP group, or fewer bytes "
        "(FP8)"
    )
    return Advice(row.name, "link-bound", text, _pick(row, "comm_us", "compute_us", "exposed_us"))


RULES: Final[tuple[Rule, ...]] = (
    _late_rank,
    _host_bound,
    _too_small,
    _overlap_pays,
    _pipeline_to_ring,
    _num_splits,
    _num_sm,
    _aggregate,
    _scatter_in_dgrad,
    _slower_than_sequential,
    _link_bound,
)


def copies_by_multiprocessors(config: OverlapConfig, method: str, library: str) -> bool:
    """Whether ``num_sm`` multiprocessors move the rows: TE's pipeline and bulk always do."""
    if library == "te" and method in ("pipeline", "bulk"):
        return True
    return not config.use_ce and method in ("ring_exchange", "bulk", "fused")


def changed_options(raw: Mapping[str, Mapping[str, OptionValue]], advice: Sequence[Advice]) -> dict[str, Any]:
    """``raw`` options by name with every change of ``advice`` written into them."""
    changed: dict[str, dict[str, OptionValue]] = {name: dict(options) for name, options in raw.items()}
    for one in advice:
        if one.options:
            changed.setdefault(one.target or one.name, {}).update(one.options)
    for one in advice:
        for name in one.remove:
            changed.pop(name, None)
    return changed


def _sequential() -> dict[str, OptionValue]:
    return {"method": "sequential"}


def _pick(row: Figures, *names: str) -> dict[str, float]:
    return {name: float(getattr(row, name)) for name in names}


def _yaml(value: OptionValue) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
