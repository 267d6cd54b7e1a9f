"""`hyperstate diff`: in what two checkpoints differ, whatever their formats and meshes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from ..checkpoint.manifest import Saved
from ..checkpoint.origins import blocks
from ..checkpoint.progress import Meter
from ..schema import DTYPES, Key, alike, counter_of, put_together
from .common import (
    CHECKPOINT,
    DIFFERENT,
    FILTER,
    Json,
    RefusedError,
    check_target,
    count,
    counted,
    matches,
    progress,
    refusing,
    report,
)
from .compare import Distance, compare, numbers
from .contents import Opened, open_contents

SHOWN = 40
"""Differences of one kind that people see; JSON has all."""
KINDS = {
    "missing": "only in the first",
    "unexpected": "only in the second",
    "shape": "of other shapes",
    "dtype": "of other dtypes",
    "value": "of other values",
}


@dataclass(frozen=True)
class Difference:
    """One name under which the two differ."""

    kind: str
    name: str
    first: str = ""
    second: str = ""
    elements: int = 0
    """Elements of the tensor."""
    distance: Distance | None = None


def diff(
    first: Annotated[str, typer.Argument(help=CHECKPOINT, metavar="FIRST")],
    second: Annotated[str, typer.Argument(help="Another; of any format, saved from any mesh.", metavar="SECOND")],
    digest: Annotated[
        bool,
        typer.Option(
            "--digest",
            help="Only whether values are equal: by checksums where both have them, else until the first difference.",
        ),
    ] = False,
    filter: Annotated[  # noqa: A002  # the option's name
        str | None, typer.Option(metavar="GLOB", help=FILTER)
    ] = None,
    json: Json = None,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes, and values bit by bit, with the largest difference in absolute
    terms and, between numbers of one sign, in units of the last place (ulp). Tensors are compared whole, however they
    were cut.

    Exit code 1: they differ; 2: one can't be read.
    """
    with refusing("diff"):
        check_target(json)
        with open_contents(first, values=True) as one, open_contents(second, values=True) as two:
            wanted = [key for key in _keys(one, two) if matches(show_key(key), filter)]
            if not wanted:
                text = (
                    f"no name matches {filter!r}"
                    if filter is not None
                    else "neither has values of a model or optimizer"
                )
                raise RefusedError(f"nothing to compare: {text}")
            with progress("comparing") as step:
                meter = Meter(step, sum(one.nbytes_of(key) for key in wanted))
                found = [d for key in wanted for d in compare_key(one, two, key, digest=digest, meter=meter)]
            if filter is None:
                found += _groups(one, two)
        value = {
            "equal": not found,
            "compared": len(wanted),
            "differences": [asdict(one) for one in found],
        }
        report(json, value, lambda console: _show(console, found, len(wanted)))
    if found:
        raise typer.Exit(DIFFERENT)


def show_key(key: Key) -> str:
    """A name for people: the FQN of a model's value, else with its section before it."""
    return str(key[1]) if key[0] == "model" else ".".join(map(str, key))


def _keys(one: Opened, two: Opened) -> list[Key]:
    return sorted({*one.contents.entries, *two.contents.entries}, key=lambda key: (key[0] != "model", show_key(key)))


