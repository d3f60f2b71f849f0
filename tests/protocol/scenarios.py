"""Everything that is explored, by name. The tests run `HOLDS`, `BROKEN_RULES` and `REDUNDANT`; `DEEP` is for patience.

Bounds. Two ranks are explored in full: every interleaving of every stream and watchdog. Three ranks have too many
(one operation alone has millions), so they use the reduction that `model` explains. Three to five operations reuse
each slot of a region at least once at depth 2; a longer run repeats the same relative positions, because credits (and
events) keep ranks within ``depth`` uses of each other, and epochs are compared cyclically. ``first_epoch=13`` modulo 16
makes every run of three uses wrap around. All ranks run the same program up to a rotation of the rank numbers, so
letting rank 0 stop, give up or deviate covers the others.

A rank that errs *on the CPU* drops its remaining work. Whatever its peers can then see is a prefix of what it would
have written, which a rank that is merely slow shows as well: for wrong reads such runs add nothing, for hangs they
are explored at R = 2 and, with the work of a rank in one queue, at R = 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import Config


@dataclass(frozen=True)
class Scenario:
    """A model, how to explore it, and (for broken rules) words that the violation must contain."""

    name: str
    config: Config
    reduce: bool = False
    expect: str = ""


def _three(name: str, **options: object) -> Scenario:
    return Scenario(name, Config(tp_size=3, **options), reduce=True)  # type: ignore[arg-type]


def _words(name: str, *, reduce: bool = False, expect: str = "", **options: object) -> Scenario:
    """On a device whose caller's words have a stream of their own."""
    config = Config(device=True, word_stream=True, **options)  # type: ignore[arg-type]
    return Scenario(f"words: {name}", config, reduce, expect)


