"""``python -m hyperstate.cli``."""

from . import main

main()
