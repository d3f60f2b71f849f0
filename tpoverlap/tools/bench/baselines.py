"""What a user could pick instead, and what is the least that it takes: none of it goes through our manager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tpoverlap.errors import TpOverlapError
from tpoverlap.memory import select_backend
from tpoverlap.memory.base import Arena
from tpoverlap.tools.bench.rows import GemmRow
from tpoverlap.tools.bench.session import Session

Run = Callable[[], torch.Tensor]

# Newer torch renamed them and warns about the old names, at every call.
gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def even_rows(row: GemmRow, tp_size: int) -> int:
    """T rounded up to a multiple of R: plain collectives take equal shards, so their users pad this far."""
    return -(-row.num_tokens // tp_size) * tp_size


def collective(session: Session, row: GemmRow, x: torch.Tensor) -> Run:
    """The plain collective alone. ``x``: [T_r, K] to gather, or [T, N] to reduce and scatter; equal shards."""

    def gather_alone() -> torch.Tensor:
        whole = x.new_empty(x.shape[0] * session.tp_size, x.shape[1])
        gather(whole, x, group=session.group)
        return whole

    def scatter_alone() -> torch.Tensor:
        own = x.new_empty(x.shape[0] // session.tp_size, x.shape[1])
        scatter(own, x, group=session.group)
        return own

    return gather_alone if row.direction == "ag" else scatter_alone


def plain_sequential(session: Session, row: GemmRow, x: torch.Tensor, weight: torch.Tensor) -> Run:
    """Collective, then GEMM, or the other way round: NCCL + cuBLAS as Megatron without overlap calls them."""
    size, group = session.tp_size, session.group

    def gather_then_gemm() -> torch.Tensor:
        whole = x.new_empty(x.shape[0] * size, x.shape[1])
        gather(whole, x, group=group)
        return torch.mm(whole, weight.t())

    def gemm_then_scatter() -> torch.Tensor:
        summand = torch.mm(x, weight.t())
        own = summand.new_empty(summand.shape[0] // size, summand.shape[1])
        scatter(own, summand, group=group)
        return own

    return gather_then_gemm if row.direction == "ag" else gemm_then_scatter


def async_tp(session: Session, row: GemmRow, x: torch.Tensor, weight: torch.Tensor) -> Run:
    """Torch's async tensor parallelism. `why_no_async_tp` says where it cannot run."""
    import torch.distributed._symmetric_memory

    operators: Any = torch.ops.symm_mem
    name, transposed = session.group.group_name, weight.t()

    def gather_then_gemm() -> torch.Tensor:
        output: torch.Tensor = operators.fused_all_gather_matmul(x, [transposed], 0, name)[1][0]
        return output

    def gemm_then_scatter() -> torch.Tensor:
        output: torch.Tensor = operators.fused_matmul_reduce_scatter(x, transposed, "sum", 0, name)
        return output

    return gather_then_gemm if row.direction == "ag" else gemm_then_scatter


def why_no_nccl(session: Session) -> str | None:
    """Why the plain collectives cannot run; None where they can."""
    return "NCCL refuses two ranks on one GPU" if session.job.shares_gpus else None


def why_no_async_tp(session: Session, row: GemmRow) -> str | None:
    """Why torch's async-TP cannot run this row; None where it can be tried."""
    if not session.is_cuda:
        return "torch async-TP needs CUDA symmetric memory"
    if session.job.shares_gpus:
        return "torch async-TP is not tried with ranks that share a GPU"
    if row.num_tokens % session.tp_size:
        return f"torch async-TP needs T divisible by R, got {row.num_tokens} and {session.tp_size}"
    return None


class PlainTransfer:
    """The bytes of one collective straight into the peers' memory: the fastest that the link gives at that size.

    By copy engine on GPUs, memcpy into shared pages on CPUs; no flags, no waits. All ranks do it at the same time, as
    in a collective. ``reason`` says why there is none: message backends map no peer.
    """

    def __init__(self, session: Session, max_bytes: int) -> None:
        self._session = session
        self._arena: Arena | None = None
        self.reason: str | None = None
        try:
            choice = select_backend("auto", session.group, session.device)
            if choice.backend.one_sided:
                # One block a source, and one to pull into.
                self._arena = choice.backend.allocate(max_bytes + 4096 * session.tp_size)
            else:
                self.reason = f"no plain transfer: {choice.reason}"
        except TpOverlapError as error:
            self.reason = f"no plain transfer: {error}"
        peers = session.tp_size - 1
        self._streams = [torch.cuda.Stream(session.device) for _ in range(peers - 1)] if session.is_cuda else []

    def push(self, row: GemmRow, source: torch.Tensor) -> Run:
        """This rank's rows into every peer."""
        return self._run(row, source, push=True)

    def pull(self, row: GemmRow, source: torch.Tensor) -> Run:
        """Every peer's rows from where its `push` would put ours, into ``source``-sized local memory."""
        return self._run(row, source, push=False)

    def _run(self, row: GemmRow, source: torch.Tensor, *, push: bool) -> Run:
        arena, rank, size = self._arena, self._session.rank, self._session.tp_size
        assert arena is not None, "the caller looks at `reason` first"
        elements = self._elements(row)
        block = -(-elements * source.element_size() // 256) * 256
        flat = source.reshape(-1)[:elements]
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for peer in ((rank + offset) % size for offset in range(1, size)):
            if push:
                pairs.append((arena.view(peer, rank * block, (elements,), source.dtype), flat))
            else:
                local = arena.view(rank, peer * block, (elements,), source.dtype)
                pairs.append((local, arena.view(peer, rank * block, (elements,), source.dtype)))
        first, *others = pairs

        def run() -> torch.Tensor:
            if not self._streams:
                for target, origin in pairs:
                    target.copy_(origin)
                return first[0]
            caller = torch.cuda.current_stream()
            for stream, (target, origin) in zip(self._streams, others, strict=True):  # several peers: all links
                stream.wait_stream(caller)
                with torch.cuda.stream(stream):
                    target.copy_(origin)
            first[0].copy_(first[1])
            for stream in self._streams:
                caller.wait_stream(stream)
            return first[0]

        return run

    def problem_after_push(self, row: GemmRow, source: torch.Tensor) -> str | None:
        """After every rank pushed the same ``source`` and all met: None when every block arrived whole."""
        assert self._arena is not None, "the caller looks at `reason` first"
        elements, rank = self._elements(row), self._session.rank
        block = -(-elements * source.element_size() // 256) * 256
        for peer in range(self._session.tp_size):
            view = self._arena.view(rank, peer * block, (elements,), source.dtype)
            if peer != rank and not torch.equal(view, source.reshape(-1)[:elements]):
                return f"the plain transfer from rank {peer} did not arrive"
        return None

    def _elements(self, row: GemmRow) -> int:
        return row.partition(self._session.tp_size).max_count * row.width

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
