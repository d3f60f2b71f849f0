"""What stands round the overlap options: the training file that embeds them, the file's name, its first comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Value = str | int | float | bool

# The training file's keys beside ``ub_tp_comm_overlap_cfg`` (NeMo's names, then Megatron-LM's) -> what they are about.
SIBLING_TOPICS: Final[Mapping[str, str]] = {
    "tensor_model_parallel_size": "tp_size",
    "pipeline_model_parallel_size": "pp_size",
    "context_parallel_size": "cp_size",
    "sequence_parallel": "sequence_parallel",
    "ub_tp_comm_overlap": "overlap",
    "tp_comm_overlap": "overlap",
    "fp8": "precision",
    "micro_batch_size": "micro_batch",
    "encoder_seq_length": "seq_len",
    "seq_length": "seq_len",
    "hidden_size": "hidden",
    "ffn_hidden_size": "ffn",
    "num_layers": "num_layers",
}
_TRAINER_KEYS: Final = ("num_nodes", "devices")
_SIZES: Final = ("num_layers", "hidden", "ffn")


@dataclass(frozen=True)
class Statement:
    """One thing that is said about the run: its value, and who says it in which line (0: the file's name)."""

    value: Value
    where: str
    line: int = 0


@dataclass(frozen=True)
class Surroundings:
    """Statements by topic (``tp_size``, ``hidden``, ``precision``, ...).

    ``stated``: by the training file round the options; ``header``: by the comments at the top; ``named``: by the
    file's name. ``remarks``: (line, text) of comments which say that nobody tuned the file.
    """

    stated: Mapping[str, Statement] = field(default_factory=dict)
    header: Mapping[str, Statement] = field(default_factory=dict)
    named: Mapping[str, Statement] = field(default_factory=dict)
    remarks: tuple[tuple[int, str], ...] = ()
    tp_assumed: bool = False
    tp_asked: int | None = None

    def find(self, topic: str) -> Statement | None:
        """The most reliable statement about ``topic``: training file, then comments, then the name."""
        return self.stated.get(topic) or self.header.get(topic) or self.named.get(topic)

    def number(self, topic: str) -> int | None:
        """The value of ``topic`` where it is a whole number of at least 1."""
        found = self.find(topic)
        value = None if found is None else found.value
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None

    def contradictions(self) -> Iterator[tuple[str, Statement, Statement]]:
        """(topic, what the name says, what the contents say) wherever the two differ."""
        for topic, claim in self.named.items():
            for source in (self.stated, self.header):
                if topic in source and not _agree(topic, claim.value, source[topic].value):
                    yield topic, claim, source[topic]
                    break


def _agree(topic: str, claim: Value, content: Value) -> bool:
    if topic == "params":  # an estimate from the sizes, without embeddings and gates
        return 0.4 <= float(content) / max(float(claim), 1.0) <= 2.5
    return claim == content


def stated_by(
    document: Mapping[Any, Any], where: tuple[Any, ...], lines: Mapping[tuple[str, ...], int]
) -> dict[str, Statement]:
    """What the mapping that holds the overlap options says about the run; {} for a file of options alone.

    Values that are interpolations or have another type than expected are left out: nobody knows them here.
    """
    if not where:
        return {}
    parent: Any = document
    for key in where[:-1]:
        parent = parent[key]
    if not isinstance(parent, Mapping):
        return {}
    found: dict[str, Statement] = {}
    prefix = tuple(str(key) for key in where[:-1])
    for key, topic in SIBLING_TOPICS.items():
        value = parent.get(key)
        if topic == "precision" and value is not None and not (isinstance(value, str) and "${" in value):
            value = "fp8" if value else "bf16"  # true, or a recipe such as "hybrid"
        flag = topic in ("overlap", "sequence_parallel")
        usable = isinstance(value, bool) if flag else isinstance(value, (int, str)) and not isinstance(value, bool)
        if topic in found or not usable or value is None or (isinstance(value, str) and topic != "precision"):
            continue
        found[topic] = Statement(value, ".".join((*prefix, key)), lines.get((*prefix, key), 0))
    return found | _derived(document, found, lines)


def _derived(
    document: Mapping[Any, Any], found: Mapping[str, Statement], lines: Mapping[tuple[str, ...], int]
) -> dict[str, Statement]:
    """Nodes, GPUs and parameters: what a name often says and a training file says only together."""
    derived: dict[str, Statement] = {}
    trainer = document.get("trainer")
    nodes, devices = (_count(trainer.get(key)) if isinstance(trainer, Mapping) else None for key in _TRAINER_KEYS)
    if nodes is not None:
        line = lines.get(("trainer", "num_nodes"), 0)
        derived["num_nodes"] = Statement(nodes, "trainer.num_nodes", line)
        if devices is not None:
            derived["num_gpus"] = Statement(nodes * devices, "trainer.num_nodes x trainer.devices", line)
    layers, hidden, ffn = (_count(found[topic].value) if topic in found else None for topic in _SIZES)
    if layers is not None and hidden is not None and ffn is not None:
        line = found["hidden"].line
        where = f"num_layers {layers}, hidden_size {hidden}, ffn_hidden_size {ffn}"
        derived["params"] = Statement(layers * (4 * hidden * hidden + 2 * hidden * ffn), where, line)
    return derived


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31 else None
