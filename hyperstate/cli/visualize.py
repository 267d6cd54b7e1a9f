"""`hyperstate visualize`: a picture of a checkpoint, or of what a mesh would hold of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..layout import Mesh, whole
from ..pictures.drawing import Drawn, colour, drawn
from ..pictures.picture import Picture
from ..simulate.placement import Rule, check_names, layout_of, parse_mesh, parse_rule
from .common import FILTER, Json, RefusedError, check_target, counted, matches, refusing, report, write
from .contents import Wanted, open_contents
from .schemas import SCHEMA, is_schema, read_schema

EXAMPLE = ("float32", (1024, 1024))
"""What is drawn for a mesh alone."""
EXAMPLE_FQNS = ("block.q_proj.weight", "block.o_proj.weight", "block.norm.weight")


def visualize(
    path: Annotated[
        str | None,
        typer.Argument(help=f"{SCHEMA} JSON needs --mesh.", metavar="PATH"),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="MESH",
            help="Draw what each rank of this mesh would hold: dp=4,tp=2. Default: what each file holds.",
        ),
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option(metavar="NAME:GLOB=DIM", help="What a mesh dimension shards, as in plan.")
    ] = None,
    filter: Annotated[  # noqa: A002  # the option's name
        str | None, typer.Option(metavar="GLOB", help=FILTER)
    ] = None,
    section: Annotated[
        str | None, typer.Option(help="Only this part of a checkpoint: model or optim. Not with --mesh.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the picture as one HTML page that needs nothing else."),
    ] = None,
    json: Json = None,
) -> None:
    """Draw the mesh, who holds which region of each tensor, memory per rank, and the sizes of the tensors.

    Exit code 2: there is nothing to draw, or it can't be read.
    """
    with refusing("visualize"):
        check_target(json)
        wanted = Wanted(filter, section)
        if mesh is not None and section is not None:
            raise RefusedError("--section goes with a checkpoint's files; with --mesh only the model is drawn")
        picture = _picture(path, mesh, tuple(parse_rule(text) for text in rule or ()), wanted)
        if html is not None:
            write(html, picture.html())
        report(json, _value(picture), lambda console: _show(console, picture, html))


def _picture(path: str | None, mesh: str | None, rules: tuple[Rule, ...], wanted: Wanted) -> Picture:
    if mesh is not None:
        return _of_mesh(path, mesh, parse_mesh(mesh), rules, wanted.pattern)
    if path is None:
        raise RefusedError("name a checkpoint, or a mesh with --mesh, or both")
    if rules:
        raise RefusedError("--rule goes with --mesh only")
    if is_schema(path):
        raise RefusedError(f"{path}: to draw a schema, say for which mesh: --mesh fsdp=4")
    return _of_files(path, wanted)


def _of_mesh(path: str | None, text: str, mesh: Mesh, rules: tuple[Rule, ...], pattern: str | None) -> Picture:
    check_names(mesh, rules)
    ranks = mesh.ranks
    if path is None:
        shape = EXAMPLE[1]
        tensors = [
            drawn(fqn, EXAMPLE[0], shape, layout_of(mesh, fqn, shape, rules), ranks)
            for fqn in EXAMPLE_FQNS
            if matches(fqn, pattern)
        ]
        title = f"{counted(len(tensors), 'tensor')} of {list(shape)} on {text}"
    else:
        found = read_schema(path)
        tensors = [
            drawn(t.fqn, t.dtype, t.shape, layout_of(mesh, t.fqn, t.shape, rules) if t.sharded else None, ranks)
            for t in found
            if matches(t.fqn, pattern)
        ]
        title = f"{_name(path)}{'' if is_schema(path) else ', the model,'} on {text}"
    if not tensors:
        raise RefusedError(f"no name matches {pattern!r}")
    return Picture(title, tuple(tensors), tuple(f"rank {rank}" for rank in ranks), mesh)


def _name(path: str) -> str:
    """The last part of a path or URL."""
    return path.rstrip("/").rpartition("/")[2] or path


def _of_files(path: str, wanted: Wanted) -> Picture:
    """Who holds what: the files of a checkpoint."""
    with open_contents(path) as opened:
        made = [
            Drawn(
                one.name if one.section == "model" else f"optim: {one.name}",
                one.dtype,
                one.shape,
                tuple((chunk.box, (chunk.file,)) for chunk in one.chunks if chunk.box.size),
            )
            for one in opened.contents.tensors
            if wanted.takes(one.section, one.name)
        ]
        names = opened.files
        if made and not any(one.regions for one in made):
            names = (_name(path),)
            made = [Drawn(one.name, one.dtype, one.shape, ((whole(one.shape), (0,)),)) for one in made]
    if not made:
        raise RefusedError(f"{path} holds no tensor" + (f" that {wanted} fits" if wanted.some else ""))
    used = sorted({holder for one in made for _, held in one.regions for holder in held})
    number = {holder: n for n, holder in enumerate(used)}  # files that hold nothing of this are not drawn
    shown = [
        replace(one, regions=tuple((box, tuple(number[holder] for holder in held)) for box, held in one.regions))
        for one in made
    ]
    title = f"{_name(path)}: {counted(len(made), 'tensor')} in {counted(len(used), 'file')}"
    return Picture(title, tuple(shown), tuple(names[holder] for holder in used))


def _value(picture: Picture) -> dict[str, Any]:
    """The picture as JSON has it. Regions are [start, stop, holders], tensors that look alike stand once."""
    mesh = picture.mesh
    return {
        "title": picture.title,
        "mesh": None if mesh is None else dict(zip(mesh.names or (), mesh.shape, strict=False)),
        "holders": list(picture.holders),
        "memory": picture.memory,
        "kinds": [
            {
                "name": kind.first.name,
                "count": kind.count,
                "dtype": kind.first.dtype,
                "shape": list(kind.first.shape),
                "nbytes": kind.first.nbytes,
                "regions": [[list(box.start), list(box.stop), list(held)] for box, held in kind.first.regions],
            }
            for kind in picture.kinds
        ],
    }


def _show(console: Console, picture: Picture, html: Path | None) -> None:
    coloured = console.is_terminal
    for line in picture.lines(min(console.width, 120) if coloured else 80):
        text = Text()
        for words, holder in line:
            style = "" if holder is None or not coloured else _style(words, colour(holder))
            text.append(words, style)
        console.print(text, soft_wrap=True)
    if html is not None:
        console.print(f"\nAs a page: {html}", markup=False, highlight=False, soft_wrap=True)


def _style(words: str, shade: str) -> str:
    return shade if words.startswith("█") else f"black on {shade}"
