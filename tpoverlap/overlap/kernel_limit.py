"""How long kernels wait for peers by themselves, and who is told when one gave up."""

from __future__ import annotations

from typing import Any, Final

import numpy.typing as npt

from tpoverlap.comm import Channel
from tpoverlap.errors import PeerTimeoutError

_FACTOR: Final = 2.0
_EXTRA_S: Final = 10.0


def kernel_limit_s(channel: Channel) -> float:
    """Seconds after which a kernel gives up, and its output is NaN.

    The watchdog satisfies waiting kernels at the time-out; this bound is for a process whose watchdog is stuck.
    """
    return _FACTOR * channel.timeout_s + _EXTRA_S


def watch_kernels(channel: Channel, error: npt.NDArray[Any], waits: str) -> None:
    """Have ``channel.check`` raise PeerTimeoutError once a kernel has written ``error``, one int32 word.

    ``waits``: which kernel and for what, "... waited {limit} s for ...", with that place left open.
    """
    text = waits.format(limit=f"{kernel_limit_s(channel):g}")

    def gave_up() -> BaseException | None:
        if not error[0]:
            return None
        return PeerTimeoutError(f"rank {channel.rank}: {text} and gave up; its output is NaN. Close the manager")

    channel.probes.append(gave_up)
