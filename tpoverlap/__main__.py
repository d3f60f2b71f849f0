"""``python -m tpoverlap``: the same as the ``tpoverlap`` command."""

from tpoverlap.tools.cli import main

if __name__ == "__main__":
    main(prog_name="tpoverlap")
