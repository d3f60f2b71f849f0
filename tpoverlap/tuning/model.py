"""The cost model: time of one operation by every method, from a device's parameters. Pure arithmetic, no device.

It follows the schedules of ``overlap/``: what a method sends when, and which GEMM waits for which chunk. All ranks are
taken to start at the same time and to own the same number of rows. Where the launches take the processor longer than
the device needs for the operation, they are the limit. What FP8 adds is in ``quantising``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from tpoverlap.fused_form import SUMMING_PROGRAMS, choose_form, choose_sequential_form
from tpoverlap.pieces import multiplies_pieces
from tpoverlap.tuning.device import DeviceModel, OneKernel
from tpoverlap.tuning.gemm_time import cool_time_us, gemm_time_us, slowdown
from tpoverlap.tuning.problem import Problem, pieces_of, scatter_parts
from tpoverlap.tuning.quantising import pack_us, quantise_host_us, quantise_us, unpack_us

PLAIN: Final = "plain"
"""The baseline without this library, as `plain` estimates it; no method of ours."""

OTHER_WORK: Final = 0.9
"""What a layer's device has to do besides, for each operation, in times of its GEMM: a weight gradient for every two
operations, attention, norms, activations."""
LAYER_FEATURES: Final = 3.3
"""Mean features of a layer's GEMMs, in times of H: QKV, projection, and both of an MLP with gates and 3.5 H."""
LAYER_DEVICE: Final = 1.33
"""Device time of a whole layer without communication, in times of its operations' GEMMs (suite ``layers``)."""
LAYER_HOST_US: Final = 180.0
"""Processor time of such a layer, by its operations: less than suite ``layers`` finds on a machine whose processor is
slow by turns, so that the device decides where both are near (docs/design/0007)."""
_HOST_SHARE_PER_STEP: Final = 0.3
"""Of an operation's processor time at R = 2, what each further push and wait adds; assumed."""


@dataclass(frozen=True)
class Candidate:
    """A method and the options of it that change its time."""

    method: str
    num_splits: int = 0
    aggregate: bool = False

    @property
    def options(self) -> dict[str, int | bool]:
        """Option keys as a configuration has them."""
        options: dict[str, int | bool] = {"num_splits": self.num_splits} if self.num_splits else {}
        return options | ({"aggregate": True} if self.aggregate else {})

    def __str__(self) -> str:
        return self.method + (f" {self.num_splits}" if self.num_splits else "") + (" aggregate" * self.aggregate)


@dataclass(frozen=True)
class Estimate:
    """Microseconds of one operation on the slowest rank.

    ``gemm_us``: its GEMM alone. ``exposed_us``: what the operation takes longer than that. ``device_us`` and
    ``host_us``: the device's work and the processor's, of which the longer one is the operation's time.
    ``quantise_us``: of the device's work what makes FP8 of activations; no method hides it, so it is not exposed.
    ``quantise_host_us``: of the processor's what launches that, under every method alike.
    ``hidden_host_us``: how long the device of a layer is busy with other things meanwhile.
    """

    candidate: Candidate
    time_us: float
    gemm_us: float
    device_us: float
    host_us: float
    quantise_us: float = 0.0
    quantise_host_us: float = 0.0
    hidden_host_us: float = 0.0

    @property
    def host_bound(self) -> bool:
        """Whether the launches are the limit."""
        return self.host_us > self.device_us

    @property
    def time_in_layer_us(self) -> float:
        """Beside the rest of a layer, which gives the device more to do but the host little: it hides launches, too."""
        # Without FP8's own launches, which no method avoids: counted, they favour `sequential` at T where measured FP8
        # layers lose by it (docs/design/0008-fp8.md).
        return max(self.device_us, self.host_us - self.quantise_host_us - self.hidden_host_us)

    @property
    def exposed_us(self) -> float:
        """Communication, launches and additions that the GEMM does not hide."""
        return max(0.0, self.time_us - self.gemm_us - self.quantise_us)


def candidates(problem: Problem, legal: Iterable[str]) -> tuple[Candidate, ...]:
    """What may run ``problem`` among the methods in ``legal``; sequential first, always."""
    methods = set(legal)
    found = [Candidate("sequential")]
    if problem.tp_size == 1:
        return tuple(found)
    if problem.is_beside:
        return (*found, Candidate("bulk")) if "bulk" in methods else tuple(found)
    if "ring_exchange" in methods:
        found.append(Candidate("ring_exchange"))
        if not problem.is_scatter and problem.tp_size >= 4:
            found.append(Candidate("ring_exchange", aggregate=True))
    if "pipeline" in methods and problem.is_scatter:
        found += [Candidate("pipeline", num_splits=splits) for splits in (2, 4)]
    if "fused" in methods:
        found.append(Candidate("fused"))
    return tuple(found)


