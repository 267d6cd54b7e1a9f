"""`hyperstate.testing.Kit` for MindSpore: ranks are processes joined by mccl, parameters are local shards.

The optimizers are written as users write theirs, on `mindspore.experimental.optim.Optimizer`; those that MindSpore
brings keep state of one fixed form from their first day on, and have tests of their own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, ClassVar

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore import nn
from mindspore.experimental.optim import Optimizer

from hyperstate import register_state_layout
from hyperstate.backend import load
from hyperstate.structure import is_sharded
from hyperstate.testing import processes
from hyperstate.testing.kit import Content

from . import job, layouts, tree
from .host import array_of, mindspore_dtype, neutral_dtype, on_host, parameter_over, stored, tensor_over
from .sharded import DTensor, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from .training import parameter_of, shard_module, value_and_grad

GAPS: dict[str, str] = {}
"""Conformance cases that this backend can't pass yet, each with the reason."""

TIMEOUT = timedelta(seconds=60)
ROWS = 8
"""Rows of a training batch."""
FLOAT8_ONE = {"float8_e4m3fn": 0x38, "float8_e5m2": 0x3C}

Floats = npt.NDArray[Any]


class Norm(nn.Cell):  # type: ignore[misc]  # MindSpore has no types
    """Normalisation over the batch with running statistics in buffers; MindSpore's own do not run on CPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = ms.Parameter(ms.Tensor(np.ones(width, np.float32)), name="weight")
        self.bias = ms.Parameter(ms.Tensor(np.zeros(width, np.float32)), name="bias")
        self.register_buffer("running_mean", ms.Tensor(np.zeros(width, np.float32)))
        self.register_buffer("running_var", ms.Tensor(np.ones(width, np.float32)))
        self.register_buffer("num_batches_tracked", ms.Tensor(np.array(0, np.int64)))

    def construct(self, batch: Any) -> Any:
        mean = batch.mean(0)
        variance = (batch - mean).square().mean(0)
        for kept, new in ((self.running_mean, mean), (self.running_var, variance)):
            array = kept.asnumpy()
            array[...] = 0.9 * array + 0.1 * new.asnumpy()
        self.num_batches_tracked.asnumpy()[...] += 1
        return (batch - mean) / ms.ops.sqrt(variance + 1e-5) * self.weight + self.bias


class Perceptron(nn.Cell):  # type: ignore[misc]  # likewise
    """Dense layers; a normalisation behind the first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.CellList([nn.Dense(n, m) for n, m in pairwise(sizes)])
        self.norm = Norm(sizes[1])
        self.width = sizes[0]

    def construct(self, batch: Any) -> Any:
        result = ms.ops.tanh(self.norm(self.layers[0](batch)))
        for layer in list(self.layers)[1:]:
            result = layer(result)
        return result


class Own(Optimizer):  # type: ignore[misc]  # likewise
    """An optimizer of a user's own: updates every parameter that has a gradient, in NumPy."""

    state_form = "sharded"
    """Moments are sharded tensors, as their parameters are (`hyperstate_mindspore.keyed`)."""
    state_keys: ClassVar[Sequence[str] | None] = None
    more: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        given = [dict(group) for group in params] if isinstance(params[0], dict) else [{}]
        super().__init__(params, {"lr": lr, **self.more})
        self.shown: dict[int, Slots] = {}
        for group, fields in zip(self.param_groups, given, strict=True):  # the base class changes and adds some
            members = group["params"]
            group.clear()
            group.update({"lr": lr, **self.more} | fields | {"params": members})

    def construct(self, gradients: Mapping[Any, Floats]) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param in gradients:
                    self.update(param, gradients[param], group)

    def update(self, param: Any, gradient: Floats, group: Any) -> None:
        """Plain descent. `gradient` has the shape of this rank's part."""
        weight = array_of(layouts.local_of(param))
        weight[...] -= (float(group["lr"]) * gradient).astype(weight.dtype)

    def moment(self, param: Any, key: str, like: Floats) -> Floats:
        """This rank's part of the state under `key`, sharing its memory; zeros at first."""
        slots = self.state[param]
        if key not in slots:
            part = ms.Tensor(np.zeros_like(like))
            noted = layouts.recorded(param) if self.state_form == "sharded" else None
            slots[key] = part if noted is None else DTensor(part, noted.device_mesh, noted.placements, noted.shape)
        value = slots[key]
        return array_of(layouts.local_of(value) if is_sharded(value) else layouts.trimmed(param, value))


