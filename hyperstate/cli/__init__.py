"""The `hyperstate` command."""

from __future__ import annotations


def main() -> None:
    """Entry point of the command."""
    from .app import app

    app(prog_name="hyperstate")
