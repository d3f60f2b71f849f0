"""The signal protocol, model-checked: it holds, and every rule that is broken on purpose is found out."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import fields

import pytest

from .config import BROKEN, Config
from .explorer import Result, explore
from .scenarios import BROKEN_RULES, HOLDS, REDUNDANT, Scenario


def _name(scenario: Scenario) -> str:
    return scenario.name


def _short(config: Config) -> str:
    return " ".join(
        f"{f.name}={getattr(config, f.name)}" for f in fields(config) if getattr(config, f.name) != f.default
    )


@pytest.fixture(scope="module")
def explored(request: pytest.FixtureRequest) -> Iterator[Callable[[Scenario], Result]]:
    """``explored(scenario)``: what two processes find, which explore what was selected of `HOLDS` from now on."""
    selected = {item.callspec.params["scenario"].name for item in request.session.items if _explores(item)}  # type: ignore[attr-defined]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        results: dict[str, Future[Result]] = {
            one.name: pool.submit(explore, one.config, one.reduce) for one in HOLDS if one.name in selected
        }
        try:
            yield lambda scenario: results[scenario.name].result()
        finally:
            pool.shutdown(cancel_futures=True)  # those of a run that -x or the keyboard ended


def _explores(item: pytest.Item) -> bool:
    return getattr(item, "function", None) is test_protocol_holds


@pytest.mark.parametrize("scenario", HOLDS, ids=_name)
def test_protocol_holds(scenario: Scenario, explored: Callable[[Scenario], Result]) -> None:
    result = explored(scenario)
    assert result.violation is None, f"{scenario.name}\n{result.report()}"
    assert result.finals, "an exploration that reaches no final state has shown nothing"
    print(f"{scenario.name}: {result.report()}")


@pytest.mark.parametrize("scenario", BROKEN_RULES, ids=_name)
def test_broken_rule_is_found(scenario: Scenario) -> None:
    result = explore(scenario.config)
    assert result.violation is not None, f"{scenario.name} went unnoticed: {result.report()}"
    assert scenario.expect in result.violation, result.report()
    assert result.trace, "a violation without a trace explains nothing"
    rules = "; ".join(BROKEN[rule] for rule in scenario.config.broken)
    print(f"{scenario.name} {rules}\n{result.report()}")


@pytest.mark.parametrize("scenario", REDUNDANT, ids=_name)
def test_rule_that_another_covers(scenario: Scenario) -> None:
    """A failure here is news, not a bug of the rule: docs/protocol.md then claims a redundancy that is gone."""
    result = explore(scenario.config)
    assert result.violation is None, result.report()


def test_every_broken_rule_has_a_counterexample() -> None:
    shown = {rule for scenario in BROKEN_RULES for rule in scenario.config.broken}
    assert shown == set(BROKEN)


REDUCED_LIKE_FULL = [
    Config(ops="ARAR"),
    Config(ops="aRaA", pieces=(2,)),
    Config(ops="AAA", gated=False),
    Config(ops="ARA", dies=0),
    Config(ops="aAA", dies=0, gated=False),
    Config(ops="ARA", dies=1, device=True),
    Config(ops="A", gives_up=(0,), device=True),
    Config(ops="AA", depth=1, gives_up=(0,), device=True, one_queue=True),
    Config(ops="ASA", deviates=(0, 2, "op"), device=True),
    Config(ops="aRLA", device=True, word_stream=True),
    Config(ops="ABA", device=True, word_stream=True, comm_waits=True),
    Config(ops="L", gives_up=(0,), device=True, word_stream=True),
    Config(tp_size=3, ops="AR", one_queue=True),
    Config(tp_size=3, ops="RA", rowless=0, one_queue=True),
    Config(tp_size=3, ops="A", dies=0, one_queue=True),
]


@pytest.mark.parametrize("config", REDUCED_LIKE_FULL, ids=_short)
def test_reduction_reaches_the_same_final_states(config: Config) -> None:
    full, reduced = explore(config), explore(config, reduce=True)
    assert full.violation is None and reduced.violation is None
    assert reduced.finals == full.finals
    assert reduced.states < full.states


RACES = [
    Config(tp_size=size, ops="AAA", gated=gated, broken=(rule,))
    for size in (2, 3)
    for rule, gated in (("flag_before_data", True), ("no_credit_wait", False), ("credit_before_read", False))
]


RACES += [
    Config(ops="AL", depth=1, device=True, word_stream=True, broken=("credit_before_read",)),
    Config(tp_size=3, ops="AA", depth=1, credit_lag=2),
    Config(tp_size=3, ops="A", gives_up=(0,), device=True, broken=("poison_before_abort",)),
]


@pytest.mark.parametrize("config", RACES, ids=_short)
def test_reduction_finds_races_too(config: Config) -> None:
    assert explore(config, reduce=True).violation is not None


def test_reduction_is_refused_where_it_is_not_sound() -> None:
    words = [Config(ops=ops, dies=dies, device=True, word_stream=True) for ops, dies in (("AT", None), ("AA", 0))]
    for config in (Config(broken=("plain_comparison",)), Config(ring=2), Config(gives_up=(0,)), *words):
        with pytest.raises(ValueError, match="not sound"):
            explore(config, reduce=True)


def test_what_the_word_stream_ignores_is_refused() -> None:
    for options in ({"device": False}, {"one_queue": True}, {"gated": False}, {"broken": ("late_descriptor",)}):
        with pytest.raises(ValueError, match="word_stream"):
            Config(**{"device": True, "word_stream": True, **options})  # type: ignore[arg-type]


def test_healthy_ranks_end_in_one_state() -> None:
    """Without faults the result does not depend on timing: exactly one final state, nobody in an error."""
    result = explore(Config(ops="ARARA"))
    assert len(result.finals) == 1
    ((_, errors),) = result.finals
    assert errors == (0, 0)


def test_the_state_where_everyone_errs_is_reached() -> None:
    """The stop scenarios are not vacuous: the survivor both finishes (rank 0 stops late) and errs (early)."""
    finals = explore(Config(ops="ARA", dies=0)).finals
    assert {errors[1] for _, errors in finals} == {0, 1}
