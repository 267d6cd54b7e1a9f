"""What the commands share: exit codes, consoles, JSON, sizes in words, progress."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ..errors import HyperstateError
from ..pictures.drawing import size

DIFFERENT, REFUSED = 1, 2
"""Exit codes besides 0: there are differences or damage; the command could not do what was asked."""

CHECKPOINT = "A checkpoint, by path or URL: ours, PyTorch's DCP, safetensors, MindSpore's .ckpt."

FILTER = "Only names that match: *.layers.0.*"

Json = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Also write the result as JSON; '-' prints it in place of the text."),
]


__all__ = [
    "CHECKPOINT",
    "DIFFERENT",
    "FILTER",
    "REFUSED",
    "Json",
    "RefusedError",
    "as_json",
    "check_target",
    "console",
    "count",
    "counted",
    "errors",
    "matches",
    "progress",
    "refusing",
    "report",
    "seconds",
    "size",
    "steps",
    "write",
]


class RefusedError(Exception):
    """The command can't do what was asked; the text says why."""


def console() -> Console:
    """For results. Where there is no terminal to fit into, lines are as long as they are."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=max(plain.width, 160))


def errors() -> Console:
    """For messages and progress."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def refusing(command: str) -> Iterator[None]:
    """Errors that a user can mend end the command with one line and exit code 2."""
    try:
        yield
    except (RefusedError, HyperstateError, OSError) as error:
        errors().print(f"hyperstate {command}: {error}", markup=False)
        raise typer.Exit(REFUSED) from None


def report(json: str | None, value: Any, show: Callable[[Console], None]) -> None:
    """Show a result to people, write it as JSON, or both."""
    if json == "-":
        sys.stdout.write(as_json(value))
        return
    show(console())
    if json is not None:
        write(Path(json), as_json(value))


def check_target(json: str | None) -> None:
    """Raises `RefusedError` for a ``--json`` file that can't be written, before any work is done."""
    if json not in (None, "-") and not Path(str(json)).absolute().parent.is_dir():
        raise RefusedError(f"--json {json}: there is no folder {Path(str(json)).absolute().parent}")


def as_json(value: Any) -> str:
    """JSON text; bytes and seconds are plain numbers."""
    return jsonlib.dumps(value, indent=2, ensure_ascii=False) + "\n"


def write(path: Path, text: str) -> None:
    """Raises `RefusedError` if the file can't be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RefusedError(f"{path}: the result can't be written: {error.strerror or error}") from None


def matches(name: str, pattern: str | None) -> bool:
    """Whether ``--filter`` lets a name through."""
    return pattern is None or fnmatchcase(name, pattern)


def count(number: float) -> str:
    """A number with thousands apart."""
    return f"{number:,.0f}"


def counted(number: int, word: str) -> str:
    """A number of things: ``1 file``, ``2 files``."""
    return f"{count(number)} {word}{'s' * (number != 1)}"


def seconds(value: float) -> str:
    """A time in words: ``1.5 s``, ``20 ms``."""
    if value == 0:
        return "0"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s"


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error for long work, silent where that is no terminal. Yields a function that takes the bytes
    done, those to do, and what is being done."""
    with _bar(what, DownloadColumn(binary_units=True), TransferSpeedColumn(), TextColumn("{task.fields[what]}")) as bar:
        task = bar.add_task(what, total=None, what="")
        yield lambda done, total, name: bar.update(task, completed=done, total=total, what=escape(name[-40:]))


@contextmanager
def steps(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """The same for work in steps. Yields a function that adds some."""
    with _bar(what, MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda number: bar.advance(task, number)


def _bar(what: str, *columns: ProgressColumn) -> Progress:
    place = Console(stderr=True)
    return Progress(
        TextColumn(what), BarColumn(), *columns, console=place, transient=True, disable=not place.is_terminal
    )
