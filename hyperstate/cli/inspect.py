"""`hyperstate inspect`: what a checkpoint holds, from its metadata alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from ..checkpoint.manifest import Stored
from ..schema import put_together
from .common import CHECKPOINT, FILTER, Json, RefusedError, check_target, counted, refusing, report, size
from .contents import Opened, Wanted, open_contents

FQNS = 3
"""Parameters of a group that people see."""


def inspect(
    path: Annotated[str, typer.Argument(help=CHECKPOINT, metavar="PATH")],
    filter: Annotated[  # noqa: A002  # the option's name
        str | None, typer.Option(metavar="GLOB", help=FILTER)
    ] = None,
    section: Annotated[
        str | None, typer.Option(metavar="SECTION", help="Only the model's or the optimizer's: model or optim.")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Levels of names to open; below them sums.")] = None,
    held: Annotated[bool, typer.Option("--held", help="Also which file holds which region of each tensor.")] = False,
    json: Json = None,
) -> None:
    """Show the names in a checkpoint as a tree, with dtype, shape, size and layout; its files and param groups.

    Only metadata and headers are read, without any framework. Exit code 2: there is no checkpoint, or none that can be
    read.
    """
    with refusing("inspect"):
        check_target(json)
        wanted = Wanted(filter, section)
        with open_contents(path) as opened:
            tensors = [one for one in opened.contents.tensors if wanted.takes(one.section, one.name)]
            value = _value(path, opened, tensors, wanted)
            if wanted.some and not (tensors or value["values"] or value["param_groups"]):
                raise RefusedError(f"{path} holds nothing that {wanted} fits")
            report(json, value, lambda console: _show(console, value, opened, tensors, depth, held))


def _value(path: str, opened: Opened, tensors: Sequence[Stored], wanted: Wanted) -> dict[str, Any]:
    """All of it, as JSON has it."""
    contents = opened.contents
    return {
        "path": path,
        "format": opened.format,
        "names": contents.naming,
        "nbytes": sum(tensor.nbytes for tensor in tensors),
        "tensors": [
            {
                "section": one.section,
                "name": one.name,
                "dtype": one.dtype,
                "shape": list(one.shape),
                "nbytes": one.nbytes,
                "sharded": one.sharded,
                "chunks": [
                    [_file(opened, chunk.file), list(chunk.box.start), list(chunk.box.stop)] for chunk in one.chunks
                ],
            }
            for one in tensors
        ],
        "values": len([key for key, entry in contents.entries.items() if not entry.tensors and wanted.key(key)]),
        "param_groups": [
            {
                "number": number,
                "params": params,
                "fields": {name: repr(field) for name, field in _fields(skeleton).items()},
            }
            for number, (fqns, skeleton) in enumerate(contents.groups)
            if (params := wanted.params(contents, fqns)) or not wanted.some
        ],
        "tied": {
            alias: fqn
            for alias, fqn in contents.tied.items()
            if wanted.takes("model", alias) or wanted.takes("model", fqn)
        },
        "files": [file for file in _files(opened, tensors) if file["chunks"] or not wanted.some],
    }


def _file(opened: Opened, number: int) -> str:
    return opened.files[number] if number < len(opened.files) else ""


def _files(opened: Opened, tensors: Sequence[Stored]) -> list[dict[str, Any]]:
    """Who holds how much."""
    held = [[0, 0] for _ in opened.files]
    for tensor in tensors:
        for chunk in tensor.chunks:
            if chunk.file < len(held):
                held[chunk.file][0] += 1
                held[chunk.file][1] += tensor.itemsize * chunk.box.size
    return [
        {"name": name, "chunks": chunks, "nbytes": nbytes}
        for name, (chunks, nbytes) in zip(opened.files, held, strict=True)
    ]


def _fields(skeleton: Any) -> dict[str, Any]:
    """The fields of a group; tensors among them by dtype and shape."""
    found: dict[str, Any] = put_together(skeleton, lambda item: str(item)[:40])
    return found


# -- for people --------------------------------------------------------------------------------------


def _show(
    console: Console, value: dict[str, Any], opened: Opened, tensors: Sequence[Stored], depth: int | None, held: bool
) -> None:
    console.print(f"{value['path']}: {value['format']} checkpoint", markup=False, soft_wrap=True)
    more = f", {counted(value['values'], 'other value')}" if value["values"] else ""
    files = f", {counted(len(value['files']), 'file')}" if value["files"] else ""
    console.print(f"{counted(len(tensors), 'tensor')}, {size(value['nbytes'])}{more}{files}")
    for section in ("model", "optim"):
        some = [one for one in tensors if one.section == section]
        if some:
            root = Tree(f"[bold]{section}[/]  {_sum(some)}")
            _grow(root, opened, [(one.name.split("."), one) for one in some], depth, held)
            console.print(root, soft_wrap=True)
    for group in value["param_groups"]:
        fields = ", ".join(f"{name}={text}" for name, text in group["fields"].items())
        names = ", ".join(group["params"][:FQNS]) + (", …" if len(group["params"]) > FQNS else "")
        held_by = f"{counted(len(group['params']), 'parameter')}" + (f" ({names})" if names else "")
        text = f"param group {group['number']}: {held_by}; {fields}"
        console.print(text, markup=False, soft_wrap=True)
    for alias, fqn in value["tied"].items():
        console.print(f"tied: {alias} is {fqn}", markup=False, soft_wrap=True)
    for file in value["files"]:
        text = f"{file['name']}: {counted(file['chunks'], 'chunk')}, {size(file['nbytes'])}"
        console.print(text, markup=False, soft_wrap=True, style="dim")


def _sum(tensors: Sequence[Stored]) -> str:
    return f"{counted(len(tensors), 'tensor')}, {size(sum(one.nbytes for one in tensors))}"


def _grow(
    branch: Tree, opened: Opened, named: Sequence[tuple[list[str], Stored]], depth: int | None, held: bool
) -> None:
    """Hang the tensors under `branch`; a level with a single name joins the next one."""
    groups: dict[str, list[tuple[list[str], Stored]]] = {}
    for path, tensor in named:
        groups.setdefault(path[0], []).append((path[1:], tensor))
    for name, inner in groups.items():
        label = name
        while len({path[0] if path else "" for path, _ in inner}) == 1 and inner[0][0]:
            label += f".{inner[0][0][0]}"
            inner = [(path[1:], tensor) for path, tensor in inner]
        leaves = [tensor for path, tensor in inner if not path]
        for tensor in leaves:
            leaf = branch.add(f"{escape(label)}  {_leaf(tensor)}")
            for chunk in tensor.chunks if held else ():
                ranges = ", ".join(f"{a}:{b}" for a, b in zip(chunk.box.start, chunk.box.stop, strict=True))
                leaf.add(f"[dim]{escape(f'[{ranges}]')} in {escape(_file(opened, chunk.file))}[/]")
        rest = [(path, tensor) for path, tensor in inner if path]
        if rest and depth is not None and depth <= 1:
            branch.add(f"[bold]{escape(label)}[/]  {_sum([tensor for _, tensor in rest])}")
        elif rest:
            below = None if depth is None else depth - 1
            _grow(branch.add(f"[bold]{escape(label)}[/]"), opened, rest, below, held)


def _leaf(tensor: Stored) -> str:
    text = f"{tensor.dtype} {escape(str(list(tensor.shape)))}  {size(tensor.nbytes)}"
    return text + (f"  {_cut(tensor)}" if len(tensor.chunks) > 1 else "")


def _cut(tensor: Stored) -> str:
    """Along which dims it is cut, into how many regions."""
    dims = [d for d in range(len(tensor.shape)) if len({chunk.box.start[d] for chunk in tensor.chunks}) > 1]
    return f"[cyan]{len(tensor.chunks)} regions along dim {', '.join(map(str, dims))}[/]"
