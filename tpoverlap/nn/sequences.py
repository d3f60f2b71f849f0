"""PackedSequences: what ``cu_seqlens`` says about the T rows of a microbatch, worked out once for all layers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from tpoverlap.errors import ActiveShapeError
from tpoverlap.nn.rotary import RotaryTable

CuSeqlens = torch.Tensor | Sequence[int]


class PackedSequences:
    """Sequences one behind the other (THD layout): row offsets, the longest length, the position of every row.

    Make one a microbatch and pass it to every layer as ``cu_seqlens``; layers make one themselves from a tensor, and
    keep it with that tensor, so that a stack of layers does this once a tensor too. A tensor on a GPU that is written
    through ``.data`` keeps the old one: make one yourself then.

    Args:
        cu_seqlens: first row of each sequence, and T at the end: [0, ..., T], strictly increasing; int32 or int64 on
            any device, or a list of ints.
        num_tokens: T.
        device: of the activations.
        max_seqlen: length of the longest sequence. With it nothing waits for the device.
        check: None: check what can be checked without waiting for a GPU, that is everything unless ``cu_seqlens`` is on
            the GPU and ``max_seqlen`` is given. True: check in any case (one wait).

    Raises:
        ActiveShapeError: ``cu_seqlens`` is malformed, does not start at 0, increase or end at T, or ``max_seqlen`` is
            not its longest length.
    """

    def __init__(
        self,
        cu_seqlens: CuSeqlens,
        num_tokens: int,
        device: torch.device,
        max_seqlen: int | None = None,
        check: bool | None = None,
    ) -> None:
        self.num_tokens = num_tokens
        self._host: tuple[int, ...] | None = None
        self._positions: torch.Tensor | None = None
        self._rotary: dict[tuple[int, float], RotaryTable] = {}
        given = cu_seqlens if isinstance(cu_seqlens, torch.Tensor) else None
        if given is not None:
            _require_offsets_tensor(given)
        if given is None or not given.is_cuda or max_seqlen is None or check:
            self._host = _whole_numbers(cu_seqlens if given is None else given.tolist())
            longest = _require_offsets(self._host, num_tokens)
            if max_seqlen is not None and max_seqlen != longest:
                raise ActiveShapeError(
                    f"max_seqlen={max_seqlen}, but the longest sequence of cu_seqlens has {longest} tokens; pass that, "
                    "or leave it out"
                )
            max_seqlen = longest
        self.max_seqlen = max_seqlen
        self.agreement = 0 if self._host is None else hash(self._host)
        """What ranks compare: a hash of the offsets where the host knew them from the start, else 0."""
        source = torch.tensor(self._host, dtype=torch.int32) if given is None or given.device != device else given
        # A copy: with interleaved microbatches backward reads it after the caller has refilled a tensor of its own.
        self.offsets = source.to(device, torch.int32, non_blocking=True, copy=given is not None)
        """int32 [number of sequences + 1], on the device of the activations."""

    @property
    def host_offsets(self) -> tuple[int, ...]:
        """The offsets on the host; waits for the device if nothing did before."""
        if self._host is None:
            self._host = tuple(self.offsets.tolist())
        return self._host

    @property
    def positions(self) -> torch.Tensor:
        """int64 [T]: 0, 1, .. from the start of each sequence."""
        if self._positions is None:
            offsets = self.offsets.long()
            rows = torch.arange(self.num_tokens, device=offsets.device)
            self._positions = rows - offsets[torch.bucketize(rows, offsets[1:-1], right=True)]
        return self._positions

    def rotary(self, head_dim: int, base: float) -> RotaryTable:
        """The table of `positions` for heads of that size; made once, so that a stack of layers shares it."""
        table = self._rotary.get((head_dim, base))
        if table is None:
            with torch.inference_mode(False):  # autograd may save it later
                table = self._rotary[head_dim, base] = RotaryTable.of(self.positions, head_dim, base)
        return table


def packed_sequences(
    cu_seqlens: CuSeqlens | PackedSequences, num_tokens: int, device: torch.device, max_seqlen: int | None = None
) -> PackedSequences:
    """``cu_seqlens`` as `PackedSequences` of T = ``num_tokens`` rows; what a tensor gave before is found with it."""
    if isinstance(cu_seqlens, PackedSequences):
        if cu_seqlens.num_tokens != num_tokens:
            raise ActiveShapeError(
                f"cu_seqlens was packed for T={cu_seqlens.num_tokens}, but this microbatch has T={num_tokens}; make "
                "another one for every microbatch"
            )
        return cu_seqlens
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.is_inference():
        return PackedSequences(cu_seqlens, num_tokens, device, max_seqlen)
    key = (cu_seqlens._version, num_tokens, device, max_seqlen)
    known = getattr(cu_seqlens, "_tpoverlap_packed", None)
    # Numpy, which may own a host tensor's memory, and ``.data`` write without a new version.
    on_host = cu_seqlens.device.type == "cpu"
    if known is None or known[0] != key or (on_host and not torch.equal(cu_seqlens, known[2])):
        packed = PackedSequences(cu_seqlens, num_tokens, device, max_seqlen)
        known = (key, packed, cu_seqlens.clone() if on_host else None)
        cu_seqlens._tpoverlap_packed = known  # type: ignore[attr-defined]  # gone with the tensor
    found: PackedSequences = known[1]
    return found


def _whole_numbers(offsets: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(offset) for offset in offsets)
    except TypeError as error:  # 4.7 would be cut to 4 by int()
        raise ActiveShapeError(
            f"cu_seqlens must be whole numbers, a list or a tensor of them, got {offsets!r}"
        ) from error


def _require_offsets_tensor(cu_seqlens: torch.Tensor) -> None:
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ActiveShapeError(
            f"cu_seqlens must be a 1-D int32 or int64 tensor, got {list(cu_seqlens.shape)} {cu_seqlens.dtype}"
        )


def _require_offsets(offsets: tuple[int, ...], num_tokens: int) -> int:
    """The longest length."""
    if len(offsets) < 2 or offsets[0] != 0:
        raise ActiveShapeError(f"cu_seqlens must start at 0 and have at least two entries, got {_shown(offsets)}")
    lengths = [end - start for start, end in pairwise(offsets)]
    for index, length in enumerate(lengths):
        if length <= 0:
            raise ActiveShapeError(
                f"cu_seqlens must increase: entry {index} is {offsets[index]}, entry {index + 1} {offsets[index + 1]}; "
                "drop empty sequences"
            )
    if offsets[-1] != num_tokens:
        raise ActiveShapeError(
            f"cu_seqlens ends at {offsets[-1]}, but this microbatch has T={num_tokens} tokens: every row must "
            "belong to a sequence (T is after any context-parallel split)"
        )
    return max(lengths)


def _shown(offsets: tuple[int, ...]) -> str:
    return str(list(offsets)) if len(offsets) <= 8 else f"[{offsets[0]}, {offsets[1]}, ... {offsets[-1]}]"
