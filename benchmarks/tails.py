"""How GEMM + reduce-scatter of two ranks may be cut and queued so that its GEMMs take no longer than one whole GEMM.

``python -m benchmarks.tails --out FILE [--rounds N] [--budget-s S]`` takes less than a minute on one GPU, without a
peer; ``--device cpu`` runs tiny sizes, which tests the script and measures nothing. Every result is checked before it
is timed. Rounds are interleaved; times are of operations queued behind a delay. The rows that this rank sends stand for
the rows that it gets (ranks are alike), so what is added too early is wrong and not only too fast.

Some candidates, at other shapes, on a GPU as hot as bench makes it, one line a shape (names may be cut short)::

    python -m benchmarks.tails --out FILE --queued 50 --shapes 8192x8192x3584,6656x8192x4096 --only "today, travels" \
        --only "one stream 1:1, travels" --only "halves, then a sum, travels"

=======================  =============================================================================================
scatter                  [0, T/2) are the peer's rows, [T/2, T) own ones
=======================  =============================================================================================
mm, lt                   one GEMM of all rows
peer's half, own half    each alone, as the next but one computes them; plain: with nothing added
halves, then a sum       peer's, own, a sum: what is done today where nothing is cut
one stream C             peer's pieces, then own ones, each added to what came; C: the sizes of a half's pieces, the
                         last one counted in tiles, the first piece of which fill whole waves
today                    the one of the two that `tpoverlap.pieces` asks for, cut where it asks for
two streams C            peer's pieces on a stream of high priority; own piece i behind peer's piece i on the caller's
two streams, own whole   likewise, own rows as one GEMM behind the last piece
side by side             both halves at a time, nothing added, a sum behind both; by lt; by lt, which is told to choose
                         for half the multiprocessors
spanning                 three GEMMs [0, a), [a, b), [b, T), a < T/2 < b: fewest waves of 128 x 256 (or 256 x 128),
                         the middle one adds zeros to the peer's rows
spanning, sum            likewise, but the middle one adds nothing: its own rows are summed behind the last one
..., travels             what own rows wait for is a copy as long as NVLink's (a copy engine, from the host)
=======================  =============================================================================================

A gather has own rows [0, T/2) first, and multiplies the others as they come: as halves, or on two streams. No public
attribute of cublasLt asks for programmatic dependent launch, so no candidate does; ``gap_us`` of a profile says what
lies between two kernels of one stream anyway.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.environment import environment
from benchmarks.gemm_alone import ROUNDS_OFF, echo_problems, session_alone
from benchmarks.tails_choice import Item, line, scatters
from benchmarks.tails_cuts import cut, full_waves, spanning, waves
from benchmarks.tails_lanes import Lanes, kernels
from tpoverlap.gemm.cublaslt import LtProducts
from tpoverlap.pieces import FirstPiece, scatter_cut
from tpoverlap.testing.numeric import relative_error
from tpoverlap.tokens import TokenPartition
from tpoverlap.tools.bench.session import Operands, Session
from tpoverlap.tools.bench.timing import measure

ITEMS: tuple[Item, ...] = (
    *(("rs", 2048, 8192, 4096), ("rs", 8192, 8192, 3584), ("rs", 8192, 8192, 1280), ("rs", 1024, 8192, 4096)),
    *(("ag", 2048, 8192, 4096), ("rs", 512, 8192, 4096), ("rs", 256, 8192, 4096)),
)
"""In the order of interest: a budget cuts off the end."""
TINY_ITEMS: tuple[Item, ...] = (("rs", 1024, 64, 96), ("ag", 256, 64, 48))
CUTS = ((1,), (1, 1), (1, 1, 1, 1), (3, 1), (4, 2, 1, 1))
ARRIVALS = ((1,), (1, 1), (1, 3))
"""Of a gather's rows."""
TILES = ((128, 256), (256, 128))
QUEUED, QUEUED_FEW = 16, 20
"""Operations of a round; more of those with few rows."""
_PROFILED = ("mm", "halves, then a sum", "one stream 1", "one stream 1:1", "two streams 1:1", "side by side", "halves")


