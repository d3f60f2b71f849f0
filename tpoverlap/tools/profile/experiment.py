"""One rank of ``profile run``: measure overlapped and plain, ask for advice, with ``--try`` measure what it is worth.

All comparisons are interleaved: whatever else the machine does meets every variant alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from tpoverlap.comm import Trace
from tpoverlap.config import resolve
from tpoverlap.errors import TpOverlapError
from tpoverlap.manager import UserBufferManager
from tpoverlap.memory.base import agree
from tpoverlap.tools.profile.advice import advise, changed_options
from tpoverlap.tools.profile.figures import Figures, figures_of, with_alone
from tpoverlap.tools.profile.layer import GemmSet, LayerSizes, without_overlap
from tpoverlap.tools.profile.model import Span, spans_of
from tpoverlap.tools.profile.picture import draw
from tpoverlap.tools.profile.report import Report, write_json
from tpoverlap.tools.profile.session import on_common_clock, profile, setting_of

_WARM_UP_STEPS: Final = 3
_MOST_DIFFERENT: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Relative Frobenius error against the plain twin; a wrong row would show as about 1."""
_LEAST_ROUNDS: Final = 3
_RECORDING: Final = 0.6
_RECORDING_BEFORE_A_TRIAL: Final = 0.25
"""Part of a T's time in which is recorded; adding up and drawing what was recorded takes its time too."""
_TRIAL_STEPS: Final = 0.35
_TRIAL_RECORDING: Final = 0.6
"""Parts of what a trial finds left, after which its steps end and its recording does."""
_MOSTLY: Final = 0.75
"""Part of the rounds that a change has to win before it is said to help."""


@dataclass(frozen=True)
class RunJob:
    """What every rank is told.

    Attributes:
        tokens: one profile for each T.
        ub_cfgs: options by name.
        rounds: steps that are measured.
        try_advice: measure the advised options too.
        out_dir: each T gets a directory below it.
        limit_s: for everything after the start of the ranks. Each T has its share: it measures fewer rounds where they
            do not fit, but at least three; a T whose turn comes later than this is left out.
    """

    sizes: LayerSizes
    tokens: tuple[int, ...]
    device_type: str
    dtype: torch.dtype
    ub_cfgs: dict[str, Any]
    rounds: int
    try_advice: bool
    out_dir: str
    timeout_s: float
    limit_s: float = math.inf


@dataclass(frozen=True)
class Trial:
    """What the advised options did.

    Attributes:
        lines: what was changed.
        before_us, after_us: whole step, slowest rank, median; ``wins``: rounds in which the change was faster.
        names: name -> (before, after) wall time of the operations, from marks of other rounds.
        verdict: "helped", "did not help" or "made it slower".
    """

    lines: tuple[str, ...]
    before_us: float
    after_us: float
    wins: int
    rounds: int
    names: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """One of three; a difference that comes and goes is none."""
        if self.wins >= _MOSTLY * self.rounds and self.after_us < self.before_us:
            return "helped"
        if self.wins <= (1 - _MOSTLY) * self.rounds and self.after_us > self.before_us:
            return "made it slower"
        return "did not help"

    def as_dict(self) -> dict[str, Any]:
        """For the JSON report."""
        return {
            "changed": list(self.lines),
            "before_us": round(self.before_us, 1),
            "after_us": round(self.after_us, 1),
            "faster_rounds": self.wins,
            "rounds": self.rounds,
            "verdict": self.verdict,
            "gemms": {name: [round(value, 1) for value in pair] for name, pair in self.names.items()},
        }


@dataclass(frozen=True)
class TokensReport:
    """One T: the report, and what ``--try`` found (None: nothing was tried)."""

    num_tokens: int
    report: Report
    trial: Trial | None


