"""Read the text to train on: which files, in which order, up to which size."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpoverlap.errors import ConfigError
from tpoverlap.tools.train.documents import split_documents

DEFAULT_MAX_BYTES = 8 << 20
_SNIFF_BYTES = 8192


@dataclass(frozen=True)
class Corpus:
    """Documents in file order.

    Attributes:
        documents: non-empty byte strings; a token is one byte.
        source: what was read, for the report.
        num_files: files that contributed.
        num_binary_files: files under a directory left out because they hold a NUL byte.
        size_bytes: bytes read.
        truncated: True when the size cap ended the reading before the last file did.
    """

    documents: tuple[bytes, ...]
    source: str
    num_files: int
    num_binary_files: int
    size_bytes: int
    truncated: bool


def default_corpus_dir() -> Path:
    """The running Python's standard-library sources: real text that is on every machine."""
    return Path(sysconfig.get_path("stdlib"))


def read_corpus(paths: Sequence[Path] = (), max_bytes: int = DEFAULT_MAX_BYTES) -> Corpus:
    """Read every text file under ``paths`` (files or directories, each sorted); none: the standard library's ``*.py``.

    Bytes stay bytes: no encoding is assumed. Reading stops at ``max_bytes``; a file cut there is text, not Python.

    Raises:
        ConfigError: a path that is missing, unreadable or neither a file nor a directory; or no document found.
    """
    documents: list[bytes] = []
    num_files = num_binary = size_bytes = 0
    truncated = False
    for path, explicit in _files(paths):
        if size_bytes >= max_bytes:
            truncated = True
            break
        data, cut = _read(path, max_bytes - size_bytes)
        # A file named on the command line is read whatever it holds; a directory's pictures and archives are not text.
        if not explicit and b"\0" in data[:_SNIFF_BYTES]:
            num_binary += 1
            continue
        truncated |= cut
        num_files += 1
        size_bytes += len(data)
        documents += split_documents(data, path.suffix == ".py" and not cut)
    source = ", ".join(str(path) for path in paths) or f"{default_corpus_dir()}/*.py"
    if not documents:
        raise ConfigError(
            f"empty corpus: {num_files} text file(s) of {size_bytes} bytes under {source} hold no document "
            f"(a top-level def or class in a .py file, a paragraph elsewhere); give --corpus a path with text"
        )
    return Corpus(tuple(documents), source, num_files, num_binary, size_bytes, truncated)


def _files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """(file, was named explicitly), in a deterministic order."""
    if not paths:
        directory = default_corpus_dir()
        files = sorted(directory.glob("*.py")) if directory.is_dir() else []
        if not files:
            raise ConfigError(f"this Python has no library sources in {directory}; give --corpus a path with text")
        yield from ((path, False) for path in files)
    for path in paths:
        try:
            if not path.exists():
                raise ConfigError(f"--corpus {path} does not exist; give an existing file or directory")
            if path.is_dir():
                yield from ((file, False) for file in _walk(path))
            elif path.is_file():
                yield path, True
            else:
                raise ConfigError(f"--corpus {path} is neither a regular file nor a directory; copy its text to a file")
        except PermissionError as error:
            raise _unreadable(path, error) from error


def _walk(directory: Path) -> list[Path]:
    """Regular files under ``directory``, sorted, without hidden ones and byte-code caches."""
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise _unreadable(directory, error) from error
    files: list[Path] = []
    for entry in entries:
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        if entry.is_dir() and not entry.is_symlink():  # a link may lead back up: never followed
            files += _walk(entry)
        elif entry.is_file():
            files.append(entry)
    return files


def _read(path: Path, max_bytes: int) -> tuple[bytes, bool]:
    """At most ``max_bytes`` of ``path``, and whether there was more."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes)
            return data, bool(file.read(1))
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError(f"cannot read {path}: {reason}; make it readable or leave it out of --corpus")
