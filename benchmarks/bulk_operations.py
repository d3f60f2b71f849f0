"""Bulk collectives beside a GEMM, as a column-parallel layer's backward runs them, and NCCL in their place.

=====  ====================  =============================  ============================
       what travels          the GEMM beside it             a layer calls it
=====  ====================  =============================  ============================
ag     x [T_r,K] -> [T,K]    dy [T,N] @ W [N,K]             dgrad
rs     dx [T,K] -> [T_r,K]   dy^T [N,T] @ x [T,K]           wgrad
=====  ====================  =============================  ============================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.config.defaults import fill_defaults
from tpoverlap.config.honoured import is_honoured, why_ignored
from tpoverlap.errors import BackendUnavailableError
from tpoverlap.gemm.triton import require_kernels
from tpoverlap.overlap import gather_beside, scatter_beside
from tpoverlap.overlap.scatter import sum_blocks
from tpoverlap.testing.numeric import FLOAT32_FLOOR, relative_error
from tpoverlap.tools.bench import baselines
from tpoverlap.tools.bench.correctness import TWIN_FACTOR, Reference
from tpoverlap.tools.bench.job import Direction
from tpoverlap.tools.bench.rows import GemmRow
from tpoverlap.tools.bench.session import Operands, Session

Work = Callable[[], torch.Tensor]
Results = tuple[torch.Tensor, torch.Tensor]
"""What travelled, whole ([T, K], or [T_r, K] summed), and the GEMM's product."""

ENGINE: Final = "copy engine"
NAMES: Final[Mapping[Direction, str]] = {"ag": "qkv_dgrad", "rs": "qkv_wgrad"}
_PROGRAMS: Final = (4, 16)


@dataclass(frozen=True)
class BulkRow:
    """A column-parallel layer's x [T, K] and weight [N, K] on one rank."""

    direction: Direction
    num_tokens: int
    in_features: int
    out_features: int

    @property
    def label(self) -> str:
        """``ag beside dgrad 8192x8192x1280``."""
        gemm = "dgrad" if self.direction == "ag" else "wgrad"
        return f"{self.direction} beside {gemm} {self.num_tokens}x{self.in_features}x{self.out_features}"

    @property
    def moved(self) -> GemmRow:
        """A row of the bench with the same rows and width on the link."""
        k, n = self.in_features, self.out_features
        features = (k, n) if self.direction == "ag" else (n, k)
        return GemmRow(self.direction, self.num_tokens, *features, self.num_tokens)


def variants(device: torch.device) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """(label -> options of both names, what is left out and why)."""
    options: dict[str, dict[str, Any]] = {ENGINE: {"method": "bulk"}}
    left_out: dict[str, str] = {}
    try:
        require_kernels(device, "use_ce: false")
    except BackendUnavailableError as error:
        return options, {"use_ce: false": str(error)}
    for programs in _PROGRAMS:
        given = {"method": "bulk", "use_ce": False, "num_sm": programs}
        for margin in (False, True):
            config = fill_defaults(NAMES["ag"], {**given, "set_sm_margin": margin}, 2)
            label = f"{programs} programs" + (", margin" if margin else "")
            if margin and not is_honoured(config, "set_sm_margin"):
                left_out[label] = why_ignored(config, "set_sm_margin")
            else:
                options[label] = {**given, "set_sm_margin": margin}
    return options, left_out


