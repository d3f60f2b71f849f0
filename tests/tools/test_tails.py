"""`benchmarks.tails` runs, on the CPU, waits for what it adds, and times nothing that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.distributed as dist

from benchmarks import gemm_alone, tails, tails_choice, tails_cuts
from benchmarks.tails_lanes import Lanes
from tpoverlap import pieces
from tpoverlap.testing import RankPool
from tpoverlap.tools.bench.session import Session

CPU = torch.device("cpu")


def run(rank: int, world_size: int, out: Path, budget_s: float, *choice: Any) -> None:
    assert dist.group.WORLD is not None, "the pool's"
    tails.measure_all(Session(gemm_alone.job_on("cpu", 1, None), dist.group.WORLD, 0), out, budget_s, *choice)


def test_on_the_cpu(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    out = tmp_path / "tails.json"
    rank_pool(1).run(run, out, 100.0)
    found = json.loads(out.read_text())
    assert found["left_out"] == [] and found["environment"]["torch"] == torch.__version__
    scatter, gather = found["rows"]
    for row in found["rows"]:
        assert not row["problems"] and all(time_us > 0 for time_us in row["times_us"].values()), row
        assert row["of_whole"]["mm"] == 1.0
    names = {f"{way} {parts}" for way in ("one stream", "two streams") for parts in ("1", "1:1", "1:1:1:1", "3:1")}
    names |= {"mm", "lt", "halves, then a sum", "two streams, own whole 3:1", "side by side, lt for half"}
    assert names | {f"{name}, travels" for name in names - {"mm", "lt"}} <= set(scatter["times_us"])
    assert {"spanning 384 640", "spanning, sum 384 640, travels"} <= set(scatter["times_us"]), (
        "of three multiprocessors"
    )
    assert {"halves", "two streams 1", "two streams 1:1, travels"} <= set(gather["times_us"])


def test_what_a_budget_leaves_out_is_named(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    out = tmp_path / "tails.json"
    rank_pool(1).run(run, out, -1.0)
    assert json.loads(out.read_text())["left_out"] == ["rs 1024x64x96", "ag 256x64x48"]


def test_a_choice(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    """Of the candidates some, at other shapes."""
    out, items = tmp_path / "tails.json", tails_choice.scatters(None, None, "512x64x96,64x32x48")
    rank_pool(1).run(run, out, 100.0, items, ("one stream 1:1, t", "halves, then a sum"), 3)
    rows = json.loads(out.read_text())["rows"]
    halves = {"mm", "halves, then a sum", "halves, then a sum, travels"}
    assert [set(row["times_us"]) for row in rows] == [{*halves, "one stream 1:1, travels"}, halves]
    assert tails_choice.line(rows[0]).startswith("512x64x96 | mm ") and " | today not cut | " in tails_choice.line(
        rows[0]
    )
    for wrong in ("64x32", "63x32x48", "axbxc"):
        with pytest.raises(click.BadParameter):
            tails_choice.scatters(None, None, wrong)


@pytest.mark.parametrize(("full", "wanted"), [(1 << 40, None), (1, [(0, 768), (768, 1280)])])
def test_today(full: int, wanted: list[tuple[int, int]] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `tpoverlap.pieces` cuts it."""
    monkeypatch.setattr(pieces, "FULL_PIECE", full)
    monkeypatch.setattr(pieces, "NARROW_OPERAND_BYTES", 0)
    monkeypatch.setattr(pieces, "_COUNTED_FROM", 0)
    assert tails._today(products(Lanes(CPU), 2560)) == wanted


def products(lanes: Lanes, rows: int = 512) -> tails.Products:
    left, weight = torch.randn(rows, 32).bfloat16(), torch.randn(48, 32).bfloat16()
    return tails.Products(lanes, left, weight.t())


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails.Products, "sum", lambda self: None)
    made = products(Lanes(CPU))
    _, problems = tails.checked(made, tails.scatter_candidates(made))
    assert "side by side" in problems and "halves, then a sum, travels" in problems
    assert "one stream 1:1" not in problems and "mm" not in problems


class Recorded(Lanes):
    """Two streams by name; an event is (stream, what that has had)."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.now, self.side = "caller", "side"  # type: ignore[assignment]
        self.after: dict[str, set[Any]] = {"caller": set(), "side": set(), "link": set()}

    @property
    def caller(self) -> Any:
        return self.now

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def mark(self, stream: Any) -> Any:
        return frozenset(self.after[stream])

    def wait(self, stream: Any, event: Any) -> None:
        self.after[stream] |= event or set()

    def travel(self, event: Any, size_bytes: int) -> Any:
        return frozenset({*event, *(("sent", row) for row in event)})


@pytest.mark.parametrize("name", ["one stream 3:1", "two streams 3:1", "two streams, own whole 1:1", "side by side"])
@pytest.mark.parametrize("travels", [False, True])
def test_own_rows_wait_for_what_they_add(name: str, travels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Recorded()
    made = products(lanes, 1024)
    added: list[int] = []

    def multiplied(start: int, stop: int, *rest: Any, **named: Any) -> None:
        lanes.after[lanes.now] |= set(range(start, stop))

    def is_there(start: int, stop: int) -> None:
        wanted = {("sent", row) if travels else row for row in range(start, stop)}
        assert wanted <= lanes.after[lanes.now], "added before it came"
        added.extend(range(start, stop))

    monkeypatch.setattr(made, "mm", multiplied)
    monkeypatch.setattr(made, "own_added", is_there)
    monkeypatch.setattr(made, "sum", lambda: is_there(0, made.half))
    tails.scatter_candidates(made)[f"{name}, travels" if travels else name].run()
    assert added == list(range(made.half)), "each row once"


def test_pieces() -> None:
    assert tails_cuts.cut(1024, (3, 1)) == [(0, 768), (768, 1024)]
    assert tails_cuts.cut(4096, (4, 2, 1, 1)) == [(0, 2048), (2048, 3072), (3072, 3584), (3584, 4096)]
    assert tails_cuts.cut(128, (3, 1)) == [] and tails_cuts.cut(128, (1,)) == [(0, 128)]


def test_waves() -> None:
    tile = (128, 256)
    assert tails_cuts.spanning(8192, 1280, 132, tile) == (3328, 4864), "3 waves, and two halves have 4"
    assert tails_cuts.spanning(2048, 4096, 132, tile) is None, "a half has one"
    assert tails_cuts.full_waves(4096, 3584, 132, tile) == (28, 4)
    assert tails_cuts.full_waves(4096, 1280, 132, tile) == (26, 6)
    assert tails_cuts.full_waves(1024, 4096, 132, tile) is None, "of less than a wave"


def test_every_row_of_interest_is_in_the_suite() -> None:
    from tpoverlap.tools.bench.suites.gemm import shapes_of

    assert {item[1:] for item in tails.ITEMS} <= set(shapes_of(gemm_alone.job_on("cuda", 1, None)))
