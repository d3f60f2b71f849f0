"""NeMo's names of presets: ``userbuffers_{bf16|fp8}_{gpu}_h{H}_tp{R}[_cp{N}]_mbs{N}_seqlen{N}[_lora]``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tpoverlap.errors import ConfigError

_PATTERN: Final = re.compile(
    r"userbuffers_(?P<dtype>bf16|fp8)_(?P<gpu>[a-z][a-z0-9]*)_h(?P<hidden>[1-9]\d*)_tp(?P<tp>[1-9]\d*)"
    r"(?:_cp(?P<cp>[1-9]\d*))?_mbs(?P<mbs>[1-9]\d*)_seqlen(?P<seqlen>[1-9]\d*)(?P<lora>_lora)?"
)


@dataclass(frozen=True)
class PresetName:
    """What such a name says. ``cp_size`` None: the name does not mention context parallelism."""

    dtype: str
    gpu: str
    hidden: int
    tp_size: int
    micro_batch: int
    seq_len: int
    cp_size: int | None = None
    lora: bool = False

    @property
    def tokens(self) -> int:
        """T of one TP group: the one token count that the preset was made for."""
        return self.seq_len * self.micro_batch // (self.cp_size or 1)

    def __str__(self) -> str:
        cp = "" if self.cp_size is None else f"_cp{self.cp_size}"
        return (
            f"userbuffers_{self.dtype}_{self.gpu}_h{self.hidden}_tp{self.tp_size}{cp}_mbs{self.micro_batch}"
            f"_seqlen{self.seq_len}{'_lora' if self.lora else ''}"
        )

    @classmethod
    def parse(cls, name: str) -> PresetName:
        """The name taken apart; ``str`` puts it together again.

        Raises:
            ConfigError: ``name`` is no such name.
        """
        match = _PATTERN.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"{name[:200]!r} is no NeMo preset name; they read "
                "userbuffers_{bf16|fp8}_{gpu}_h{H}_tp{R}[_cp{N}]_mbs{N}_seqlen{N}[_lora]"
            )
        said = match.groupdict()
        numbers = {key: int(said[key]) for key in ("hidden", "tp", "mbs", "seqlen")}
        cp = None if said["cp"] is None else int(said["cp"])
        return cls(
            said["dtype"], said["gpu"], numbers["hidden"], numbers["tp"], numbers["mbs"], numbers["seqlen"], cp,
            said["lora"] is not None,
        )  # fmt: skip
