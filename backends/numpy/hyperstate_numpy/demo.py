"""What each rank of `hyperstate demo --backend numpy` does, where no framework is installed.

Ranks are threads of one process, so bytes and messages are counted by the fabric, and memory and CPU seconds
of one rank can't be told apart. The comparison gathers with the toy framework's own ``full_tensor``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import hyperstate
from hyperstate_numpy import job
from hyperstate_numpy.arrays import Tensor
from hyperstate_numpy.sharded import DTensor

BEFORE, AFTER = 3, 2
SIZES = (255, 513, 255)
HOW = (
    "Ranks are threads, the framework is the reference backend's own, and all ranks train on the same data: two meshes "
    "can differ only by what the move of the state changed."
)
LEGEND = (
    "MiB sent and messages: of all ranks, as the reference fabric counts. Memory and CPU seconds of one thread are not "
    "known."
)
FROM_ROOT = hyperstate.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@dataclass
class Report:
    """See hyperstate_torch.demo."""

    title: str = f"a perceptron of widths {', '.join(map(str, SIZES))} with a normalisation, and Adam"
    versions: str = f"numpy {np.__version__}"
    how: str = HOW
    legend: str = LEGEND
    meshes: list[str] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    refused: str = ""


def rank_main(kit: Any, *, folder: str | None = None, file: str | None = None) -> dict[str, Any]:
    """The whole demo on one rank."""
    report = Report()
    if folder is not None or file is not None:
        report.refused = "--model, --checkpoint and --fetch-example need PyTorch: add --backend torch"
        return asdict(report)
    report.meshes = [f"{kit.world}-rank FSDP", f"2×{kit.world // 2} HSDP"]
    target = report.meshes[1]
    first = _start(kit, kit.mesh((kit.world,), ("shard",)), seed=0)
    second = _start(kit, kit.mesh((2, kit.world // 2), ("replica", "shard")), seed=1)
    kit.train(*first, BEFORE)
    with _measured(kit, report, "full state, to the root"):
        options = hyperstate.StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optim = hyperstate.get_state_dict(*first, options=options)
    with _measured(kit, report, f"from it into {target}"):
        hyperstate.set_state_dict(*second, model_state_dict=model, optim_state_dict=optim, options=FROM_ROOT)
    _compare(report, f"right after the move: {target}", kit, first, second)
    kit.train(*first, AFTER, BEFORE)
    kit.train(*second, AFTER, BEFORE)
    _compare(report, f"{AFTER} steps later: {target}", kit, first, second)
    alone = _start(kit, None, seed=0)
    kit.train(*alone, BEFORE + AFTER)
    _compare(report, f"{AFTER} steps later: one process that trained alone", kit, first, alone)
    return asdict(report)


def _start(kit: Any, mesh: Any, seed: int) -> tuple[Any, Any]:
    """A model, sharded if there is a mesh, with a fresh optimizer."""
    model = kit.model(seed, SIZES)
    model = model if mesh is None else kit.shard(model, mesh)
    return model, kit.optimizer(model)


@contextmanager
def _measured(kit: Any, report: Report, call: str) -> Iterator[None]:
    _meet()
    kit.traffic(reset=True)
    start = time.perf_counter()
    yield
    wall = time.perf_counter() - start
    counts = kit.traffic()
    _meet()
    cost = {"sent": counts["bytes_sent"], "messages": counts["messages"], "peak": None, "cpu": None, "wall": wall}
    report.costs.append({"call": call, "by": "hyperstate", **cost})


def _meet() -> None:
    here = job.current()
    if here is not None:
        here.meet(tuple(range(here.world)), None)


def _compare(report: Report, what: str, kit: Any, left: tuple[Any, Any], right: tuple[Any, Any]) -> None:
    mine, others = _values(kit, *left), _values(kit, *right)
    differences = [name for name in sorted({*mine, *others}) if mine.get(name) != others.get(name)]
    report.checks.append({"what": what, "compared": len(mine), "differences": differences[:5], "decides": True})


def _values(kit: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """Full values by name, as bytes; all ranks must call this."""
    found = {f"model {name}": _bytes(value) for name, value in kit.named(model).items()}
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            found[f"optimizer {name} {key}"] = _bytes(value)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in kit.groups(optimizer):
        fields = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            found[f"group of {names[id(parameter)]}"] = fields
    return found


def _bytes(value: Any) -> Any:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return (full.dtype, full.shape, full.array.tobytes()) if isinstance(full, Tensor) else full
