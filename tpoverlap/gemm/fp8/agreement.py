"""What ranks have to agree on before they read one another's FP8 rows: the recipe, and where histories come from.

Histories of tensors that travel start equal and see the same magnitudes, so they stay equal. Only a write from outside
can part them: another checkpoint on one rank, a buffer that was broadcast to some. The buffers' version counters show
such a write (`load_state_dict`, `torch.distributed.checkpoint` and a plain ``copy_`` alike); the next use then hashes
the numbers, which waits for the device once. In the steady state counters are compared, on the host.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tpoverlap.gemm.fp8.recipes import Recipe

State = tuple[int, ...]


class Agreement:
    """A number for a quantizer that is equal on ranks whose scales are: part of what operations compare.

    Args:
        recipe: of the quantizer.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe_hash = zlib.crc32(repr(recipe).encode())
        self._state: State = ()
        self._value = self._recipe_hash

    def value(self, *buffers: torch.Tensor) -> int:
        """The number, for a quantizer whose history is ``buffers``: that of the last write that was not `written`."""
        if not buffers:
            return self._value
        state = _state_of(buffers)
        if state != self._state and not _is_capturing(buffers):
            self._state, self._value = state, self._recipe_hash
            for buffer in buffers:
                self._value = zlib.crc32(buffer.detach().cpu().numpy().tobytes(), self._value)
        return self._value

    def written(self, *buffers: torch.Tensor, known: bool) -> None:
        """The quantizer itself wrote: no news, unless somebody else had written before (``known`` False)."""
        if known:
            self._state = _state_of(buffers)

    def knows(self, *buffers: torch.Tensor) -> bool:
        """Whether nobody wrote since `value` or `written`."""
        return self._state == _state_of(buffers)


def _state_of(buffers: tuple[torch.Tensor, ...]) -> State:
    # The objects, too: `.to()` and load_state_dict(assign=True) put others in their place, while these still live.
    try:
        return tuple([part for one in buffers for part in (id(one), one._version)])
    except RuntimeError:  # made in inference mode: such a tensor counts no versions
        return tuple([id(one) for one in buffers])


def _is_capturing(buffers: tuple[torch.Tensor, ...]) -> bool:
    """A CUDA graph cannot wait for the device. It is captured after a warm-up, which has looked."""
    return any(one.is_cuda for one in buffers) and torch.cuda.is_current_stream_capturing()
