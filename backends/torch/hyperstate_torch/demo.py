"""What each rank of `hyperstate demo` does: train sharded, move the state to another mesh, train on, compare.

The comparison does not use hyperstate: full values come from ``DTensor.full_tensor`` and are compared bit
by bit, with the other mesh and with one process that trained alone (on the root).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import hyperstate
from hyperstate.testing.meter import measured
from hyperstate_torch.demo_inputs import Input, RefusedInputError, Tree, adamw, open_input

BEFORE, AFTER = 3, 2
"""Training steps before the state moves, and after."""
HOW = (
    "All ranks train on the same data and average gradients in float64, which is exact in any order: two meshes "
    "can differ only by what the move of the state changed."
)
LEGEND = (
    "MiB sent: by all ranks' TCP connections, as the kernel counts. messages: hyperstate's point-to-point messages, "
    "PyTorch's collectives (each is many messages), of all ranks. peak: MiB above the start of the call; others: the "
    "highest of them. CPU s: all ranks together."
)
OURS, THEIRS = "hyperstate", "PyTorch"
GET = "full state, to the root"
FROM_ROOT = hyperstate.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
MeasureCall = Callable[[str, str], AbstractContextManager[None]]
PATIENCE = timedelta(minutes=10)
"""How long ranks wait for one another: the root reads files and trains alone meanwhile."""


@dataclass
class Report:
    """What a rank tells the command: costs of calls, and what was compared (all JSON-able)."""

    title: str = ""
    how: str = HOW
    legend: str = LEGEND
    versions: str = f"torch {torch.__version__}"
    meshes: list[str] = field(default_factory=list)
    costs: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    refused: str = ""


@dataclass
class Run:
    """A model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def train(self, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            self.model(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def rank_main(kit: Any, *, folder: str | None = None, file: str | None = None) -> dict[str, Any]:
    """The whole demo on one rank. `refused` in the result tells of input that can't be used."""
    report = Report()
    dist.distributed_c10d._set_pg_timeout(PATIENCE)
    given, report.refused = _agree_on_input(kit, folder, file)
    if given is not None:
        report.title = given.title
        try:
            _demo(kit, given, report)
        except RefusedInputError as error:
            report.refused = str(error)
    return asdict(report)


def _agree_on_input(kit: Any, folder: str | None, file: str | None) -> tuple[Input | None, str]:
    """The input, or why some rank refuses it: then all do. The root alone reads the values."""
    given, refusal = None, ""
    try:
        given = open_input(folder, file, values=kit.rank == 0)
    except RefusedInputError as error:
        refusal = str(error)
    told: list[Any] = [None] * kit.world
    dist.all_gather_object(told, refusal)
    refusal = next((text for text in told if text), "")
    return (None, refusal) if refusal else (given, "")


def _demo(kit: Any, given: Input, report: Report) -> None:
    one = kit.mesh((kit.world,), ("shard",))
    two = kit.mesh((2, kit.world // 2), ("replica", "shard"))
    report.meshes = [f"{kit.world}-rank FSDP", f"2×{kit.world // 2} HSDP"]
    target = report.meshes[1]
    alone = _alone(given) if kit.rank == 0 else None
    first, second, third = _sharded(given, one, 0), _sharded(given, two, 1), _sharded(given, two, 2)
    meter = _Meter(kit, report)
    _warm_up(kit, one, two)
    if given.values is not None:
        try:
            with meter(f"the file into {kit.world} ranks", OURS):
                _load_file(kit, given, first)
        except hyperstate.HyperstateError as error:  # on all ranks alike
            raise RefusedInputError(str(error)) from error
        _compare(report, "after loading: one process that loaded with PyTorch's own", first, alone)
    first.train(0, BEFORE)
    _move(kit, meter, first, second, target)
    _compare(report, f"right after the move: {target}", first, second)
    first.train(BEFORE, AFTER)
    second.train(BEFORE, AFTER)
    if alone is not None:
        alone.train(0, BEFORE + AFTER)
    _compare(report, f"{AFTER} steps later: {target}", first, second)
    _compare(report, f"{AFTER} steps later: one process that trained alone", first, alone)
    # Last, because a failure of it may leave the process group unusable.
    try:
        _move_by_pytorch(meter, first, third, target)
        _compare(report, f"for comparison: {target} by PyTorch's API, no group fields", first, third, decides=False)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is PyTorch's and no verdict on us
        report.how += f" PyTorch's own API failed at this move: {type(error).__name__}: {error}"


def _move(kit: Any, meter: MeasureCall, first: Run, second: Run, target: str) -> None:
    """The state of `first` into `second` by hyperstate: full on the root, then from there to each rank its shard."""
    options = hyperstate.StateDictOptions(full_state_dict=True, cpu_offload=True)
    with meter(GET, OURS):
        model, optim = hyperstate.get_state_dict(first.model, first.optimizer, options=options)
    if kit.rank != 0:
        assert not model
        assert not optim
    with meter(f"from it into {target}", OURS):
        hyperstate.set_state_dict(
            second.model, second.optimizer, model_state_dict=model, optim_state_dict=optim, options=FROM_ROOT
        )


def _move_by_pytorch(meter: MeasureCall, first: Run, third: Run, target: str) -> None:
    """The same by PyTorch's own functions."""
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    with meter(GET, THEIRS):
        model, optim = dcp.get_state_dict(first.model, first.optimizer, options=options)
    # As if saved and read: on the CPU PyTorch's getter gives live tensors, and its setter keeps what it is given.
    model, optim = copy.deepcopy((model, optim))
    options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with meter(f"from it into {target}", THEIRS):
        # Not set_state_dict: ranks that pass an empty model dict skip the model, and the root hangs (torch 2.13).
        dcp.set_model_state_dict(third.model, model, options=options)
        dcp.set_optimizer_state_dict(third.model, third.optimizer, optim, options=options)


# -- models ------------------------------------------------------------------------------------------


def _sharded(given: Input, mesh: Any, seed: int) -> Run:
    """The input's model sharded over `mesh`, with a fresh optimizer.

    Gradients are averaged in float64: that average of equal float32 values is exact in any order, so
    FSDP and HSDP, which add in different orders, get equal bits.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    model = given.build(seed)
    ignored = {parameter for parameter in model.parameters() if parameter.dim() == 0}  # FSDP2 takes no scalars
    for module in [*model.modules()][::-1]:
        own = isinstance(module, Tree) and list(module.parameters(recurse=False))
        if own or module is model or isinstance(module, nn.Sequential | nn.Embedding):
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    if given.values is not None:
        model.to_empty(device="cpu")
        with torch.no_grad():
            for value in [*model.parameters(), *model.buffers()]:
                value.fill_(float("nan") if value.is_floating_point() else 0)  # what no load overwrites will show
    return Run(model, given.new_optimizer(model))


def _alone(given: Input) -> Run:
    """The same model in this process alone; a file's state goes in by PyTorch's own loaders."""
    model = given.build(0)
    if given.values is not None:
        model.load_state_dict({name: value.clone() for name, value in given.values.items()}, assign=True)
    run = Run(model, given.new_optimizer(model))
    if given.optimizer_state is not None:
        run.optimizer.load_state_dict(copy.deepcopy(given.optimizer_state))
    return run


def _load_file(kit: Any, given: Input, run: Run) -> None:
    values = given.values if kit.rank == 0 else {}
    if given.optimizer_state is None:
        hyperstate.set_model_state_dict(run.model, values, options=FROM_ROOT)
        return
    state = given.optimizer_state if kit.rank == 0 else {}
    hyperstate.set_state_dict(
        run.model, run.optimizer, model_state_dict=values, optim_state_dict=state, options=FROM_ROOT
    )


# -- costs -------------------------------------------------------------------------------------------


class _Meter:
    def __init__(self, kit: Any, report: Report) -> None:
        self._kit, self._report = kit, report

    @contextmanager
    def __call__(self, call: str, by: str) -> Iterator[None]:
        self._kit.traffic(reset=True)
        with measured(dist.barrier) as cost:
            before = _collectives()
            yield
            collectives = _collectives() - before
            messages = self._kit.traffic()["messages"] if by == OURS else collectives
        self._report.costs.append({"call": call, "by": by, "messages": messages, **asdict(cost)})


def _collectives() -> int:
    """Collectives that this rank has called so far, over all its process groups."""
    groups: list[Any] = [group for group in dist.distributed_c10d._world.pg_map if hasattr(group, "rank")]
    return sum(int(group._get_sequence_number_for_group()) for group in groups)


def _warm_up(kit: Any, one: Any, two: Any) -> None:
    """One unmeasured move of a tiny model by both APIs, so that imports and connections are nobody's cost."""
    tiny = Input("", lambda _: _tiny(), adamw)
    runs = [_sharded(tiny, mesh, 0) for mesh in (one, two, two)]
    runs[0].train(0, 1)
    meter = _Meter(kit, Report())
    _move(kit, meter, runs[0], runs[1], "")
    _move_by_pytorch(meter, runs[0], runs[2], "")


def _tiny() -> nn.Module:
    model = Tree()
    model.register_parameter("weight", nn.Parameter(torch.ones(8, 2)))
    return model


# -- the comparison ----------------------------------------------------------------------------------

IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable", "param_names")
"""Fields of a param group that say nothing about the result."""


def _compare(report: Report, what: str, left: Run, right: Run | None, decides: bool = True) -> None:
    """Compare the values of two runs bit by bit. All ranks call this; those with no `right` only help to gather.

    A comparison that does not decide the verdict leaves out the fields of groups, whose types PyTorch changes.
    """
    mine, others = _values(left, decides), _values(right, decides) if right is not None else {}
    differences = sorted(others.keys() - mine.keys())
    compared = 0
    for name, value in mine.items():
        found = value()
        if right is not None:
            compared += 1
            if name not in others or not _same(found, others[name]()):
                differences.append(name)
    report.checks.append({"what": what, "compared": compared, "differences": differences[:5], "decides": decides})


def _values(run: Run, groups: bool) -> dict[str, Callable[[], Any]]:
    """By name: functions that give full values. Every rank must call them in this order, where they are sharded."""
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    found: dict[str, Callable[[], Any]] = {}
    for name, value in [*run.model.named_parameters(), *run.model.named_buffers()]:
        found[f"model {name}"] = _full(value)
    for parameter, name in names.items():
        for key, value in sorted(run.optimizer.state.get(parameter, {}).items()):
            found[f"optimizer {name} {key}"] = _full(value)
    for group in run.optimizer.param_groups if groups else ():
        fields = {key: value for key, value in sorted(group.items()) if key not in IMPLEMENTATION}
        for parameter in group["params"]:
            found[f"group of {names[parameter]}"] = partial(dict, fields)
    return found


def _full(value: Any) -> Callable[[], Any]:
    if isinstance(value, DTensor):
        sharded: Any = value.detach()
        gather: Callable[[], Any] = sharded.full_tensor
        return gather
    return lambda: value


def _same(left: Any, right: Any) -> bool:
    """Equal to the bit: dtype, shape and content; nan equals itself, -0.0 is not 0.0."""
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and bool(left == right)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (left, right))
    return torch.equal(left, right)
