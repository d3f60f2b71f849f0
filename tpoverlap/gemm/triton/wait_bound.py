"""What bounds the waits inside kernels, and the word that says that one gave up."""

from __future__ import annotations

from typing import Final

import torch

_POLLS_PER_S: Final = 2_000
"""Roughly what the interpreter manages, which has no clock; its bound only has to exist."""


class WaitBound:
    """For the kernels of one launcher.

    Args:
        device: of the kernels.
        limit_s: seconds that a wait may take.
        interpreted: they run in Triton's interpreter.

    Attributes:
        limit: that, as kernels count it: nanoseconds, or polls of the interpreter.
        error: int32 [1] on the host, not 0 once a kernel gave up.
        address: of that word, for kernels.
    """

    def __init__(self, device: torch.device, limit_s: float, *, interpreted: bool) -> None:
        self.limit = int(limit_s * (_POLLS_PER_S if interpreted else 1e9))
        # Pinned: the kernel stores into it, the host looks at it without a copy or a synchronisation.
        word = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.error, self.address = word.numpy(), word.data_ptr()
