"""Does `fused` run on two GPUs, where does it stop if it does not, and how fast is it? One command, one JSON file.

``python -m benchmarks.fused_probe --out FILE`` on a host with two GPUs; ``--device cpu`` runs tiny sizes in Triton's
interpreter, which checks this script and no speed. Each stage has processes of its own and a hard time-out; a stage
that fails or hangs is written down, with the words of both ranks, and the next one still runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import fused_probe_ranks as ranks
from benchmarks.environment import environment
from tpoverlap.fused_form import FORMS
from tpoverlap.testing import RankPool

STAGES = ("alone", "gather", "scatter", "variants", "time")


class Probe:
    """The stages and what they found."""

    def __init__(self, out: Path, device: str, budget_s: float) -> None:
        self._out, self._device, self._deadline = out, device, time.monotonic() + budget_s
        self.found: dict[str, Any] = {"environment": environment(), "device": device, "stages": {}}
        self.save()

    def save(self) -> None:
        """Write what is known so far."""
        self._out.write_text(json.dumps(self.found, indent=1, default=str))

    def left_s(self) -> float:
        """Of the budget."""
        return self._deadline - time.monotonic()

    def stage(self, name: str, work: Callable[..., Any], *arguments: Any, timeout_s: float, env: Any = None) -> bool:
        """Run ``work`` on two fresh ranks; whether it ended well."""
        timeout_s = min(timeout_s, self.left_s() - 12.0)
        if timeout_s < 5.0:
            self.found["stages"][name] = {"ok": False, "error": "no time left for it"}
            self.save()
            return False
        started = time.monotonic()
        environment = {"TRITON_INTERPRET": "1" if self._device == "cpu" else None, **(env or {})}
        record: dict[str, Any] = {"ok": False}
        with tempfile.TemporaryDirectory() as folder:
            pool = RankPool(2, device=self._device, env=environment, grace_s=8.0, group_timeout_s=120.0)
            try:
                with pool:
                    answers = pool.run(work, self._device, folder, *arguments, timeout_s=timeout_s)
                record = {"ok": not _wrong(answers), "ranks": answers}
                if not record["ok"]:
                    record["error"] = f"wrong numbers: {json.dumps(_wrong(answers))}"[:6000]
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {error}"[-6000:]
            for path in sorted(Path(folder).iterdir()):
                text = path.read_text()
                if text and not (record["ok"] and path.suffix == ".stacks"):
                    with contextlib.suppress(ValueError):
                        text = json.loads(text)
                    record.setdefault("files", {})[path.name] = text
        record["seconds"] = round(time.monotonic() - started, 1)
        self.found["stages"][name] = record
        self.save()
        print(f"{name}: {'ok' if record['ok'] else 'FAILED'} in {record['seconds']} s", flush=True)
        return bool(record["ok"])


def _wrong(answers: list[Any]) -> list[dict[str, Any]]:
    """What `ranks.grow` found to be wrong, of all ranks."""
    return [
        {"rank": rank, "TKN": row["TKN"], **found}
        for rank, rows in enumerate(answers)
        for row in rows
        for found in row.get("wrong", ())
    ]


def main(given: Sequence[str] | None = None) -> None:
    """Run the stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--budget-s", type=float, default=165.0)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--forms", default=",".join(FORMS), help="forms that the stages gather and scatter run")
    parser.add_argument("--turns", type=int, default=5, help="operations of each size in these stages")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args(given)
    wanted = set(arguments.stages.split(","))
    probe = Probe(arguments.out, arguments.device, arguments.budget_s)
    if arguments.device == "cuda":  # one cache for all stages: what one compiled, the next one loads
        os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="fused_probe_triton_"))
    hung: list[str] = []
    if "alone" in wanted:
        probe.stage("alone", ranks.alone, timeout_s=70.0)
    for direction in ("gather", "scatter"):
        for form in arguments.forms.split(","):
            if direction in wanted and not probe.stage(
                f"{direction} {form}", ranks.grow, direction, form, "", arguments.turns, timeout_s=60.0
            ):
                hung.append(f"{direction} {form}")
    if "variants" in wanted:
        for name in hung:
            direction, form = name.split()
            for variant in ranks.VARIANTS:
                probe.stage(f"{name}, {variant}", ranks.grow, direction, form, variant, arguments.turns, timeout_s=25.0)
    if "time" in wanted:
        probe.stage("time", ranks.timed, tuple(hung), arguments.rounds, timeout_s=probe.left_s() - 14.0)
    print_summary(probe.found)


def print_summary(found: dict[str, Any]) -> None:
    """The table of times, last, so that a reply that keeps the end of the output keeps it."""
    for name, record in found["stages"].items():
        if not record["ok"]:
            print(f"-- {name}: {record['error'][:1500]}")
            for file, seen in record.get("files", {}).items():
                if file.endswith(".json"):
                    print(f"   {file}: {json.dumps(seen)[:1500]}")
    alone = found["stages"].get("alone", {})
    for row in alone.get("ranks", [[]])[0]:
        print("alone", row)
    for row in found["stages"].get("time", {}).get("ranks", [[]])[0]:
        times = "  ".join(
            f"{key} {value['eager_us']:.0f}/{value['queued_us']:.0f}/{value['host_us']:.0f}"
            for key, value in row["times"].items()
        )
        print(f"{row['direction']} {row['T']}x{row['K']}x{row['N']}: {times}   (eager/queued/host us) {row['errors']}")


if __name__ == "__main__":
    main()
