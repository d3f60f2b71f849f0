"""The C function that plays tapes: compiled when it is first needed, kept in the user's cache, loaded by ctypes.

It needs a C compiler where the process runs, as Triton does, and no header but that of C's integers. Without one
operations are played call by call from Python, which takes the host longer and the device as long.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

logger = logging.getLogger("tpoverlap")
Player = Callable[[int], int]
"""(address of a `TapeHead`) -> 0, or the status of the call that failed."""
_SOURCE: Final = Path(__file__).with_name("tape.c")
_OPTIONS: Final = ("-O2", "-std=c99", "-shared", "-fPIC")
_COMPILE_S: Final = 60.0


class NativeCalls(ctypes.Structure):
    """``struct functions`` of tape.c: addresses of functions."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("submit", "record", "wait", "copy", "start", "attribute", "multiply")
    )


@cache
def player() -> Player | None:
    """The function; None, said once in the log, where it cannot be compiled."""
    try:
        folder = _folder()
        if folder is not None:
            return _load(_compiled(folder))
        with tempfile.TemporaryDirectory(prefix="tpoverlap-native-") as made:  # what is loaded stays loaded
            return _load(_compiled(Path(made)))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) and error.stderr else error
        logger.warning("operations are started call by call from Python, which takes the host longer: %s", detail)
        return None


def _load(path: Path) -> Player:
    # CDLL, not PyDLL: a full launch queue blocks, and the watchdog must run meanwhile.
    function = ctypes.CDLL(str(path)).tpoverlap_play
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    play: Player = function
    return play


def _compiled(folder: Path) -> Path:
    source = _SOURCE.read_bytes()
    digest = hashlib.blake2b(source + " ".join((*_OPTIONS, platform.machine())).encode(), digest_size=8).hexdigest()
    target = folder / f"tape-{digest}.so"
    if not target.exists():
        compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
        if compiler is None:
            raise OSError("there is no C compiler (cc, gcc, clang) in PATH; install one")
        with tempfile.TemporaryDirectory(dir=folder) as workplace:
            made = Path(workplace) / "tape.so"
            command = [compiler, *_OPTIONS, str(_SOURCE), "-o", str(made)]
            subprocess.run(
                command, check=True, capture_output=True, text=True, errors="replace", timeout=_COMPILE_S
            )  # a compiler may write in any language
            os.replace(made, target)  # ranks compile at the same time: each finds a whole file
    return target


def _folder() -> Path | None:
    """A folder that nobody else can write to: what lies there is loaded as code. None: there is none to keep it in."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "tpoverlap" / "native"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home
        pass
    return None
