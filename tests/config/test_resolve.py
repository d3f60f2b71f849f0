"""Defaults, resolution, round trips and the property that nothing but ConfigError ever escapes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpoverlap.config import (
    KNOWN_NAMES,
    METHODS,
    OPTION_KEYS,
    ConfigWarning,
    OverlapConfig,
    ResolvedConfig,
    check,
    default_config,
    resolve,
    to_yaml,
)
from tpoverlap.errors import ConfigError

DEFAULTS = {
    "qkv_fprop": ("ring_exchange", False),
    "fc1_fprop": ("ring_exchange", False),
    "proj_dgrad": ("ring_exchange", False),
    "fc2_dgrad": ("ring_exchange", False),
    "proj_fprop": ("ring_exchange", True),
    "fc2_fprop": ("ring_exchange", True),
    "qkv_dgrad": ("bulk", False),
    "fc1_dgrad": ("bulk", False),
    "qkv_wgrad": ("bulk", True),
    "fc1_wgrad": ("bulk", True),
}


def quiet(config: Any, tp_size: int = 4, **kwargs: Any) -> ResolvedConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return resolve(config, tp_size, **kwargs)


def test_defaults_of_the_twelve_names() -> None:
    config = resolve(None, 4)
    assert {name: (c.method, c.is_reduce_scatter) for name, c in config.names.items()} == DEFAULTS
    assert config.get("proj_wgrad") is None and config.get("fc2_wgrad") is None and config.get("mtp") is None
    assert config.notes == () and config.explicit_keys("qkv_fprop") == () and config.source("qkv_fprop") == "default"


def test_defaults_of_each_key() -> None:
    config = resolve({"fc2_fprop": {"method": "pipeline"}}, 8)
    ring, pipeline = config.names["proj_fprop"], config.names["fc2_fprop"]
    assert ring == OverlapConfig(
        method="ring_exchange", is_reduce_scatter=True, num_sm=1, cga_size=1, set_sm_margin=False, num_splits=8,
        aggregate=False, atomic_gemm=False, use_ce=True, fp8_buf=False, comm_priority=None, gemm_priority=None,
        pipeline_rs_overlap_first_gemm=False, num_max_streams=3,
    )  # fmt: skip
    assert (pipeline.num_sm, pipeline.cga_size, pipeline.set_sm_margin, pipeline.num_splits) == (16, 2, True, 4)
    assert config.names["qkv_fprop"].fp8_buf and not pipeline.fp8_buf


def test_explicit_keys_win_and_flags_become_booleans() -> None:
    given_ = {"method": "pipeline", "set_sm_margin": 0, "num_sm": 24, "num_splits": 2, "comm_priority": -5}
    config = resolve({"fc2_fprop": given_}, 4)
    fc2 = config.names["fc2_fprop"]
    assert (fc2.set_sm_margin, fc2.num_sm, fc2.num_splits, fc2.comm_priority) == (False, 24, 2, -5)
    assert fc2.set_sm_margin is False
    assert config.explicit_keys("fc2_fprop") == tuple(given_) and config.source("fc2_fprop") == "explicit"


def test_ring_forces_num_splits() -> None:
    assert resolve({"fc2_fprop": {"method": "ring_exchange", "num_splits": 3}}, 4).names["fc2_fprop"].num_splits == 4


@pytest.mark.parametrize("layer", ["qkv", "fc1"])
@pytest.mark.parametrize("method", ["ring_exchange", "pipeline"])
def test_dgrad_that_reduce_scatters(layer: str, method: str) -> None:
    dgrad, wgrad = f"{layer}_dgrad", f"{layer}_wgrad"
    config = resolve({dgrad: {"method": method}}, 2)
    assert config.names[dgrad].is_reduce_scatter and config.names[dgrad].method == method
    assert config.get(wgrad) is None and wgrad not in config.names
    assert config.get("fc1_wgrad" if layer == "qkv" else "qkv_wgrad") is not None
    for order in ((dgrad, wgrad), (wgrad, dgrad)):
        with pytest.raises(ConfigError, match=f"remove {wgrad}"):
            resolve({name: {"method": method if name == dgrad else "bulk"} for name in order}, 2)


@pytest.mark.parametrize("method", ["sequential", "auto"])
def test_methods_that_are_legal_both_ways_follow_the_given_direction(method: str) -> None:
    gathers = resolve({"qkv_dgrad": {"method": method}}, 2)
    scatters = resolve({"qkv_dgrad": {"method": method, "is_reduce_scatter": 1}}, 2)
    assert not gathers.names["qkv_dgrad"].is_reduce_scatter and gathers.get("qkv_wgrad") is not None
    assert scatters.names["qkv_dgrad"].is_reduce_scatter and scatters.get("qkv_wgrad") is None


def test_bulk_dgrad_cannot_reduce_scatter() -> None:
    with pytest.raises(ConfigError, match=r"qkv_dgrad\.is_reduce_scatter"):
        resolve({"qkv_dgrad": {"is_reduce_scatter": True}}, 2)


def test_external_is_kept_as_written_but_communicates_nothing() -> None:
    config = resolve({"proj_wgrad": {"method": "external"}}, 2)
    assert config.get("proj_wgrad") is None and config.source("proj_wgrad") == "explicit"
    assert resolve(config.to_dict(), 2) == config


def test_own_names() -> None:
    with pytest.warns(ConfigWarning, match="mtp_proj does not say is_reduce_scatter"):
        config = resolve({"mtp_proj": {"num_sm": 2}, "head": {"method": "pipeline"}}, 2)
    assert (config.names["mtp_proj"].method, config.names["mtp_proj"].is_reduce_scatter) == ("ring_exchange", False)
    assert config.names["head"].is_reduce_scatter and set(DEFAULTS) < set(config.names)


def test_a_name_near_a_known_one_is_registered_with_a_warning() -> None:
    with pytest.warns(ConfigWarning, match="did you mean 'qkv_fprop'"):
        config = resolve({"qkv_fpropp": {"method": "ring_exchange", "is_reduce_scatter": 0}}, 2)
    assert config.get("qkv_fpropp") is not None


def test_default_config() -> None:
    for name, (method, is_reduce_scatter) in DEFAULTS.items():
        assert default_config(name, is_reduce_scatter, 4) == resolve(None, 4).names[name]
        assert default_config(name, is_reduce_scatter, 4).method == method
    scatters = resolve({"qkv_dgrad": {"method": "ring_exchange"}}, 4)
    assert default_config("qkv_dgrad", True, 4) == scatters.names["qkv_dgrad"]
    assert [default_config("mtp", rs, 4).is_reduce_scatter for rs in (False, True)] == [False, True]
    for name, is_reduce_scatter in (("proj_fprop", False), ("qkv_wgrad", False), ("fc2_wgrad", False)):
        with pytest.raises(ConfigError, match=name):
            default_config(name, is_reduce_scatter, 4)
    with pytest.raises(ConfigError, match="tp_size"):
        default_config("mtp", False, 0)


def test_with_method_moves_the_defaults_and_keeps_what_was_written() -> None:
    config = resolve({"fc2_fprop": {"method": "auto", "set_sm_margin": 0}}, 8)
    pipeline, ring = config.with_method("fc2_fprop", "pipeline"), config.with_method("fc2_fprop", "ring_exchange")
    assert (pipeline.num_sm, pipeline.num_splits, pipeline.set_sm_margin) == (16, 4, False)
    assert (ring.num_sm, ring.num_splits) == (1, 8)
    with pytest.raises(ConfigError, match="makes it a reduce-scatter"):
        config.with_method("qkv_dgrad", "ring_exchange")
    with pytest.raises(ConfigError, match="nobody"):
        config.with_method("nobody", "bulk")


def test_names_cannot_be_changed() -> None:
    config = resolve(None, 2)
    with pytest.raises(TypeError):
        config.names["x"] = config.names["qkv_fprop"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        config.names["qkv_fprop"].num_sm = 3  # type: ignore[misc]


def test_overlap_config_objects_are_accepted() -> None:
    config = default_config("fc2_fprop", True, 4)
    assert resolve({"fc2_fprop": config}, 4).names["fc2_fprop"] == config


def test_digest_tells_what_matters_and_is_the_same_in_every_process() -> None:
    base = {"fc2_fprop": {"method": "pipeline", "num_sm": 8}, "fc1_fprop": {"aggregate": 1}}
    digest = quiet(base).digest
    assert digest == quiet(dict(reversed(base.items()))).digest == quiet(base | {"foreign": 1}).digest
    others = [quiet(base, 2), quiet({}), quiet({"fc2_fprop": {"method": "pipeline", "num_sm": 9}})]
    # written or defaulted differs too: a tuner may change only the latter
    others.append(quiet(base | {"qkv_fprop": {"num_max_streams": 3}}))
    assert digest not in {other.digest for other in others}
    code = f"from tpoverlap.config import resolve; print(resolve({base!r}, 4).digest)"
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": other_seed, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert child.stdout.strip() == digest


def test_section_of_our_own_is_kept() -> None:
    config = quiet({"tpoverlap": {"names": {"mtp": {"width": 7}}}})
    assert config.extras == {"names": {"mtp": {"width": 7}}} and quiet(config.to_dict()) == config
    for bad in ({"a": {1: 2}}, {"a": object()}):
        with pytest.raises(ConfigError, match=r"tpoverlap\.a"):
            quiet({"tpoverlap": bad})
    cyclic: dict[str, Any] = {}
    cyclic["again"] = cyclic
    with pytest.raises(ConfigError, match="contains itself"):
        quiet({"tpoverlap": cyclic})


@pytest.mark.parametrize("wrong", [3, [{"qkv_fprop": {}}], {"a"}, b"x.yaml", 1.5])
def test_wrong_type_of_ub_cfgs(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="ub_cfgs must be"):
        resolve(wrong, 2)


# ---- properties -----------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers(-3, 40) | st.integers() | st.floats() | st.text(max_size=6)
values = (
    scalars | st.sampled_from(METHODS) | st.lists(scalars, max_size=2) | st.dictionaries(scalars, scalars, max_size=2)
)
option_keys = st.sampled_from(OPTION_KEYS) | st.text(max_size=8) | scalars
wild = st.dictionaries(
    st.sampled_from([*KNOWN_NAMES, "mtp", "tpoverlap", "model"]) | st.text(max_size=8) | scalars,
    st.dictionaries(option_keys, values, max_size=5) | values,
    max_size=5,
)

counts, flags = st.integers(1, 64), st.booleans() | st.sampled_from([0, 1])
priorities = st.none() | st.integers(-5, 0)
legal_options = st.fixed_dictionaries(
    {},
    optional={
        "num_sm": counts, "cga_size": counts, "set_sm_margin": flags, "num_splits": counts, "aggregate": flags,
        "fp8_buf": flags, "comm_priority": priorities, "gemm_priority": priorities, "num_max_streams": counts,
        "pipeline_rs_overlap_first_gemm": flags, "use_ce": st.sampled_from([1, True]),
    },
)  # fmt: skip
user_names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)


@st.composite
def tame(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    """A legal configuration."""
    config: dict[str, dict[str, Any]] = {}
    for name, (_, scatters) in DEFAULTS.items():
        if draw(st.booleans()):
            bulk = name[:3] in ("qkv", "fc1") and not name.endswith("fprop")
            methods = ["bulk"] if bulk else ["ring_exchange", "pipeline"] if scatters else ["ring_exchange"]
            config[name] = {"method": draw(st.sampled_from([*methods, "sequential", "auto"]))} | draw(legal_options)
    for name in draw(st.lists(user_names, max_size=3, unique=True)):
        if name not in KNOWN_NAMES and name != "tpoverlap":
            method = draw(st.sampled_from(["ring_exchange", "pipeline", "bulk", "sequential", "auto"]))
            direction = True if method == "pipeline" else draw(flags)
            config[name] = {"method": method, "is_reduce_scatter": direction} | draw(legal_options)
    return config


@settings(max_examples=200, deadline=None)
@given(wild, st.integers(1, 8), st.booleans())
def test_anything_gives_a_config_or_a_config_error(config: dict[Any, Any], tp_size: int, fp8: bool) -> None:
    notes = check(config, tp_size, fp8=fp8)
    try:
        resolved = quiet(config, tp_size, fp8=fp8)
    except ConfigError:
        assert any(note.level == "error" for note in notes)
    else:
        assert not any(note.level == "error" and note.target != "te" for note in notes) and len(resolved.digest) == 16


@settings(max_examples=50, deadline=None)
@given(config=tame(), tp_size=st.integers(1, 8))
def test_round_trips(config: dict[str, Any], tp_size: int, tmp_path_factory: Any) -> None:
    resolved = quiet(config, tp_size)
    assert quiet(resolved.to_dict(), tp_size) == resolved
    assert quiet(resolved, tp_size) == resolved and hash(quiet(resolved, tp_size)) == hash(resolved)
    assert pickle.loads(pickle.dumps(resolved)) == resolved
    assert quiet(resolved.to_dict(defaults=True), tp_size).names == resolved.names
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(to_yaml(resolved), encoding="utf-8")
    assert quiet(path, tp_size) == resolved
    path.write_text(to_yaml(resolved, defaults=True), encoding="utf-8")
    assert quiet(path, tp_size).names == resolved.names


@settings(max_examples=100, deadline=None)
@given(tame())
def test_every_written_key_is_in_effect_or_reported(config: dict[str, Any]) -> None:
    resolved = quiet(config, 4)
    reported = {(note.name, note.key) for note in resolved.notes}
    for name, options in config.items():
        for key, value in options.items():
            in_effect = getattr(resolved.names[name], key) == value
            assert in_effect or (name, key) in reported, (name, key, value)
