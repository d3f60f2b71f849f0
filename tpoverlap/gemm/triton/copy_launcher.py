"""Launching `copy_and_flag`: ``num_sm`` programs that copy bytes and then set a flag, on the current stream."""

from __future__ import annotations

from typing import Final

import torch

from tpoverlap.gemm.triton.prepared import signed32

_VECTOR_BYTES: Final = 16
_UNITS: Final = 8192
"""Units a program copies in one step: 32 KiB, 16-byte vectors of which each thread has several in flight."""
_NUM_WARPS: Final = 16


class CopyLauncher:
    """One a stream: launches share a counter, so they must not overlap each other.

    Args:
        num_programs: how many multiprocessors the copy takes.
    """

    def __init__(self, device: torch.device, num_programs: int) -> None:
        self._interpreted = device.type == "cpu"
        self._num_programs = num_programs
        self._done = torch.zeros(1, dtype=torch.int32, device=device)
        self._finished = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, flag_address: int, value: int) -> None:
        """``target[:] = source`` (contiguous, the same size), then ``value`` into the int32 at ``flag_address``."""
        from tpoverlap.gemm.triton.copy_rows import copy_and_flag

        assert target.is_contiguous() and source.is_contiguous(), "copies contiguous bytes"
        size_bytes = source.numel() * source.element_size()
        assert size_bytes == target.numel() * target.element_size(), "sizes differ"
        self._finished += self._num_programs
        in_vectors = (target.data_ptr() | source.data_ptr() | size_bytes) % _VECTOR_BYTES == 0 and not self._interpreted
        unit, multiple = (torch.int32, 4) if in_vectors else (torch.int8, 1)
        count = size_bytes // unit.itemsize // multiple
        # The interpreter copies whole storages back after a launch, over what peers wrote meanwhile: give it addresses.
        copy_and_flag[(self._num_programs,)](
            target.data_ptr() if self._interpreted else target.view(-1).view(unit),
            source.data_ptr() if self._interpreted else source.view(-1).view(unit),
            count,
            self._done,
            signed32(self._finished),
            flag_address,
            signed32(value),
            UNITS=_UNITS,
            MULTIPLE=multiple,
            ADDRESSED=self._interpreted,
            num_warps=_NUM_WARPS,
        )
