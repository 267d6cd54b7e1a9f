"""How an `Outcome` looks: tables for people, JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import metadata

from rich import box
from rich.console import Console
from rich.table import Table

from .demo import Cost, Outcome

MIB = 2**20


def as_json(outcome: Outcome) -> str:
    """The outcome as JSON text; bytes and seconds are plain numbers."""
    return json.dumps({"equal": outcome.equal, **asdict(outcome)}, indent=2, ensure_ascii=False)


def show(console: Console, outcome: Outcome) -> None:
    """Print the outcome."""
    ours = f"hyperstate {metadata.version('hyperstate-dist')}"
    console.print(f"{ours}, {outcome.versions}, {outcome.ranks} ranks on this machine's CPUs", markup=False)
    console.print(outcome.title + ".", markup=False)
    console.print(outcome.how, markup=False)
    console.print()
    console.print(_checks(outcome))
    console.print(_costs(outcome.costs))
    console.print(outcome.legend, style="dim", markup=False)
    console.print()
    if outcome.equal:
        console.print(f"[bold green]EQUAL[/]: every value on {outcome.meshes[1]} has the bits of {outcome.meshes[0]}.")
        console.print("Next: the script in README.md, which draws what it moves on both meshes.", style="dim")
    else:
        first = next((check for check in outcome.checks if check.decides and not check.equal), None)
        names = ", ".join(first.differences) if first and first.differences else "nothing was compared"
        console.print("[bold red]NOT EQUAL[/]:", end=" ")
        console.print(f"{first.what if first else 'no check ran'}: {names}", markup=False)


def _checks(outcome: Outcome) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(f"compared with {outcome.meshes[0]}, bit by bit")
    table.add_column("values", justify="right")
    table.add_column("verdict")
    for check in outcome.checks:
        table.add_row(check.what, str(check.compared), "[green]equal[/]" if check.equal else "[red]not equal[/]")
    return table


def _costs(costs: list[Cost]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("what moved", "by"):
        table.add_column(name)
    for name in ("MiB\nsent", "mes-\nsages", "peak\nroot", "peak\nothers", "CPU s", "wall s"):
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for cost in costs:
        figures = (_mib(cost.sent), _count(cost.messages), _mib(cost.peak_root), _mib(cost.peak_others))
        table.add_row(
            cost.call if cost.call != last else "", cost.by, *figures, _seconds(cost.cpu), _seconds(cost.wall)
        )
        last = cost.call
    return table


def _mib(value: int | None) -> str:
    return "–" if value is None else f"{value / MIB:.1f}"


def _count(value: int | None) -> str:
    return "–" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