def methods_known(device: DeviceModel, problem: Problem, legal: Iterable[str]) -> tuple[str, ...]:
    """Those of ``legal`` that ``device`` says anything about: ``fused`` may be untimed in FP8."""
    unknown = problem.fp8 and (device.fp8 is None or None in (device.fp8.fused, device.fp8.one_launch))
    return tuple(method for method in legal if method != "fused" or not unknown)


def estimate(
    device: DeviceModel, problem: Problem, candidate: Candidate, *, current: bool = True, traded: bool = True
) -> Estimate:
    """Time of ``problem`` by ``candidate`` on ``device``. Raises ConfigError for FP8 where the device has none.

    ``current`` False: as other libraries and our first version have it. A ring's chunks travel whole, and sequential
    calls the group's collectives instead of pushing through the registered buffers. ``traded`` False: sequential pushes
    few rows by copy engine, too, as it did before there was a kernel for them.
    """
    problem = problem.by(candidate.method)
    device = device.in_fp8 if problem.fp8 else device
    gemm_us, quantising_us = _gemm_us(device, problem), quantise_us(device, problem)
    if problem.tp_size == 1:
        return _estimate(candidate, gemm_us, gemm_us + quantising_us, 0.0, quantising_us)
    # wgrad's operand is turned beside the scatter, as its GEMM runs; everything else comes before the operation
    beside_us = quantising_us if problem.kind == "beside-scatter" else 0.0
    launched = launched_as(problem, candidate, traded=traded and current)
    device_us = _device_us(device, problem, candidate, gemm_us + beside_us, current, launched)
    device_us += quantising_us - beside_us
    host_us, launches_us = _host_us(device, problem, candidate, launched), quantise_host_us(device, problem)
    found = _estimate(candidate, gemm_us, device_us, host_us + launches_us, quantising_us, launches_us)
    return replace(found, hidden_host_us=_hidden_host_us(device, problem, gemm_us))


def _hidden_host_us(device: DeviceModel, problem: Problem, gemm_us: float) -> float:
    """A small GEMM's launches lie behind the large ones of its layer, as far as the layer's own leave room."""
    features = round(LAYER_FEATURES * problem.width / problem.tp_size)
    typical_us = _gemm_us(device, replace(problem, kind="gather", features=features))
    return round(max(OTHER_WORK * gemm_us, LAYER_DEVICE * typical_us - LAYER_HOST_US), 1)


def gemm_alone_us(device: DeviceModel, problem: Problem) -> float:
    """Its GEMM, operands in memory as it reads them."""
    return _gemm_us(device.in_fp8 if problem.fp8 else device, problem)


def _gemm_us(device: DeviceModel, problem: Problem) -> float:
    return gemm_time_us(device, *problem.gemm_shape, problem.operand_bytes, problem.itemsize_bytes)


def _estimate(
    candidate: Candidate,
    gemm_us: float,
    device_us: float,
    host_us: float,
    quantising_us: float,
    launches_us: float = 0.0,
) -> Estimate:
    # A tenth of a microsecond, so that no two machines differ over the last bit of a logarithm.
    gemm_us, device_us, host_us = round(gemm_us, 1), round(device_us, 1), round(host_us, 1)
    quantising = round(quantising_us, 1), round(launches_us, 1)
    return Estimate(candidate, max(device_us, host_us), gemm_us, device_us, host_us, *quantising)


def collective_us(device: DeviceModel, problem: Problem) -> float:
    """The library's own collective, alone."""
    rate = device.scatter if problem.is_scatter else device.gather
    if problem.bytes_sent == 0:
        return 0.0
    return rate.time_us(problem.bytes_sent) + device.hop_us * (problem.tp_size - 2)


