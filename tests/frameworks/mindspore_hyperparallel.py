"""A stand-in for HyperParallel's sharded tensors on MindSpore: their attributes and their limits, none of their code.

As there: the tensor is a subclass of MindSpore's, a Parameter made from it is an object of both classes; a mesh has
`mesh_shape`, `rank_list` and a *method* `device_type()`, but no `shape`; its grid is a tensor; placements share no base
with any other's; `from_local` takes no global shape but computes it, so every dimension must split evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mindspore as ms
import numpy as np

from hyperstate_mindspore import job


@dataclass(frozen=True)
class Shard:
    """Splits a tensor dimension evenly."""

    dim: int

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False


@dataclass(frozen=True)
class Replicate:
    """All ranks hold the same."""

    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def is_replicate(self) -> bool:
        return True

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False


@dataclass(frozen=True)
class Partial:
    """Ranks hold addends."""

    reduce_op: str = "sum"

    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op in (None, self.reduce_op)


class DeviceMesh:
    """A grid of global ranks, row-major."""

    def __init__(self, device_type: str, mesh: Any, mesh_dim_names: Sequence[str] | None = None) -> None:
        self.mesh = ms.Tensor(np.asarray(mesh, dtype=np.int32))
        self.mesh_shape = tuple(self.mesh.shape)
        self.rank_list = tuple(int(rank) for rank in np.asarray(mesh).reshape(-1))
        self.mesh_dim_names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        self.root_mesh = None
        self._device_type = device_type

    def device_type(self) -> str:
        return self._device_type

    @property
    def ndim(self) -> int:
        return len(self.mesh_shape)

    def get_coordinate(self) -> tuple[int, ...] | None:
        found = np.argwhere(self.mesh.asnumpy() == job.rank())
        return tuple(found[0].tolist()) if len(found) else None


class DTensor(ms.Tensor):
    """A tensor split evenly over a mesh."""

    def __new__(cls, local: Any, device_mesh: Any = None, placements: Any = None) -> Any:
        made = ms.Tensor.__new__(cls)
        if isinstance(local, DTensor):  # as Parameter asks for
            local, device_mesh, placements = local._local_tensor, local.device_mesh, local.placements
        ms.Tensor.__init__(made, local)
        made._local_tensor, made.device_mesh, made.placements = local, device_mesh, tuple(placements)
        return made

    def __init__(self, local: Any, device_mesh: Any = None, placements: Any = None) -> None:
        pass  # done by __new__

    @classmethod
    def from_local(cls, local: Any, device_mesh: Any, placements: Any) -> Any:
        return cls(local, device_mesh, placements)

    def to_local(self) -> Any:
        return self._local_tensor

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self._local_tensor.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = self.device_mesh.mesh_shape
        return tuple(
            size * prod(n for n, p in zip(sizes, self.placements, strict=True) if isinstance(p, Shard) and p.dim == d)
            for d, size in enumerate(self._local_tensor.shape)
        )
