"""A stand-in for HyperParallel on PyTorch: what examples/integrations uses of it, with its attributes and its limits.

None of its code is here. As there: the sharded tensor has the local shape underneath and tells the global one; a mesh
has `mesh_shape`, `rank_list` and a *method* `device_type()`, but no `shape`; placements share no base with PyTorch's;
dim 0 must split evenly; optimizers work on the local parts, inside `SkipDTensorDispatch`, and keep plain local state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext as SkipDTensorDispatch  # noqa: N812  # its name
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

__all__ = ["DTensor", "Shard", "SkipDTensorDispatch", "fully_shard", "init_device_mesh"]


class Shard:
    """Splits a dim evenly."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False


class DeviceMesh:
    """A row of ranks."""

    def __init__(self, device_type: str, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str] | None) -> None:
        self._device_type = device_type
        self.mesh_shape, self.mesh_dim_names = tuple(mesh_shape), mesh_dim_names and tuple(mesh_dim_names)
        self.rank_list = tuple(range(self.mesh_shape[0]))

    def device_type(self) -> str:
        return self._device_type


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    return DeviceMesh(device_type, mesh_shape, mesh_dim_names)


class DTensor(torch.Tensor):
    """A parameter that is split along dim 0."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def from_local(local: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Shard]) -> DTensor:
        made = torch.Tensor._make_subclass(DTensor, local.detach())
        made._local_tensor, made.device_mesh, made.placements = local.detach(), device_mesh, tuple(placements)
        made._is_param = True
        return made

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # the global shape, as such classes give it
        rows, *rest = self._local_tensor.shape
        return torch.Size((rows * self.device_mesh.mesh_shape[0], *rest))

    def detach(self) -> DTensor:  # type: ignore[override]  # keeps its layout
        return self.from_local(self._local_tensor, self.device_mesh, self.placements)

    def to_local(self) -> torch.Tensor:
        return self._local_tensor

    def full_tensor(self) -> torch.Tensor:
        parts = [torch.empty_like(self._local_tensor) for _ in self.device_mesh.rank_list]
        dist.all_gather(parts, self._local_tensor)
        return torch.cat(parts)


def fully_shard(module: nn.Module, *, mesh: DeviceMesh) -> nn.Module:
    """Each rank keeps its rows; a forward gathers them, a backward gives each part its gradient."""
    for inner in module.modules():
        for name, value in list(inner.named_parameters(recurse=False)):
            if len(value) % mesh.mesh_shape[0]:
                raise NotImplementedError("Uneven sharding on dim 0 not supported")
            part = value.detach().chunk(mesh.mesh_shape[0])[dist.get_rank()].clone()
            inner._parameters[name] = DTensor.from_local(part, mesh, [Shard(0)]).requires_grad_()
    plain_forward = module.forward

    def forward(*batch: Any) -> Any:
        full = {name: value.full_tensor().requires_grad_() for name, value in module.named_parameters()}
        for name, value in module.named_parameters():
            full[name].register_hook(lambda gradient, own=value: _give(own, gradient))
        module.forward = plain_forward  # type: ignore[method-assign]  # for this call
        try:
            return functional_call(module, full, batch)
        finally:
            module.forward = forward  # type: ignore[method-assign]  # the same

    module.forward = forward  # type: ignore[method-assign]  # the same
    return module


def _give(parameter: DTensor, gradient: torch.Tensor) -> None:
    part = gradient.chunk(parameter.device_mesh.mesh_shape[0])[dist.get_rank()].clone()
    parameter.grad = DTensor.from_local(part, parameter.device_mesh, parameter.placements)
