"""The conformance cases: what every backend must do, as functions that run on every rank of a job.

A case is ``case(kit, **arguments)``; it asserts by itself, and what it returns must be equal on all
ranks. The files: forms (what getters return), loads, matching and groups (what setters do), values,
refusals, participants, laws, losses, checkpoints, templates.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from .tools import MARK, Run

FILES = (
    "forms",
    "loads",
    "matching",
    "groups",
    "values",
    "refusals",
    "participants",
    "laws",
    "losses",
    "checkpoints",
    "templates",
)


class Case(NamedTuple):
    """One run of one case: of `function` in the file `path`, on `run.ranks` ranks."""

    name: str
    """``file.function``, as `GAPS` of a kit names it."""
    path: Path
    function: str
    run: Run

    @property
    def id(self) -> str:
        """Name, number of ranks and arguments: unique."""
        return "-".join([self.name, f"{self.run.ranks}r", *(str(value) for value in self.run.arguments.values())])


def all_cases() -> Iterator[Case]:
    """Every run of every case, in the order of the files."""
    for file in FILES:
        module = import_module(f"{__name__}.{file}")
        for function, value in vars(module).items():
            runs: list[Run] = getattr(value, MARK, []) if not isinstance(value, type) else []
            for run in runs:
                yield Case(f"{file}.{function}", Path(_file_of(module)), function, run)


def _file_of(module: Any) -> str:
    assert module.__file__ is not None
    return str(module.__file__)
