"""Communicators: what ``mgr.get(name)`` and ``mgr.layer(name)`` return.

=====================  ==================================================================
``CommOverlap``        a name whose method is bulk, pipeline or sequential
``CommOverlapP2P``     a name whose method is ring_exchange
``LayerCommunicators``  fprop, dgrad and wgrad of one layer: what autograd functions take
=====================  ==================================================================
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tpoverlap.active_shape import ShapeLike, require_capacity
from tpoverlap.config import OverlapConfig
from tpoverlap.errors import ActiveShapeError
from tpoverlap.operation_cache import OperationCache
from tpoverlap.statistics import NameStatistics
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager


class CommOverlap:
    """One named GEMM's communicator. Made by the manager, never by users.

    ====================================  ======================================================================
    ``set_buffer_active_shape((T, H))``   T for this name only, until the manager's shape changes; local, no cost
    ``get_buffer_active_shape()``         (T, H); the capacity before any shape was set
    ``get_buffer_capacity_shape()``       (C, H)
    ``get_buffer(local_chunk=False)``     view of the active rows of the next operation's slot, no copy
    ``copy_into_buffer(x, local_chunk)``  fill it
    ====================================  ======================================================================

    Attributes:
        name: of the GEMM.
        config: its options.
        width, max_tokens, max_rows_per_rank: what it was registered with.
        hint: where it is not registered, what its name may be a slip of, as `explain` says it.
        operations: the manager's memory: what was made for a use, while ``config`` is ``chosen_for``.
    """

    def __init__(
        self,
        manager: UserBufferManager,
        name: str,
        config: OverlapConfig,
        *,
        width: int,
        max_tokens: int,
        max_rows_per_rank: int,
        gather_region: str,
        scatter_region: str,
        registered: bool = True,
    ) -> None:
        self.manager = manager
        self.name = name
        self.config = config
        self.width = width
        self.max_tokens = max_tokens
        self.max_rows_per_rank = max_rows_per_rank
        self.gather_region = gather_region
        self.scatter_region = scatter_region
        self.registered = registered
        self.hint = ""
        self.statistics = NameStatistics(max_tokens)
        self.operations = OperationCache()
        self.chosen_for = config
        self._own_shape: tuple[int, TokenPartition] | None = None
        self._overridden: CommOverlap | None = None
        self.scatter_staging: torch.Tensor | None = None
        self.is_quantised = False
        self._quantised: CommOverlap | None = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name!r}, {self.config.method}, capacity {self.get_buffer_capacity_shape()})"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> CommOverlap:
        """The same one: it belongs to the manager, which a copied model shares."""
        return self

    def as_quantised(self) -> CommOverlap:
        """The same name, options, regions and counters with a buffer of FP8 rows and an active shape of its own."""
        if self._quantised is None:
            self._quantised = copy.copy(self)
            self._quantised.is_quantised = True
            self._quantised.scatter_staging = None  # that of this one has another dtype
        return self._quantised

    @property
    def buffer_dtype(self) -> torch.dtype:
        """Of `get_buffer`: the manager's dtype, or uint8 (as in Transformer Engine) for FP8 rows."""
        return torch.uint8 if self.is_quantised else self.manager.dtype

    def with_config(self, config: OverlapConfig) -> CommOverlap:
        """The same name, regions, shape and counters under other options: for one layer whose flags say so."""
        other = copy.copy(self)
        other.config, other._overridden = config, self
        other.operations, other.chosen_for, other._quantised = OperationCache(), config, None
        return other

    @property
    def overrides(self) -> bool:
        """Whether a layer's flags, and not the manager's configuration, gave it its options."""
        return self._overridden is not None

    @property
    def is_reduce_scatter(self) -> bool:
        """The direction that its configuration gives it."""
        return self.config.is_reduce_scatter

    # -- active shape --------------------------------------------------------------------------------------------

    def set_buffer_active_shape(self, shape: ShapeLike, partition: TokenPartition | None = None) -> None:
        """Set (T, H) for this name alone; the manager's next shape replaces it.

        Raises:
            ActiveShapeError: see `ActiveShape.parse`. CapacityError: it does not fit.
        """
        self.manager.require_open()
        active = self.manager.active
        parsed = active.parse(shape, partition, self.width)
        self.require_capacity(parsed)
        self._own_shape = (active.version, parsed)

    @property
    def partition(self) -> TokenPartition | None:
        """This name's own partition if it was set since the manager's, else the manager's; None: infer."""
        if self._overridden is not None:
            return self._overridden.partition
        if self._own_shape is not None and self._own_shape[0] == self.manager.active.version:
            return self._own_shape[1]
        return self.manager.active.partition

    def get_buffer_active_shape(self) -> tuple[int, int]:
        """(T, H), or the capacity when no shape was set."""
        partition = self.partition
        return (self.max_tokens if partition is None else partition.total, self.width)

    def get_buffer_capacity_shape(self) -> tuple[int, int]:
        """(C, H)."""
        return (self.max_tokens, self.width)

    def require_capacity(self, partition: TokenPartition) -> None:
        """Raise CapacityError unless ``partition`` fits, or overflow is allowed to run sequentially."""
        if self.manager.on_overflow == "error":
            require_capacity(partition, self.max_tokens, self.max_rows_per_rank, self.name)

    # -- buffer --------------------------------------------------------------------------------------------------

    def get_buffer(self, local_chunk: bool = False) -> torch.Tensor:
        """View of the active rows of the next operation's slot.

        All-gather: [T, H] in registered memory (``local_chunk``: own rows, [T_r, H]); it stays valid until the
        next-but-one operation on the region. Reduce-scatter: [T, H] of a private staging buffer, because peers write
        only summands into the registered one.
        """
        self.manager.require_open()
        partition = self._buffer_partition()
        rows = partition.rows(self.manager.rank) if local_chunk else slice(0, partition.total)
        if self.is_reduce_scatter:
            return self._make_staging().detach()[rows]  # what autograd hangs on a view must not stay on the buffer
        return self.manager.next_gather_slot(self, partition)[rows]

    def _make_staging(self) -> torch.Tensor:
        if self._overridden is not None:  # one a name, however many layers have options of their own for it
            base = self._overridden
            return (base.as_quantised() if self.is_quantised else base)._make_staging()
        if self.scatter_staging is None:
            manager = self.manager
            with torch.inference_mode(False):  # it outlives the caller's mode
                self.scatter_staging = torch.empty(
                    self.max_tokens, self.width, dtype=self.buffer_dtype, device=manager.device
                )
            if manager.channel is not None:
                manager.channel.also_holds(self.scatter_staging)
        return self.scatter_staging

    def stagings(self) -> list[torch.Tensor]:
        """What `get_buffer` has made for this name: [C, H], and the same for FP8 rows."""
        twins = (self,) if self._quantised is None else (self, self._quantised)
        return [one.scatter_staging for one in twins if one.scatter_staging is not None]

    def copy_into_buffer(self, x: torch.Tensor, local_chunk: bool = False) -> None:
        """Copy ``x`` into `get_buffer`'s view: [T, H], or [T_r, H] when ``local_chunk``.

        Peers may already be pushing their rows of the next operation into an all-gather slot: there, copy own rows only
        (``local_chunk=True``), unless ``x`` is what the gather will give.

        Raises:
            ActiveShapeError: the shapes differ.
        """
        target = self.get_buffer(local_chunk)
        if x.shape != target.shape:
            which = "this rank's rows" if local_chunk else "the active shape"
            raise ActiveShapeError(f"{self.name}: x is {list(x.shape)} but {which} is {list(target.shape)}")
        target.copy_(x.detach())

    def _buffer_partition(self) -> TokenPartition:
        partition = self.partition
        if partition is None:
            return TokenPartition.balanced(self.max_tokens, self.manager.tp_size)
        require_capacity(partition, self.max_tokens, self.max_rows_per_rank, self.name)
        return partition


class CommOverlapP2P(CommOverlap):
    """A communicator whose method moves chunk by chunk between pairs of ranks (ring_exchange)."""


@dataclass(frozen=True)
class LayerCommunicators:
    """The communicators of one layer; ``mgr.layer("qkv")``.

    `scatters_in_dgrad` says that the configuration reduce-scatters the input gradient inside dgrad instead of beside
    wgrad (a non-bulk ``qkv_dgrad``); there is no wgrad communicator then, nor in a row layer.
    """

    manager: UserBufferManager
    name: str
    fprop: CommOverlap
    dgrad: CommOverlap
    wgrad: CommOverlap | None

    @property
    def scatters_in_dgrad(self) -> bool:
        """Column layers: whether dgrad's GEMM itself is overlapped with the reduce-scatter of its result."""
        return self.dgrad.is_reduce_scatter


Communicators = CommOverlap | LayerCommunicators


def names_of_layer(name: str) -> Sequence[str]:
    """The three GEMM names of a layer."""
    return tuple(f"{name}_{phase}" for phase in ("fprop", "dgrad", "wgrad"))
