"""The search of ``tpoverlap tune``: what wins, what must be confirmed, budget, resumption, the file that it writes."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tpoverlap.config import KNOWN_NAMES, check, legal_methods, resolve
from tpoverlap.errors import ConfigError
from tpoverlap.tools.predict.tokens import parse_tokens
from tpoverlap.tools.tune.decide import Result, beats, row_of, slowest, verdict_of, winner
from tpoverlap.tools.tune.job import Ask, Bucket, TuneJob
from tpoverlap.tools.tune.lengths import read_lengths
from tpoverlap.tools.tune.output import by_name, cache_entries, unmeasured_names, yaml_text
from tpoverlap.tools.tune.session import Outcome, tune
from tpoverlap.tools.tune.state import State
from tpoverlap.tools.tune.tables import show
from tpoverlap.tuning import Candidate, entry_key, estimated_table, load_device
from tpoverlap.tuning.layer import LayerShape

LAYER = LayerShape(8192, 28672, 2, 64, 8, gated=True)
JOB = TuneJob(LAYER, parse_tokens("512:8192"), (), "cuda", 3, 60.0)
MACHINE = {"device": "toy", "multiprocessors": 132}
TIMES = st.lists(st.lists(st.floats(1.0, 1e4), min_size=2, max_size=2), min_size=2, max_size=5)


class Fake:
    """Times by method, on both ranks; counts its runs. ``again``: what a run of two candidates says instead."""

    def __init__(self, times: dict[str, float], again: dict[str, float] | None = None) -> None:
        self.times, self.again, self.asked = times, again or {}, []

    def __call__(self, ask: Ask) -> list[list[list[float]]]:
        self.asked: list[Ask]
        self.asked.append(ask)
        alone = len(ask.candidates) == 2 and ask.candidates[0].method != "sequential"
        by_method = self.times | (self.again if alone else {})
        rows = [[by_method[str(one)] * (1 + index) for index in range(len(ask.tokens))] for one in ask.candidates]
        return [rows, [[value * 0.9 for value in row] for row in rows]]


RING_BEST = {
    "fused": 30.0,
    "sequential": 20.0,
    "ring_exchange": 10.0,
    "pipeline 2": 15.0,
    "pipeline 4": 16.0,
    "bulk": 12.0,
}
SEQUENTIAL_BEST = RING_BEST | {"sequential": 5.0}
PIPELINE_BEST = RING_BEST | {"pipeline 2": 8.0}


def search(tmp_path: Path, measure: Any, budget_s: float = 1e9, clock: Callable[[], float] = lambda: 0.0) -> Outcome:
    state = State(tmp_path / "state.json", JOB.key(MACHINE))
    return tune(
        JOB, JOB.buckets(132), measure, state, budget_s=budget_s, listen=lambda done, total, what: None, clock=clock
    )


def test_buckets_cover_the_range_and_share_shapes() -> None:
    buckets = JOB.buckets(132)
    assert [bucket.high for bucket in buckets] == sorted((bucket.high for bucket in buckets), reverse=True)
    names = {name for bucket in buckets for name in bucket.names}
    assert names == set(LAYER.problems())
    for name in names:
        mine = sorted((bucket for bucket in buckets if name in bucket.names), key=lambda bucket: bucket.high)
        assert mine[0].low == 511 and mine[-1].high == 8192
        assert all(one.high == other.low for one, other in zip(mine, mine[1:], strict=False))  # noqa: RUF007
        for bucket in mine:
            assert all(bucket.low < tokens <= bucket.high for tokens in bucket.tokens)
            assert bucket.candidates[0].method == "sequential"
            assert bucket.candidates[bucket.default].method in ("ring_exchange", "bulk")
    plain = TuneJob(LayerShape(8192, 28672, 2), parse_tokens("512:8192"), (), "cuda", 3, 60.0)
    shared = next(bucket for bucket in plain.buckets(132) if "fc1_fprop" in bucket.names)
    assert set(shared.names) == {"fc1_fprop", "fc2_dgrad"}, "one measurement for one shape"
    assert len({bucket.key for bucket in buckets}) == len(buckets)


def test_lengths_say_which_buckets_matter(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([600, 610, 8000]))
    lengths = read_lengths(path)
    job = TuneJob(LAYER, parse_tokens("600:8000"), lengths, "cuda", 3, 60.0)
    buckets = [bucket for bucket in job.buckets(132) if "qkv_fprop" in bucket.names]
    assert {bucket.tokens for bucket in buckets} == {(600, 610), (8000,)}, "no bucket without a T"
    path.write_text(json.dumps({"steps": [{"active_tokens": 5}, {"active_tokens": 9}]}))
    assert read_lengths(path) == (5, 9)
    for text in ("{", "[]", "[0]", "[true]", '["5"]', "{}", '{"steps": 3}', "5"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="--tokens-from"):
            read_lengths(path)


@given(TIMES, st.integers(0, 1))
def test_a_winner_is_slower_nowhere(times: list[list[float]], default: int) -> None:
    won = winner(times, default)
    assert all(one <= other for one, other in zip(times[won], times[default], strict=True))
    assert won == default or beats(times[won], times[default])
    assert winner([times[default]], 0) == 0


def test_beats() -> None:
    assert beats([9.0, 9.0], [10.0, 10.0]) and not beats([9.95, 10.0], [10.0, 10.0]), "half a percent is noise"
    assert not beats([1.0, 10.1], [10.0, 10.0]), "slower at one T"
    assert slowest([[[1.0, 5.0]], [[2.0, 4.0]]]) == [[2.0, 5.0]]


def test_the_default_needs_no_confirmation(tmp_path: Path) -> None:
    fake = Fake(RING_BEST)
    outcome = search(tmp_path, fake)
    assert outcome.is_complete and len(fake.asked) == len(outcome.buckets)
    for bucket in outcome.buckets:
        result = outcome.result(bucket)
        assert result is not None and result.chosen == bucket.default and result.confirmation is None


@pytest.mark.parametrize(
    ("again", "chosen"),
    [({}, "sequential"), ({"sequential": 10.0}, "ring_exchange"), ({"sequential": 11.0}, "ring_exchange")],
)
def test_a_winner_is_confirmed_or_the_default_is_written(tmp_path: Path, again: dict[str, float], chosen: str) -> None:
    fake = Fake(SEQUENTIAL_BEST, again)
    outcome = search(tmp_path, fake)
    bucket = next(one for one in outcome.buckets if "qkv_fprop" in one.names)
    result = outcome.result(bucket)
    assert result is not None and bucket.candidates[result.won].method == "sequential"
    assert result.confirmation is not None and row_of(bucket, result).candidate.method == chosen
    runs = [ask for ask in fake.asked if ask.kind == "gather" and ask.tokens == bucket.tokens]
    assert [one.method for one in runs[1].candidates] == ["ring_exchange", "sequential"], "default and winner alone"


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    fake = Fake(PIPELINE_BEST)

    def breaking(ask: Ask) -> Sequence[Any]:
        if len(fake.asked) == 5:
            raise KeyboardInterrupt
        return fake(ask)

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, breaking)
    first = State(tmp_path / "state.json", JOB.key(MACHINE)).results
    assert 0 < len(first) <= 5
    rest = Fake(PIPELINE_BEST)
    outcome = search(tmp_path, rest)
    assert outcome.is_complete and all(outcome.results[key] == one for key, one in first.items())
    whole = Fake(PIPELINE_BEST)
    (tmp_path / "other").mkdir()
    assert search(tmp_path / "other", whole).results == outcome.results
    assert len(rest.asked) < len(whole.asked), "what had been measured was not measured again"


class Slow:
    """A `Fake` on whose clock every run takes 10 s. ``dies``: runs that find no time, by number."""

    def __init__(self, times: dict[str, float], dies: Sequence[int] = ()) -> None:
        self.fake, self.now_s, self.dies = Fake(times), 0.0, dies

    def __call__(self, ask: Ask) -> list[list[list[float]]] | None:
        self.now_s += 10.0
        found = self.fake(ask)
        return None if len(self.fake.asked) in self.dies else found

    def clock(self) -> float:
        return self.now_s


def test_the_budget_ends_it(tmp_path: Path) -> None:
    slow = Slow(RING_BEST)
    outcome = search(tmp_path, slow, budget_s=45.0, clock=slow.clock)
    assert slow.now_s == 40.0, "a fifth bucket, of 10 s like those before it, would have ended after 50"
    assert [ask.limit_s for ask in slow.fake.asked] == [45.0, 35.0, 25.0, 15.0], "what is left, for the ranks to obey"
    left = len(outcome.buckets)
    assert slow.fake.asked[0].share_s == pytest.approx(3 * 45.0 / left), "no first bucket that takes it all"
    assert slow.fake.asked[3].share_s == pytest.approx(3 * 15.0 / (left - 3))
    assert outcome.num_measured == 4 and not outcome.is_complete
    assert max(bucket.high for bucket in outcome.buckets) == 8192
    assert all(outcome.result(one) for one in outcome.buckets[:4]), "the largest T first"
    text = yaml_text(JOB, MACHINE, outcome, ["a remark"])
    assert "not measured, the time budget was used up; the default" in text and "# a remark" in text
    assert f"4 of {len(outcome.buckets)} buckets" in text
    path = tmp_path / "ub.yaml"
    path.write_text(text)
    assert not [note for note in check(path, 2) if note.level in ("error", "warning")]
    for name in unmeasured_names(outcome):
        assert f"# {name}: not measured" in text and name not in resolve(path, 2).extras["by_tokens"]
    assert len(unmeasured_names(outcome)) == 10 - len(by_name(outcome)) > 0
    assert cache_entries(outcome) == {}, "half a shape is not for the cache"
    assert search(tmp_path, Fake(RING_BEST)).is_complete
    assert search(tmp_path, Fake(RING_BEST), budget_s=0.0).is_complete, "nothing left to do"


@pytest.mark.parametrize(
    ("dies", "measured"), [((3,), 1), ((4,), 1), ((5,), 2)], ids=["while searching", "while confirming", "next bucket"]
)
def test_half_a_bucket_is_not_filed(tmp_path: Path, dies: Sequence[int], measured: int) -> None:
    """With a winner other than the default each bucket has two runs: what is unconfirmed is unmeasured."""
    slow = Slow(SEQUENTIAL_BEST, dies)
    outcome = search(tmp_path, slow, budget_s=1e6, clock=slow.clock)
    assert outcome.num_measured == measured and len(slow.fake.asked) == dies[0], "and nothing is begun after it"
    assert len(State(tmp_path / "state.json", JOB.key(MACHINE)).results) == measured


def test_untuned_is_what_a_manager_does_untuned() -> None:
    """Where the dispatcher has a cost model, its choice is the default that must not be made slower."""
    model = load_device("h200")
    defaults = {True: set(), False: set()}
    for bucket in JOB.buckets(132, model):
        name = bucket.names[0]
        legal = legal_methods(name, KNOWN_NAMES[name].is_reduce_scatter)
        table = estimated_table(model, bucket.problem, 8192, legal, {})
        untuned = bucket.candidates[bucket.default]
        assert untuned == table.at(bucket.high).candidate
        assert row_of(bucket, None).candidate == untuned, "an unmeasured bucket keeps it"
        defaults[bucket.problem.is_beside].add(untuned.method)
    assert len(defaults[False]) > 1, "else this says no more than the default method of the name"


def test_the_verdict_stands_in_table_and_file(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=60, highlight=False, markup=False, soft_wrap=True)
    refuted = Fake(SEQUENTIAL_BEST, {"sequential": 11.0})
    outcome = search(tmp_path, refuted)
    show(console, outcome)
    shown, text = console.file.getvalue(), yaml_text(JOB, MACHINE, outcome)  # type: ignore[attr-defined]
    assert "not confirmed: default" in shown, shown
    assert "sequential 11.0/22.0 against the default's 10.0/20.0 again: not confirmed, so the default ring_exch" in text
    bucket = outcome.buckets[0]
    result = outcome.result(bucket)
    assert result is not None and verdict_of(bucket, result) == "not confirmed: default"
    assert verdict_of(bucket, replace(result, chosen=result.won)) == "confirmed"
    assert verdict_of(bucket, replace(result, won=bucket.default)) == "default kept"
    assert verdict_of(bucket, None) == "not measured: default"


def test_a_state_of_another_run_is_refused(tmp_path: Path) -> None:
    search(tmp_path, Fake(RING_BEST))
    path = tmp_path / "state.json"
    with pytest.raises(ConfigError, match=r"belongs to another tuning run.*dtype.*--restart"):
        State(path, JOB.key(MACHINE) | {"dtype": "fp32"})
    assert State(path, JOB.key(MACHINE) | {"dtype": "fp32"}, restart=True).results == {}
    for text in ("{", "[]", json.dumps({"format": 1, "key": {}, "results": {"a": {}}})):
        path.write_text(text)
        with pytest.raises(ConfigError, match="no state file of tpoverlap tune"):
            State(path, JOB.key(MACHINE))
    assert Result.from_dict(Result(((1.0,),), 0, 0, ((1.0,), (2.0,))).to_dict()).confirmation == ((1.0,), (2.0,))


@pytest.mark.parametrize("times", [RING_BEST, SEQUENTIAL_BEST, PIPELINE_BEST])
def test_the_file_is_read_by_us_and_by_transformer_engine(tmp_path: Path, times: dict[str, float]) -> None:
    outcome = search(tmp_path, Fake(times))
    path = tmp_path / "ub.yaml"
    path.write_text(yaml_text(JOB, MACHINE, outcome))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolved = resolve(path, 2)
    assert not check(path, 2), "not a note either: every key does something for one of its readers"
    for name, buckets in by_name(outcome).items():
        entry = resolved.extras["by_tokens"][name]
        assert entry["instead_of"] == resolved.names[name].method, "so that the rows decide here"
        assert entry["features"] == buckets[0].problem.features and entry["width"] == 8192
        assert [row["up_to"] for row in entry["rows"]] == [bucket.high for bucket in buckets]
        for row, bucket in zip(entry["rows"], buckets, strict=True):
            assert row["method"] == row_of(bucket, outcome.result(bucket)).candidate.method
            assert row["time_us"] > 0 and row["sequential_us"] > 0
    assert resolved.names["proj_fprop"].method == ("pipeline" if times is PIPELINE_BEST else "ring_exchange")
    text = path.read_text()
    assert "sequential " in text and "us at T = " in text, "the figures stand beside the choices"
    assert ("confirmed" in text) == (times is not RING_BEST)
    entries = cache_entries(outcome)
    assert entry_key(LAYER.problems()["fc1_wgrad"]) in entries and len(entries) == 10


def test_a_bucket_without_a_result_keeps_the_default() -> None:
    bucket: Bucket = JOB.buckets(132)[0]
    row = row_of(bucket, None)
    assert row.candidate == bucket.candidates[bucket.default] and row.time_us is None
    assert isinstance(row.candidate, Candidate)
