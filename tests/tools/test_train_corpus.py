"""Which documents come out of which files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpoverlap.errors import ConfigError
from tpoverlap.tools.train.corpus import Corpus, read_corpus
from tpoverlap.tools.train.documents import paragraphs, python_blocks, split_documents

SOURCE = b'''import os

CONSTANT = 1

@decorator
@other(
    1,
)
def first(a):
    """Text

    with a blank line."""
    return a

class Second:
    def method(self):
        pass

async def third():
    pass
'''


def test_python_is_cut_into_top_level_blocks_with_decorators() -> None:
    blocks = python_blocks(SOURCE)
    assert blocks is not None
    assert [block.split(b"\n")[0] for block in blocks] == [b"@decorator", b"class Second:", b"async def third():"]
    assert blocks[0].endswith(b"return a\n") and b"with a blank line" in blocks[0]
    assert all(block in SOURCE for block in blocks)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_line_ends_and_form_feeds_do_not_shift_blocks(newline: bytes) -> None:
    # \f and \x1c end a line for str.splitlines, but not for the parser.
    source = b'X = "\x1c"\n\x0c\ndef f():\n    return 1\n\n\ndef g():\n    return 2\n'.replace(b"\n", newline)
    assert python_blocks(source) == [
        b"def f():\n    return 1\n".replace(b"\n", newline),
        b"def g():\n    return 2\n".replace(b"\n", newline),
    ]


@pytest.mark.parametrize("broken", [b"print 'two'\n\nx = 1\n", b"def f(:\n\n\0", b"(" * 5000])
def test_python_that_does_not_parse_is_text(broken: bytes) -> None:
    assert python_blocks(broken) is None
    assert split_documents(broken, is_python=True) == paragraphs(broken)


def test_paragraphs_are_runs_of_lines() -> None:
    text = b"\n\none\n  two\n \t\n\r\nthree\r\n\r\nfour\n\n"
    assert paragraphs(text) == [b"one\n  two", b"three", b"four"]


def test_default_corpus_is_large_and_deterministic(default_corpus: Corpus) -> None:
    first, second = default_corpus, read_corpus()
    assert first == second
    assert first.num_files > 100 and len(first.documents) > 1000
    lengths = sorted(map(len, first.documents))
    assert lengths[-1] > 20 * lengths[len(lengths) // 2], "lengths are not long-tailed"


def test_directories_are_walked_in_order_without_binary_hidden_and_cached_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_bytes(b"from b")
    (tmp_path / "a.py").write_bytes(b"def f():\n    pass\n")
    (tmp_path / "c.bin").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_bytes(b"secret")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.txt").write_bytes(b"cache")
    os.symlink(tmp_path, tmp_path / "b" / "loop")
    corpus = read_corpus([tmp_path])
    assert corpus.documents == (b"def f():\n    pass\n", b"from b")
    assert (corpus.num_files, corpus.num_binary_files, corpus.truncated) == (2, 1, False)


def test_bytes_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("gr\u00fc\u00dfe".encode("latin-1"))
    assert read_corpus([file]).documents == ("gr\u00fc\u00dfe".encode("latin-1"),)


def test_the_size_cap_is_kept_and_reported(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"x" * 100)
    corpus = read_corpus([tmp_path], max_bytes=150)
    assert (corpus.size_bytes, corpus.num_files, corpus.truncated) == (150, 2, True)
    assert read_corpus([tmp_path], max_bytes=300).truncated is False


@pytest.mark.parametrize(
    ("content", "message"), [(None, "does not exist"), (b"", "empty corpus"), (b" \n\n\t\n", "empty corpus")]
)
def test_missing_and_empty_paths_are_errors(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "file.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_corpus([file])
    assert str(file) in str(error.value)


def test_a_directory_without_text_is_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="empty corpus"):
        read_corpus([tmp_path])


def test_unreadable_file_names_file_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.txt").write_bytes(b"text")

    def refuse(self: Path, *args: object, **kwargs: object) -> object:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # chmod does not stop root, which tests often run as
    with pytest.raises(ConfigError, match=r"cannot read .*secret\.txt: Permission denied; make it readable"):
        read_corpus([tmp_path])


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="neither a regular file nor a directory"):
        read_corpus([tmp_path / "pipe"])
