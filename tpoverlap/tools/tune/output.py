"""The file that ``-o`` names: options that Transformer Engine reads too, then our section by T with its figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from tpoverlap.config import KNOWN_NAMES, default_method
from tpoverlap.tools.tune.decide import comment_of, row_of, verdict_of
from tpoverlap.tools.tune.job import Bucket, TuneJob
from tpoverlap.tools.tune.session import Outcome
from tpoverlap.tuning import Candidate, Row, entry_key

# Transformer Engine takes the other keys from the name's original method, pipeline, which keeps multiprocessors free.
# Without that margin its num_sm and cga_size do nothing in a ring by copy engine.
_RING_FOR_TE: Final = "  set_sm_margin: 0\n"


def by_name(outcome: Outcome) -> dict[str, list[Bucket]]:
    """The buckets of each name, ascending; names of which nothing was measured are missing."""
    found: dict[str, list[Bucket]] = {}
    for bucket in sorted(outcome.buckets, key=lambda bucket: bucket.high):
        for name in bucket.names:
            found.setdefault(name, []).append(bucket)
    measured = {name for name, buckets in found.items() if any(outcome.result(one) for one in buckets)}
    return {name: found[name] for name in KNOWN_NAMES if name in measured}


def unmeasured_names(outcome: Outcome) -> list[str]:
    """Names of which no bucket was measured, in the usual order."""
    asked = {name for bucket in outcome.buckets for name in bucket.names}
    return [name for name in KNOWN_NAMES if name in asked - by_name(outcome).keys()]


def cache_entries(outcome: Outcome) -> dict[str, list[Row]]:
    """For the cache: shapes of which every bucket was measured."""
    return {
        entry_key(buckets[0].problem): [row_of(one, outcome.result(one)) for one in buckets]
        for buckets in by_name(outcome).values()
        if all(outcome.result(one) for one in buckets)
    }


def yaml_text(job: TuneJob, machine: Mapping[str, Any], outcome: Outcome, remarks: Sequence[str] = ()) -> str:
    """The whole file. ``remarks``: one comment each, at the top."""
    return "".join(_lines(job, machine, outcome, remarks))


def _lines(job: TuneJob, machine: Mapping[str, Any], outcome: Outcome, remarks: Sequence[str]) -> Iterator[str]:
    layer = job.layer
    sizes = f"hidden {layer.hidden}, ffn {layer.ffn}, TP {layer.tp_size}, {layer.dtype}"
    yield f"# written by tpoverlap tune on {datetime.now(UTC):%Y-%m-%d}: {sizes}\n"
    yield "# measured on " + ", ".join(f"{key} {value}" for key, value in machine.items()) + "\n"
    yield from (f"# {remark}\n" for remark in remarks)
    if not outcome.is_complete:
        yield f"# {outcome.num_measured} of {len(outcome.buckets)} buckets measured; the others have their defaults\n"
    yield "# The rows by T at the end decide here. What comes first is for Transformer Engine and for other shapes.\n\n"
    names = by_name(outcome)
    for name in unmeasured_names(outcome):
        yield f"# {name}: not measured, the time budget was used up; it keeps its default {default_method(name)}\n"
    for name, buckets in names.items():
        one = _one_for_all(name, buckets, outcome)
        yield f"{name}:\n  method: {one.method}\n"
        if one.method == "pipeline":
            yield f"  num_splits: {one.num_splits}\n"
        elif KNOWN_NAMES[name].te_method == "pipeline":
            yield _RING_FOR_TE
    if names:
        yield "\ntpoverlap:\n  by_tokens:\n"
    for name, buckets in names.items():
        problem = buckets[0].problem
        yield f"    {name}:\n      features: {problem.features}\n      width: {problem.width}\n"
        yield f"      instead_of: {_one_for_all(name, buckets, outcome).method}\n      rows:\n"
        for bucket in buckets:
            result = outcome.result(bucket)
            yield f"      # {comment_of(bucket, result)}\n      - {_flow(row_of(bucket, result))}\n"


def results(job: TuneJob, machine: Mapping[str, Any], outcome: Outcome, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Everything that was measured, for ``--json``; times in microseconds, by candidate and by T of ``tokens``.

    ``seconds``: what the run took and what it was given.
    """
    buckets = []
    for bucket in sorted(outcome.buckets, key=lambda one: (one.problem.kind, one.problem.features, one.high)):
        result = outcome.result(bucket)
        row = row_of(bucket, result)
        measured = result and {
            str(one): [round(value, 1) for value in times]
            for one, times in zip(bucket.candidates, result.times, strict=True)
        }
        again = result and result.confirmation
        buckets.append(
            {
                "names": list(bucket.names),
                "kind": bucket.problem.kind,
                "features": bucket.problem.features,
                "above": bucket.low,
                "up_to": bucket.high,
                "tokens": list(bucket.tokens),
                "choice": str(row.candidate),
                "default": str(bucket.candidates[bucket.default]),
                "won": None if result is None else str(bucket.candidates[result.won]),
                "verdict": verdict_of(bucket, result),
                "times_us": measured,
                "again_us": again and {
                    "default": [round(value, 1) for value in again[0]],
                    "won": [round(value, 1) for value in again[1]],
                },
            }
        )  # fmt: skip
    return {
        "tool": "tune",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine),
        "layer": asdict(job.layer),
        "rounds": job.rounds,
        "is_complete": outcome.is_complete,
        **seconds,
        "buckets": buckets,
    }


def _one_for_all(name: str, buckets: list[Bucket], outcome: Outcome) -> Candidate:
    """For a reader that knows no T: the choice of the largest T; the default where such a reader lacks its method."""
    largest = buckets[-1]
    chosen = row_of(largest, outcome.result(largest)).candidate
    in_te = chosen.method in ("ring_exchange", "pipeline", "bulk")
    return chosen if in_te and not chosen.aggregate else Candidate(default_method(name))


def _flow(row: Row) -> str:
    words = {True: "true", False: "false"}
    values = (f"{key}: {words[value] if isinstance(value, bool) else value}" for key, value in row.to_dict().items())
    return "{" + ", ".join(values) + "}"