@dataclass(frozen=True)
class Candidate:
    """One way.

    Attributes:
        run: queues it, the caller's stream behind all of it.
        read: its result.
        exact: what that should be, in float32, of the same shape.
    """

    run: Callable[[], Any]
    read: Callable[[], torch.Tensor]
    exact: Callable[[], torch.Tensor]


class Products:
    """Operands and results of one row.

    Args:
        left: [T, K]. right: [K, N].
    """

    def __init__(self, lanes: Lanes, left: torch.Tensor, right: torch.Tensor) -> None:
        self.lanes, self.left, self.right = lanes, left, right
        self.rows, self.half, self.features = left.shape[0], left.shape[0] // 2, right.shape[1]
        self.whole = left.new_empty(self.rows, self.features)  # peer's rows, then own: what pieces are written to
        self.own = left.new_empty(self.rows - self.half, self.features)  # of side by side, before the sum
        generator = torch.Generator(left.device).manual_seed(5)
        received = torch.randn(self.own.shape, device=left.device, dtype=left.dtype, generator=generator)
        self.spanning_addend = torch.cat([torch.zeros_like(self.whole[: self.half]), received])
        self.product = left.float() @ right.float()

    def exact(self) -> torch.Tensor:
        return self.product

    def exact_added(self) -> torch.Tensor:
        """Own rows and what was sent."""
        peers, own = self.product[: self.half], self.product[self.half :]
        return torch.cat([peers, own + peers.to(self.left.dtype).float()])

    def exact_spanning(self) -> torch.Tensor:
        return self.product + self.spanning_addend.float()

    def mm(self, start: int, stop: int, out: torch.Tensor | None = None) -> None:
        torch.mm(self.left[start:stop], self.right, out=self.whole[start:stop] if out is None else out)

    def lt(
        self,
        start: int,
        stop: int,
        addend: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        by: LtProducts | None = None,
    ) -> None:
        """Rows [start, stop), with ``addend``, by cublasLt; ``by``: another one than the device's."""
        target = self.whole[start:stop] if out is None else out
        left, lt = self.left[start:stop], by or self.lanes.lt
        if lt is not None:
            if not lt.multiply(left, self.right, target, addend):
                raise RuntimeError("cublasLt has no algorithm for it")
        elif addend is None:
            torch.mm(left, self.right, out=target)
        else:
            torch.addmm(addend, left, self.right, out=target)

    def own_added(self, start: int, stop: int) -> None:
        """Own rows, counted from the first own one, and the same of those that were sent."""
        self.lt(self.half + start, self.half + stop, self.whole[start:stop])

    def sum(self) -> None:
        torch.add(self.own, self.whole[: self.half], out=self.whole[self.half :])


