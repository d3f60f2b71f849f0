"""A tape gives streams and cublasLt, word for word and in the same order, what the same operation does without one."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.comm import tape_word_ranks as functions
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]
pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="tapes need a C compiler"
)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_streams_are_given_the_same(rank_pool: Pools, world_size: int, narrow: bool) -> None:
    """Any rows, none among them; one piece or several; with and without a reader, a bias, an operation inside."""
    for wrong, kinds in rank_pool(world_size).run(functions.differences, narrow, 8, timeout_s=60):
        assert not wrong, "\n".join(wrong[:3])
        assert kinds == set(functions.KINDS), f"no tape was played of {set(functions.KINDS) - kinds}"
