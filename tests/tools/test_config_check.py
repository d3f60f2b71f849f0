"""`tpoverlap config check`: findings in the published files, exit codes, text, JSON, and files that cannot be read."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.tools import config_findings as table
from tpoverlap.config import check_file
from tpoverlap.tools.cli import main

RING = "fc1_fprop: {method: ring_exchange}\n"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in table.variables():
        monkeypatch.delenv(name, raising=False)


def check(*arguments: object) -> Result:
    result = CliRunner().invoke(main, ["config", "check", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_finding_in_every_published_file() -> None:
    expected = table.committed()
    found = Counter(table.current())
    missing, new = set(expected) - set(found), set(found) - set(expected)
    assert not missing and not new, (
        f"lost {sorted(missing)[:5]}, new {sorted(new)[:5]}; python -m tests.tools.config_findings"
    )
    assert max(found.values()) == 1, "a finding is reported twice"
    assert len({row[0] for row in expected}) >= 60


def test_false_positives_are_counted() -> None:
    """Every error and every warning was judged by a person; what is said in vain would be counted here."""
    judged = Counter(verdict for row, verdict in table.committed().items() if row[4] != "note")
    assert set(judged) == {"true"} and judged["true"] > 90


# What FACTS.md and issue 5 name, and where it stands in the published files.
NAMED = [
    ("embedded", 25), ("from-environment", 76), ("empty-file", 1), ("foreign-key", 1), ("te-cga-exceeds-num-sm", 3),
    ("cga-exceeds-num-sm", 7), ("te-margin-with-copy-engine", 55), ("overlap-at-tp-1", 4),
    ("overlap-without-sequence-parallel", 1), ("te-missing-wgrad", 13), ("te-defaults-differ", 10),
    ("name-contradicts-contents", 6), ("te-atomic-needs-fp8", 2),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "count"), NAMED, ids=[rule for rule, _ in NAMED])
def test_what_the_issue_names_is_found(rule: str, count: int) -> None:
    assert sum(row[6] == rule for row in table.committed()) == count


def test_the_whole_folder_takes_less_than_five_seconds() -> None:
    started, used = time.monotonic(), time.process_time()
    result = check(*table.files())
    assert min(time.monotonic() - started, time.process_time() - used) < 5.0  # the machine is shared
    assert (
        result.exit_code == 1 and "62 files: Transformer Engine accepts 61, this version of tpoverlap" in result.output
    )


def test_exit_codes(tmp_path: Path) -> None:
    clean = write(tmp_path / "clean.yaml", RING)
    warned = write(tmp_path / "warned.yaml", "other: 1\n" + RING)
    wrong = write(tmp_path / "wrong.yaml", "fc1_fprop:\n  num_sms: 2\n")
    assert check(clean, "--tp", 2).exit_code == 0
    assert check(warned).exit_code == 0 and "warning" in check(warned).output
    assert check(wrong).exit_code == 1 and check(clean, wrong).exit_code == 1
    assert check(tmp_path / "none.yaml").exit_code == 2 and check(wrong, tmp_path / "none.yaml").exit_code == 2
    assert check().exit_code == 2 and check(clean, "--tp", 0).exit_code == 2


def test_an_error_says_where_what_why_and_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "fc1_fprop:\n  method: bulk\n  num_sms: 2\n")
    output = check(path).output
    assert f"{path}: 1 error" in output
    assert "  line 3: error: fc1_fprop.num_sms is no option [unknown-option]" in output
    assert "remedy: did you mean 'num_sm'?" in output


def test_the_path_stands_once_a_file(tmp_path: Path) -> None:
    (tmp_path / "ub").mkdir()
    texts = {
        "embedded": "m:\n  ub_tp_comm_overlap_cfg:\n    fc1_fprop: {method: ring_exchange, num_splits: 7}\n",
        "duplicate-key": RING + RING,
        "foreign-key": "other: 1\n" + RING,
        "empty-file": "",
    }
    for rule, text in texts.items():
        path = write(tmp_path / "ub" / "a.yaml", text)
        output = check(path).output
        assert f"[{rule}]" in output and output.count(str(path)) == 1, output
    assert "this file" in output
    assert check(tmp_path / "none.yaml").output.count("none.yaml") == 2, "what cannot be read is named in its reason"


def test_json(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "m:\n  ub_tp_comm_overlap_cfg:\n    my gemm:\n      method: bulk\n")
    result = check(path, "--json", "--tp", 4)
    report = json.loads(result.output)
    assert report["exit_code"] == result.exit_code == 1 and report["schema"] == 1
    (file,) = report["files"]
    assert (file["file"], file["tp_size"], file["tp_source"], file["readable"]) == (str(path), 4, "--tp", True)
    assert file["runs_in"] == {"te": True, "tpoverlap": False}
    (error,) = [finding for finding in file["findings"] if finding["level"] == "error"]
    assert {key: error[key] for key in ("file", "line", "gemm", "key", "level", "for", "rule")} == {
        "file": str(path), "line": 3, "gemm": "my gemm", "key": "", "level": "error", "for": "tpoverlap",
        "rule": "bad-name",
    }  # fmt: skip
    assert error["why"] and error["remedy"]


def test_the_two_questions_are_answered_apart(tmp_path: Path) -> None:
    ours = write(tmp_path / "ours.yaml", "fc2_fprop: {method: pipeline, num_max_streams: 2}\n")
    theirs = write(tmp_path / "theirs.yaml", "my gemm: {method: bulk, is_reduce_scatter: 0}\n")
    codes = {
        who: (check(ours, "--for", who).exit_code, check(theirs, "--for", who).exit_code) for who in ("te", "tpoverlap")
    }
    assert codes == {"te": (1, 0), "tpoverlap": (0, 1)}
    summary = check(ours, theirs).output.splitlines()[-1]
    assert summary == "2 files: Transformer Engine accepts 1, this version of tpoverlap 1; 0 cannot be read"


def test_many_notes_do_not_drown_an_error() -> None:
    (path,) = table.FOLDER.glob("*v4.0__a100tp4mbs1.yaml")
    report = check_file(path)
    notes = sum(note.level == "note" for note in report.notes)
    lines = check(path).output.splitlines()
    paragraphs = [line for line in lines if ": note" in line]
    assert notes >= 7 and len(paragraphs) <= notes / 2
    levels = [level for line in lines for level in ("error", "warning", "note") if f": {level}" in line]
    assert levels == sorted(levels, key=("error", "warning", "note").index) and levels.count("error") == 2
    assert ": note" not in check(path, "--no-notes").output


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (b"", 0, "holds no keys"),
        (b"# nothing\n", 0, "holds no keys"),
        (b"a: [1,\n", 2, "not a YAML file"),
        (b"- 1\n", 2, "holds a list"),
        (b"fc1_fprop: \xff\n", 2, "not UTF-8"),
        (b"fc1_fprop: {num_sm: '${oc.env:TPOVERLAP_UNSET}'}\n", 1, "does not resolve"),
        (b"fc1_fprop: {num_sm: '${oc.env:TPOVERLAP_UNSET'}\n", 1, "does not resolve"),
        (b"model: {ub_tp_comm_overlap_cfg: '${nowhere}'}\n", 2, "does not resolve"),
        (b"#" * (2**18 + 1), 2, "larger than"),
        (b"a" * 100_000, 2, "holds a str"),
        (b"[" * 100_000, 2, "nested"),
    ],
)
def test_content_that_cannot_be_used(content: bytes, code: int, says: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    result = check(path)
    assert result.exit_code == code and says in result.output
    assert json.loads(check(path, "--json").output)["exit_code"] == code


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero", tmp_path / "none", "", "x" * 5000):
        result = check(path)
        assert result.exit_code == 2 and "cannot read" in result.output, path


def test_a_folder_is_its_yaml_files(tmp_path: Path) -> None:
    write(tmp_path / "b.yml", "fc1_fprop:\n  num_sms: 2\n")
    write(tmp_path / "a.yaml", RING)
    write(tmp_path / "README.md", "no YAML: {")
    (tmp_path / "below.yaml").mkdir()
    result = check(tmp_path)
    assert result.exit_code == 1 and result.output.index("a.yaml") < result.output.index("b.yml: 1 error")
    assert "2 files: " in result.output


def test_what_a_file_says_cannot_repaint_the_terminal(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", 'fc1_fprop:\n  "\\e[2J": 1\n  "\\ud800": 2\n  "a\\nb": 3\n')
    output = check(path).output
    assert output.isascii() and "\x1b" not in output and "\\x1b[2J" in output and "\\ud800" in output