HOLDS = [
    # every rank behaves
    Scenario("two ranks", Config(ops="ARARA")),
    Scenario("two ranks, two pieces a chunk", Config(ops="AARRA", pieces=(2,))),
    Scenario("the number of pieces changes", Config(ops="AAAA", pieces=(1, 1, 2, 1), modulus=4, first_epoch=3)),
    Scenario("a rank without rows", Config(ops="ARASR", rowless=0, ring=2)),
    Scenario("a held slot of each region", Config(ops="aArRA")),
    Scenario("with sequential operations between", Config(ops="ASRSA")),
    Scenario("senders without events: credits alone", Config(ops="ARAR", gated=False)),
    Scenario("senders without events, all slots held", Config(ops="aaaa", gated=False)),
    Scenario("the smallest epoch modulus, 2 * depth", Config(ops="AAAA", gated=False, modulus=4, first_epoch=3)),
    Scenario("depth 1", Config(ops="AAA", depth=1)),
    Scenario("depth 3", Config(ops="AAAA", depth=3, gated=False)),
    Scenario("one hardware queue", Config(ops="aRaAR", one_queue=True)),
    Scenario("a caller's stream for each region", Config(ops="ARA", caller_streams=2)),
    Scenario("the smallest ring with events, 2", Config(ops="ARASRA", ring=2)),
    Scenario("the smallest ring with credits alone, depth + 1", Config(ops="AAAA", gated=False, ring=3)),
    # the caller's stream alone, and a descriptor that comes late
    Scenario("all at once", Config(ops="TUTUA")),
    Scenario("all at once between others", Config(ops="ATRUT")),
    Scenario("all at once, a held slot", Config(ops="aTTRU")),
    Scenario("all at once, a rank without rows", Config(ops="TUATU", rowless=0)),
    Scenario("a descriptor with the first transfer", Config(ops="BABRB")),
    Scenario("CUDA: all at once, a rank stops anywhere", Config(ops="TUAT", dies=0, device=True)),
    Scenario("CUDA: all at once, a rank gives up", Config(ops="TA", gives_up=(0,), device=True), reduce=True),
    Scenario("CUDA: all at once, a rank deviates", Config(ops="TUTU", device=True, deviates=(0, 1, "T"))),
    Scenario("CPU: a late descriptor, a rank deviates", Config(ops="BAB", deviates=(0, 1, "skip"))),
    Scenario("CUDA: a late descriptor, a rank stops anywhere", Config(ops="BAB", dies=0, device=True)),
    _three("three ranks, all at once", ops="TUB"),
    # one kernel for the whole exchange
    Scenario("one kernel", Config(ops="KNKNA", pieces=(2,))),
    Scenario("one kernel between others", Config(ops="TKRNK")),
    Scenario("one kernel, a held slot", Config(ops="kKNK", pieces=(2,))),
    Scenario("one kernel, a rank without rows", Config(ops="KNKN", rowless=0, pieces=(2,))),
    Scenario("CUDA: one kernel, another library", Config(ops="KN", library=True, behind=1, device=True)),
    Scenario("CUDA: one kernel, a rank stops anywhere", Config(ops="KNK", pieces=(2,), dies=0, device=True)),
    Scenario("CUDA: one kernel, a rank gives up", Config(ops="NK", gives_up=(0,), device=True), reduce=True),
    Scenario("CUDA: one kernel, a rank deviates: T", Config(ops="KNK", pieces=(2,), device=True, deviates=(0, 1, "T"))),
    Scenario("CUDA: one kernel, a rank deviates: skip", Config(ops="NKNA", device=True, deviates=(0, 1, "skip"))),
    _three("three ranks, one kernel", ops="KN", pieces=(2,)),
    # fused: the computed flag, and the one-launch form's order of waits
    Scenario("fused by copy engine", Config(ops="FGFFR")),
    Scenario("fused by copy engine, two pieces", Config(ops="GFF", pieces=(2,))),
    Scenario("fused by copy engine, a rank without rows", Config(ops="FGFF", rowless=0)),
    Scenario("fused by copy engine, another library", Config(ops="FG", library=True)),
    Scenario("fused by copy engine, a rank behind another library", Config(ops="GF", library=True, behind=1)),
    Scenario("fused in one launch", Config(ops="LMLMA")),
    Scenario("fused in one launch, two pieces", Config(ops="LML", pieces=(2,))),
    Scenario("fused in one launch, a rank without rows", Config(ops="LMRL", rowless=0)),
    Scenario("fused in one launch, another library", Config(ops="LM", library=True, behind=1)),
    Scenario("CUDA: fused in one launch", Config(ops="LMRL", device=True)),
    Scenario("CUDA: fused in one launch, one hardware queue", Config(ops="LMLMA", device=True, one_queue=True)),
    Scenario(
        "CUDA: one launch, one queue, a rank deviates",
        Config(ops="LML", device=True, one_queue=True, deviates=(0, 1, "T")),
    ),
    Scenario("CUDA: one launch, a rank stops anywhere", Config(ops="LML", dies=0, device=True)),
    Scenario("CUDA: one launch, a rank gives up", Config(ops="L", gives_up=(0,), device=True)),
    Scenario("CUDA: one launch, a rank deviates: T", Config(ops="LML", device=True, deviates=(0, 1, "T"))),
    Scenario("CUDA: one launch, a rank deviates: skip", Config(ops="LMLA", device=True, deviates=(0, 1, "skip"))),
    Scenario("CUDA: copy engine, a rank deviates", Config(ops="FGF", device=True, deviates=(0, 1, "counts"))),
    _three("three ranks, fused", ops="FLM"),
    _three("three ranks", ops="ARARA"),
    _three("three ranks, held slots, sequential", ops="aSrARA"),
    _three("three ranks, one without rows", ops="ARASR", rowless=0),
    _three("three ranks, senders without events", ops="AAA", gated=False),
    Scenario("three ranks, one hardware queue, in full", Config(tp_size=3, ops="ARA", one_queue=True)),
    # three streams a rank
    _words("rings", ops="ARARA"),
    _words("the comm stream waits", ops="ARARA", comm_waits=True),
    _words("two pieces", ops="ARA", pieces=(2,)),
    _words("a rank without rows", ops="ARLRA", rowless=0, ring=2),
    _words("held slots", ops="aRaAR"),
    _words("a held slot before one launch", ops="aLaL", depth=1),
    _words("held slots of several orders", ops="aTkLA"),
    _words("a late descriptor", ops="ABRB", comm_waits=True),
    _words("one launch", ops="LMLMA"),
    _words("fused by copy engine, another library", ops="FG", library=True),
    _words("fused by copy engine, a rank behind another library", ops="GF", library=True, behind=1),
    _words("one launch, another library", ops="LM", library=True, behind=1),
    _words("one kernel between others", ops="KLNM"),
    _words("a caller's stream for each region", ops="ARA", caller_streams=2),
    _words("all at once, and some send nothing", ops="ATTTA", rowless=0, rowless_in=(3,)),
    _words("all at once after a held slot", ops="AaTA", depth=1, comm_waits=True, rowless=0, rowless_in=(2,)),
    _words("one kernel, and some send nothing", ops="RNR", depth=1, rowless=0, rowless_in=(2,)),
    _words("the smallest ring, 2 * most_ahead", ops="LTLTLTL", most_ahead=2, ring=4, modulus=32, rowless=0),
    _words("the smallest ring, no launch ahead", ops="LTTLSL", most_ahead=1, ring=2),
    _words("a rank stops anywhere", ops="ARA", dies=0),
    _words("a rank stops anywhere, the comm stream waits", ops="ATA", dies=0, comm_waits=True),
    _words("one launch, a rank stops anywhere", ops="LML", dies=0),
    _words("one launch, a rank gives up", ops="L", gives_up=(0,)),
    _words("a rank gives up, held slots", ops="aRaAR", gives_up=(0,), reduce=True),
    _words("a rank gives up, the comm stream waits", ops="AL", gives_up=(0,), comm_waits=True, reduce=True),
    _words("a rank deviates: T", ops="ALT", deviates=(0, 1, "T")),
    _words("a rank deviates: counts", ops="LAA", deviates=(0, 2, "counts")),
    _words("a rank deviates: skip", ops="ALAL", deviates=(0, 1, "skip")),
    _words("three ranks", tp_size=3, ops="ARAR", reduce=True),
    _words("three ranks, held slots", tp_size=3, ops="aSrA", reduce=True),
    _words("three ranks, one launch and one kernel", tp_size=3, ops="LKR", reduce=True),
    # rank 0 stops anywhere
    Scenario("CPU: a rank stops anywhere", Config(ops="ARARA", dies=0)),
    Scenario("CUDA: a rank stops anywhere", Config(ops="ARAR", dies=0, device=True)),
    Scenario("CUDA: a rank stops, one hardware queue", Config(ops="aRAA", dies=0, device=True, one_queue=True)),
    _three("CPU: one of three ranks stops anywhere", ops="ARARA", dies=0),
    _three("CUDA: one of three ranks stops anywhere", ops="ARAR", dies=0, device=True),
    # rank 0 raises, aborts or times out at any moment
    Scenario("CPU: a rank gives up at any moment", Config(ops="ARA", gives_up=(0,))),
    Scenario("CPU: both ranks give up at any moment", Config(ops="AAA", gives_up=(0, 1))),
    Scenario("CUDA: a rank gives up, in full", Config(ops="A", gives_up=(0,), device=True)),
    Scenario("CUDA: both ranks give up", Config(ops="ARARA", gives_up=(0, 1), device=True), reduce=True),
    Scenario("CUDA: a rank gives up, held slots", Config(ops="aRaAR", gives_up=(0,), device=True), reduce=True),
    Scenario(
        "CUDA: a rank gives up and a peer stops",
        Config(ops="AA", depth=1, dies=1, gives_up=(0,), device=True, one_queue=True),
    ),
    _three("CUDA: one of three gives up, one queue", ops="AA", depth=1, gives_up=(0,), device=True, one_queue=True),
    # rank 0 calls something else
    *(
        Scenario(f"{'CUDA' if device else 'CPU'}: a rank deviates: {what}", Config(ops=ops, device=device, deviates=at))
        for device in (False, True)
        for what, ops, at in (
            ("another operation", "ARAR", (0, 2, "op")),
            ("another T", "ARAR", (0, 2, "T")),
            ("other counts, same T", "ARAR", (0, 2, "counts")),
            ("one operation left out", "ARAR", (0, 1, "skip")),
            ("the last operation left out", "ARAA", (0, 3, "skip")),
        )
    ),
    _three("CUDA: one of three ranks deviates", ops="ARAR", device=True, deviates=(0, 2, "T")),
    Scenario("CPU: one of three deviates", Config(tp_size=3, ops="AA", one_queue=True, deviates=(0, 1, "T"))),
]

