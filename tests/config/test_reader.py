"""YAML files: published ones, embedded options, interpolations, and everything that can be wrong with a file."""

from __future__ import annotations

import builtins
import csv
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from tpoverlap.config import SUPPORTED, ConfigWarning, check, read_config, resolve, to_yaml
from tpoverlap.errors import ConfigError

DATA = Path(__file__).parents[1] / "data" / "ub_configs"
FILES = sorted(DATA.glob("*.yaml"))
ATOMIC = {  # they ask for atomic_gemm, which selects fused
    "NVIDIA__NeMo-Framework-Launcher__mlperf-24n__v2.yaml",
    "mlcommons__training_results_v4.0__a100tp4mbs1.yaml",
    "mlcommons__training_results_v4.0__h100tp2mbs1__v2.yaml",
    "mlcommons__training_results_v4.0__h100tp4mbs1.yaml",
    "mlcommons__training_results_v4.0__h100tp8mbs1.yaml",
    "mlcommons__training_results_v4.0__h100tp8mbs2.yaml",
    "mlcommons__training_results_v4.1__h100tp4mbs1.yaml",
    "mlcommons__training_results_v4.1__h100tp4mbs1__v2.yaml",
    "mlcommons__training_results_v4.1__h100tp4mbs2.yaml",
    "mlcommons__training_results_v5.1__h100tp2mbs4.yaml",
}
RING = {"qkv_fprop": {"method": "ring_exchange", "aggregate": 1}}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def one(pattern: str) -> Path:
    (path,) = DATA.glob(pattern)
    return path


