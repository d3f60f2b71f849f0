"""The start of an operation on a device in few calls of Python, where nothing about it is out of the ordinary.

Turn, number, slot and flight are those of `Channel.open`. A trace, a meter's sample, a test's hook, a held slot, flags
that are due for a refresh, or another stream that still reads the slot are left to `DeviceExchange`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tpoverlap.comm.device_signals import DeviceSignals
from tpoverlap.comm.device_streams import CallerDeviceStream, DeviceStream, MarkEvent
from tpoverlap.comm.exchange import REFRESH_EVERY
from tpoverlap.comm.in_flight import Flight
from tpoverlap.comm.outline import Outline
from tpoverlap.errors import TpOverlapError

if TYPE_CHECKING:
    from tpoverlap.comm.channel import Channel

logger = logging.getLogger("tpoverlap")
Claimed = tuple[CallerDeviceStream, int, Flight]
"""The caller's stream, the epoch, and what the watchdog sees."""


class QuickOperation:
    """Operations of one outline, one after the other.

    Args:
        channel: on a device.
        signals: the channel's.
        outline: with a region.
    """

    def __init__(self, channel: Channel, signals: DeviceSignals, outline: Outline) -> None:
        self._channel, self._signals, self._outline = channel, signals, outline
        self.region = channel.regions[outline.region]
        self._caller_stream = channel.transport.caller_stream

    def _claim(self) -> Claimed | None:
        """Take a turn, a number and the next slot; None: something is out of the ordinary, and nothing was taken."""
        channel, region = self._channel, self.region
        if channel.trace is not None or channel.before_copy is not None or channel.before_gemm is not None:
            return None
        channel.turn.acquire()  # `Channel.enter`
        channel.num_open += 1
        try:
            with channel.lock:
                channel.check()
                caller = self._caller_stream()
                epoch = region.uses + 1
                reader = region.last_reader.get(epoch % region.depth)
                if (
                    epoch % REFRESH_EVERY >= region.depth
                    and not region.held
                    and isinstance(caller, CallerDeviceStream)
                    and caller.disturb is None
                    and (reader is None or (isinstance(reader, MarkEvent) and reader.stream == caller.handle))
                    and (channel.meter is None or channel.meter.passes(self._outline.label))
                ):
                    region.uses = epoch
                    return caller, epoch, channel.next_flight(self._outline, region.index + 1, epoch)
        except BaseException:
            channel.leave()
            raise
        channel.leave()
        return None

    def _fail_claimed(self, error: BaseException, claimed: Claimed, sender: DeviceStream) -> None:
        """Peers are told what this was, then that it failed; the host learns when the device has left it.

        ``sender``: the stream that told the peers, or would have; maybe the caller's.
        """
        caller, epoch, flight = claimed
        channel, signals, region = self._channel, self._signals, self.region
        try:
            sender.follow(caller)
            signals.publish_all(sender, flight.descriptor)  # once more, if that had been done
            sender.flush()
        finally:
            channel.fail(error, flight.descriptor)
            try:
                caller.follow(sender)
                end = region.last_reader[epoch % region.depth] = signals.mark_done(caller)
                caller.flush()
                channel.in_flight.land(flight, end)
            except TpOverlapError:
                logger.exception("the driver refused the end of an operation that had failed")
