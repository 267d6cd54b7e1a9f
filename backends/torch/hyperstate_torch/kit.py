"""`hyperstate.testing.Kit` for PyTorch: ranks are processes, parameters are DTensors.

HYPERSTATE_TEST_DEVICE chooses the kind of device on which models and tensors live: "cpu" (default), "cuda", "npu", …
HYPERSTATE_TEST_GROUP says which tensors the default process group moves: "host+device" (default; gloo beside the
device's own backend) or "device" (the device's own backend alone, as `init_process_group("nccl")` makes it).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hyperstate.backend import load
from hyperstate.testing import processes
from hyperstate.testing.kit import Content

from .dtensors import current_device
from .tensors import _TO_NEUTRAL, _TO_TORCH

DEVICE_VARIABLE, GROUP_VARIABLE = "HYPERSTATE_TEST_DEVICE", "HYPERSTATE_TEST_GROUP"
_LOSS = "losses.a_rank_that_dies_while_values_move_is_an_error_on_the_survivors"
_ON_DEVICES = {
    f"{_LOSS}-{ranks}r-{call}": "HCCL and NCCL do not tell of a lost peer: who receives from it waits in vain"
    for ranks, call in (
        (4, "get_model_state_dict"),
        (4, "get_optim_state_dict"),
        (4, "get_state_dict"),
        (2, "get_state_dict"),
    )
}
GAPS: dict[str, str] = _ON_DEVICES if os.environ.get(GROUP_VARIABLE) == "device" else {}
"""Conformance cases that this backend can't pass, each with the reason."""

TIMEOUT = timedelta(seconds=60)


def device_kind() -> str:
    """The kind of device under test. Raises `RuntimeError` for a kind that PyTorch does not know."""
    return torch.device(os.environ.get(DEVICE_VARIABLE, "").strip() or "cpu").type


def absent() -> str:
    """Why the device that HYPERSTATE_TEST_DEVICE names can't be tested here; empty if it can."""
    try:
        kind = device_kind()
    except RuntimeError:
        if os.environ[DEVICE_VARIABLE].strip() == "npu":  # the one kind that PyTorch learns of from another package
            return f"{DEVICE_VARIABLE}=npu, and torch-npu is not loaded"
        raise
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind == "cpu" or (here is not None and here.type == kind):
        return ""
    there = "no accelerator" if here is None else f"{here.type} only"
    return f"{DEVICE_VARIABLE}={kind}, and this PyTorch ({torch.__version__}) finds {there}"


def group_backend(kind: str, group: str) -> str:
    """The backend of the default process group, as `init_process_group` takes it."""
    if kind == "cpu":
        return "gloo"
    own = dist.get_default_backend_for_device(kind)
    choices = {"host+device": f"cpu:gloo,{kind}:{own}", "device": own}
    if group not in choices:
        raise ValueError(f"{GROUP_VARIABLE}={group!r} must be one of: {', '.join(choices)}")
    return choices[group]


class Perceptron(torch.nn.Module):
    """Linear layers; a normalisation behind the first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        pairs = pairwise(sizes)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(n, m) for n, m in pairs)
        self.norm = torch.nn.BatchNorm1d(sizes[1])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result = torch.tanh(self.norm(self.layers[0](batch)))
        for layer in list(self.layers)[1:]:
            result = layer(result)
        return result


class LocalAdam(torch.optim.Optimizer):
    """Adam whose moments ``m`` and ``v`` are plain float32 tensors of the local shard's shape; ``step`` is an int."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999)})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]  # no loss is returned
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group["lr"], group["betas"])

    def _update(self, param: torch.Tensor, lr: float, betas: tuple[float, float]) -> None:
        weight, grad = _local(param), _local(param.grad).float()
        state = self.state[param]
        if not state:
            state.update(step=0, m=torch.zeros_like(grad), v=torch.zeros_like(grad))
        state["step"] += 1
        state["m"].mul_(betas[0]).add_(grad, alpha=1 - betas[0])
        state["v"].mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        m = state["m"] / (1 - betas[0] ** state["step"])
        v = state["v"] / (1 - betas[1] ** state["step"])
        weight.sub_((lr * m / (v.sqrt() + 1e-8)).to(weight.dtype))


class Custom(torch.optim.Optimizer):
    """Plain descent that keeps whatever state the case puts there."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]  # no loss is returned
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    _local(param).sub_(_local(param.grad), alpha=group["lr"])


def _local(value: Any) -> torch.Tensor:
    """This rank's elements, detached, sharing memory with `value`."""
    found: torch.Tensor = (value._local_tensor if isinstance(value, DTensor) else value).detach()
    return found


