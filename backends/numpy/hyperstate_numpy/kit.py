"""`hyperstate.testing.Kit` for the reference backend: ranks are threads of the test's own process.

``HYPERSTATE_NUMPY_FABRIC=device`` runs the suite over a fabric that refuses host memory, as NCCL and HCCL do.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyperstate.backend import load
from hyperstate.errors import OptionError
from hyperstate.testing.kit import Content
from hyperstate.testing.pool import RankFailure
from hyperstate.testing.worker import load_file

from . import arrays, job, optimizers
from .arrays import CPU, SIM, Parameter, Tensor
from .modules import Module, Perceptron, fully_shard, set_gradient
from .sharded import DeviceMesh, DTensor, Placement, Replicate, Shard, plain
from .tensors import is_sharded

GAPS: dict[str, str] = {}
"""Conformance cases that this backend can't pass yet, each with the reason."""

FABRIC_VARIABLE = "HYPERSTATE_NUMPY_FABRIC"
TRANSFER_TIMEOUT_S = 30.0
ROWS = 8
"""Rows of a training batch."""


def run_here(
    ranks: int, path: Path, function: str, timeout: float, lost: Sequence[int], arguments: Mapping[str, Any]
) -> list[Any]:
    """Run `function(kit, **arguments)` of the file on every rank; see `hyperstate.testing.Pool.run`."""
    body = getattr(load_file(str(path)), function)
    try:
        return job.run_ranks(
            ranks,
            lambda _: body(Kit(), **arguments),
            timeout=timeout,
            transfer_timeout=TRANSFER_TIMEOUT_S,
            device_only=_device_only(),
            lost=lost,
        )
    except job.JobError as error:
        raise RankFailure(str(error)) from error


def _device_only() -> bool:
    wanted = os.environ.get(FABRIC_VARIABLE, "host")
    if wanted not in ("host", "device"):
        raise OptionError(f"{FABRIC_VARIABLE}={wanted!r} must be 'host' or 'device'")
    return wanted == "device"


class Kit:
    """See `hyperstate.testing.Kit`. Everything lives on the simulated device where the job's fabric asks for it."""

    name = "numpy"

    def __init__(self) -> None:
        self.rank, self.world = job.rank(), job.world()
        here = job.current()
        self.device = SIM if here is not None and here.device_only else CPU

    # -- meshes and sharded tensors ---------------------------------------------------------------

    def mesh(self, shape: Sequence[int], names: Sequence[str]) -> Any:
        return DeviceMesh(np.arange(self.world).reshape(tuple(shape)), names, self.device)

    def shard(self, model: Any, mesh: Any) -> Any:
        return fully_shard(model, mesh)

    def sharded_tensor(self, full: Any, mesh: Any, placements: Sequence[str]) -> Any:
        found: list[Placement] = [Replicate() if one == "R" else Shard(int(one[1:])) for one in placements]
        return DTensor.distribute(full, mesh, found)

    # -- models -----------------------------------------------------------------------------------

    def model(self, seed: int = 0, sizes: Sequence[int] = (5, 7, 3)) -> Any:
        model = Perceptron(sizes)
        numbers = np.random.default_rng(seed)
        for value in model.parameters():
            plain(value).array[...] = numbers.uniform(-1, 1, value.shape)
        return model.to(self.device)

    def with_parameters(self, values: dict[str, Any]) -> Any:
        root = Module()
        made: dict[int, Any] = {}
        for fqn, value in values.items():
            *path, name = fqn.split(".")
            inner = root
            for step in path:
                inner = inner.children_.setdefault(step, Module())
            if id(value) not in made:
                made[id(value)] = _parameter(value)
            inner.register_parameter(name, made[id(value)])
        return root

    def add_buffer(self, model: Any, name: str, value: Any, persistent: bool = True) -> None:
        model.register_buffer(name, value, persistent)

    def freeze(self, model: Any, fqn: str) -> None:
        self.named(model)[fqn].requires_grad = False

    def named(self, model: Any) -> dict[str, Any]:
        return dict(model.named_parameters()) | dict(model.named_buffers())

    # -- optimizers -------------------------------------------------------------------------------

    def optimizer(self, model: Any, kind: str = "adam", lr: float = 0.01, groups: Any = None) -> Any:
        params = dict(model.named_parameters())
        members: Any = model.parameters()
        if groups is not None:
            members = [{"params": [params[fqn] for fqn in fqns], **fields} for fqns, fields in groups]
        if kind == "momentum":
            return optimizers.SGD(members, lr, momentum=0.9)
        if kind == "custom":
            return type("Custom", (optimizers.Custom,), {})(members, lr)
        made = {"adam": optimizers.Adam, "sgd": optimizers.SGD, "local": optimizers.LocalAdam}
        return made[kind](members, lr)

    def state(self, optimizer: Any, parameter: Any) -> MutableMapping[Any, Any]:
        found: MutableMapping[Any, Any] = optimizer.state[parameter]
        return found

    def groups(self, optimizer: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = optimizer.param_groups
        return found

    def train(self, model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            batch = np.random.default_rng(1000 + step).standard_normal((ROWS, model.linears[0].width_in), np.float32)
            output = model.forward(batch)
            model.backward(output * np.float32(2 / output.size))
            optimizer.step()
            optimizer.zero_grad()

    def fake_step(self, model: Any, optimizer: Any, seed: int = 0) -> None:
        for fqn, param in model.named_parameters():
            numbers = np.random.default_rng(zlib.crc32(f"{seed} {fqn}".encode()))
            set_gradient(param, numbers.standard_normal(tuple(param.shape), np.float32))
        optimizer.step()
        optimizer.zero_grad()

    # -- values -----------------------------------------------------------------------------------

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        return arrays.tensor(values, dtype)

    def content(self, value: Any) -> Content:
        part = plain(value)
        return Content(part.dtype, part.shape, part.array.tobytes().hex())

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Tensor) or is_sharded(value)

    def is_sharded(self, value: Any) -> bool:
        return is_sharded(value)

    def on_host(self, value: Any) -> bool:
        return plain(value).device == CPU

    # -- the job ----------------------------------------------------------------------------------

    def traffic(self, reset: bool = False) -> dict[str, int]:
        fabric: Any = load("numpy").fabric
        counts: dict[str, int] = fabric.traffic()
        if reset:
            fabric.reset_traffic()
        return counts

    def die(self, exchange: int = 0) -> None:
        if exchange:
            job.seat().dies_at = exchange
        else:
            job.die()


def _parameter(value: Any) -> Any:
    """A parameter that shares memory with `value`; numbers that have no gradient need none."""
    found: Any = Parameter(value) if isinstance(value, Tensor) else value.detach()
    found.requires_grad = found.dtype.startswith(("float", "bfloat", "complex"))
    return found
