"""What each rank of `hyperstate demo --backend mindspore` does: train sharded, move the state, train on, compare.

The comparison gathers with this package's `unsharded` and `DTensor.full_tensor`, not with the functions shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

import hyperstate
from hyperstate.testing.meter import measured
from hyperstate_mindspore import groups, layouts
from hyperstate_mindspore.sharded import DTensor, init_device_mesh
from hyperstate_mindspore.training import shard_module, unsharded, value_and_grad

BEFORE, AFTER = 3, 2
WIDTHS = (255, 513, 255)
HOW = (
    "All ranks train on the same data, and both meshes average gradients over the same ranks in one order: they can "
    "differ only by what the move of the state changed."
)
LEGEND = (
    "MiB sent: by all ranks' TCP connections, as the kernel counts. messages: point-to-point, of all ranks. peak: MiB "
    "above the start of the call; others: the highest of them. CPU s: all ranks together."
)
FROM_ROOT = hyperstate.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@dataclass
class Report:
    """See hyperstate_torch.demo."""

    title: str = f"Dense, LayerNorm, Tanh, Dense of widths {', '.join(map(str, WIDTHS))}, and nn.AdamWeightDecay"
    versions: str = f"mindspore {ms.__version__}"
    how: str = HOW
    legend: str = LEGEND
    meshes: list[str] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    refused: str = ""


@dataclass
class Run:
    """A sharded cell and its optimizer."""

    cell: Any
    optimizer: Any

    def train(self, first: int, steps: int) -> None:
        step = value_and_grad(lambda batch: self.cell(batch).square().mean(), self.cell, self.optimizer.parameters)
        for number in range(first, first + steps):
            batch = np.random.default_rng(number).standard_normal((16, WIDTHS[0])).astype(np.float32)
            _, gradients = step(ms.Tensor(batch))
            self.optimizer(gradients)


def rank_main(kit: Any, *, folder: str | None = None, file: str | None = None) -> dict[str, Any]:
    """The whole demo on one rank."""
    report = Report()
    if folder is not None or file is not None:
        report.refused = "--model, --checkpoint and --fetch-example need PyTorch: add --backend torch"
        return asdict(report)
    report.meshes = [f"{kit.world}-rank FSDP", f"2×{kit.world // 2} HSDP"]
    target = report.meshes[1]
    first = _start((kit.world,), seed=0)
    second = _start((2, kit.world // 2), seed=1)
    first.train(0, BEFORE)
    with _measured(kit, report, "full state, to the root"):
        options = hyperstate.StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optim = hyperstate.get_state_dict(first.cell, first.optimizer, options=options)
    with _measured(kit, report, f"from it into {target}"):
        hyperstate.set_state_dict(
            second.cell, second.optimizer, model_state_dict=model, optim_state_dict=optim, options=FROM_ROOT
        )
    _compare(report, f"right after the move: {target}", first, second)
    first.train(BEFORE, AFTER)
    second.train(BEFORE, AFTER)
    _compare(report, f"{AFTER} steps later: {target}", first, second)
    return asdict(report)


def _start(shape: tuple[int, ...], seed: int) -> Run:
    """A cell sharded over a mesh of that shape, with a fresh optimizer."""
    a, b, c = WIDTHS
    cell = nn.SequentialCell(nn.Dense(a, b), nn.LayerNorm((b,)), nn.Tanh(), nn.Dense(b, c))
    made = np.random.default_rng(seed)
    for parameter in cell.get_parameters():
        values = made.standard_normal(tuple(parameter.shape)) * 0.05 + ("gamma" in parameter.name)
        parameter.set_data(ms.Tensor(values.astype(np.float32)))
    shard_module(cell, init_device_mesh(shape))
    return Run(cell, nn.AdamWeightDecay(cell.trainable_params(), learning_rate=0.01))


@contextmanager
def _measured(kit: Any, report: Report, call: str) -> Iterator[None]:
    def meet() -> None:
        groups.all_reduce(np.zeros(1, np.float32), tuple(range(kit.world)))

    kit.traffic(reset=True)
    with measured(meet) as cost:
        yield
        messages = kit.traffic()["messages"]
    report.costs.append({"call": call, "by": "hyperstate", "messages": messages, **asdict(cost)})


def _compare(report: Report, what: str, left: Run, right: Run) -> None:
    mine, others = _values(left), _values(right)
    differences = [name for name in sorted({*mine, *others}) if mine.get(name) != others.get(name)]
    report.checks.append({"what": what, "compared": len(mine), "differences": differences[:5], "decides": True})


def _values(run: Run) -> dict[str, Any]:
    """Full values by name, as bytes; all ranks must call this."""
    with unsharded(run.cell):
        found = {f"model {fqn}": _bytes(value) for fqn, value in run.cell.parameters_and_names()}
    names = {id(parameter): fqn for fqn, parameter in run.cell.parameters_and_names()}
    for i, parameter in enumerate(run.optimizer.parameters):
        noted = layouts.recorded(parameter)
        assert noted is not None
        for key in ("moments1", "moments2"):
            part = layouts.trimmed(parameter, getattr(run.optimizer, key)[i])
            full = DTensor(part, noted.device_mesh, noted.placements, noted.shape).full_tensor()
            found[f"optimizer {names[id(parameter)]} {key}"] = _bytes(full)
    found["optimizer global_step"] = _bytes(run.optimizer.global_step)
    found["optimizer learning_rate"] = _bytes(run.optimizer.get_lr())
    return found


def _bytes(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    return str(value.dtype), tuple(value.shape), value.asnumpy().tobytes()