def profile_rank(rank: int, world_size: int, job: RunJob) -> list[TokensReport]:
    """Run the job on this rank of an initialised group; rank 0 returns the reports, the others nothing."""
    group = dist.group.WORLD
    assert group is not None, "the ranks were started with a group"
    device = torch.device(job.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())

    end_s = time.monotonic() + job.limit_s
    base = GemmSet(group, job.sizes, max(job.tokens), job.dtype, device, job.ub_cfgs, job.timeout_s)

    def make(ub_cfgs: dict[str, Any]) -> GemmSet:
        return GemmSet(group, job.sizes, max(job.tokens), job.dtype, device, ub_cfgs, job.timeout_s, like=base)

    plain = make(without_overlap(resolve(job.ub_cfgs, world_size)))
    reports = []
    try:
        for index, num_tokens in enumerate(job.tokens):
            left_s = end_s - time.monotonic()
            if any(agree(group, left_s <= 0.0)):
                break
            share_s = left_s / (len(job.tokens) - index)
            reports.append(_one_t(job, num_tokens, base, plain, make, share_s))
    finally:
        base.close()
        plain.close()
    return reports if rank == 0 else []


def _one_t(
    job: RunJob,
    num_tokens: int,
    base: GemmSet,
    plain: GemmSet,
    make: Callable[[dict[str, Any]], GemmSet],
    share_s: float,
) -> TokensReport:
    mgr, group = base.manager, base.manager.group
    begin_s = time.monotonic()
    x = base.input(num_tokens)
    outputs = [_warm_up(one, x, num_tokens) for one in (plain, base)]
    _require_close(*outputs)
    part = _RECORDING_BEFORE_A_TRIAL if job.try_advice else _RECORDING
    recorded = _record((base, plain), x, num_tokens, job.rounds, begin_s + part * share_s)
    directory = Path(job.out_dir) / f"T{num_tokens}"
    with profile(directory, manager=mgr):  # one step for the trace: torch's own recording slows launches
        base.step(x, num_tokens)
    overlapped, alone = (figures_of(spans) for spans in recorded)
    figures = with_alone(overlapped, alone)
    setting = setting_of(mgr)
    # Rank 0 decides for all: the ranks' spans are the same, but floating point need not be.
    advice = agree(group, advise(figures, setting))[0]
    trial = None
    if job.try_advice and any(one.options for one in advice):
        resolved = resolve(job.ub_cfgs, mgr.tp_size)
        tried = make(changed_options(resolved.explicit, advice))
        try:
            _require_close(outputs[0], _warm_up(tried, x, num_tokens))
            lines = tuple(line for one in advice for line in one.lines)
            trial = _trial(job, (base, tried), x, num_tokens, lines, begin_s + share_s)
        finally:
            tried.close()
    report = _report(job, num_tokens, mgr, figures, advice)
    if mgr.rank == 0:
        draw(directory / "timeline.png", _last_step(recorded[0]), report.title)
        write_json(directory / "report.json", report.as_dict() | {"try": trial.as_dict() if trial else None})
    return TokensReport(num_tokens, report, trial)


def _report(
    job: RunJob, num_tokens: int, mgr: UserBufferManager, figures: Sequence[Figures], advice: Sequence[Any]
) -> Report:
    device = torch.cuda.get_device_name(mgr.device) if mgr.device.type == "cuda" else "cpu"
    sizes = job.sizes
    facts = {
        "hidden": sizes.hidden,
        "ffn": sizes.ffn,
        "tp_size": sizes.tp_size,
        "num_tokens": num_tokens,
        "dtype": str(job.dtype).removeprefix("torch."),
        "device": device,
        "backend": mgr.backend_name,
        "torch": torch.__version__,
        "rounds": max((row.calls for row in figures), default=0),
        "rounds_asked": job.rounds,
    }
    notes = [
        "alone: method sequential, one after the other, measured in turns with the overlapped step",
        "the layer has no attention, no normalisation and no activation: its GEMMs follow one another",
    ]
    if device == "cpu":
        notes.append("on the CPU the ranks share cores: times show order and waiting, not what a GPU would do")
    title = f"H {sizes.hidden}, F {sizes.ffn}, R {sizes.tp_size}, T {num_tokens} on {device}"
    return Report(title, tuple(figures), tuple(advice), tuple(notes), facts)


# -- measuring -------------------------------------------------------------------------------------------------------


