"""Explicit-state check of the signal protocol that `docs/protocol.md` describes. ``python -m tests.protocol`` prints it."""
