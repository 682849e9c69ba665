"""Python imports this when it starts, if the folder is on its path: see ``OTHERWISE`` in tests/support/rounding.py."""

from tests.support.rounding import rounded_otherwise

ROUNDING = rounded_otherwise()  # it ends when nothing holds it
ROUNDING.__enter__()
