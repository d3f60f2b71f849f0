"""ShardSpec: how one parameter of the full model is cut over the TP group. Arithmetic only; nothing is communicated.

===================  =======================================  =====================================================
parameter            full                                     this rank's part
===================  =======================================  =====================================================
replicated           any shape                                all of it
column               [N, K]                                   rows r N/R .. (r + 1) N/R
row                  [N, K]                                   columns r K/R .. (r + 1) K/R
gate and up          [2 F, K]: gate's rows, then up's         rows r F/R .. of the gate, then the same of up
fused QKV            [(A + 2 G) d, K]: group by group, its    the rows of groups r G/R .. (r + 1) G/R: one block
                     A/G query heads, key head, value head
vocabulary           [V, K]                                   rows of ``TokenPartition.balanced(V, R)``
===================  =======================================  =====================================================

A layer keeps the specs of its parameters in ``shard_specs``, by name. Not on the parameters: ``copy.deepcopy`` and
``Module.to_empty`` make new parameters, without the attributes of the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.tokens import TokenPartition


@dataclass(frozen=True)
class ShardSpec:
    """How one parameter is cut; see the table above.

    Attributes:
        full_shape: of the parameter of the full model.
        dim: the dimension that is cut; None: every rank holds all of it.
        parts: names of what lies along ``dim`` in the full parameter, and sizes there: ("gate", F), ("up", F).
        num_groups: None: the parts lie one behind the other, and each is cut for itself. G: the parts alternate, a
            G-th of each at a time, and the cuts lie between such groups.
    """

    full_shape: tuple[int, ...]
    dim: int | None = None
    parts: tuple[tuple[str, int], ...] = ()
    num_groups: int | None = None

    def pieces(self, rank: int, tp_size: int) -> list[tuple[int, int]]:
        """(first index in the full parameter, length) along ``dim`` of what ``rank`` holds, in its order.

        Raises:
            ConfigError: the parameter is replicated, so it has no pieces.
        """
        if self.dim is None:
            raise ConfigError(f"a replicated parameter {list(self.full_shape)} is not cut into pieces")
        blocks, unit = [self.full_shape[self.dim]], 1
        if self.num_groups is not None:
            unit = blocks[0] // self.num_groups
        elif self.parts:
            blocks = [size for _, size in self.parts]
        found, start = [], 0
        for size in blocks:
            units = TokenPartition.balanced(size // unit, tp_size).rows(rank)
            found.append((start + units.start * unit, (units.stop - units.start) * unit))
            start += size
        return found

    def local_shape(self, rank: int, tp_size: int) -> tuple[int, ...]:
        """Shape of what ``rank`` holds."""
        if self.dim is None:
            return self.full_shape
        shape = list(self.full_shape)
        shape[self.dim] = sum(length for _, length in self.pieces(rank, tp_size))
        return tuple(shape)

    def shard(self, full: torch.Tensor, rank: int, tp_size: int) -> torch.Tensor:
        """What ``rank`` holds of ``full``: a view where it is one piece."""
        if self.dim is None:
            return full
        pieces = [full.narrow(self.dim, *piece) for piece in self.pieces(rank, tp_size)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def pieces_of(self, shard: torch.Tensor, rank: int, tp_size: int) -> list[torch.Tensor]:
        """Views of the pieces of what ``rank`` holds, in the order of `pieces`."""
        assert self.dim is not None, "pieces() raises"
        return list(shard.split([length for _, length in self.pieces(rank, tp_size)], self.dim))

    def unshard(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full parameter of all ranks' parts, in rank order."""
        if self.dim is None:
            return shards[0].clone()
        full, tp_size = shards[0].new_empty(self.full_shape), len(shards)
        for rank, shard in enumerate(shards):
            for place, piece in zip(self.pieces(rank, tp_size), self.pieces_of(shard, rank, tp_size), strict=True):
                full.narrow(self.dim, *place).copy_(piece)
        return full

    def part_shape(self, name: str) -> tuple[int, ...]:
        """Shape of one of the ``parts``, in full."""
        assert self.dim is not None, "only cut parameters have parts"
        return (*self.full_shape[: self.dim], dict(self.parts)[name], *self.full_shape[self.dim + 1 :])

    def split(self, full: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of ``full`` by name: gate and up; query, key and value."""
        assert self.dim is not None and self.parts, "asked for parts of a parameter that has none"
        groups = self.num_groups or 1
        grouped = full.unflatten(self.dim, (groups, -1)).split([size // groups for _, size in self.parts], self.dim + 1)
        return {name: part.flatten(self.dim, self.dim + 1) for (name, _), part in zip(self.parts, grouped, strict=True)}

    def join(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of `split`.

        Raises:
            ConfigError: a part is missing or has another shape.
        """
        assert self.dim is not None and self.parts, "asked for parts of a parameter that has none"
        groups = self.num_groups or 1
        grouped = []
        for name, _ in self.parts:
            shape = self.part_shape(name)
            if name not in parts or tuple(parts[name].shape) != shape:
                found = list(parts[name].shape) if name in parts else "nothing"
                raise ConfigError(f"the {name} part has to be {list(shape)}, got {found}")
            grouped.append(parts[name].unflatten(self.dim, (groups, -1)))
        return torch.cat(grouped, self.dim + 1).flatten(self.dim, self.dim + 1)
