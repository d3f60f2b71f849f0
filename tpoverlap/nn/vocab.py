"""The vocabulary's two ends, cut along the vocabulary: embedding and head.

===================  ==========================================  ================================================
                     forward                                     backward
===================  ==========================================  ================================================
embedding            own rows of the table, zeros for the        all-gather of dy, then add to own rows
                     others' tokens; reduce-scatter [T,H]
                     -> [T_r,H]
head                 as `tpoverlap.nn.column`: all-gather +      as `tpoverlap.nn.column`
                     GEMM, [T_r,H] -> [T,V_r]
===================  ==========================================  ================================================

V_r: the vocabulary's rows of rank r, ``TokenPartition.balanced(V, R)``: V need not be divisible by R (the first V mod R
ranks have one more). Losses: `vocab_parallel_cross_entropy`, which never gathers the logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from tpoverlap.communicator import CommOverlap, LayerCommunicators
from tpoverlap.errors import ActiveShapeError, ConfigError
from tpoverlap.nn.agreement import refuse, values_hash
from tpoverlap.nn.autograd import is_compiling, uncompiled
from tpoverlap.nn.layer_view import OverlapFlags
from tpoverlap.nn.parallel_gemm import ParallelGemm
from tpoverlap.nn.parallel_layer import ParallelLayer
from tpoverlap.nn.parameters import (
    InitMethod,
    add_parameter,
    describe_parameter,
    draw_shard,
    require_sizes,
    resolve_manager,
    uniform_by_fan_in,
)
from tpoverlap.nn.recompute import note_shape
from tpoverlap.nn.shard_spec import ShardSpec
from tpoverlap.overlap import gather_beside, scatter_beside
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager


def vocabulary_rows(vocab_size: int, manager: UserBufferManager) -> slice:
    """This rank's rows of the vocabulary. Raises ConfigError when a rank would have none."""
    if vocab_size < manager.tp_size:
        raise ConfigError(f"a vocabulary of {vocab_size} leaves a rank of tp_size={manager.tp_size} without a row")
    return TokenPartition.balanced(vocab_size, manager.tp_size).rows(manager.rank)