def plain(device: DeviceModel, problem: Problem) -> Estimate:
    """The operation without this library: torch's GEMM and the group's collective (cuBLAS and NCCL) in turn.

    Their launches cost the processor less than those of our own ``sequential``. In FP8 they move what we move, but sums
    always wide, and exchange magnitudes by another collective, whose launch is taken to cost what the other two do.
    """
    problem = problem.by(PLAIN)
    device = device.in_fp8 if problem.fp8 else device
    alone = problem.tp_size == 1
    gemm_us, quantising_us = _gemm_us(device, problem), quantise_us(device, problem, device.gather.latency_us)
    device_us = gemm_us + quantising_us + (0.0 if alone else collective_us(device, problem))
    host_us = device.host_us.get(PLAIN, 0.0)
    if problem.fp8:
        launches = replace(device, host_us={**device.host_us, "ag traded": host_us}) if device.host_us else device
        host_us += quantise_host_us(launches, problem)
    return _estimate(Candidate(PLAIN), gemm_us, device_us, host_us, quantising_us)


def transfer_us(device: DeviceModel, problem: Problem) -> float:
    """The same rows by the copy engine, alone, without the sum of a reduce-scatter."""
    return device.copy.latency_us + problem.bytes_sent / device.copy.gb_s * 1e-3


def _device_us(
    device: DeviceModel, problem: Problem, candidate: Candidate, gemm_us: float, current: bool, launched: str
) -> float:
    if candidate.method == "sequential":
        if launched == "traded":
            return gemm_us + _exchange_us(device, problem)
        # docs/design/0005: a reduce-scatter is an exchange of blocks and a float32 sum
        moving = transfer_us(device, problem) + device.step_us if current else collective_us(device, problem)
        return gemm_us + moving + _add_us(device, problem)
    if candidate.method == "bulk":
        return max(gemm_us, transfer_us(device, problem)) + device.step_us + _add_us(device, problem)
    if candidate.method == "fused":
        form, moving = form_of(problem, device), transfer_us(device, problem)
        working = gemm_us * form.gemm_factor
        if problem.is_scatter:  # rows travel once they are computed: only own rows' half of the GEMM is left to hide it
            return working + max(0.0, moving - working / problem.tp_size) + form.fixed_us
        return max(working, moving) + form.fixed_us
    if candidate.method == "pipeline":
        return _pipeline_us(device, problem, candidate.num_splits)
    if problem.is_scatter:
        parts = scatter_parts(problem, device.multiprocessors) if current else [problem.rows_per_rank]
        return _ring_scatter_us(device, problem, parts)
    return _ring_gather_us(device, problem, candidate.aggregate, pieces_of(problem) if current else 1)


def launched_as(problem: Problem, candidate: Candidate, *, traded: bool = True) -> str:
    """The name of its launches: the method, or the form of ``fused``; "traded" where a kernel exchanges the rows."""
    if candidate.method == "sequential":
        by_kernel = traded and choose_sequential_form(problem.chunk_bytes, problem.tp_size) == "kernel"
        return "traded" if by_kernel else "sequential"
    if candidate.method != "fused":
        return candidate.method
    form = choose_form("scatter" if problem.is_scatter else "gather", problem.num_tokens)
    return "one_launch" if form == "one_launch" else "fused"


def form_of(problem: Problem, device: DeviceModel) -> OneKernel:
    """The form that ``fused`` takes for ``problem``."""
    return device.one_launch if launched_as(problem, Candidate("fused")) == "one_launch" else device.fused


