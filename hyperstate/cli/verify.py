"""`hyperstate verify`: is a checkpoint whole?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from ..checkpoint.origins import blocks
from ..checkpoint.progress import Meter
from ..checkpoint.verifying import verify_at
from ..errors import CheckpointError
from .common import CHECKPOINT, DIFFERENT, Json, check_target, counted, progress, refusing, report, size
from .contents import format_of, open_contents


def verify(
    path: Annotated[str, typer.Argument(help=CHECKPOINT, metavar="PATH")],
    json: Json = None,
) -> None:
    """Read all of a checkpoint and say whether it is whole: headers, sizes, every element of every tensor once, and
    for our own also the checksum of every piece. Other formats have no checksums.

    Exit code 1: it is damaged; 2: there is no checkpoint.
    """
    with refusing("verify"):
        check_target(json)
        kind = format_of(path)
        value: dict[str, Any] = {"path": path, "format": kind, "whole": True, "problems": ""}
        try:
            value |= _ours(path) if kind == "hyperstate" else _others(path)
        except CheckpointError as error:
            value |= {"whole": False, "problems": str(error)}
        report(json, value, lambda console: _show(console, value))
    if not value["whole"]:
        raise typer.Exit(DIFFERENT)


def _ours(path: str) -> dict[str, Any]:
    with progress("reading") as step:
        found = asdict(verify_at(path, step))
    return {"checksums": True, **{name: found[name] for name in ("files", "tensors", "nbytes")}}


def _others(path: str) -> dict[str, Any]:
    """Every byte can be read; nothing tells whether it is the byte that was written."""
    with open_contents(path, values=True) as opened:
        tensors = opened.contents.tensors
        assert opened.origin is not None
        nbytes = sum(tensor.nbytes for tensor in tensors)
        with progress("reading") as step:
            meter = Meter(step, nbytes)
            for number, tensor in enumerate(tensors):
                for box in blocks(tensor.shape, tensor.dtype):
                    opened.origin.read(number, box, memoryview(bytearray(tensor.itemsize * box.size)))
                    meter.step(tensor.itemsize * box.size, tensor.name)
        return {"checksums": False, "files": len(opened.files) or None, "tensors": len(tensors), "nbytes": nbytes}


def _show(console: Console, value: dict[str, Any]) -> None:
    if not value["whole"]:
        console.print(f"[bold red]DAMAGED[/]: {value['format']}")
        console.print(value["problems"], markup=False, soft_wrap=True)
        return
    files = f"{counted(value['files'], 'file')}, " if value["files"] else ""
    sums = "" if value["checksums"] else "; the format has no checksums, so only what can be read was checked"
    console.print("[bold green]WHOLE[/]", end="")
    text = f": {value['format']}, {files}{counted(value['tensors'], 'tensor')}, {size(value['nbytes'])}{sums}"
    console.print(text, markup=False, soft_wrap=True)
