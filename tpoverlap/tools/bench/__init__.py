"""``tpoverlap bench``: every method beside everything a user could pick instead, in one run.

``command`` (options) -> ``job`` (validated, picklable) -> ``worker`` (ranks, one row after another) -> ``suites/*``
(what a row is) on top of ``variants``, ``baselines``, ``correctness`` and ``timing``; ``report``, ``tables`` and
``plot`` show it. A new suite is one file in ``suites/`` and one line in ``suites/__init__.py``.
"""
