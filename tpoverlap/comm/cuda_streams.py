"""`Stream` and `Event` on CUDA. See `tpoverlap.comm.streams` for the interface."""

from __future__ import annotations

import torch

from tpoverlap.comm.streams import Event, Stream, Work


class CudaEvent(Event):
    """A CUDA event that has been recorded."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())


class CudaStream(Stream):
    """A CUDA stream. ``run`` launches at once; the GPU keeps the order."""

    def __init__(self, label: str, stream: torch.cuda.Stream) -> None:
        self.label = label
        self.stream = stream

    @classmethod
    def create(cls, label: str, device: torch.device, *, high_priority: bool) -> CudaStream:
        """A new stream. A transfer that is ready must not queue behind GEMMs, so comm streams get high priority."""
        return cls(label, torch.cuda.Stream(device=device, priority=-1 if high_priority else 0))

    @property
    def handle(self) -> int:
        """The driver's stream handle."""
        return int(self.stream.cuda_stream)

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), f"a CUDA stream cannot wait for {event!r}"
        self.stream.wait_event(event.event)

    def close(self) -> None:
        pass
