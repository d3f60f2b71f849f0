"""Whether peers' processes still exist, for ranks on one host. Only evidence of death is used, never of life."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessIdentity:
    """Where a rank runs; exchanged once at set-up."""

    host: str
    pid_namespace: str
    pid: int

    @classmethod
    def own(cls) -> ProcessIdentity:
        """This process."""
        try:
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            namespace = "unknown"
        return cls(socket.gethostname(), namespace, os.getpid())

    def is_dead(self) -> bool:
        """True when the process is known to be gone (or a zombie); False when alive, elsewhere or unknown."""
        here = ProcessIdentity.own()
        if (self.host, self.pid_namespace) != (here.host, here.pid_namespace) or self.pid_namespace == "unknown":
            return False
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                # "pid (name) state ...": the name may hold spaces and brackets, so split after the last one.
                return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
        except (FileNotFoundError, ProcessLookupError):
            return True
        except (OSError, IndexError):
            return False