def test_the_published_files_are_here_and_listed() -> None:
    with (DATA / "MANIFEST.csv").open() as manifest:
        assert sorted(row["file"] for row in csv.DictReader(manifest)) == [path.name for path in FILES]
    assert len(FILES) == 62


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem[-30:])
def test_published_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in re.findall(r"oc\.env:(\w+)", path.read_text()):
        monkeypatch.delenv(variable, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        config = resolve(str(path), 2)
        assert resolve(config.to_dict(), 2) == config
        assert all(note.level != "error" for note in config.notes)
        assert any(one.atomic_gemm for one in config.names.values()) == (path.name in ATOMIC)
        earlier = [note.rule for note in check(path, 2, supported=SUPPORTED - {"atomic_gemm"}) if note.level == "error"]
        assert set(earlier) == ({"atomic-gemm-unsupported"} if path.name in ATOMIC else set())


def test_interpolations_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    path = one("*v5.1__h100tp2mbs4*")
    monkeypatch.setenv("TE_UB_ATOMIC_GEMM_RS_PROJ", "0")
    monkeypatch.setenv("FC2_FPROP_METHOD", "pipeline")
    monkeypatch.setenv("FC2_FPROP_SM", "20")
    fc2 = resolve(path, 2).names["fc2_fprop"]
    assert (fc2.method, fc2.num_sm) == ("pipeline", 20)
    monkeypatch.setenv("FC2_FPROP_METHOD", "pipelined")
    with pytest.raises(ConfigError, match="did you mean 'pipeline'"):
        resolve(path, 2)


def test_embedded_options_are_found_and_the_place_is_noted() -> None:
    config = resolve(one("*gpt3_175b_hydra*"), 4)
    assert config.names["fc2_fprop"].num_sm == 20 and config.source("qkv_wgrad") == "explicit"
    (note,) = [note for note in config.notes if note.rule == "embedded"]
    assert "model.ub_tp_comm_overlap_cfg" in note.message
    assert "model.ub_tp_comm_overlap_cfg" in config.origin


def test_embedded_deep_in_lists_and_under_a_mapping_argument() -> None:
    config = resolve({"stages": [{"x": 1}, {"a.b": {"ub_tp_comm_overlap_cfg": RING}}]}, 2)
    assert config.names["qkv_fprop"].aggregate
    assert config.origin == "ub_cfgs (stages[1].a.b.ub_tp_comm_overlap_cfg)"


def test_several_places() -> None:
    same = {"model": {"ub_tp_comm_overlap_cfg": RING}, "eval": {"ub_tp_comm_overlap_cfg": dict(RING)}}
    assert resolve(same, 2).names["qkv_fprop"].aggregate
    same["eval"] = {"ub_tp_comm_overlap_cfg": {"qkv_fprop": {}}}
    with pytest.raises(ConfigError, match=r"model\.ub_tp_comm_overlap_cfg, eval\.ub_tp_comm_overlap_cfg"):
        resolve(same, 2)
    with pytest.raises(ConfigError, match="its top"):
        resolve({"qkv_fprop": {}, "model": {"ub_tp_comm_overlap_cfg": RING}}, 2)


def test_embedded_null_and_embedded_text() -> None:
    assert resolve({"model": {"ub_tp_comm_overlap_cfg": None}}, 2) == resolve(None, 2)
    with pytest.raises(ConfigError, match="if it names another file, pass that file"):
        resolve({"model": {"ub_tp_comm_overlap_cfg": "other.yaml"}}, 2)


def test_only_the_overlap_section_is_interpolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM", "7")
    text = """
    foreign: ${only.in:their,program}
    sizes: {sm: 5}
    model:
      ub_tp_comm_overlap_cfg:
        fc2_fprop: {method: pipeline, num_sm: "${sizes.sm}"}
        proj_fprop: {method: pipeline, num_sm: "${oc.decode:${oc.env:SM}}"}
    """
    config = resolve(write(tmp_path / "c.yaml", text), 2)
    assert (config.names["fc2_fprop"].num_sm, config.names["proj_fprop"].num_sm) == (5, 7)
    with pytest.warns(ConfigWarning, match="'foreign'"):
        resolve({"foreign": "${broken", "qkv_fprop": {"num_sm": 1}}, 2)


@pytest.mark.parametrize(
    "text", ["${oc.env:TPOVERLAP_UNSET}", "${oc.env:UNCLOSED", "${nowhere}", "${no.such.resolver:1}"]
)
def test_broken_interpolation(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "broken.yaml", f"qkv_fprop:\n  method: '{text}'\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml.*qkv_fprop.*does not resolve"):
        resolve(path, 2)


def test_omegaconf_objects() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    document = {"foreign": "${x:1}", "sm": 3, "m": {"ub_tp_comm_overlap_cfg": {"fc2_fprop": {"num_sm": "${sm}"}}}}
    root = omegaconf.OmegaConf.create(document)
    assert resolve(root, 2).names["fc2_fprop"].num_sm == 3
    assert resolve(root.m.ub_tp_comm_overlap_cfg, 2).names["fc2_fprop"].num_sm == 3
    with pytest.raises(ConfigError, match="got an OmegaConf list"):
        resolve(omegaconf.OmegaConf.create([1]), 2)


@pytest.mark.parametrize(("library", "text"), [("yaml", "a: 1"), ("omegaconf", "qkv_fprop: {num_sm: '${x}'}")])
def test_a_missing_library_is_named(library: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == library:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    path = write(tmp_path / "c.yaml", text)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=f"pip install {'py' if library == 'yaml' else ''}{library}"):
        resolve(path, 2)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n"])
def test_a_file_without_keys_is_an_empty_config(text: str, tmp_path: Path) -> None:
    config = resolve(write(tmp_path / "c.yaml", text), 2)
    assert config == resolve(None, 2) and [note.rule for note in config.notes] == ["empty-file"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "holds a list"),
        (b"just text", "holds a str"),
        (b"a: [1, 2", "not a YAML file"),
        (b"a: 1\n--- \nb: 2\n", "not a YAML file"),
        (b"a: !!python/object:os.system {}\n", "not a YAML file"),
        (b"a: 2001-99-99\n", "not a YAML file"),
        (b"a: \x07\n", "not a YAML file"),
        (b"\xff\xfe\x00broken", "not UTF-8"),
        (b"? [1, 2]\n: 3\n? {a: 1}\n: 2\n", "not a YAML file"),
        (b"[" * 5000, "not a YAML file"),
    ],
)
def test_files_that_cannot_be_read(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(path, 2)
    assert str(path) in str(caught.value)
    (note,) = check(path, 2)
    assert (note.level, note.rule) == ("error", "unreadable")


@pytest.mark.parametrize(
    ("content", "blamed", "lines"),
    [
        ("qkv_fprop:\n  num_sm: 2\n  cga_size: 1\n  num_sm: 1\n", ("qkv_fprop", "num_sm"), (2, 4)),
        ("qkv_fprop: {}\nqkv_fprop: {}\n", ("qkv_fprop", ""), (1, 2)),
        ("m:\n  ub_tp_comm_overlap_cfg:\n    a: 1\n    a: 2\n", ("a", ""), (3, 4)),
    ],
)
def test_a_key_twice(content: str, blamed: tuple[str, str], lines: tuple[int, int], tmp_path: Path) -> None:
    path = write(tmp_path / "twice.yaml", content)
    key = blamed[1] or blamed[0]
    with pytest.raises(ConfigError, match=f"{path}.*'{key}' twice, in lines {lines[0]} and {lines[1]}"):
        resolve(path, 2)
    (note,) = [note for note in check(path, 2) if note.level == "error"]
    assert (note.rule, note.name, note.key, note.line) == ("duplicate-key", *blamed, lines[1])


@pytest.mark.parametrize(
    ("content", "line"),
    [("a: 1\nb: [1,\n", 3), ("a: 1\n\n- b\n", 3), (b"a: 1\nb: \xff\n", 2), ("a: 1\nb: \x07\n", 0), ("- 1\n", 1)],
)
def test_the_line_at_which_reading_ended(content: str | bytes, line: int, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (note,) = check(path, 2)
    assert (note.rule, note.line) == ("unreadable", line)


def test_lines_of_findings_in_a_file(tmp_path: Path) -> None:
    text = "a: &a\n  num_sm: 0\n"
    text += "m:\n- ub_tp_comm_overlap_cfg:\n    fc1_fprop:\n      aggregat: 1\n    fc2_fprop: {<<: *a}\n"
    notes = {note.rule: note.line for note in check(write(tmp_path / "c.yaml", text), 2)}
    assert notes["unknown-option"] == 6 and notes["embedded"] == 4
    assert notes["count-below-one"] == 7  # inherited: the name that inherits it is to blame


def test_one_open_interpolation_does_not_hide_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPOVERLAP_UNSET", raising=False)
    text = "fc1_fprop:\n  num_sm: ${oc.env:TPOVERLAP_UNSET}\n  aggregate: ${oc.decode:${oc.env:X_,1}\n  atomic: 1\n"
    errors = [(n.rule, n.key, n.line) for n in check(write(tmp_path / "c.yaml", text), 2) if n.level == "error"]
    assert errors == [
        ("interpolation-unresolved", "num_sm", 2),
        ("interpolation-unresolved", "aggregate", 3),
        ("unknown-option", "atomic", 4),
    ]


def test_aliases_that_stand_for_more_than_memory_holds(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (note,) = check(write(tmp_path / "bomb.yaml", "\n".join(lines)), 2)
    assert note.rule == "unreadable" and "aliases" in note.message


def test_a_file_that_is_too_large_or_no_regular_file(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_bytes(b"#" * (2**18 + 1))
    with pytest.raises(ConfigError, match="larger than"):
        resolve(tmp_path / "large.yaml", 2)
    with pytest.raises(ConfigError, match="no regular file"):
        resolve("/dev/zero", 2)


def test_numbers_too_long_to_print(tmp_path: Path) -> None:
    notes = check(write(tmp_path / "c.yaml", f"fc1_fprop:\n  num_sm: 0x{'f' * 5000}\n? 0x{'f' * 5000}\n: 1\n"), 2)
    assert {note.rule for note in notes if note.level != "note"} == {"value-type", "foreign-key"}


def test_twice_outside_the_overlap_section_is_none_of_our_business(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "t: {a: 1, a: 2}\nm:\n  ub_tp_comm_overlap_cfg: {qkv_fprop: {num_sm: 1}}\n")
    assert resolve(path, 2).source("qkv_fprop") == "explicit"


def test_anchors_merge_keys_and_cycles(tmp_path: Path) -> None:
    text = "a: &a {aggregate: 1}\nb: &b {num_sm: 2}\nqkv_fprop: {<<: *a, <<: *b}\nfc1_fprop: {<<: *a, aggregate: 0}\n"
    with pytest.warns(ConfigWarning):  # 'a' and 'b' are mappings of option keys, so they register names
        config = resolve(write(tmp_path / "c.yaml", text), 2)
    assert (config.names["qkv_fprop"].aggregate, config.names["fc1_fprop"].aggregate) == (True, False)
    with pytest.warns(ConfigWarning, match="'a'"):
        resolve(write(tmp_path / "d.yaml", "a: &x {b: *x, c: [*x]}\n"), 2)


@pytest.mark.parametrize(
    "path", ["/nowhere/c.yaml", "", "a\0b", "x" * 5000, "qkv_fprop:\n  method: bulk\n", "~nobody/c"]
)
def test_paths_that_lead_nowhere(path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot read|several lines"):
        resolve(path, 2)


def test_a_directory_and_a_file_without_permission(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory"):
        resolve(tmp_path, 2)
    path = write(tmp_path / "c.yaml", "a: 1")
    path.chmod(0)
    if not os.access(path, os.R_OK):  # root may read it all the same
        with pytest.raises(ConfigError, match="Permission denied"):
            resolve(path, 2)


def test_a_byte_order_mark_and_a_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbfqkv_fprop: {aggregate: 1}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/c.yaml", 2).names["qkv_fprop"].aggregate


def test_read_config_gives_raw_entries() -> None:
    raw = read_config(one("*Megatron-LM__tp_comm_overlap_cfg__v2*"))
    assert raw.entries["MODEL_ARGS"] == {"--async-save": True} and raw.entries["qkv_fprop"]["aggregate"] == 1


def test_to_yaml_is_what_a_person_would_write(tmp_path: Path) -> None:
    config = resolve(RING, 2)
    text = to_yaml(config)
    assert text.splitlines()[1:] == ["qkv_fprop:", "  method: ring_exchange", "  aggregate: true"]
    assert config.digest in text.splitlines()[0]
    assert resolve(write(tmp_path / "c.yaml", to_yaml(resolve(None, 2))), 2) == resolve(None, 2)