class Kit:
    """See `hyperstate.testing.Kit`."""

    name = "torch"

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        torch.set_num_threads(1)
        self.device = self._own_device()
        if self.world > 1:
            backend = group_backend(self.device.type, os.environ.get(GROUP_VARIABLE, "").strip() or "host+device")
            dist.init_process_group(backend, timeout=TIMEOUT)
        self._mesh = lru_cache(maxsize=None)(self._new_mesh)

    # -- meshes and sharded tensors ---------------------------------------------------------------

    def mesh(self, shape: Sequence[int], names: Sequence[str]) -> Any:
        """One mesh per shape and names: each makes process groups, which are never freed."""
        return self._mesh(tuple(shape), tuple(names))

    def _new_mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    @staticmethod
    def _own_device() -> torch.device:
        """This rank's device: by its place on the machine, since a global rank says nothing about that."""
        kind = device_kind()
        if kind != "cpu":
            count = torch.accelerator.device_count()
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % max(count, 1))
        return current_device(kind)

    def shard(self, model: Any, mesh: Any) -> Any:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def sharded_tensor(self, full: Any, mesh: Any, placements: Sequence[str]) -> Any:
        found = [Replicate() if one == "R" else Shard(int(one[1:])) for one in placements]
        # src_data_rank=None: each rank takes its part of its own `full`, nothing is sent.
        return distribute_tensor(full, mesh, found, src_data_rank=None)

    # -- models -----------------------------------------------------------------------------------

    def model(self, seed: int = 0, sizes: Sequence[int] = (5, 7, 3)) -> Any:
        model = Perceptron(sizes)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in model.parameters():
                value.copy_(torch.empty(value.shape).uniform_(-1, 1, generator=generator))
        return model.to(self.device)

    def with_parameters(self, values: dict[str, Any]) -> Any:
        root = torch.nn.Module()
        made: dict[int, torch.nn.Parameter] = {}
        for fqn, value in values.items():
            *path, name = fqn.split(".")
            inner = root
            for step in path:
                if not hasattr(inner, step):
                    inner.add_module(step, torch.nn.Module())
                inner = getattr(inner, step)
            trained = value.is_floating_point() or value.is_complex()
            param = made.setdefault(id(value), torch.nn.Parameter(value.detach(), requires_grad=trained))
            inner.register_parameter(name, param)
        return root

    def add_buffer(self, model: Any, name: str, value: Any, persistent: bool = True) -> None:
        model.register_buffer(name, value, persistent=persistent)

    def freeze(self, model: Any, fqn: str) -> None:
        self.named(model)[fqn].requires_grad_(False)

    def named(self, model: Any) -> dict[str, Any]:
        return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))

    # -- optimizers -------------------------------------------------------------------------------

    def optimizer(self, model: Any, kind: str = "adam", lr: float = 0.01, groups: Any = None) -> Any:
        params = dict(model.named_parameters())
        members: Any = list(params.values())
        if groups is not None:
            members = [{"params": [params[fqn] for fqn in fqns], **fields} for fqns, fields in groups]
        if kind == "custom":
            return type("Custom", (Custom,), {})(members, lr=lr)
        # Without foreach, PyTorch's default on accelerators: it refuses plain and sharded parameters in one group.
        made: dict[str, Any] = {
            "adam": partial(torch.optim.Adam, foreach=False),
            "sgd": partial(torch.optim.SGD, foreach=False),
            "momentum": partial(torch.optim.SGD, momentum=0.9, foreach=False),
            "local": LocalAdam,
        }
        return made[kind](members, lr=lr)

    def state(self, optimizer: Any, parameter: Any) -> MutableMapping[Any, Any]:
        found: MutableMapping[Any, Any] = optimizer.state[parameter]
        return found

    def groups(self, optimizer: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = optimizer.param_groups
        return found

    def train(self, model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
        width = next(iter(model.layers)).in_features
        for step in range(first, first + steps):
            generator = torch.Generator().manual_seed(1000 + step)
            batch = torch.randn(8, width, generator=generator).to(self.device)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def fake_step(self, model: Any, optimizer: Any, seed: int = 0) -> None:
        for fqn, param in model.named_parameters():
            if not param.requires_grad:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {fqn}".encode()))
            grad = torch.randn(param.shape, generator=generator).to(self.device, param.dtype)
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()

    # -- values -----------------------------------------------------------------------------------

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        wanted = _TO_TORCH[dtype]
        # By way of float32: float8 is not made from numbers.
        made = torch.tensor(values, dtype=torch.float32 if dtype.startswith("float8") else wanted)
        return made.to(wanted).to(self.device)

    def content(self, value: Any) -> Content:
        found = _local(value).cpu().contiguous()
        data = found.reshape(-1).view(torch.uint8).numpy().tobytes() if found.numel() else b""
        return Content(_TO_NEUTRAL[found.dtype], tuple(found.shape), data.hex())

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def is_sharded(self, value: Any) -> bool:
        return isinstance(value, DTensor)

    def on_host(self, value: Any) -> bool:
        return bool(_local(value).device.type == "cpu")

    # -- the job ----------------------------------------------------------------------------------

    def traffic(self, reset: bool = False) -> dict[str, int]:
        return processes.traffic(load("torch").fabric, reset)

    def die(self, exchange: int = 0) -> None:
        processes.die(load("torch").fabric, exchange)
