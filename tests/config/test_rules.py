"""Every rule of the table: a configuration on which it fires, and the nearest one on which it does not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tpoverlap.config import METHODS, OPTION_KEYS, RULES, SUPPORTED, ConfigWarning, check, legal_methods, resolve
from tpoverlap.errors import ConfigError

ATOMIC, LATER = {"atomic_gemm": 1}, {"supported": SUPPORTED | {"atomic_gemm", "sm_copy"}, "tp_size": 4}
IN_A_FILE = {  # tests/config/test_surroundings.py has them
    "te-atomic-needs-fp8", "fp8-buffer-in-bf16", "overlap-at-tp-1", "overlap-without-sequence-parallel",
    "overlap-switched-off", "fp8-training", "tp-size-contradicted", "name-contradicts-contents", "not-tuned",
}  # fmt: skip
EARLIER = {"supported": SUPPORTED - {"fused", "atomic_gemm", "sm_copy"}}  # what a release without them says
RING, BULK, PIPELINE = {"method": "ring_exchange"}, {"method": "bulk"}, {"method": "pipeline"}
ROWS = {"features": 8, "width": 16, "rows": [{"up_to": 4, "method": "sequential"}]}
AG, RS = {"is_reduce_scatter": False}, {"is_reduce_scatter": True}

# rule id -> (fires on, keyword arguments, name and key it blames, does not fire on)
CASES: dict[str, tuple[dict[Any, Any], dict[str, Any], tuple[str, str], dict[Any, Any]]] = {
    "name-without-options": ({"qkv_fprop": None}, {}, ("qkv_fprop", ""), {"qkv_fprop": {}}),
    "bad-name": ({"my gemm": RING | AG}, {}, ("my gemm", ""), {"my.gemm-1": RING | AG}),
    "section-not-mapping": ({"tpoverlap": [1]}, {}, ("tpoverlap", ""), {"tpoverlap": {}}),
    "section-key-unread": ({"tpoverlap": {"later": 1}}, {}, ("tpoverlap", "later"), {"tpoverlap": {}}),
    "by-tokens-illegal": (
        {"tpoverlap": {"by_tokens": {"fc1_fprop": ROWS | {"width": 0}}}}, {},
        ("tpoverlap", "by_tokens.fc1_fprop.width"), {"tpoverlap": {"by_tokens": {"fc1_fprop": ROWS}}},
    ),
    "foreign-key": ({"MODEL_ARGS": {"--async-save": True}}, {}, ("MODEL_ARGS", ""), {"mtp": {"num_sm": 2}}),
    "unknown-option": ({"fc1_fprop": {"num_sms": 2}}, {}, ("fc1_fprop", "num_sms"), {"fc1_fprop": {"num_sm": 2}}),
    "value-type": ({"fc1_fprop": {"use_ce": "true"}}, {}, ("fc1_fprop", "use_ce"), {"fc1_fprop": {"use_ce": 1}}),
    "count-below-one": ({"fc1_fprop": {"num_sm": 0}}, {}, ("fc1_fprop", "num_sm"), {"fc1_fprop": {"num_sm": 1}}),
    "unknown-method": ({"fc1_fprop": {"method": "ring"}}, {}, ("fc1_fprop", "method"), {"fc1_fprop": RING}),
    "method-unsupported": ({"fc1_fprop": {"method": "fused"}}, EARLIER, ("fc1_fprop", "method"), {"fc1_fprop": RING}),
    "atomic-gemm-unsupported": (
        {"fc1_fprop": {"atomic_gemm": 1}}, EARLIER, ("fc1_fprop", "atomic_gemm"), {"fc1_fprop": {"atomic_gemm": 0}},
    ),
    "sm-copy-unsupported": (
        {"qkv_dgrad": BULK | {"use_ce": 0}}, EARLIER, ("qkv_dgrad", "use_ce"), {"fc2_fprop": PIPELINE | {"use_ce": 0}},
    ),
    "fp8-gather-in-original-dtype": (
        {"fc1_fprop": {"fp8_buf": 0}}, {"fp8": True}, ("fc1_fprop", "fp8_buf"), {"fc2_fprop": {"fp8_buf": 0}},
    ),
    "fp8-buffer-unsupported": (
        {"fc2_fprop": {"fp8_buf": 1}}, {"fp8": True, "supported": SUPPORTED - {"fp8"}}, ("fc2_fprop", "fp8_buf"),
        {"fc2_fprop": {"fp8_buf": 0}},
    ),
    "pipeline-all-gather": ({"mtp": PIPELINE | AG}, {}, ("mtp", "method"), {"mtp": PIPELINE | RS}),
    "bulk-without-independent-gemm": ({"fc2_fprop": BULK}, {}, ("fc2_fprop", "method"), {"mtp": BULK | AG}),
    "wgrad-output-stays": ({"qkv_wgrad": RING}, {}, ("qkv_wgrad", "method"), {"qkv_wgrad": {"method": "sequential"}}),
    "row-wgrad-has-nothing-to-do": (
        {"proj_wgrad": BULK}, {}, ("proj_wgrad", "method"), {"proj_wgrad": {"method": "external"}},
    ),
    "external-elsewhere": (
        {"qkv_wgrad": {"method": "external"}}, {}, ("qkv_wgrad", "method"), {"fc2_wgrad": {"method": "external"}},
    ),
    "direction-contradicts-name": (
        {"proj_fprop": {"is_reduce_scatter": 0}}, {}, ("proj_fprop", "is_reduce_scatter"), {"qkv_dgrad": RING | RS},
    ),
    "dgrad-excludes-wgrad": (
        {"fc1_wgrad": BULK, "fc1_dgrad": PIPELINE}, {}, ("fc1_wgrad", ""), {"fc1_wgrad": BULK, "qkv_dgrad": PIPELINE},
    ),
    "near-known-name": ({"qkv_frop": RING | AG}, {}, ("qkv_frop", ""), {"mtp_qkv_fprop": RING | AG}),
    "direction-assumed": ({"mtp": RING}, {}, ("mtp", "is_reduce_scatter"), {"mtp": PIPELINE}),
    "cga-exceeds-num-sm": (
        {"fc1_fprop": {"cga_size": 2}}, {}, ("fc1_fprop", "cga_size"), {"fc2_fprop": {"cga_size": 2}},
    ),
    "ring-num-splits": (
        {"fc2_fprop": {"num_splits": 2}}, {}, ("fc2_fprop", "num_splits"), {"fc2_fprop": {"num_splits": 4}},
    ),
    "option-ignored": (
        {"fc2_fprop": RING | {"aggregate": 1}}, {}, ("fc2_fprop", "aggregate"), {"fc1_fprop": RING | {"aggregate": 1}},
    ),
    "external-ignored": ({"fc2_wgrad": {"num_sm": 2}}, {}, ("fc2_wgrad", ""), {"fc2_dgrad": {"num_sm": 2}}),
    "te-default-method": ({"fc2_fprop": {}}, {}, ("fc2_fprop", "method"), {"fc1_fprop": {}}),
    "te-defaults-differ": ({"proj_fprop": RING}, {}, ("proj_fprop", "method"), {"qkv_dgrad": RING}),
    "nothing-to-overlap": ({"fc1_fprop": {}}, {"tp_size": 1}, ("", ""), {}),
    "te-refuses-option": (
        {"fc2_fprop": PIPELINE | {"num_max_streams": 2}}, {}, ("fc2_fprop", "num_max_streams"),
        {"mtp": PIPELINE | RS | {"num_max_streams": 2}},
    ),
    "te-has-no-method": (
        {"fc1_fprop": {"method": "auto"}}, {}, ("fc1_fprop", "method"), {"mtp": {"method": "auto"} | AG},
    ),
    "te-atomic-precision-unknown": (
        {"fc2_fprop": PIPELINE | ATOMIC}, LATER, ("fc2_fprop", "atomic_gemm"), {"mtp": PIPELINE | RS | ATOMIC},
    ),
    "te-atomic-unpaired": (
        {"fc2_fprop": RING | ATOMIC}, LATER, ("fc2_fprop", "atomic_gemm"), {"fc2_fprop": PIPELINE | ATOMIC},
    ),
    "te-atomic-bulk": ({"fc1_dgrad": BULK | ATOMIC}, LATER, ("fc1_dgrad", "atomic_gemm"), {"fc1_dgrad": BULK}),
    "te-cga-exceeds-num-sm": (
        {"fc1_dgrad": BULK | {"num_sm": 1}}, {}, ("fc1_dgrad", "cga_size"), {"fc1_dgrad": BULK | {"num_sm": 2}},
    ),
    "te-cga-no-divisor": (
        {"fc1_dgrad": BULK | {"num_sm": 3}}, {}, ("fc1_dgrad", "cga_size"), {"fc1_dgrad": BULK | {"num_sm": 4}},
    ),
    "te-margin-with-copy-engine": (
        {"fc1_fprop": {"set_sm_margin": 1}}, {}, ("fc1_fprop", "set_sm_margin"), {"fc1_dgrad": {"set_sm_margin": 1}},
    ),
    "te-option-ignored": (
        {"fc1_dgrad": BULK | {"use_ce": 0}}, LATER, ("fc1_dgrad", "use_ce"), {"fc1_fprop": RING | {"use_ce": 0}},
    ),
    "te-missing-wgrad": (
        {"fc1_dgrad": BULK}, {}, ("fc1_dgrad", ""), {"fc1_dgrad": BULK, "fc1_wgrad": BULK, "qkv_dgrad": RING},
    ),
    "aggregate-at-two": (
        {"fc1_fprop": {"aggregate": 1}}, {"tp_size": 2}, ("fc1_fprop", "aggregate"), {"fc2_fprop": {"aggregate": 1}},
    ),
}  # fmt: skip


def found(config: object, rule: str, **kwargs: Any) -> list[tuple[str, str]]:
    notes = check(config, kwargs.pop("tp_size", 4), **kwargs)  # type: ignore[arg-type]
    return [(note.name, note.key) for note in notes if note.rule == rule]


def test_every_rule_has_a_case() -> None:
    assert [rule.id for rule in RULES if rule.id not in IN_A_FILE] == list(CASES)
    assert {rule.id for rule in RULES} > IN_A_FILE


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.id in CASES], ids=lambda rule: rule.id)
def test_rule_fires_once_and_is_quiet_beside(rule: Any) -> None:
    fires, kwargs, blamed, quiet = CASES[rule.id]
    assert found(fires, rule.id, **kwargs) == [blamed]
    assert found(quiet, rule.id, **kwargs) == []


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.id in CASES], ids=lambda rule: rule.id)
def test_resolve_raises_warns_or_notes_by_level(rule: Any) -> None:
    fires, kwargs, _, _ = CASES[rule.id]
    kwargs = {"tp_size": 4} | kwargs
    note = next(note for note in check(fires, **kwargs) if note.rule == rule.id)
    message = str(note)
    if rule.level == "error" and note.target != "te":
        with pytest.raises(ConfigError) as caught:
            resolve(fires, **kwargs)
        assert message in str(caught.value)
        return
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always")
        config = resolve(fires, **kwargs)
    assert rule.id in [note.rule for note in config.notes]
    assert any(message in str(warning.message) for warning in issued) == (
        rule.level == "warning" and note.target != "te"  # te's are nothing that a run of tpoverlap need warn about
    )
    assert all(issubclass(warning.category, ConfigWarning) for warning in issued)


def test_messages_have_no_open_template() -> None:
    for fires, kwargs, _, _ in CASES.values():
        for note in check(fires, **({"tp_size": 4} | kwargs)):
            assert note.message and "{" not in str(note).replace(repr(fires), ""), note


@pytest.mark.parametrize("key", OPTION_KEYS)
def test_a_slip_in_a_key_is_told_the_right_one(key: str) -> None:
    slip = key.replace("_", "") + "s" if "_" in key else key[:-1]
    with pytest.raises(ConfigError, match=f"did you mean '{key}'"):
        resolve({"fc1_fprop": {slip: 1}}, 2)


@pytest.mark.parametrize("method", METHODS)
def test_a_slip_in_a_method_is_told_the_right_one(method: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{method}'"):
        resolve({"fc1_fprop": {"method": method[:-1].upper()}}, 2)


def test_all_errors_are_listed_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)2 errors.*1\. .*num_smm.*2\. .*fc2_fprop.method 'bulk'"):
        resolve({"fc1_fprop": {"num_smm": 2}, "fc2_fprop": BULK}, 2)


def test_supported_is_a_parameter() -> None:
    later = SUPPORTED | {"fused", "atomic_gemm", "sm_copy", "fp8"}
    config = {
        "fc1_fprop": {"method": "fused", "use_ce": 0, "atomic_gemm": 1, "fp8_buf": 1},
        "fc2_fprop": {"use_ce": 0, "num_sm": 4},
    }
    assert resolve(config, 2, supported=later, fp8=True).names["fc1_fprop"].method == "fused"
    assert not found(config, "option-ignored", supported=later, fp8=True)[2:]  # use_ce and atomic_gemm of fused alone
    with pytest.raises(ConfigError, match="supported now: ring_exchange, pipeline, bulk, sequential, auto"):
        resolve(config, 2, **EARLIER)


def test_fp8_buf_does_nothing_in_bf16_and_says_so() -> None:
    config = resolve({"fc2_fprop": {"fp8_buf": 1}, "qkv_fprop": {"fp8_buf": 1}, "fc1_fprop": {"fp8_buf": 0}}, 2)
    ignored = [(note.name, note.key) for note in config.notes if note.rule == "option-ignored"]
    assert ignored == [("fc2_fprop", "fp8_buf"), ("qkv_fprop", "fp8_buf")]


def test_errors_hide_remarks_but_not_other_names_remarks() -> None:
    notes = check(
        {"fc2_fprop": RING | {"aggregate": 1, "atomic_gemm": 1}, "proj_fprop": {"aggregate": 1}}, 2, **EARLIER
    )
    about = [note for note in notes if note.name == "fc2_fprop"]
    assert {note.rule for note in about if note.target != "te"} == {"atomic-gemm-unsupported"}
    assert all(note.level != "note" for note in about)
    assert "option-ignored" in {note.rule for note in notes if note.name == "proj_fprop"}


@pytest.mark.parametrize(
    ("name", "is_reduce_scatter", "methods"),
    [
        ("qkv_fprop", False, ("ring_exchange", "fused", "sequential")),
        ("qkv_fprop", True, ()),
        ("proj_fprop", True, ("ring_exchange", "pipeline", "fused", "sequential")),
        ("fc1_dgrad", False, ("bulk", "sequential")),
        ("fc1_dgrad", True, ("ring_exchange", "pipeline", "fused", "sequential")),
        ("fc1_wgrad", True, ("bulk", "sequential")),
        ("fc2_wgrad", False, ()),
        ("mtp", True, ("ring_exchange", "pipeline", "bulk", "fused", "sequential")),
    ],
)
def test_legal_methods(name: str, is_reduce_scatter: bool, methods: tuple[str, ...]) -> None:
    assert legal_methods(name, is_reduce_scatter) == methods


@pytest.mark.parametrize("name", ["mtp_proj_fprop", "decoder.fc1_dgrad", "lm_head"])
def test_prefixed_names_are_not_near(name: str) -> None:
    assert found({name: RING | AG}, "near-known-name") == []


@pytest.mark.parametrize("tp_size", [0, -1, True, 2.0, "2", None])
def test_tp_size_is_checked(tp_size: Any) -> None:
    with pytest.raises(ConfigError, match="tp_size must be"):
        resolve(None, tp_size)
    with pytest.raises(ConfigError, match="tp_size must be"):
        check(None, tp_size)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("method", ["bulk"], [None, 1, True, ["bulk"]]),
        ("aggregate", [True, False, 0, 1], [2, -1, 1.0, "1", "true", None, []]),
        ("num_sm", [1, 132, 2**31 - 1], [True, False, 1.0, "4", None, 2**31, [4]]),
        ("comm_priority", [None, 0, -5, 3], [True, "high", -1.0, 2**40]),
    ],
)
def test_value_types(key: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert found({"qkv_dgrad": {key: value}}, "value-type") == [], value
    for value in bad:
        assert found({"qkv_dgrad": {key: value}}, "value-type") == [("qkv_dgrad", key)], value
