"""``tpoverlap doctor``: what works on this machine, found out by trying it.

``worker*.py`` run in processes of their own (a hang or a crash there is a row of the report, never a traceback);
``probes*.py`` start them and turn what they saw into rows; ``report.py`` prints the rows.
"""
