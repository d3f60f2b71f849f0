"""`Stream` and `Event` on CUDA. See `tpoverlap.comm.streams` for the interface."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from cuda.bindings import driver

from tpoverlap.comm.epochs import wrap32
from tpoverlap.comm.streams import Event, Stream, Work
from tpoverlap.errors import BackendUnavailableError

_WAIT_GEQ = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)


class CudaEvent(Event):
    """A CUDA event that has been recorded."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())


class CudaStream(Stream):
    """A CUDA stream. ``run`` launches at once; the GPU keeps the order.

    Attributes:
        handle: the driver's handle, for stream memory operations.
    """

    def __init__(self, label: str, stream: torch.cuda.Stream) -> None:
        self.label = label
        self.stream = stream
        self.handle = driver.CUstream(int(stream.cuda_stream))

    @classmethod
    def create(cls, label: str, device: torch.device, *, high_priority: bool) -> CudaStream:
        """A new stream. A transfer that is ready must not queue behind GEMMs, so comm streams get high priority."""
        return cls(label, torch.cuda.Stream(device=device, priority=-1 if high_priority else 0))

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def enqueue(self, work: Work) -> None:
        work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.is_contiguous() and source.is_contiguous(), "a copy engine moves contiguous bytes"
        size_bytes = source.numel() * source.element_size()
        (status,) = driver.cuMemcpyDtoDAsync(target.data_ptr(), source.data_ptr(), size_bytes, self.handle)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise BackendUnavailableError(f"copying {size_bytes} bytes to a peer failed: {status}")

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def wait_counter(self, counters: torch.Tensor, index: int, target: int) -> None:
        address = counters.data_ptr() + index * counters.element_size()
        (status,) = driver.cuStreamWaitValue32(self.handle, address, wrap32(target), _WAIT_GEQ)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise BackendUnavailableError(f"waiting for a counter failed: {status}; run `tpoverlap doctor`")

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), f"a CUDA stream cannot wait for {event!r}"
        self.stream.wait_event(event.event)

    def close(self) -> None:
        pass


class CurrentCudaStream(CudaStream):
    """The caller's stream: it is current already, so work needs no switch."""

    def run(self, work: Work) -> None:
        work()