class Scatter:
    """Ways of a reduce-scatter's GEMM."""

    def __init__(self, products: Products) -> None:
        self.products, self.lanes = products, products.lanes

    def _arrived(self, event: Any, rows: int, travels: bool) -> Any:
        one = self.products.whole
        return self.lanes.travel(event, rows * one.shape[1] * one.element_size()) if travels else event

    def one_stream(self, pieces: Sequence[tuple[int, int]], travels: bool) -> None:
        lanes, products = self.lanes, self.products
        caller, arrived = lanes.caller, []
        for start, stop in pieces:
            products.mm(start, stop)
            if travels:
                arrived.append(self._arrived(lanes.mark(caller), stop - start, True))
        for number, (start, stop) in enumerate(pieces):
            if travels:
                lanes.wait(caller, arrived[number])
            products.own_added(start, stop)

    def two_streams(self, pieces: Sequence[tuple[int, int]], own_whole: bool, travels: bool) -> None:
        lanes, products = self.lanes, self.products
        caller, arrived = lanes.caller, []
        lanes.wait(lanes.side, lanes.mark(caller))
        with lanes.on(lanes.side):
            for start, stop in pieces:
                products.mm(start, stop)
                arrived.append(self._arrived(lanes.mark(lanes.side), stop - start, travels))
        if own_whole:
            lanes.wait(caller, arrived[-1])
            products.own_added(0, products.half)
            return
        for number, (start, stop) in enumerate(pieces):
            lanes.wait(caller, arrived[number])
            products.own_added(start, stop)

    def then_sum(self, travels: bool) -> None:
        lanes, products = self.lanes, self.products
        products.mm(0, products.half)
        arrived = self._arrived(lanes.mark(lanes.caller), products.half, True) if travels else None
        products.mm(products.half, products.rows, products.own)
        lanes.wait(lanes.caller, arrived)
        products.sum()

    def side_by_side(self, multiply: Callable[..., None], travels: bool) -> None:
        lanes, products = self.lanes, self.products
        caller = lanes.caller
        lanes.wait(lanes.side, lanes.mark(caller))
        with lanes.on(lanes.side):
            multiply(0, products.half)
            arrived = self._arrived(lanes.mark(lanes.side), products.half, travels)
        multiply(products.half, products.rows, out=products.own)
        lanes.wait(caller, arrived)
        products.sum()

    def spanning(self, a: int, b: int, travels: bool) -> None:
        lanes, products = self.lanes, self.products
        caller, addend, rows = lanes.caller, products.spanning_addend, products.rows
        products.mm(0, a)
        first = self._arrived(lanes.mark(caller), a, True) if travels else None
        lanes.wait(caller, first)
        products.lt(a, b, addend[a:b])
        second = self._arrived(lanes.mark(caller), products.half - a, True) if travels else None
        lanes.wait(caller, second)
        products.lt(b, rows, addend[b:])

    def spanning_sum(self, a: int, b: int, travels: bool) -> None:
        lanes, products = self.lanes, self.products
        caller, addend, rows = lanes.caller, products.spanning_addend, products.rows
        products.mm(0, a)
        first = self._arrived(lanes.mark(caller), a, True) if travels else None
        products.mm(a, b)
        second = self._arrived(lanes.mark(caller), products.half - a, True) if travels else None
        lanes.wait(caller, first)
        products.lt(b, rows, addend[b:])
        lanes.wait(caller, second)
        middle = products.whole[products.half : b]
        torch.add(middle, addend[products.half : b], out=middle)


def scatter_candidates(products: Products) -> dict[str, Candidate]:
    """By name."""
    ways, half, rows, lanes = Scatter(products), products.half, products.rows, products.lanes
    found: dict[str, Candidate] = {}

    def add(name: str, run: Callable[[], Any], exact: Callable[[], torch.Tensor] = products.exact_added) -> None:
        found[name] = Candidate(run, lambda: products.whole, exact)

    def both(name: str, run: Callable[[bool], Any], exact: Callable[[], torch.Tensor] = products.exact_added) -> None:
        add(name, lambda: run(False), exact)
        add(f"{name}, travels", lambda: run(True), exact)

    def half_by_lt(start: int, stop: int, out: torch.Tensor | None = None) -> None:
        products.lt(start, stop, out=out, by=lanes.lt_half)

    add("mm", lambda: products.mm(0, rows), products.exact)
    add("lt", lambda: products.lt(0, rows), products.exact)
    peers, own = (lambda: products.product[:half]), (lambda: products.product[half:])
    found["peer's half"] = Candidate(lambda: products.mm(0, half), lambda: products.whole[:half], peers)
    plain = lambda: products.mm(half, rows, products.own)  # noqa: E731
    found["own half, plain"] = Candidate(plain, lambda: products.own, own)
    addend = products.spanning_addend[half:]
    found["own half"] = Candidate(
        lambda: products.lt(half, rows, addend),
        lambda: products.whole[half:],
        lambda: products.exact_spanning()[half:],
    )
    both("halves, then a sum", ways.then_sum)
    asked = _today(products)
    if asked is not None:
        both("today", lambda travels: ways.one_stream(asked, travels))
    in_waves = full_waves(half, products.features, lanes.processors, TILES[0])
    for parts in dict.fromkeys((*CUTS, in_waves) if in_waves else CUTS):
        pieces, text = cut(half, parts), ":".join(map(str, parts))
        if not pieces:
            continue
        both(f"one stream {text}", lambda travels, p=pieces: ways.one_stream(p, travels))
        both(f"two streams {text}", lambda travels, p=pieces: ways.two_streams(p, False, travels))
        if len(parts) > 1:
            both(f"two streams, own whole {text}", lambda travels, p=pieces: ways.two_streams(p, True, travels))
    both("side by side", lambda travels: ways.side_by_side(products.mm, travels))
    both("side by side, lt", lambda travels: ways.side_by_side(products.lt, travels))
    both("side by side, lt for half", lambda travels: ways.side_by_side(half_by_lt, travels))
    for pair in dict.fromkeys(spanning(rows, products.features, lanes.processors, tile) for tile in TILES):
        if pair is not None:
            text = f"{pair[0]} {pair[1]}"
            exact = products.exact_spanning
            both(f"spanning {text}", lambda travels, p=pair: ways.spanning(*p, travels), exact)
            both(f"spanning, sum {text}", lambda travels, p=pair: ways.spanning_sum(*p, travels), exact)
    return found


