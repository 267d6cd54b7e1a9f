"""`hyperstate plan`: what moving a state would cost on meshes that need not exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..layout import Mesh
from ..simulate.costs import (
    BANDWIDTHS,
    LATENCY_S,
    OPERATIONS,
    OPTIMIZERS,
    Figures,
    Job,
    Tensor,
    simulate,
    with_optimizer,
)
from ..simulate.placement import Rule, layout_of, parse_mesh, parse_rule
from .common import Json, RefusedError, check_target, count, counted, refusing, report, seconds, size, steps
from .schemas import SCHEMA, read_schema

GB = 1e9


def plan(
    schema: Annotated[str, typer.Argument(help=SCHEMA, metavar="SCHEMA")],
    source: Annotated[str, typer.Option("--from", metavar="MESH", help="The mesh that holds the state: fsdp=8.")],
    target: Annotated[
        str | None, typer.Option("--to", metavar="MESH", help="The mesh that it goes to: dp=4,tp=2. Default: the same.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help=f"State beside the parameters: {', '.join(OPTIMIZERS)}.")] = "none",
    optimizer_dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Of the optimizer's state. Default: the parameter's.")
    ] = "",
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:GLOB=DIM",
            help="What the mesh dimension NAME shards: tp:*.wq.weight=0. The first that fits decides. Repeatable.",
        ),
    ] = None,
    bandwidth: Annotated[
        list[float] | None, typer.Option(metavar="GB/S", help="Of each rank, in and out. Repeatable.")
    ] = None,
    latency: Annotated[float, typer.Option(metavar="µS", help="Per message.")] = LATENCY_S * 1e6,
    json: Json = None,
) -> None:
    """Plan every operation between two meshes of up to 16,384 ranks, without any rank: bytes, messages, memory, time.

    Mesh dimensions called fsdp (shard, dp_shard) shard every tensor along dim 0; dp (replica, replicate, dp_replicate)
    replicate; tp shards as Megatron does, by the usual names of layers; ep shards stacked experts; --rule says others.
    Beside each figure stands that of PyTorch's whole-tensor all-gather and broadcast.
    Exit code 2: the schema or a mesh can't be read.
    """
    with refusing("plan"):
        check_target(json)
        widths = [width * GB for width in bandwidth or [width / GB for width in BANDWIDTHS]]
        if min(widths) <= 0 or latency < 0:
            raise RefusedError("--bandwidth must be above 0, --latency not below")
        meshes = parse_mesh(source), parse_mesh(target or source)
        tensors = read_schema(schema)
        rules = tuple(parse_rule(text) for text in rule or ())
        job = Job(with_optimizer(tensors, optimizer, optimizer_dtype), *meshes, rules, widths, latency / 1e6)
        with steps("planning", len(OPERATIONS)) as step:
            figures = simulate(job, lambda _: step(1))
        value = _value(job, tensors, optimizer, figures)
        report(json, value, lambda console: _show(console, job, value, figures))


def _value(job: Job, tensors: Sequence[Tensor], optimizer: str, figures: Sequence[Figures]) -> dict[str, Any]:
    """The result as JSON has it."""
    return {
        "tensors": len(tensors),
        "nbytes": sum(tensor.nbytes for tensor in tensors),
        "optimizer": optimizer,
        "nbytes_with_optimizer": sum(tensor.nbytes for tensor in job.tensors),
        "from": _placed(job.source, tensors, job.rules),
        "to": _placed(job.target, tensors, job.rules),
        "latency": job.latency,
        "operations": [asdict(one) for one in figures],
    }


def _placed(mesh: Mesh, tensors: Sequence[Tensor], rules: Sequence[Rule]) -> dict[str, Any]:
    """A mesh, and how many tensors lie on it in which way."""
    ways: Counter[str] = Counter()
    names = mesh.names or ()
    for tensor in tensors:
        if not tensor.sharded:
            ways["plain"] += 1
            continue
        splits = layout_of(mesh, tensor.fqn, tensor.shape, rules).splits
        parts = [f"dim {d} by {', '.join(names[m] for m in split)}" for d, split in enumerate(splits) if split]
        ways[" and ".join(parts) or "replicated"] += 1
    return {
        "mesh": dict(zip(names, mesh.shape, strict=True)),
        "ranks": len(mesh.ranks),
        "tensors": dict(sorted(ways.items(), key=lambda way: (-way[1], way[0]))),
    }


# -- for people --------------------------------------------------------------------------------------


def _show(console: Console, job: Job, value: dict[str, Any], figures: Sequence[Figures]) -> None:
    state = f", {size(value['nbytes_with_optimizer'])} with {value['optimizer']}"
    if value["optimizer"] == "none":
        state = ", without optimizer state (--optimizer adam counts Adam's)"
    console.print(f"{counted(value['tensors'], 'tensor')}, {size(value['nbytes'])}{state}", markup=False)
    for word in ("from", "to"):
        placed = value[word]
        mesh = ",".join(f"{name}={n}" for name, n in placed["mesh"].items())
        ways = "; ".join(f"{number} {way}" for way, number in placed["tensors"].items())
        console.print(f"{word + ':':5} {mesh} ({counted(placed['ranks'], 'rank')}): {ways}", markup=False)
    console.print(_volumes(figures))
    console.print(_rest(job, figures))
    widths = ", ".join(f"{width / GB:g}" for width in job.bandwidths)
    console.print(
        f"Per rank; root is rank 0. Messages: of the rank that sends most; PyTorch's are collective calls.\n"
        f"Peak: above what was in use. Time: {widths} GB/s of each rank, {seconds(job.latency)} a message.",
        style="dim",
        markup=False,
    )
    sampled = [one for one in figures if one.counted]
    if sampled:
        names = ", ".join(f"{one.operation} ({count(one.counted)} of {count(one.ranks)})" for one in sampled)
        console.print(f"Senders that stand for all: {names}. What is received is of all ranks.", markup=False)


def _volumes(figures: Sequence[Figures]) -> Table:
    """Bytes on the wire."""
    table = _columns("sent\nroot", "sent\nmax", "sent\nmean", "received\nroot", "received\nmax")
    for one in figures:
        cells = (one.sent_root, one.sent_max, one.sent_mean, one.received_root, one.received_max)
        _rows(table, one, list(map(size, cells)))
    return table


def _rest(job: Job, figures: Sequence[Figures]) -> Table:
    """Messages, memory and time."""
    times = [f"time at\n{width / GB:g} GB/s" for width in job.bandwidths]
    table = _columns("messages", "peak\nroot", "peak\nothers", *times)
    for one in figures:
        cells = [count(one.messages_max), size(one.peak_root), size(one.peak_others)]
        _rows(table, one, [*cells, *map(seconds, one.seconds.values())])
    return table


def _columns(*names: str) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _rows(table: Table, one: Figures, cells: list[str]) -> None:
    """An operation is named once, above its two rows."""
    if one.by == "hyperstate":
        table.add_row(f"[bold]{one.operation}[/]")
    table.add_row(f"  {one.by}", *cells)
