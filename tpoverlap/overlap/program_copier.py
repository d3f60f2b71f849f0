"""``use_ce: false``: ``num_sm`` programs of a kernel push the rows and set the flag, instead of a copy engine."""

from __future__ import annotations

from tpoverlap.comm import Channel, Copier, CopyJob
from tpoverlap.comm.signals import Signals
from tpoverlap.comm.streams import Stream
from tpoverlap.errors import BackendUnavailableError
from tpoverlap.gemm.triton import require_kernels
from tpoverlap.gemm.triton.copy_launcher import CopyLauncher


class ProgramCopier(Copier):
    """See the module's text. One a channel and number of programs: launches follow each other on the comm stream."""

    def __init__(self, rank: int, launcher: CopyLauncher) -> None:
        self._rank = rank
        self._launcher = launcher

    def push(self, signals: Signals, stream: Stream, job: CopyJob) -> None:
        ref = job.ref
        offset = ref.layout.arrival_offset(ref.region, ref.slot, self._rank, job.piece)
        flag_address = ref.arena.bytes_of(job.destination).data_ptr() + offset
        with stream.current():
            self._launcher.copy(job.target, job.source, flag_address, ref.epoch)


def program_copier(channel: Channel, num_programs: int) -> Copier:
    """The copier of ``channel`` with that many programs.

    Raises:
        BackendUnavailableError: the backend maps no peer memory, or Triton kernels cannot run.
    """
    what = "use_ce: false"
    if not channel.backend.one_sided:
        raise BackendUnavailableError(
            f"{what} pushes rows into mapped peer memory, which backend {channel.backend.name!r} does not have; "
            "set use_ce: true"
        )
    require_kernels(channel.device, what)
    return channel.resource(
        f"copier/{num_programs}", lambda: ProgramCopier(channel.rank, CopyLauncher(channel.device, num_programs))
    )