class VocabParallelEmbedding(torch.nn.Module):
    """tokens [T] -> x_shard [T_r, H]. ``weight`` [V_r, H]: rows of this rank's part of the vocabulary.

    Args:
        num_embeddings, embedding_dim: V and H of the full table.
        sequence_parallel: only True: without it, sum the rows with an embedding of your own.
        ub_name: a registered name of width H (``mgr.register("embedding", width=H)``); else it runs without overlap,
            which costs little: there is no GEMM to hide behind.
        init_method: fills this rank's weight; None: as ``torch.nn.Embedding``.
        Others: as `Linear`.

    Raises:
        ConfigError: fewer rows than ranks.
    """

    weight: torch.nn.Parameter
    shard_specs: dict[str, ShardSpec]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        manager: UserBufferManager | None = None,
        ub_name: str = "embedding",
        tp_group: Any = None,
        tp_size: int | None = None,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        require_sizes(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.num_embeddings, self.embedding_dim, self.ub_name = num_embeddings, embedding_dim, ub_name
        self.manager = resolve_manager(manager, tp_group, tp_size)
        self.vocabulary = vocabulary_rows(num_embeddings, self.manager)
        add_parameter(self, "weight", ShardSpec((num_embeddings, embedding_dim), 0), self.manager, device, params_dtype)
        draw_shard(self.weight, self.manager, init_method or torch.nn.init.normal_)

    @property
    def comm(self) -> LayerCommunicators:
        """Its communicators."""
        return self.manager.layer(self.ub_name, row=True)

    def forward(self, tokens: torch.Tensor, partition: TokenPartition | None = None) -> torch.Tensor:
        """Tokens [T] of all ranks, the same on each -> the embeddings of own rows, [T_r, H].

        Raises:
            ActiveShapeError: ``tokens`` is not a 1-D integer tensor of the active T entries in the vocabulary. (On a
                GPU nobody waits to look at values: a token outside the vocabulary has an embedding of NaN.)
            RankMismatchError: on the CPU, ranks differ in their tokens; one rank refuses its tokens and others do not.
        """
        if is_compiling():
            return uncompiled(VocabParallelEmbedding.forward, self, tokens, partition)
        comm = self.comm.fprop
        resolved = self._require_tokens(tokens, partition)
        x: torch.Tensor = _Embed.apply(  # type: ignore[no-untyped-call]
            comm, resolved, tokens, self.weight, self.vocabulary, self.num_embeddings
        )
        return x

    def _require_tokens(self, tokens: torch.Tensor, partition: TokenPartition | None) -> TokenPartition:
        name, manager = self.ub_name, self.manager
        if not isinstance(tokens, torch.Tensor):
            raise ActiveShapeError(f"{name}: tokens must be a 1-D tensor of integers, got {type(tokens).__name__}")
        if tokens.dim() != 1 or tokens.dtype not in (torch.int32, torch.int64):
            raise ActiveShapeError(f"{name}: tokens must be 1-D integers, got {list(tokens.shape)} {tokens.dtype}")
        note_shape(manager.active)
        active = self.comm.fprop.partition if partition is None else manager.active.parse(None, partition)
        resolved = TokenPartition.balanced(tokens.shape[0], manager.tp_size) if active is None else active
        if resolved.total != tokens.shape[0]:
            raise ActiveShapeError(
                f"{name}: {tokens.shape[0]} tokens, but the active shape says T={resolved.total}; every rank takes the "
                "tokens of all ranks"
            )
        self.comm.fprop.require_capacity(resolved)
        if tokens.device.type == "cpu":
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.num_embeddings:
                problem = f"tokens lie between {low} and {high}, the vocabulary has {self.num_embeddings} entries"
                refuse(manager, self.comm.fprop.name, tokens, f"{name}, rank {manager.rank}: {problem}")
        return resolved

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, rows {self.vocabulary.start}..{self.vocabulary.stop}"


class _Embed(torch.autograd.Function):
    """See the table above. Saved: the tokens' rows in the own table."""

    @staticmethod
    def forward(
        ctx: Any,
        comm: CommOverlap,
        partition: TokenPartition,
        tokens: torch.Tensor,
        weight: torch.Tensor,
        vocabulary: slice,
        vocab_size: int,
    ) -> torch.Tensor:
        rows = tokens.long() - vocabulary.start
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        nothing = torch.zeros_like(tokens, dtype=weight.dtype)
        nothing.masked_fill_((tokens < 0) | (tokens >= vocab_size), torch.nan)
        found = torch.where(elsewhere[:, None], nothing[:, None], weight[rows.masked_fill(elsewhere, 0)])
        out = found.new_empty(partition.counts[comm.manager.rank], weight.shape[1])
        detail = values_hash(comm.manager, comm.name, tokens, vocab_size)  # another vocabulary would leave gaps
        operation = comm.manager.operation(comm, partition, scatter=True, beside=True, detail=detail)
        scatter_beside(operation, found, lambda: None, out)
        ctx.comm, ctx.partition, ctx.num_rows = comm, partition, weight.shape[0]
        ctx.save_for_backward(rows.masked_fill_(elsewhere, weight.shape[0]))
        return out

    @staticmethod
    @once_differentiable  # the gradient of a gradient would need collectives of its own
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (rows,) = ctx.saved_tensors
        comm: CommOverlap = ctx.comm
        found: list[torch.Tensor] = []

        def add(dy: torch.Tensor) -> None:
            # torch's own backward adds in float32; the row behind the table is where others' tokens went.
            padding = ctx.num_rows
            found.append(torch.ops.aten.embedding_dense_backward(dy, rows, padding + 1, padding, False)[:padding])

        operation = comm.manager.operation(comm, ctx.partition, scatter=False, beside=True)
        gather_beside(operation, grads[0].contiguous(), lambda: None, add)
        return None, None, None, found[0], None, None


class VocabParallelHead(ParallelLayer):
    """x_shard [T_r, H] -> logits [T, V_r] of this rank's part of the vocabulary: one large all-gather GEMM.

    ``weight`` [V_r, H]; its rows are those of `VocabParallelEmbedding`, so the two may share one parameter.

    Args:
        hidden_size, vocab_size: H and V.
        weight: an existing parameter [V_r, H] to use (tied embeddings); None: a new one.
        ub_name: a registered name of width H (``mgr.register("lm_head", width=H)``).
        Others: as `Linear`.

    Raises:
        ConfigError: fewer rows than ranks; ``weight`` has another shape; as `Linear`.
    """

    weight: torch.nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        weight: torch.nn.Parameter | None = None,
        manager: UserBufferManager | None = None,
        ub_name: str = "lm_head",
        sequence_parallel: bool = True,
        tp_group: Any = None,
        tp_size: int | None = None,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        save_gathered: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        ub_overlap_ag: bool | None = None,
        ub_overlap_rs_dgrad: bool | None = None,
        ub_bulk_dgrad: bool | None = None,
        ub_bulk_wgrad: bool | None = None,
    ) -> None:
        super().__init__()
        require_sizes(hidden_size=hidden_size, vocab_size=vocab_size)
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.manager = resolve_manager(manager, tp_group, tp_size)
        self.vocabulary = vocabulary_rows(vocab_size, self.manager)
        gemm = ParallelGemm(
            self.manager,
            ub_name,
            row=False,
            sequence_parallel=sequence_parallel,
            flags=OverlapFlags(ub_overlap_ag, None, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad),
            save_gathered=save_gathered,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        self._gemms = (gemm,)
        spec = ShardSpec((vocab_size, hidden_size), 0)
        shape = spec.local_shape(self.manager.rank, self.manager.tp_size)
        if weight is None:
            add_parameter(self, "weight", spec, self.manager, device, params_dtype)
            draw_shard(self.weight, self.manager, init_method or uniform_by_fan_in(hidden_size))
        else:
            if weight.shape != shape:
                raise ConfigError(f"{ub_name}: weight is {list(weight.shape)}, this rank's part is {list(shape)}")
            self.weight = weight
            describe_parameter(self, "weight", spec)

    def forward(self, x: torch.Tensor, partition: TokenPartition | None = None) -> torch.Tensor:
        """[T_r, H] -> [T, V_r]."""
        if is_compiling():
            return uncompiled(VocabParallelHead.forward, self, x, partition)
        return self._gemms[0].column(x, self.weight, None, partition)[0]

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.hidden_size}, {self.vocab_size}, rows {self.vocabulary.start}..{self.vocabulary.stop}"