class BulkInputs:
    """The operands of one row on this rank: views of shared memory, none of which overlap."""

    def __init__(self, session: Session, operands: Operands, row: BulkRow) -> None:
        tokens, k, n = row.num_tokens, row.in_features, row.out_features
        self.row, self._session = row, session
        self.partition = tpo.TokenPartition.balanced(tokens, session.tp_size)
        self.own = self.partition.rows(session.rank)
        if row.direction == "ag":
            self.whole = operands.activation(tokens, k)
            self.sent = self.whole[self.own]
            self.factors = operands.own_activation(tokens, n), operands.weight(n, k)
        else:
            self.whole = self.sent = operands.own_activation(tokens, k)
            self.factors = operands.activation(tokens, n).t(), operands.weight(tokens, k)

    @staticmethod
    def sizes(rows: list[BulkRow]) -> tuple[int, int]:
        """Elements of an activation and of a weight that `Operands` has to draw."""
        activation = max(row.num_tokens * max(row.in_features, row.out_features) for row in rows)
        return activation, max(max(row.num_tokens, row.out_features) * row.in_features for row in rows)

    def gemm(self) -> torch.Tensor:
        return torch.mm(*self.factors)

    def ours(self, manager: tpo.UserBufferManager, work: Work, *, keeps: bool = False) -> Results:
        """Our bulk collective beside ``work``. ``keeps``: copy what was gathered, which no layer does."""
        comm, scatter = manager.get(NAMES[self.row.direction]), self.row.direction == "rs"
        operation = manager.operation(comm, self.partition, scatter=scatter, beside=True)
        products: list[torch.Tensor] = []
        if scatter:
            out = self.sent.new_empty(self.partition.counts[self._session.rank], self.row.in_features)
            scatter_beside(operation, self.sent, lambda: products.append(work()), out)
            return out, products[0]
        seen: list[torch.Tensor] = []
        gather_beside(
            operation,
            self.sent,
            lambda: products.append(work()),
            lambda whole: seen.append(whole.clone() if keeps else self.sent),
        )
        return seen[0], products[0]

    def nccl(self, work: Work, *, beside: bool) -> Results:
        """The plain collective on its own stream beside ``work``, or before it. Equal shards."""
        size, session = self._session.tp_size, self._session
        if self.row.direction == "ag":
            out, collective = self.sent.new_empty(self.sent.shape[0] * size, self.sent.shape[1]), baselines.gather
        else:
            out, collective = self.sent.new_empty(self.sent.shape[0] // size, self.sent.shape[1]), baselines.scatter
        pending = collective(out, self.sent, group=session.group, async_op=beside)
        product = work()
        if beside:
            pending.wait()
        return out, product

    def add(self) -> torch.Tensor:
        """The sum that ends our reduce-scatter, of as many rows."""
        blocks = [self.sent[self.partition.rows(rank)] for rank in range(self._session.tp_size)]
        out = torch.empty_like(blocks[self._session.rank])
        sum_blocks(blocks, out, None)
        return out


class BulkReference:
    """What both results have to be. Collective."""

    def __init__(self, session: Session, inputs: BulkInputs) -> None:
        row, (left, right) = inputs.row, inputs.factors
        rows = GemmRow("ag", left.shape[0], left.shape[1], right.shape[1], left.shape[0])
        self._product = Reference(session, rows, left, right.t())
        self._whole, self._summed = inputs.whole, None
        if row.direction == "rs":
            wide = torch.float64 if inputs.sent.dtype == torch.float32 else torch.float32
            summed = inputs.sent.to(wide)
            dist.all_reduce(summed, group=session.group)
            self._summed = summed[inputs.own]

    def problem(self, results: Results) -> str | None:
        """Of our operation or of NCCL's: a gather is exact, a sum may be rounded once more than its twin."""
        moved, product = results
        wrong = self._product.compare(product, 0)[1]
        if wrong is not None:
            return f"the GEMM beside it: {wrong}"
        if self._summed is None:
            return None if torch.equal(moved, self._whole) else "the gathered rows are not those that were sent"
        error = relative_error(moved, self._summed)
        bound = TWIN_FACTOR * relative_error(self._summed.to(moved.dtype), self._summed) + FLOAT32_FLOOR
        return None if error <= bound else f"the sum: relative error {error:.3e}, allowed {bound:.3e}"


def open_managers(session: Session, width: int, max_tokens: int, options: Mapping[str, dict[str, Any]]) -> Managers:
    """One manager a variant, for x of ``width`` columns. Collective."""
    make = partial(
        tpo.UserBufferManager,
        session.group,
        (max_tokens, width),
        dtype=session.job.dtype,
        device=session.device,
        timeout_s=session.job.timeout_s,
    )
    return Managers({label: make(ub_cfgs=dict.fromkeys(NAMES.values(), given)) for label, given in options.items()})


class Managers(dict[str, tpo.UserBufferManager]):
    """By variant: `drop` one that failed, `check_and_close` the others in the end."""

    def drop(self, label: str) -> None:
        """What failed may have left it unusable."""
        self.pop(label).abort()

    def check_and_close(self) -> None:
        for manager in self.values():
            manager.check()
            manager.close()