BROKEN_RULES = [
    Scenario("a", Config(ops="AAA", broken=("flag_before_data",)), expect="reads nothing"),
    Scenario("b", Config(ops="AAA", gated=False, broken=("no_credit_wait",)), expect="overwrites data"),
    Scenario("b, with a held slot", Config(ops="aAA", broken=("no_credit_wait",)), expect="overwrites data"),
    Scenario("b, all at once", Config(ops="TT", depth=1, broken=("no_credit_wait",)), expect="overwrites data"),
    Scenario("b, a late descriptor", Config(ops="BB", depth=1, broken=("no_credit_wait",)), expect="overwrites data"),
    Scenario("c", Config(ops="AAA", gated=False, broken=("credit_before_read",)), expect="overwrites data"),
    Scenario("d", Config(ops="AA", depth=1, credit_lag=2), expect="overwrites data"),
    Scenario("e", Config(ops="AA", deviates=(1, 1, "T"), broken=("no_compare",)), expect="variant 1"),
    Scenario(
        "e on CUDA", Config(ops="AA", deviates=(1, 1, "T"), device=True, broken=("no_compare",)), expect="variant 1"
    ),
    Scenario("f", Config(ops="AA", descriptor_wait=False, broken=("late_descriptor",)), expect="false alarm"),
    Scenario("g", Config(ops="AA", dies=0, broken=("no_watchdog",)), expect="hang"),
    Scenario(
        "g with three ranks", Config(tp_size=3, ops="A", dies=0, one_queue=True, broken=("no_watchdog",)), expect="hang"
    ),
    Scenario("h", Config(ops="AAA", broken=("plain_comparison",)), expect="reads"),
    Scenario("h, epochs too few", Config(ops="AAA", modulus=2, first_epoch=1), expect="false alarm"),
    Scenario("i", Config(ops="A", broken=("record_before_digest",)), expect="false alarm"),
    Scenario("j", Config(ops="A", gives_up=(0,), device=True, broken=("poison_before_abort",)), expect="tainted"),
    Scenario(
        "k",
        Config(ops="AA", depth=1, dies=1, gives_up=(0,), device=True, one_queue=True, broken=("poison_once",)),
        expect="never drain",
    ),
    Scenario("l", Config(ops="A", one_queue=True, broken=("waiter_first",)), expect="false alarm"),
    Scenario("m", Config(ops="ARA", ring=2, broken=("host_publishes",)), expect="overwrites its descriptor"),
    Scenario("n", Config(ops="aAA", broken=("grant_after_send",)), expect="false alarm"),
    Scenario(
        "o", Config(ops="A", gives_up=(0,), device=True, one_queue=True, broken=("deaf_check",)), expect="silence"
    ),
    Scenario("p", Config(ops="AAA", pieces=(1, 1, 2), modulus=4, broken=("stale_flags",)), expect="reads"),
    Scenario("q", Config(ops="G", library=True, behind=1, broken=("no_entered",)), expect="false alarm"),
    Scenario("r", Config(ops="F", library=True, broken=("no_computed",)), expect="false alarm"),
    Scenario("s", Config(ops="L", broken=("waits_before_pushing",)), expect="false alarm"),
    Scenario("t", Config(ops="L", device=True, library=True, behind=1, broken=("no_reserve",)), expect="false alarm"),
    Scenario(
        "e in one launch", Config(ops="LL", device=True, deviates=(1, 1, "T"), broken=("no_compare",)), expect="uses"
    ),
    Scenario("a in one launch", Config(ops="L", device=True, broken=("flag_before_data",)), expect="uses what"),
    Scenario("u", Config(ops="L", device=True, broken=("early_refresh",)), expect="uses what"),
    Scenario("u, reduce-scatter", Config(ops="M", broken=("early_refresh",)), expect="uses what"),
    Scenario("b in one launch", Config(ops="LLL", device=True, depth=1, credit_lag=2), expect="overwrites data"),
    Scenario("v", Config(ops="K", pieces=(2,), broken=("first_flags",)), expect="reads"),
    Scenario("z", Config(ops="N", pieces=(2,), device=True, broken=("part_flag_first",)), expect="reads"),
    Scenario("w", Config(ops="NNN", depth=1, pieces=(2,), broken=("first_credits",)), expect="overwrites data"),
    _words("b", ops="LAL", depth=1, broken=("no_credit_wait",), rowless=0, expect="overwrites data"),
    _words("c", ops="AAA", depth=1, broken=("credit_before_read",), expect="overwrites data"),
    _words("c, one launch", ops="LL", depth=1, broken=("credit_before_read",), expect="overwrites data"),
    _words("c, a held slot", ops="aAA", depth=1, broken=("credit_before_read",), expect="overwrites data"),
    _words("e", ops="AA", deviates=(1, 1, "T"), broken=("no_compare",), expect="variant 1"),
    _words("q", ops="G", library=True, behind=1, broken=("no_entered",), expect="false alarm"),
    _words("r", ops="F", library=True, broken=("no_computed",), expect="false alarm"),
    _words("x", ops="ATA", depth=1, rowless=0, rowless_in=(2,), broken=("late_credits",), expect="false alarm"),
    _words("x, depth 2", ops="ATTTA", rowless=0, rowless_in=(3,), broken=("late_credits",), expect="false alarm"),
    _words(
        "x, a held slot",
        **{"ops": "AaTA", "depth": 1, "comm_waits": True, "rowless": 0, "rowless_in": (2,)},
        broken=("late_credits",),
        expect="false alarm",
    ),
    _words("x, one kernel", ops="RNR", depth=1, rowless=0, rowless_in=(2,), broken=("late_credits",), expect="alarm"),
    _words("y", ops="LTTL", ring=3, broken=("descriptors_ahead",), expect="overwrites its descriptor"),
    _words("ring too small", ops="LTLTLTL", most_ahead=2, ring=3, modulus=32, rowless=0, expect="its descriptor"),
    Scenario("ring 1", Config(ops="AR", ring=1), expect="overwrites its descriptor"),
    Scenario("ring too small for credits alone", Config(ops="ARARA", gated=False, ring=4), expect="its descriptor"),
    Scenario("two callers' streams share a ring", Config(ops="ARR", caller_streams=2, ring=2), expect="its descriptor"),
]

REDUNDANT = [
    Scenario("b with events and no held slot", Config(ops="ARAA", broken=("no_credit_wait",))),
    Scenario("c with events", Config(ops="ARAA", broken=("credit_before_read",))),
    Scenario("f with a wait for the descriptor", Config(ops="ARAA", broken=("late_descriptor",))),
    Scenario("i on CUDA, where compares are waits", Config(ops="AA", device=True, broken=("record_before_digest",))),
]
"""Rules that another rule happens to cover in the engine as it is: what docs/protocol.md calls belt and braces."""

DEEP = [
    Scenario("the smallest ring with credits alone, two regions", Config(ops="ARARAR", gated=False, ring=5)),
    Scenario("two callers' streams", Config(ops="ARRRR", caller_streams=2, ring=5)),
    _three("three ranks, senders without events", ops="ARAR", gated=False),
    _three("CUDA: one of three ranks gives up, depth 1", ops="AA", depth=1, gives_up=(0,), device=True),
    _three("CUDA: one of three ranks gives up", ops="AAA", gives_up=(0,), device=True),
]
"""Minutes and gigabytes; ``python -m tests.protocol --deep``."""
