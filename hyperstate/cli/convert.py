"""`hyperstate convert`: a checkpoint in another format."""

from __future__ import annotations

import json as jsonlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..checkpoint.converting import FORMATS, convert_at
from ..checkpoint.manifest import SECTIONS
from ..checkpoint.storage import local_path
from .common import CHECKPOINT, Json, RefusedError, check_target, progress, refusing, report, size


def convert(
    source: Annotated[str, typer.Argument(help=CHECKPOINT, metavar="PATH")],
    target: Annotated[str, typer.Argument(help="The file or folder to write, by path or URL.", metavar="TARGET")],
    to: Annotated[str, typer.Option(help=f"The format: {', '.join(FORMATS)}.")] = "own",
    section: Annotated[
        str, typer.Option(help=f"What safetensors and ckpt files get: {' or '.join(SECTIONS)}.")
    ] = "model",
    names: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON object from old FQNs to new ones; others stay.")
    ] = None,
    file_mib: Annotated[int, typer.Option(help="Size of each file of a safetensors folder, in MiB.")] = 5 << 10,
    json: Json = None,
) -> None:
    """Write a checkpoint again in another format: in one process, a block at a time, no framework but where the format
    is PyTorch's DCP.

    Exit code 2: it could not be read or written.
    """
    with refusing("convert"):
        check_target(json)
        if file_mib < 1:
            raise RefusedError(f"--file-mib {file_mib}: must be 1 at least")
        renamed = None if names is None else _read_names(names)
        with progress("converting") as step:
            convert_at(source, target, to, renamed, section, file_mib << 20, step)
        value = {"source": source, "target": target, "to": to, "nbytes": _bytes_at(target)}
        report(json, value, lambda console: _show(console, value))


def _read_names(path: Path) -> dict[str, str]:
    try:
        found = jsonlib.loads(path.read_bytes())
    except ValueError as error:
        raise RefusedError(f"--names {path}: no JSON: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(new, str) for new in found.values()):
        raise RefusedError(f"--names {path}: must be one JSON object with names as values")
    return found


def _bytes_at(target: str) -> int | None:
    """Bytes of what was written; None for a URL."""
    path = Path(local_path(target))
    if path.is_dir():
        return sum(Path(folder, file).stat().st_size for folder, _, files in os.walk(path) for file in files)
    return path.stat().st_size if path.is_file() else None


def _show(console: Console, value: dict[str, Any]) -> None:
    nbytes = "" if value["nbytes"] is None else f": {size(value['nbytes'])}"
    console.print(f"wrote {value['target']} ({value['to']}){nbytes}", markup=False, soft_wrap=True)
