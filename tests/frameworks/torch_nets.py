"""What the tests of the PyTorch adapter share: small nets, training on fixed data, snapshots to compare.

Imported by test files and by rank bodies alike; nothing in here uses hyperstate.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Build = Callable[[int, float], tuple[Any, Any]]
"""(seed, learning rate) -> (model or models, optimizer or optimizers)."""


class Net(nn.Module):
    """A multilayer perceptron with a normalisation that has buffers, one of them a 0-d integer."""

    def __init__(self, seed: int = 0, sizes: tuple[int, int, int] = (5, 7, 3)) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(sizes[0], sizes[1])
        self.norm = nn.BatchNorm1d(sizes[1])
        self.second = nn.Linear(sizes[1], sizes[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


class Renaming(nn.Module):
    """Drops ``inner.`` from its keys when it saves and puts it back when it loads."""

    def __init__(self, seed: int, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(5, width)
        self.register_state_dict_post_hook(self._drop)
        self.register_load_state_dict_pre_hook(self._add)

    @staticmethod
    def _drop(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        for key in [key for key in state if key.startswith(prefix + "inner.")]:
            state[prefix + key[len(prefix + "inner.") :]] = state.pop(key)

    @staticmethod
    def _add(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            if prefix + name in state:
                state[f"{prefix}inner.{name}"] = state.pop(prefix + name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Mlp(nn.Module):
    """Two layers without bias between which nothing but a tanh stands: what tensor parallelism wants."""

    def __init__(self, seed: int = 0, sizes: tuple[int, int, int] = (6, 8, 4)) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(sizes[0], sizes[1])
        self.norm = nn.LayerNorm(sizes[0])
        self.down = nn.Linear(sizes[1], sizes[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Tied(nn.Module):
    """A head that shares the weight of the embedding."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x.abs().long() % 5))


class Parts(nn.Module):
    """A module whose parameters are exactly the tensors given, by dotted name."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for fqn, value in values.items():
            *path, name = fqn.split(".")
            home: nn.Module = self
            for part in path:
                if part not in home._modules:
                    home.add_module(part, nn.Module())
                home = home._modules[part]  # type: ignore[assignment]  # added above
            home.register_parameter(name, nn.Parameter(value))


def inputs(step: int, width: int, rows: int = 6) -> torch.Tensor:
    """Data that depend on the step alone: equal on every rank, so that averaged gradients are one process' own."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0, width: int = 5) -> None:
    """`steps` updates from real gradients."""
    for step in range(first, first + steps):
        model(inputs(step, width)).square().sum().backward()
        for one in listed(optimizer):
            one.step()
            one.zero_grad()


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def noise(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A float32 tensor that depends on name, shape and seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name}/{seed}".encode())))


def like(full: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`full` laid out as `target` is; no communication."""
    if not isinstance(target, DTensor):
        return full
    return distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)


def push(model: Any, optimizer: Any, seed: int, skip: tuple[str, ...] = ()) -> None:
    """One update with made-up gradients, for models that have no forward."""
    for module in listed(model):
        for fqn, param in module.named_parameters():
            grad = noise(fqn, tuple(param.shape), seed).to(param.dtype)
            param.grad = like(grad, param).detach() if param.requires_grad and fqn not in skip else None
    for one in listed(optimizer):
        one.step()
        one.zero_grad()


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh per shape and names in each rank process: groups are never freed."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


# -- how models are spread over ranks ------------------------------------------------------------------


def fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 (HSDP on a mesh with two dimensions): each child a unit of its own, the root for the rest."""
    for child in model.children():
        if next(child.parameters(), None) is not None:
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: Mlp, mesh: DeviceMesh) -> Mlp:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def experts(seed: int, flat: DeviceMesh, grid: DeviceMesh) -> Parts:
    """Dense weights over all ranks, experts over half of the grid, one tensor split twice, a plain gate."""

    def full(name: str, *shape: int) -> torch.Tensor:
        return noise(name, shape, seed)

    return Parts(
        {
            "dense.weight": distribute_tensor(full("d", 8, 4), flat, [Shard(0)], src_data_rank=None),
            "experts.w1": distribute_tensor(full("e", 4, 3, 3), grid["ep"], [Shard(0)], src_data_rank=None),
            "both.weight": distribute_tensor(full("b", 5, 6), grid, [Shard(1), Shard(0)], src_data_rank=None),
            "copies.weight": distribute_tensor(full("c", 3), flat, [Replicate()], src_data_rank=None),
            "gate": full("g", 4, 2),
        }
    )


# -- reading back --------------------------------------------------------------------------------------


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def frozen_copy(value: Any) -> Any:
    """`value` with every tensor replaced by (kind, dtype, local content), so that == compares bits and types."""
    if isinstance(value, torch.Tensor):
        content = local(value.detach())
        where = (tuple(value.shape), tuple(map(str, value.placements))) if isinstance(value, DTensor) else None
        flat = content.contiguous().reshape(-1)
        return ("tensor", where, str(value.dtype), tuple(content.shape), bytes(flat.view(torch.uint8).tolist()))
    if isinstance(value, dict):
        return {key: frozen_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(frozen_copy, value))
    return (type(value).__name__, value)


def snapshot(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """Everything that training depends on, on this rank, comparable with ==."""
    found: dict[str, Any] = {}
    for module in listed(model):
        found |= {f"param {name}": frozen_copy(p) for name, p in module.named_parameters(remove_duplicate=False)}
        found |= {f"buffer {name}": frozen_copy(b) for name, b in module.named_buffers()}
    names = {id(p): name for module in listed(model) for name, p in module.named_parameters()}
    for number, one in enumerate([] if optimizer is None else listed(optimizer)):
        for i, group in enumerate(one.param_groups):
            fields = {key: value for key, value in group.items() if key != "params"}
            found[f"group {number}.{i}"] = frozen_copy({**fields, "params": [names[id(p)] for p in group["params"]]})
        for key, slots in one.state.items():
            found[f"state {names.get(id(key), key)}"] = frozen_copy(slots)
    return found


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """The names under which two snapshots differ."""
    return sorted(key for key in {**expected, **actual} if expected.get(key) != actual.get(key))


def assert_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert [] == differences(expected, actual)


def without_groups(found: dict[str, Any]) -> dict[str, Any]:
    """A snapshot without group fields: PyTorch's own code turns their tuples into lists on the way."""
    return {key: value for key, value in found.items() if not key.startswith("group ")}


def assert_close(expected: dict[str, Any], actual: dict[str, Any], **tolerance: float) -> None:
    """Two dicts of (nested) plain tensors are equal to rounding."""
    assert sorted(map(str, expected)) == sorted(map(str, actual))
    torch.testing.assert_close(dict(expected), dict(actual), **tolerance)


def cloned(value: Any) -> Any:
    """A deep copy that keeps sharded tensors' layouts: what a file would give back."""
    return copy.deepcopy(dict(value)) if isinstance(value, dict) else copy.deepcopy(value)


def full_values(model: Any) -> dict[str, torch.Tensor]:
    """Full parameters and buffers by PyTorch's own gathering; all ranks of the meshes must call it."""

    def each() -> Iterator[tuple[str, torch.Tensor]]:
        for module in listed(model):
            yield from module.state_dict().items()

    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in each()}


def full_state(model: Any, optimizer: Any) -> dict[str, dict[str, Any]]:
    """Full optimizer state by FQN, gathered by PyTorch itself."""
    names = {id(p): name for module in listed(model) for name, p in module.named_parameters()}
    return {
        names[id(p)]: {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in slots.items()}
        for one in listed(optimizer)
        for p, slots in one.state.items()
    }
