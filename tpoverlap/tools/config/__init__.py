"""``tpoverlap config``: check, explain, convert and look up overlap configurations. Needs no GPU.

``command``: the group; ``check``, ``check_report``: findings; ``explain``, ``sizes``, ``timeline``, ``picture``: words
and pictures; ``convert``, ``document``, ``preset_name``: other formats; ``presets``: the ones that ship.
"""
