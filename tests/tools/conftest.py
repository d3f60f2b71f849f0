"""The standard library's documents, parsed once: that takes longer than most tests that use them."""

from __future__ import annotations

import pytest

from tpoverlap.tools.train.corpus import Corpus, read_corpus


@pytest.fixture(scope="session")
def default_corpus() -> Corpus:
    return read_corpus()
