"""Rules about a file as a whole: its options against the training file round them, its comments and its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from tpoverlap.config.rules import Case, Rule, whole
from tpoverlap.config.surroundings import Statement


def _stated(case: Case, topic: str) -> Statement | None:
    return case.surroundings.stated.get(topic)


def _is_on(case: Case) -> bool:
    overlap = _stated(case, "overlap")
    return overlap is not None and overlap.value is True


def _on_at_tp_1(case: Case) -> bool:
    tp = _stated(case, "tp_size")
    return _is_on(case) and tp is not None and tp.value == 1


def _on_without_sequence_parallel(case: Case) -> bool:
    flag, tp = _stated(case, "sequence_parallel"), _stated(case, "tp_size")
    return _is_on(case) and flag is not None and flag.value is False and not (tp is not None and tp.value == 1)


def _off(case: Case) -> bool:
    overlap = _stated(case, "overlap")
    return bool(case.entries) and overlap is not None and overlap.value is False


def _says_fp8(case: Case) -> bool:
    precision = _stated(case, "precision")
    return precision is not None and precision.value == "fp8"


def _other_tp(case: Case) -> bool:
    asked, tp = case.surroundings.tp_asked, case.surroundings.find("tp_size")
    return asked is not None and tp is not None and tp.value != asked


def _line(topic: str) -> Any:
    def line(case: Case, key: Any) -> int:
        found = case.surroundings.find(topic)
        return 0 if found is None else found.line

    return line


def _contradicted(case: Case) -> Iterator[str]:
    yield from (topic for topic, _, _ in case.surroundings.contradictions())


def _both(case: Case, key: Any) -> tuple[Statement, Statement]:
    return next((claim, content) for topic, claim, content in case.surroundings.contradictions() if topic == key)


def _contradiction_words(case: Case, key: Any) -> dict[str, Any]:
    claim, content = _both(case, key)
    what = {"params": "about {} parameters"}.get(key, f"{key} {{}}")
    claimed, found = (f"{s.value:.3g}" if key == "params" else str(s.value) for s in (claim, content))
    return {"claim": f"{claim.where} says {what.format(claimed)}", "content": f"{content.where} says {found}"}


def _remark_words(case: Case, key: Any) -> dict[str, Any]:
    return {"remark": case.surroundings.remarks[0][1]}


def _tp_words(case: Case, key: Any) -> dict[str, Any]:
    tp = case.surroundings.find("tp_size")
    return {} if tp is None else {"says": f"{tp.where} says {tp.value}"}


# fmt: off
SURROUNDING_RULES: Final[tuple[Rule, ...]] = (
    Rule("overlap-at-tp-1", "file", "warning",
         whole(_on_at_tp_1, "tensor_model_parallel_size"),
         "overlap is switched on at tensor_model_parallel_size 1: there is no peer and nothing to overlap",
         "set ub_tp_comm_overlap: false",
         "TE: switched off silently; Megatron-LM: an assertion", line=_line("tp_size")),
    Rule("overlap-without-sequence-parallel", "file", "warning",
         whole(_on_without_sequence_parallel, "sequence_parallel"),
         "overlap is switched on, but sequence_parallel is false: there is no all-gather or reduce-scatter to overlap",
         "set sequence_parallel: true, or ub_tp_comm_overlap: false",
         "TE: switched off silently; Megatron-LM: an assertion", line=_line("sequence_parallel")),
    Rule("overlap-switched-off", "file", "note",
         whole(_off, "ub_tp_comm_overlap"),
         "overlap is switched off in the training file, so none of these options is read",
         "set ub_tp_comm_overlap: true, or remove the options",
         "NeMo: ub_tp_comm_overlap", line=_line("overlap")),
    Rule("fp8-training", "file", "note",
         whole(_says_fp8, "fp8"),
         "the training file switches FP8 on; rows then move in FP8 only if the manager and the layer say so, too",
         "pass quantization_modes=['none', 'fp8'] to the manager, and fp8_recipe= (or fp8_autocast) to the layer",
         "ours: FP8 is asked for in code", target="tpoverlap", line=_line("precision")),
    Rule("tp-size-contradicted", "file", "warning",
         whole(_other_tp, "tensor_model_parallel_size"),
         "checked for tp_size {tp_size}, but {says}",
         "pass the --tp that the file is used with",
         "ours: a preset is made for one size", words=_tp_words, line=_line("tp_size")),
    Rule("name-contradicts-contents", "file", "warning",
         _contradicted,
         "{claim}, but {content}",
         "rename the file, or correct it: presets are chosen by their name",
         "FACTS: file names that contradict contents",
         words=_contradiction_words, line=lambda case, key: _both(case, key)[1].line),
    Rule("not-tuned", "file", "note",
         whole(lambda c: bool(c.surroundings.remarks)),
         "its own comment says that nobody tuned it: {remark!r}",
         "measure before relying on it",
         "seen in published files", words=_remark_words, line=lambda case, key: case.surroundings.remarks[0][0]),
)
# fmt: on
