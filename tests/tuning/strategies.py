"""Problems and devices for hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tpoverlap.tuning import Candidate, DeviceModel, Problem, known_devices, load_device

KINDS = ("gather", "scatter", "beside-gather", "beside-scatter")
METHODS = ("sequential", "ring_exchange", "pipeline", "bulk", "fused")


def problems() -> st.SearchStrategy[Problem]:
    return st.builds(
        Problem,
        st.sampled_from(KINDS),
        st.integers(1, 20000),
        st.integers(1, 16384),
        st.integers(1, 16384),
        st.sampled_from((2, 3, 4, 8)),
        st.sampled_from((2, 4)),
    )


def devices() -> st.SearchStrategy[DeviceModel]:
    return st.sampled_from([load_device(name) for name in known_devices()])


def idle_host(device: DeviceModel) -> DeviceModel:
    """Launches that cost nothing: what is left is the device's arithmetic, whatever was measured of the processor."""
    return replace(device, host_us={})


def candidate_for(problem: Problem) -> list[Candidate]:
    from tpoverlap.tuning import candidates

    return list(candidates(problem, METHODS))
