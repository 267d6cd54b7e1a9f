"""A stand-in for HyperParallel's sharded tensors: their attributes and their limits, none of their code.

As there: a mesh has `mesh_shape`, `rank_list` and a *method* `device_type()`, but no `shape`; placements share no
base with those of any framework; `from_local` takes no global shape but computes it, so every dimension must
split evenly; optimizers keep state as plain local tensors. The adapter never imports this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from . import job
from .arrays import Tensor
from .dtypes import Array


@dataclass(frozen=True)
class Shard:
    """Splits a tensor dimension evenly."""

    dim: int

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether it splits `dim` (any, if None)."""
        return dim is None or dim == self.dim

    def is_replicate(self) -> bool:
        """No."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:  # noqa: ARG002  # the signature there
        """No."""
        return False


@dataclass(frozen=True)
class Replicate:
    """All ranks hold the same."""

    def is_shard(self, dim: int | None = None) -> bool:  # noqa: ARG002  # the signature there
        """No."""
        return False

    def is_replicate(self) -> bool:
        """Yes."""
        return True

    def is_partial(self, reduce_op: str | None = None) -> bool:  # noqa: ARG002  # the signature there
        """No."""
        return False


class Mesh:
    """A grid of global ranks, row-major."""

    def __init__(self, device_type: str, mesh: Any, mesh_dim_names: Sequence[str] | None = None) -> None:
        self.mesh: Array = np.asarray(mesh, dtype=np.int32)
        self.mesh_shape = tuple(self.mesh.shape)
        self.rank_list = tuple(self.mesh.reshape(-1).tolist())
        self.mesh_dim_names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        self.root_mesh: Mesh | None = None
        self._device_type = device_type

    def device_type(self) -> str:
        """Where the shards live."""
        return self._device_type

    def get_coordinate(self) -> tuple[int, ...] | None:
        """The calling rank's place, or None."""
        found = np.argwhere(self.mesh == job.rank())
        return tuple(found[0].tolist()) if len(found) else None


@dataclass(frozen=True)
class Layout:
    """Mesh and placements; `tensor_map` has per tensor dimension the reversed index of its mesh dimension, or -1."""

    mesh_shape: tuple[int, ...]
    rank_list: tuple[int, ...]
    placements: tuple[Shard | Replicate, ...]
    tensor_map: tuple[int, ...]


class DTensor:
    """A tensor split evenly over a mesh."""

    def __init__(self, local: Tensor, device_mesh: Mesh, placements: Sequence[Shard | Replicate]) -> None:
        self._local, self.device_mesh, self.placements = local, device_mesh, tuple(placements)
        self.requires_grad = local.requires_grad
        self.grad: Any = None

    @classmethod
    def from_local(cls, local: Tensor, device_mesh: Mesh, placements: Sequence[Shard | Replicate]) -> DTensor:
        """Around a local part, whose shape tells the global one."""
        return cls(local, device_mesh, placements)

    @classmethod
    def distribute(cls, full: Tensor, device_mesh: Mesh, placements: Sequence[Shard | Replicate]) -> DTensor:
        """This rank's part of `full`. Raises `ValueError` where a dimension does not split evenly."""
        part = own_part(full.array, device_mesh, placements)
        return cls(Tensor(part.copy(), full.dtype, device_mesh.device_type()), device_mesh, placements)

    def to_local(self) -> Tensor:
        """This rank's part, sharing memory."""
        return self._local

    def own_part(self, full: Array) -> Array:
        """This rank's region of a full array."""
        return own_part(full, self.device_mesh, self.placements)

    @property
    def dtype(self) -> str:
        """Neutral dtype name."""
        return self._local.dtype

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return self._local.shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape: local sizes times the mesh dimensions that split them."""
        return tuple(
            size * prod(n for n, p in zip(self.device_mesh.mesh_shape, self.placements, strict=True) if p.is_shard(d))
            for d, size in enumerate(self._local.shape)
        )

    @property
    def layout(self) -> Layout:
        """Mesh and placements in one."""
        mesh, last = self.device_mesh, len(self.placements) - 1
        tensor_map = [-1] * len(self.shape)
        for i, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                tensor_map[placement.dim] = last - i
        return Layout(mesh.mesh_shape, mesh.rank_list, self.placements, tuple(tensor_map))


def own_part(full: Array, mesh: Mesh, placements: Sequence[Shard | Replicate]) -> Array:
    """The calling rank's region of a full array. Raises `ValueError` for an uneven split or a foreign rank."""
    here = mesh.get_coordinate()
    if here is None:
        raise ValueError(f"rank {job.rank()} is no member of the mesh over {mesh.rank_list}")
    for parts, place, placement in zip(mesh.mesh_shape, here, placements, strict=True):
        if isinstance(placement, Shard):
            if full.shape[placement.dim] % parts:
                raise ValueError(f"uneven: dim {placement.dim} of shape {full.shape} over {parts} ranks")
            full = np.split(full, parts, axis=placement.dim)[place]
    return full
