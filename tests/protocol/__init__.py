"""Explicit-state check of the signal protocol (`docs/protocol.md`). ``python -m tests.protocol`` prints its results."""