class Custom(Own):
    """Plain descent that keeps whatever state the case puts there."""


class Sgd(Own):
    """Plain descent without state."""

    state_keys = ()


class Momentum(Own):
    """Descent along a running sum of gradients, ``momentum_buffer``."""

    state_keys = ("momentum_buffer",)
    more: ClassVar[Mapping[str, Any]] = {"momentum": 0.9}

    def update(self, param: Any, gradient: Floats, group: Any) -> None:
        held = self.moment(param, "momentum_buffer", gradient)
        held[...] = group["momentum"] * held + gradient
        super().update(param, held, group)


class Adam(Own):
    """Adam with ``exp_avg`` and ``exp_avg_sq`` of the parameter's shape, and a 0-d tensor ``step``."""

    more: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.999), "eps": 1e-8}
    state_keys = ("step", "exp_avg", "exp_avg_sq")

    def update(self, param: Any, gradient: Floats, group: Any) -> None:
        slots = self.state[param]
        gradient = gradient.astype(np.float32)
        step = int(slots["step"]) + 1 if slots else 1
        slots["step"] = self.counter(step)
        first, second = (self.moment(param, name, gradient) for name in self.state_keys[1:])
        a, b = group["betas"]
        first[...] = a * first + (1 - a) * gradient
        second[...] = b * second + (1 - b) * gradient * gradient
        change = (first / (1 - a**step)) / (np.sqrt(second / (1 - b**step)) + 1e-8)
        super().update(param, change, group)

    @staticmethod
    def counter(steps: int) -> Any:
        """How steps are counted."""
        return ms.Tensor(np.array(steps, np.float32))


class LocalAdam(Adam):
    """Adam whose moments ``m`` and ``v`` are plain tensors of the local shard's shape; ``step`` is an int."""

    state_form = "local"
    more: ClassVar[Mapping[str, Any]] = {"betas": (0.9, 0.999)}
    state_keys = ("step", "m", "v")

    @staticmethod
    def counter(steps: int) -> Any:
        return steps


register_state_layout(Momentum, {"momentum_buffer": "like_param"})
register_state_layout(Adam, {"exp_avg": "like_param", "exp_avg_sq": "like_param", "step": "replicated"})

OPTIMIZERS: dict[str, type[Own]] = {"adam": Adam, "sgd": Sgd, "momentum": Momentum, "local": LocalAdam}


