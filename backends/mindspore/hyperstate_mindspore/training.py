"""Cells whose parameters are local shards: made by `shard_module`, trained in eager mode with any optimizer.

Between steps a rank holds only its part of each parameter, and so does its optimizer (ZeRO; over a mesh with a
replicating dimension: HSDP). A step gathers the whole weights, computes on this rank's data, averages the gradients
over the mesh and keeps the local part of them:

    step = value_and_grad(forward, cell, optimizer.parameters)
    loss, gradients = step(data, label)
    optimizer(gradients)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import mindspore as ms
import numpy as np
import numpy.typing as npt

from hyperstate.errors import UnsupportedConfigurationError

from . import groups, job, layouts, tree
from .host import array_of, neutral_dtype, parameter_over
from .sharded import DeviceMesh, DTensor, Placement, Replicate, Shard, cut, from_numpy, gather

Placements = Sequence[Placement]
Plan = Mapping[str, Placements | None] | Callable[[str, Any], Placements | None]
"""Placements by FQN or shell pattern (the first that fits), or computed; None leaves a parameter whole."""


def shard_module(cell: Any, mesh: DeviceMesh, plan: Plan | None = None) -> Any:
    """Keep of each parameter of `cell` this rank's part; returns the cell itself. Nothing is sent.

    All ranks of `mesh` must hold equal values. Without a plan (or where it says nothing) dim 0 is split along the last
    mesh dimension and copied along the others; 0-d parameters are copied. Statistics such as BatchNorm's stay whole.
    Parameters stay the same objects; build the optimizer afterwards. A parameter without values yet (`has_init`)
    gets its part when it is loaded. The gradient of a parameter that is left whole (None in the plan) is not averaged.
    """
    found = [(member.fqn, member.parameter) for member in tree.parameters(cell) if not member.statistic]
    placed = [(parameter, _placements(fqn, parameter, mesh, plan)) for fqn, parameter in found]
    if isinstance(plan, Mapping) and (idle := [p for p in plan if not any(fnmatchcase(fqn, p) for fqn, _ in found)]):
        raise ValueError(f"the plan names {', '.join(map(repr, idle))}, which fits no parameter of the cell")
    if again := [parameter.name for parameter, _ in placed if layouts.recorded(parameter) is not None]:
        raise ValueError(f"parameter {again[0]!r} is sharded already")
    for parameter, placements in placed:
        if placements is not None:
            shape = tuple(int(size) for size in parameter.shape)
            layouts.layout(mesh, placements, len(shape))  # refuses before anything is changed
    for parameter, placements in placed:
        if placements is not None:
            _keep_part(parameter, layouts.record(parameter, mesh, placements, parameter.shape))
    cell.register_forward_pre_hook(_refuse_local)
    return cell


def _keep_part(parameter: Any, noted: layouts.Record) -> None:
    """Give a parameter its part in place of the whole. assign_value keeps the object and takes another shape."""
    if parameter.has_init and noted.padded:
        parameter.set_data(ms.Tensor(np.zeros(noted.shape), parameter.dtype))  # there is nothing to wait for
    if parameter.has_init:
        part = ms.Tensor(shape=noted.kept_shape, dtype=parameter.dtype, init=parameter.init)
        parameter.assign_value(part)
        parameter.init_mode = part
    else:
        parameter.assign_value(from_numpy(_own_part(parameter, array_of(parameter)), parameter.dtype))


def _placements(fqn: str, parameter: Any, mesh: DeviceMesh, plan: Plan | None) -> Placements | None:
    if isinstance(plan, Mapping):
        for pattern, placements in plan.items():
            if fnmatchcase(fqn, pattern):
                return placements
    elif plan is not None:
        return plan(fqn, parameter)
    last: Placement = Shard(0) if len(parameter.shape) else Replicate()
    return [Replicate()] * (mesh.ndim - 1) + [last]


def parameter_of(value: DTensor, name: str | None = None, requires_grad: bool = True) -> Any:
    """A Parameter that holds this rank's part of `value` (a copy), with its layout recorded."""
    part = value.to_local()
    content = _padded(np.array(array_of(part), order="C"))
    made = parameter_over(content, neutral_dtype(part.dtype), name, requires_grad)
    layouts.record(made, value.device_mesh, value.placements, value.shape)
    return made


def dtensor_of(parameter: Any) -> DTensor:
    """The sharded tensor of a Parameter with a recorded layout: shares its memory, follows it when it changes."""
    noted = layouts.recorded(parameter)
    if noted is None:
        raise ValueError(f"parameter {parameter.name!r} is not sharded")
    return DTensor(parameter, noted.device_mesh, noted.placements, noted.shape)