def _today(products: Products) -> list[tuple[int, int]] | None:
    """A half's pieces; None: not cut, so halves and a sum."""
    left = products.left
    partition = TokenPartition.balanced(products.rows, 2)
    row_bytes = left.shape[1] * left.element_size()
    half, processors = products.half, products.lanes.processors
    asked = scatter_cut(partition, products.features, left.element_size(), row_bytes, processors)
    if asked is None:
        return None
    if isinstance(asked, FirstPiece):
        return [(0, asked.rows), (asked.rows, half)]
    return [(start, min(start + asked, half)) for start in range(0, half, asked)]


def gather_candidates(products: Products) -> dict[str, Candidate]:
    """By name; own rows are [0, T/2)."""
    lanes, half, rows = products.lanes, products.half, products.rows
    row_bytes = products.left.shape[1] * products.left.element_size()
    found: dict[str, Candidate] = {}

    def arrivals(pieces: Sequence[tuple[int, int]], travels: bool) -> list[Any]:
        begin = lanes.mark(lanes.caller) if travels else None
        return [lanes.travel(begin, (stop - start) * row_bytes) if travels else None for start, stop in pieces]

    def one_stream(pieces: Sequence[tuple[int, int]], travels: bool) -> None:
        arrived = arrivals(pieces, travels)
        products.mm(0, half)
        for number, (start, stop) in enumerate(pieces):
            lanes.wait(lanes.caller, arrived[number])
            products.mm(half + start, half + stop)

    def two_streams(pieces: Sequence[tuple[int, int]], travels: bool) -> None:
        caller, arrived = lanes.caller, arrivals(pieces, travels)
        lanes.wait(lanes.side, lanes.mark(caller))
        with lanes.on(lanes.side):
            products.mm(0, half)
            through = lanes.mark(lanes.side)
        for number, (start, stop) in enumerate(pieces):
            lanes.wait(caller, arrived[number])
            products.mm(half + start, half + stop)
        lanes.wait(caller, through)

    def add(name: str, run: Callable[[], Any]) -> None:
        found[name] = Candidate(run, lambda: products.whole, products.exact)

    add("mm", lambda: products.mm(0, rows))
    add("lt", lambda: products.lt(0, rows))
    found["own half"] = Candidate(
        lambda: products.mm(0, half), lambda: products.whole[:half], lambda: products.product[:half]
    )
    for parts in ARRIVALS:
        pieces, text = cut(rows - half, parts), ":".join(map(str, parts))
        for end, travels in (("", False), (", travels", True)):
            if pieces:
                name = "halves" if len(parts) == 1 else f"one stream {text}"
                add(f"{name}{end}", lambda p=pieces, t=travels: one_stream(p, t))
                add(f"two streams {text}{end}", lambda p=pieces, t=travels: two_streams(p, t))
    return found