def _ring_gather_us(device: DeviceModel, problem: Problem, aggregate: bool, pieces: int) -> float:
    """Own chunk first; chunk i has arrived after i pushes on this rank's link."""
    at_once = 2 if aggregate else 1
    push_us = problem.chunk_bytes / device.copy.gb_s * 1e-3
    parts = pieces if multiplies_pieces(problem.features) and not aggregate else 1
    free = 0.0
    for first in range(0, problem.tp_size, at_once):
        last = min(first + at_once, problem.tp_size) - 1
        rows = problem.rows_per_rank * (last - first + 1)
        for part in range(1, parts + 1) if last else (1,):
            share = part if last else parts
            arrived = device.copy.latency_us + (last - 1 + share / parts) * push_us if last else 0.0
            gemm = _part_us(device, problem, -(-rows // parts) if last else rows, problem.features, problem.width)
            free = max(free, arrived) + gemm + (device.step_us if last else 0.0)
    return free


def _ring_scatter_us(device: DeviceModel, problem: Problem, parts: list[int]) -> float:
    """Peers' chunks first, each push once it is computed; own chunk last; then the sum.

    In pieces (R = 2) own rows are computed on top of what arrived, piece by piece, and no sum is left.

    Args:
        parts: rows of a chunk's pieces.
    """
    gemms = {
        rows: _part_us(device, problem, rows, problem.width, problem.features)
        + pack_us(device, problem, rows, problem.width)
        for rows in parts
    }
    row_us = 1e-3 * problem.chunk_bytes / problem.rows_per_rank  # of a row, at 1 GB/s
    free = link = 0.0
    arrivals = []
    for rows in parts * (problem.tp_size - 1):
        free += gemms[rows]
        link = max(link, free) + rows * row_us / device.copy.gb_s
        arrivals.append(link + device.copy.latency_us)
    if len(parts) == 1 or problem.is_packed:  # own rows as a whole, then a sum
        own = _part_us(device, problem, problem.rows_per_rank, problem.width, problem.features)
        own += pack_us(device, problem, problem.rows_per_rank, problem.width)
        launched = 0.0 if problem.is_packed else device.add.latency_us  # a sum alone: its launch is in the step
        return max(free + own, arrivals[-1]) + device.step_us + _add_us(device, problem) - launched
    for rows, arrived in zip(parts, arrivals, strict=True):
        read_us = rows * row_us / device.add.gb_s  # what arrived is read by the GEMM's end
        free = max(free, arrived) + gemms[rows] + read_us + device.step_us
    return free


def _pipeline_us(device: DeviceModel, problem: Problem, num_splits: int) -> float:
    """The GEMM cut along its columns; every piece travels while the next computes, the last one is exposed."""
    columns = -(-problem.width // num_splits)
    gemm = _part_us(device, problem, problem.num_tokens, columns, problem.features)
    gemm += pack_us(device, problem, problem.num_tokens, columns)
    push_us = problem.bytes_sent / num_splits / device.copy.gb_s * 1e-3
    link = 0.0
    for piece in range(1, num_splits + 1):
        link = max(link, piece * gemm) + push_us
    fixed = num_splits * (device.step_us + device.add.latency_us) - device.add.latency_us
    return link + device.copy.latency_us + fixed + _add_us(device, problem)


def _part_us(device: DeviceModel, problem: Problem, rows: int, columns: int, inner: int) -> float:
    """A part of the problem's GEMM: shorter, but at the clock of the whole."""
    sizes = problem.operand_bytes, problem.itemsize_bytes
    whole = cool_time_us(device, *problem.gemm_shape, *sizes)
    return cool_time_us(device, rows, columns, inner, *sizes) * slowdown(device, whole)


def _add_us(device: DeviceModel, problem: Problem) -> float:
    """Sum of R blocks of a rank's rows: R reads and a write. Packed blocks become float32 first."""
    if problem.is_packed:
        summed = problem.rows_per_rank * problem.width * (4 * problem.tp_size + problem.itemsize_bytes)
        return unpack_us(device, problem) + device.add.time_us(summed)
    return device.add.time_us((problem.tp_size + 1) * problem.chunk_bytes) if problem.is_scatter else 0.0


def _exchange_us(device: DeviceModel, problem: Problem) -> float:
    """One kernel moves the rows; a reduce-scatter's also adds them, R reads and a write, by its few programs."""
    added = (problem.tp_size + 1) * problem.chunk_bytes if problem.is_scatter else 0
    share = min(1.0, SUMMING_PROGRAMS / device.multiprocessors)
    return device.exchange.time_us(problem.bytes_sent) + added / (device.add.gb_s * share) * 1e-3


def _host_us(device: DeviceModel, problem: Problem, candidate: Candidate, launched: str) -> float:
    direction = "rs" if problem.is_scatter else "ag"
    steps = problem.tp_size - 1 if candidate.method == "ring_exchange" else 1
    if candidate.method == "pipeline":
        per_split = device.host_us.get("rs pipeline", 0.0)
        return device.host_us.get("rs fixed", 0.0) + candidate.num_splits * per_split
    ring = device.host_us.get(f"{direction} ring_exchange", 0.0)  # bulk and fused where nobody timed them
    own = device.host_us.get(f"{direction} {launched}", ring)
    if launched == "traded" and f"{direction} traded" not in device.host_us:
        # Not measured: as the form whose calls of the driver are as few, or as it was before.
        before = device.host_us.get(f"{direction} sequential", ring)
        own = device.host_us.get(f"{direction} one_launch", before)
    return own * (1.0 + _HOST_SHARE_PER_STEP * (steps - 1))