def compare_key(one: Opened, two: Opened, key: Key, *, digest: bool, meter: Meter) -> Iterator[Difference]:
    """The differences under one name."""
    name, a, b = show_key(key), one.contents.entries.get(key), two.contents.entries.get(key)
    if a is None or b is None:
        there = (one, a) if a is not None else (two, b)
        text = _brief(*there)
        yield Difference("missing" if b is None else "unexpected", name, *(("", text) if a is None else (text, "")))
        return
    if len(a.tensors) != len(b.tensors) or not alike(a.skeleton, b.skeleton):
        yield Difference("value", name, _brief(one, a), _brief(two, b))
        return
    for left, right in zip(a.tensors, b.tensors, strict=True):
        x, y = one.contents.tensors[left], two.contents.tensors[right]
        if x.shape != y.shape:
            yield Difference("shape", name, str(list(x.shape)), str(list(y.shape)))
        elif x.dtype != y.dtype:
            yield Difference("dtype", name, x.dtype, y.dtype)
        else:
            distance = _distance(one, left, two, right, digest)
            if distance.differing:
                yield Difference("value", name, elements=x.nbytes // x.itemsize, distance=distance)
        meter.step(x.nbytes, x.name)


def _brief(opened: Opened, entry: Saved | None) -> str:
    assert entry is not None
    if not entry.tensors:
        return _words(entry.skeleton)
    tensor = opened.contents.tensors[entry.tensors[0]]
    return f"{tensor.dtype} {list(tensor.shape)}"


def _distance(one: Opened, left: int, two: Opened, right: int, digest: bool) -> Distance:
    """How far two tensors of one shape and dtype are apart; after `digest` only whether."""
    x, y = one.contents.tensors[left], two.contents.tensors[right]
    assert one.origin is not None and two.origin is not None
    found = Distance()
    if digest and one.summed and two.summed and [c.box for c in x.chunks] == [c.box for c in y.chunks]:
        if [c.sums for c in x.chunks] != [c.sums for c in y.chunks]:
            found.differing, found.numeric = 1, False
        return found
    start, itemsize = 0, DTYPES[x.dtype][0]
    for box in blocks(x.shape, x.dtype):
        room = bytearray(itemsize * box.size), bytearray(itemsize * box.size)
        one.origin.read(left, box, memoryview(room[0]))
        two.origin.read(right, box, memoryview(room[1]))
        if room[0] != room[1]:
            if digest:
                found.differing, found.numeric = 1, False
                return found
            compare(memoryview(room[0]), memoryview(room[1]), x.dtype, start, found)
        start += box.size
    return found


def _groups(one: Opened, two: Opened) -> list[Difference]:
    """Fields of param groups, parameter by parameter: groups may be cut otherwise."""
    left, right = _fields(one), _fields(two)
    found = []
    for fqn in sorted({*left, *right}) if left and right else ():
        a, b = left.get(fqn, {}), right.get(fqn, {})
        for field in sorted({*a, *b}):
            x, y = a.get(field, "absent"), b.get(field, "absent")
            if not alike(x, y):
                found.append(Difference("value", f"param_group.{fqn}.{field}", _words(x), _words(y)))
    return found


def _words(skeleton: Any) -> str:
    """A value that is no large tensor, as Python writes it; a counter is its number."""

    def leaf(item: Any) -> Any:
        if "T" not in item:
            return str(item)
        spec, data = counter_of(item)
        known = numbers(data, spec.dtype)
        return known[0] if known else f"{spec.dtype} {data.hex()}"

    return repr(put_together(skeleton, leaf))[:60]


def _fields(opened: Opened) -> dict[str, Mapping[str, Any]]:
    return {
        fqn: {str(name): skeleton for name, skeleton in fields["{"]}
        for fqns, fields in opened.contents.groups
        for fqn in fqns
    }


# -- for people --------------------------------------------------------------------------------------


def _show(console: Console, found: list[Difference], compared: int) -> None:
    for kind, words in KINDS.items():
        some = [one for one in found if one.kind == kind]
        if not some:
            continue
        console.print(f"[bold]{kind}[/]: {count(len(some))} {words}")
        for one in some[:SHOWN]:
            console.print(f"  {one.name}{_how(one)}", markup=False, soft_wrap=True)
        if len(some) > SHOWN:
            console.print(f"  … and {len(some) - SHOWN} more")
    verdict = "[bold red]DIFFERENT[/]" if found else "[bold green]EQUAL[/]"
    console.print(f"{verdict}: {counted(compared, 'name')} compared, {counted(len(found), 'difference')}")


def _how(one: Difference) -> str:
    if one.distance is None:
        both = [text for text in (one.first, one.second) if text]
        return f": {' and '.join(both)}" if both else ""
    d = one.distance
    if not d.numeric:
        return ": the bytes differ"
    ulp = f", {count(d.max_ulp)} ulp" if d.max_ulp else ""
    sign = f"; {count(d.signs)} with the other sign" if d.signs else ""
    return (
        f": {count(d.differing)} of {counted(one.elements, 'element')}, at most {d.max_abs:.4g}{ulp}{sign}; "
        f"first at {d.first}"
    )