def candidates_of(
    lanes: Lanes, operands: Operands, item: Item, only: Sequence[str] = ()
) -> tuple[Products, dict[str, Candidate]]:
    """Of the operands that the gemm suite has; ``only``: mm, and those whose names begin so."""
    direction, rows, k, n = item
    left = operands.activation(rows, k) if direction == "ag" else operands.own_activation(rows, k)
    products = Products(lanes, left, operands.weight(n, k).t())
    found = (gather_candidates if direction == "ag" else scatter_candidates)(products)
    chosen = {name: one for name, one in found.items() if not only or name == "mm" or name.startswith(tuple(only))}
    return products, chosen


def checked(products: Products, candidates: dict[str, Candidate]) -> tuple[dict[str, float], dict[str, str]]:
    """(relative error of each, what is wrong with those that are not to be timed)."""
    errors: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name, candidate in candidates.items():
        try:
            for _ in range(2):  # in the first call algorithms are looked for, so the host is late
                products.whole.fill_(float("nan"))
                products.own.fill_(float("nan"))
                products.lanes.delayed(candidate.run)
                error = relative_error(candidate.read(), candidate.exact())
                errors[name] = max(errors.get(name, 0.0), float("inf") if error != error else error)
        except RuntimeError as refused:  # by this installation
            problems[name] = str(refused)[:200]
            continue
        if errors[name] > ROUNDS_OFF:
            problems[name] = f"relative error {errors[name]:.3e}, allowed {ROUNDS_OFF}; not timed"
    return errors, problems


def row_of(
    session: Session, lanes: Lanes, operands: Operands, item: Item, only: Sequence[str], queued: int | None
) -> dict[str, Any]:
    """Check every candidate, then time those that are right."""
    products, candidates = candidates_of(lanes, operands, item, only)
    errors, problems = checked(products, candidates)
    runs = {name: one.run for name, one in candidates.items() if name not in problems}
    queued = queued or (QUEUED if item[1] > 2048 else QUEUED_FEW)
    found = measure(session, runs, calls=1, queued_operations=queued) if runs else {}
    times = {name: one.queued_us if session.is_cuda else one.eager_us for name, one in found.items()}
    problems |= {name: "no round was queued in time" for name, time_us in times.items() if time_us is None}
    whole = times.get("mm")
    row: dict[str, Any] = {"direction": item[0], "T": item[1], "K": item[2], "N": item[3]}
    halves = products.half, products.rows - products.half
    row["waves"] = {
        f"{tile[0]}x{tile[1]}": [waves(count, item[3], lanes.processors, tile) for count in (item[1], *halves)]
        for tile in TILES
    }
    if item[0] == "rs":
        row["today"] = [stop - start for start, stop in _today(products) or []]
    row["times_us"] = times
    row["of_whole"] = {name: us / whole for name, us in times.items() if us is not None and whole}
    parts = [times.get(name) for name in ("peer's half", "own half", "one stream 1")]
    if all(part is not None for part in parts):
        row["halves_less_parts_us"] = parts[2] - parts[1] - parts[0]
    return {**row, "relative_errors": errors, "problems": problems}


def _seconds(session: Session) -> float:
    return time.monotonic() - session.begin_s


