"""The compiled player: where it is kept, and what happens where it cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpoverlap import explanation
from tpoverlap.native import library

pytestmark = pytest.mark.skipif(library.shutil.which("cc") is None, reason="tapes need a C compiler")
SAID = "started call by call from Python"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """(the user's cache, the folder of temporary files): nothing is there, and no player is loaded."""
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    library.player.cache_clear()
    yield cache, temporary
    library.player.cache_clear()


def kept(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "tpoverlap" / "native").iterdir())


def fake_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """``cc`` is that script."""
    folder.mkdir()
    compiler = folder / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_it_is_compiled_once(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.player() is library.player() is not None
    (name,) = kept(places[0])
    assert name.startswith("tape-") and name.endswith(".so") and not list(places[1].iterdir())
    monkeypatch.setenv("PATH", "/nowhere")
    library.player.cache_clear()
    assert library.player() is not None, "another process needs no compiler"


def test_no_compiler(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert library.player() is None and library.player() is None
    (record,) = caplog.records
    assert SAID in record.getMessage() and "no C compiler (cc, gcc, clang)" in record.getMessage()
    assert not kept(places[0])


def test_a_compiler_that_fails(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may say so in any encoding; nothing of it is left."""
    fake_compiler(tmp_path / "bin", monkeypatch, "printf 'kein Platz \\374brig' >&2; exit 1")
    assert library.player() is None and library.player() is None
    (record,) = caplog.records
    assert SAID in record.getMessage() and "kein Platz" in record.getMessage()
    assert not kept(places[0])


def test_a_compiler_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(tmp_path / "bin", monkeypatch, "exec sleep 20")
    monkeypatch.setattr(library, "_COMPILE_S", 0.2)
    assert library.player() is None and "timed out" in caplog.text


def test_what_it_makes_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(tmp_path / "bin", monkeypatch, 'while [ "$1" != -o ]; do shift; done; echo nothing > "$2"')
    assert library.player() is None and SAID in caplog.text


@pytest.mark.parametrize("why", ["others may write to it", "it is a file", "there is no home"])
def test_a_folder_that_is_not_used(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """The player is compiled for this process alone, and no file is left behind."""
    folder = places[0] / "tpoverlap" / "native"
    if why == "others may write to it":
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    elif why == "it is a file":
        folder.parent.mkdir(parents=True)
        folder.touch()
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")

        def home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", home)
    assert library.player() is not None
    assert not list(places[1].iterdir()), "it is left behind"
    assert not folder.is_dir() or not kept(places[0])


def test_a_folder_of_another_user(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert library.player() is not None and not kept(places[0])


def test_processes_that_compile_at_the_same_time(places: tuple[Path, Path]) -> None:
    """Each loads a whole file, and one is left."""
    work = "from tpoverlap.native import player; import sys; sys.exit(player() is None)"
    started = [subprocess.Popen([sys.executable, "-c", work], env={**os.environ}) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert len(kept(places[0])) == 1


@pytest.mark.parametrize(("maker", "lines"), [(None, 1), (object(), 0)])
def test_explain_says_so(monkeypatch: pytest.MonkeyPatch, maker: object, lines: int) -> None:
    def communicator(device: str) -> Any:
        return SimpleNamespace(manager=SimpleNamespace(channel=SimpleNamespace(device=torch.device(device))))

    monkeypatch.setattr(explanation, "tape_maker", lambda channel: maker)
    ring: Any = SimpleNamespace(method="ring_exchange")
    said = explanation.calls_by_python(communicator("cuda"), ring)
    assert len(said) == lines and all("no C compiler" in line for line in said)
    assert not explanation.calls_by_python(communicator("cpu"), ring), "Python makes them there anyway"
    assert not explanation.calls_by_python(SimpleNamespace(manager=SimpleNamespace(channel=None)), ring)  # type: ignore[arg-type]