class Slots(MutableMapping[Any, Any]):
    """The state of a parameter that stands for a part without elements: shown as what it stands for."""

    def __init__(self, inner: dict[Any, Any], param: Any) -> None:
        self.inner, self._param = inner, param

    def __getitem__(self, key: Any) -> Any:
        value = self.inner[key]
        return layouts.trimmed(self._param, value) if isinstance(value, ms.Tensor) else value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.inner[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.inner[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Kit:
    """See `hyperstate.testing.Kit`."""

    name = "mindspore"

    def __init__(self) -> None:
        ms.set_device("CPU")
        job.join(TIMEOUT)
        self.rank, self.world = job.rank(), job.world()
        self._meshes: dict[Any, Any] = {}

    # -- meshes and sharded tensors ---------------------------------------------------------------

    def mesh(self, shape: Sequence[int], names: Sequence[str]) -> Any:
        key = (tuple(shape), tuple(names))
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(*key)
        return self._meshes[key]

    def shard(self, model: Any, mesh: Any) -> Any:
        return shard_module(model, mesh)

    def sharded_tensor(self, full: Any, mesh: Any, placements: Sequence[str]) -> Any:
        found: list[Placement] = [Replicate() if one == "R" else Shard(int(one[1:])) for one in placements]
        return distribute_tensor(full, mesh, found)

    # -- models -----------------------------------------------------------------------------------

    def model(self, seed: int = 0, sizes: Sequence[int] = (5, 7, 3)) -> Any:
        model = Perceptron(sizes)
        numbers = np.random.default_rng(seed)
        for member in tree.parameters(model):
            member.parameter.asnumpy()[...] = numbers.uniform(-1, 1, member.parameter.shape)
        return model

    def with_parameters(self, values: dict[str, Any]) -> Any:
        root = nn.Cell()
        made: dict[int, Any] = {}
        for fqn, value in values.items():
            *path, name = fqn.split(".")
            inner = root
            for step in path:
                if step not in inner._cells:
                    inner.insert_child_to_cell(step, nn.Cell())
                inner = inner._cells[step]
            if id(value) not in made:
                made[id(value)] = _parameter(value, fqn)
            inner.insert_param_to_cell(name, made[id(value)])
        return root

    def add_buffer(self, model: Any, name: str, value: Any, persistent: bool = True) -> None:
        model.register_buffer(name, value, persistent)

    def freeze(self, model: Any, fqn: str) -> None:
        self.named(model)[fqn].requires_grad = False

    def named(self, model: Any) -> dict[str, Any]:
        visits = tree.walk(model)
        found = {member.fqn: member.parameter for member in tree.members(visits)}
        for visit in visits:
            found |= {visit.prefix + name: value for name, value in visit.cell._buffers.items() if value is not None}
        return found

    # -- optimizers -------------------------------------------------------------------------------

    def optimizer(self, model: Any, kind: str = "adam", lr: float = 0.01, groups: Any = None) -> Any:
        params = {member.fqn: member.parameter for member in tree.parameters(model)}
        members: Any = list(params.values())
        if groups is not None:
            members = [{"params": [params[fqn] for fqn in fqns], **fields} for fqns, fields in groups]
        return (type("Custom", (Custom,), {}) if kind == "custom" else OPTIMIZERS[kind])(members, lr)

    def state(self, optimizer: Any, parameter: Any) -> MutableMapping[Any, Any]:
        inner: dict[Any, Any] = optimizer.state[parameter]
        noted = layouts.recorded(parameter)
        if noted is None or not noted.padded:
            return inner
        shown: dict[int, Slots] = optimizer.shown
        if id(parameter) not in shown or shown[id(parameter)].inner is not inner:
            shown[id(parameter)] = Slots(inner, parameter)
        return shown[id(parameter)]

    def groups(self, optimizer: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = optimizer.param_groups
        return found

    def train(self, model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
        weights = [param for param in optimizer.parameters if param.requires_grad]
        compute = value_and_grad(lambda batch: model(batch).square().mean(), model, weights)
        for step in range(first, first + steps):
            batch = np.random.default_rng(1000 + step).standard_normal((ROWS, model.width), np.float32)
            _, gradients = compute(ms.Tensor(batch))
            parts = {param: layouts.trimmed(param, one) for param, one in zip(weights, gradients, strict=True)}
            optimizer.construct({param: part.asnumpy() for param, part in parts.items()})

    def fake_step(self, model: Any, optimizer: Any, seed: int = 0) -> None:
        gradients = {}
        for member in tree.parameters(model):
            if member.parameter.requires_grad:
                numbers = np.random.default_rng(zlib.crc32(f"{seed} {member.fqn}".encode()))
                shape = layouts.shape_of(member.parameter)
                gradients[member.parameter] = _part(numbers.standard_normal(shape, np.float32), member.parameter)
        optimizer.construct(gradients)

    # -- values -----------------------------------------------------------------------------------

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        if dtype in FLOAT8_ONE:  # the cases have zeros and ones
            return tensor_over(np.asarray(np.asarray(values, np.uint8) * np.uint8(FLOAT8_ONE[dtype])), dtype)
        return ms.Tensor(np.asarray(values).astype(stored(dtype)), dtype=mindspore_dtype(dtype))

    def content(self, value: Any) -> Content:
        found = layouts.local_of(value)
        return Content(neutral_dtype(found.dtype), tuple(found.shape), array_of(found).tobytes().hex())

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, (ms.Tensor, DTensor))

    def is_sharded(self, value: Any) -> bool:
        return layouts.is_sharded(value)

    def on_host(self, value: Any) -> bool:
        return on_host(layouts.local_of(value))

    # -- the job ----------------------------------------------------------------------------------

    def traffic(self, reset: bool = False) -> dict[str, int]:
        return processes.traffic(load("mindspore").fabric, reset)

    def die(self, exchange: int = 0) -> None:
        processes.die(load("mindspore").fabric, exchange)


def _parameter(value: Any, name: str) -> Any:
    """A parameter with the contents of `value`; numbers that have no gradient need none."""
    trained = neutral_dtype(value.dtype).startswith(("float", "bfloat", "complex"))
    if is_sharded(value):
        return parameter_of(value, name, trained)
    return parameter_over(np.array(array_of(value), order="C"), neutral_dtype(value.dtype), name, trained)


def _part(full: Floats, param: Any) -> Floats:
    """This rank's part of a gradient."""
    if layouts.recorded(param) is None:
        return full
    box = layouts.layout_of(param).box(layouts.shape_of(param), job.rank())
    assert box is not None
    return full[tuple(map(slice, box.start, box.stop))]