def lines(row: dict[str, Any]) -> Iterator[str]:
    """A table of one row, the fastest first within those that travel and those that do not."""
    of_waves = ", ".join(f"{tile} {'/'.join(map(str, counts))}" for tile, counts in row["waves"].items())
    yield f"{row['direction']} {row['T']}x{row['K']}x{row['N']}: waves whole/peer/own {of_waves}"
    if "halves_less_parts_us" in row:
        yield f"    one stream 1 less its two GEMMs alone: {row['halves_less_parts_us']:.2f} us"
    times = {name: us for name, us in row["times_us"].items() if us is not None}
    for name in sorted(times, key=lambda one: (one.endswith("travels"), times[one])):
        yield f"    {name:42} {times[name]:8.2f}  {row['of_whole'].get(name, float('nan')):.3f}"


def profile_row(lanes: Lanes, operands: Operands, item: Item, row: dict[str, Any]) -> None:
    """Names and times of kernels, to ``row``."""
    candidates = candidates_of(lanes, operands, item)[1]
    row["profiles"] = {
        name: kernels(one.run)
        for name, one in candidates.items()
        if (name in _PROFILED or (name.startswith("spanning") and "travels" not in name)) and name in row["of_whole"]
    }
    for name, seen in row["profiles"].items():
        shown = ", ".join(f"{us:.1f} {kernel[:60]}" for kernel, us in seen["kernels"])
        click.echo(f"    {name}: gap {seen['gap_us']} us: {shown or seen.get('problem')}")


def measure_all(
    session: Session,
    out: Path,
    budget_s: float,
    items: Sequence[Item] = (),
    only: Sequence[str] = (),
    queued: int | None = None,
) -> dict[str, Any]:
    """Every item in turn; after all of them their kernels, since a profiler may slow down what follows."""
    items = items or (ITEMS if session.is_cuda else TINY_ITEMS)
    lanes = Lanes(session.device)
    operands = Operands(
        session, max(item[1] * max(item[2:]) for item in items), max(item[2] * item[3] for item in items)
    )
    result: dict[str, Any] = {"environment": environment(), "device": session.device.type}
    result |= {"processors": lanes.processors, "link": lanes.link, "rows": [], "left_out": [], "not_profiled": []}
    for item in items:
        label = f"{item[0]} {'x'.join(map(str, item[1:]))}"
        if _seconds(session) > budget_s:
            result["left_out"].append(label)
            continue
        result["rows"].append(row_of(session, lanes, operands, item, only, queued))
        click.echo(line(result["rows"][-1]) if only else "\n".join(lines(result["rows"][-1])))
        echo_problems(result["rows"][-1])
        out.write_text(json.dumps(result) + "\n")
    for item, row in zip(items, result["rows"], strict=False) if session.is_cuda and not only else ():
        label = f"{item[0]} {'x'.join(map(str, item[1:]))}"
        if _seconds(session) > budget_s:
            result["not_profiled"].append(label)
            continue
        click.echo(f"{label}, kernels:")
        profile_row(lanes, operands, item, row)
    result["seconds"] = round(_seconds(session), 1)
    for kind in ("left_out", "not_profiled"):
        if result[kind]:
            click.echo(f"{kind.replace('_', ' ')} for time: {', '.join(result[kind])}")
    out.write_text(json.dumps(result, indent=1) + "\n")
    return result


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="A JSON file.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Medians are over so many.")
@click.option("--budget-s", default=42.0, show_default=True, help="Begin no row after so long.")
@click.option(
    "--shapes", "items", default="", callback=scatters, help="TxKxN,...: reduce-scatters instead of the usual."
)
@click.option("--only", multiple=True, help="Candidates whose names begin so, and mm; one line a shape. Repeatable.")
@click.option("--queued", type=int, help="Operations of a round; 50, as bench has them, make the GPU hot.")
def main(
    out: Path,
    device: str,
    rounds: int,
    budget_s: float,
    items: tuple[Item, ...],
    only: tuple[str, ...],
    queued: int | None,
) -> None:
    """Check and time every row."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("it needs a GPU, torch sees none; --device cpu checks the script alone")
    with session_alone(device, rounds, None) as session, torch.no_grad():
        result = measure_all(session, out, budget_s, items, only, queued)
    if not result["rows"] or any(row["problems"] for row in result["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
