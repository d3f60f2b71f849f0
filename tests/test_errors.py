"""The exception tree is a public contract: users catch these by their built-in bases too."""

from __future__ import annotations

import inspect
import pickle

import pytest

from tpoverlap import errors

BASES = {
    "TpOverlapError": (Exception,),
    "ConfigError": (errors.TpOverlapError, ValueError),
    "ActiveShapeError": (errors.TpOverlapError, ValueError),
    "CapacityError": (errors.ActiveShapeError,),
    "RankMismatchError": (errors.TpOverlapError,),
    "PeerTimeoutError": (errors.TpOverlapError, TimeoutError),
    "BackendUnavailableError": (errors.TpOverlapError, RuntimeError),
    "NotInitializedError": (errors.TpOverlapError, RuntimeError),
}


def test_the_tree_is_complete() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert defined == set(BASES)


@pytest.mark.parametrize("name", BASES)
def test_bases(name: str) -> None:
    assert getattr(errors, name).__bases__ == BASES[name]


@pytest.mark.parametrize("name", BASES)
def test_documented_and_picklable(name: str) -> None:
    kind = getattr(errors, name)
    assert kind.__doc__ and name in (errors.__doc__ or "")
    copy = pickle.loads(pickle.dumps(kind("T=9 exceeds C=8")))
    assert type(copy) is kind and str(copy) == "T=9 exceeds C=8"


def test_mismatch_is_no_value_error() -> None:
    """`except ValueError` around a set-up call must not swallow the end of a manager."""
    assert not issubclass(errors.RankMismatchError, ValueError)
    assert not issubclass(errors.PeerTimeoutError, ValueError)