def _padded(part: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`part`, or zeros in its place if it has no elements: optimizers refuse such parameters."""
    return part if part.size else np.zeros([max(size, 1) for size in part.shape], part.dtype)


def fill(parameter: Any, part: Any) -> None:
    """Give a parameter that has no values yet (`has_init`) this rank's part, a plain tensor."""
    parameter.set_data(from_numpy(_padded(array_of(part)), part.dtype))


def _own_part(parameter: Any, full: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What the Parameter holds of a full array: a fresh copy."""
    noted = layouts.recorded(parameter)
    assert noted is not None
    box = layouts.layout_of(parameter).box(noted.shape, job.rank())
    assert box is not None
    return _padded(cut(full, box))


def _is_local(parameter: Any) -> bool:
    """Whether a parameter holds a part now, not the whole."""
    if layouts.recorded(parameter) is None or hasattr(parameter, layouts.WHOLE):
        return False
    return bool(layouts.layout_of(parameter).used)


def _refuse_local(cell: Any, _: Any) -> None:
    """Forward pre-hook: whole weights must be there."""
    if any(_is_local(member.parameter) for member in tree.parameters(cell)):
        raise UnsupportedConfigurationError(
            "the cell was called while its parameters are local shards; call it inside "
            "`with unsharded(cell):`, or train with hyperstate_mindspore.value_and_grad"
        )


@contextmanager
def unsharded(cell: Any) -> Iterator[None]:
    """Inside the block the parameters of `cell` are whole; afterwards local parts again, with changes made inside.

    All ranks of the meshes must enter. One collective per mesh.
    """
    members = [member.parameter for member in tree.parameters(cell) if _is_local(member.parameter)]
    if lazy := [parameter.name for parameter in members if parameter.has_init]:
        raise UnsupportedConfigurationError(f"parameter {lazy[0]!r} has no values yet; load the cell first")
    # The parts' own storage returns into the Parameters afterwards: the optimizers of `mindspore.nn` remember it
    # from their first step on (2.10), and would update nothing if it were replaced.
    parts = [ms.Tensor(parameter) for parameter in members]
    for parameter, full in zip(members, gather(members), strict=True):
        parameter.assign_value(from_numpy(full, parameter.dtype))
        setattr(parameter, layouts.WHOLE, True)
    try:
        yield
    finally:
        for parameter, part in zip(members, parts, strict=True):
            changed = _own_part(parameter, parameter.asnumpy())
            parameter.assign_value(part)
            delattr(parameter, layouts.WHOLE)
            parameter.copy_(from_numpy(changed, parameter.dtype))


def value_and_grad(
    forward: Callable[..., Any], cell: Any, weights: Sequence[Any] | None = None, has_aux: bool = False
) -> Callable[..., Any]:
    """`mindspore.value_and_grad` for a sharded cell: gathers, computes, averages over the mesh, keeps the local part.

    `forward` uses `cell`; `weights` are the parameters whose gradients are wanted, in the order of the optimizer
    (``optimizer.parameters``; default: ``cell.trainable_params()``). The result is called with the inputs of
    `forward` on all ranks of the mesh; it returns (value, gradients), the value that of this rank's data.
    """
    wanted = tuple(cell.trainable_params()) if weights is None else tuple(weights)
    compute = ms.value_and_grad(forward, None, wanted, has_aux)

    def run(*inputs: Any) -> Any:
        with unsharded(cell):
            value, gradients = compute(*inputs)
        return value, reduce_gradients(wanted, gradients)

    return run


def reduce_gradients(parameters: Sequence[Any], gradients: Sequence[Any]) -> tuple[Any, ...]:
    """Of whole gradients, one per parameter: the local parts of their means over each parameter's mesh.

    Half precision is averaged in float32. Gradients of parameters that are not sharded come back as they are.
    All ranks of the meshes must call, with the same parameters in the same order: one collective per mesh and dtype.
    """
    result = list(gradients)
    rows: dict[tuple[tuple[int, ...], Any], list[int]] = {}
    for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        noted = layouts.recorded(parameter)
        if noted is not None:
            rows.setdefault((layouts.mesh_of(noted.device_mesh).ranks, gradient.dtype), []).append(i)
    for (ranks, dtype), members in rows.items():
        wide = ms.float32 if dtype in (ms.float16, ms.bfloat16) else dtype
        parts = [gradients[i].asnumpy().astype(ms.dtype_to_nptype(wide)) for i in members]
        total = groups.all_reduce(np.concatenate([part.reshape(-1) for part in parts]), ranks)
        mean, start = total / np.asarray(len(ranks), total.dtype), 0
        for i, part in zip(members, parts, strict=True):
            part_of_mean = _own_part(parameters[i], mean[start : start + part.size].reshape(part.shape))
            result[i] = from_numpy(part_of_mean.astype(ms.dtype_to_nptype(dtype)), dtype)
            start += part.size
    return tuple(result)