def _warm_up(one: GemmSet, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
    for _ in range(_WARM_UP_STEPS):
        out = one.step(x, num_tokens)
    one.manager.check()
    return out


def _require_close(expected: torch.Tensor, found: torch.Tensor) -> None:
    if expected.numel() == 0:
        return
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    limit = _MOST_DIFFERENT[expected.dtype]
    if not error <= limit:  # NaN too
        raise TpOverlapError(f"the overlapped step differs from the plain one by {error:.2e} (limit {limit:.0e})")


@contextmanager
def _traced(mgr: UserBufferManager, into: list[Span]) -> Iterator[None]:
    """One step's marks, appended to ``into`` when the block ends. Calls are numbered on from those that are there."""
    assert mgr.channel is not None, "R = 1 was refused"
    trace = Trace(mgr.device)
    mgr.channel.record(trace)
    try:
        yield
    finally:
        mgr.channel.record(None)
    first = 1 + max((span.call for span in into), default=-1)
    spans = spans_of(trace.marks(), mgr.rank, trace.start_s * 1e6)
    into += [replace(span, call=span.call + first) for span in spans]


def _turns(group: dist.ProcessGroup, rounds: int, end_s: float) -> Iterator[int]:
    """0, 1, .. below ``rounds``, until one of the ranks is past ``end_s``; at least the first `_LEAST_ROUNDS`.

    The ranks ask each other before every turn, so that all of them make the same number. Collective.
    """
    for turn in range(rounds):
        if turn >= _LEAST_ROUNDS and end_s != math.inf and any(agree(group, time.monotonic() >= end_s)):
            return
        yield turn


def _record(
    sets: Sequence[GemmSet], x: torch.Tensor, num_tokens: int, rounds: int, end_s: float = math.inf
) -> list[list[Span]]:
    """Spans of all ranks for each set, measured in turns; the same list on every rank."""
    group = sets[0].manager.group
    own: list[list[Span]] = [[] for _ in sets]
    for turn in _turns(group, rounds, end_s):
        for offset in range(len(sets)):
            index = (turn + offset) % len(sets)  # nobody always comes first
            _together(sets[index].manager)
            with _traced(sets[index].manager, own[index]):
                sets[index].step(x, num_tokens)
    return [on_common_clock([span for spans in agree(group, one) for span in spans]) for one in own]


def _trial(
    job: RunJob,
    sets: tuple[GemmSet, GemmSet],
    x: torch.Tensor,
    num_tokens: int,
    lines: tuple[str, ...],
    end_s: float,
) -> Trial:
    group = sets[0].manager.group
    now_s = time.monotonic()
    left_s = max(0.0, end_s - now_s)
    times_us: list[list[float]] = [[], []]
    for turn in _turns(group, job.rounds, now_s + _TRIAL_STEPS * left_s):
        for offset in range(2):
            index = (turn + offset) % 2
            times_us[index].append(_step_us(sets[index], x, num_tokens))
    slowest = [[max(ranks) for ranks in zip(*agree(group, one), strict=True)] for one in times_us]
    wins = sum(after < before for before, after in zip(*slowest, strict=True))
    before, after = (
        {row.name: row.wall_us for row in figures_of(spans)}
        for spans in _record(sets, x, num_tokens, job.rounds, now_s + _TRIAL_RECORDING * left_s)
    )
    names = {name: (before[name], after[name]) for name in before if name in after}
    medians = [statistics.median(one) for one in slowest]
    return Trial(lines, medians[0], medians[1], wins, len(times_us[0]), names)


def _step_us(one: GemmSet, x: torch.Tensor, num_tokens: int) -> float:
    _together(one.manager)
    started = time.perf_counter()
    one.step(x, num_tokens)
    if one.manager.device.type == "cuda":
        torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - started)


def _together(mgr: UserBufferManager) -> None:
    """All ranks start the next step at about the same time, with idle devices."""
    if mgr.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(mgr.group)


def _last_step(spans: Sequence[Span]) -> list[Span]:
    """The spans of every rank's last step: as many operations as there are names."""
    names = len({span.name for span in spans})
    last = {rank: max(span.call for span in spans if span.rank == rank) for rank in {span.rank for span in spans}}
    return [span for span in spans if span.call > last[span.rank] - names]
