"""The toy framework's sharded tensors: meshes, placements, `DTensor`. In PyTorch's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hyperstate.layout import Box, Layout, Mesh
from hyperstate.structure import splits

from . import job
from .arrays import CPU, Tensor, empty
from .dtypes import Array


class Placement:
    """What one mesh dimension does to a tensor."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether it splits tensor dimension `dim` (any, if None)."""
        return isinstance(self, Shard) and (dim is None or dim == self.dim)

    def is_replicate(self) -> bool:
        """Whether all its ranks hold the same."""
        return isinstance(self, Replicate)

    def is_partial(self) -> bool:
        """Whether its ranks hold addends, not values."""
        return isinstance(self, Partial)


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank holds the same."""


@dataclass(frozen=True)
class Partial(Placement):
    """The value is the sum over the ranks."""


@dataclass(frozen=True)
class Shard(Placement):
    """Cuts tensor dimension `dim` as `hyperstate.layout.chunk` does; the last chunks may be smaller or empty."""

    dim: int


@dataclass(frozen=True)
class StridedShard(Shard):
    """A shard of a dimension that later mesh dimensions, of `split_factor` ranks together, have split before."""

    split_factor: int = 1


class DeviceMesh:
    """A grid of global ranks. `mesh[name]` is the slice through the calling rank along some mesh dimensions."""

    def __init__(
        self, ranks: Any, names: Sequence[str] | None = None, device_type: str = CPU, root: DeviceMesh | None = None
    ) -> None:
        self.mesh: Array = np.asarray(ranks, dtype=np.int64)
        self.mesh_dim_names = tuple(names) if names is not None else None
        if self.mesh_dim_names is not None and len(self.mesh_dim_names) != self.mesh.ndim:
            raise ValueError(f"{self.mesh.ndim} mesh dimensions were given the names {self.mesh_dim_names}")
        self.device_type = device_type
        self.root_mesh = self if root is None else root
        self._layouts: dict[Any, Layout] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of ranks along each mesh dimension."""
        return tuple(self.mesh.shape)

    @cached_property
    def description(self) -> Mesh:
        """The core's description of this mesh."""
        root = None if self.root_mesh is self else self.root_mesh.description
        return Mesh(self.shape, tuple(self.mesh.reshape(-1).tolist()), self.mesh_dim_names, root)

    def layout(self, placements: Sequence[Placement], ndim: int) -> Layout:
        """The core's layout; one object per placements and number of tensor dimensions."""
        key = (tuple(placements), ndim)
        if key not in self._layouts:
            self._layouts[key] = Layout(self.description, splits(placements, self.shape, ndim))
        return self._layouts[key]

    def get_coordinate(self) -> tuple[int, ...] | None:
        """The calling rank's place, or None if it is no member."""
        return self.description.coordinate(job.rank())

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        wanted = (names,) if isinstance(names, str) else tuple(names)
        here = self.get_coordinate()
        own = self.mesh_dim_names or ()
        if unknown := [name for name in wanted if name not in own]:
            raise KeyError(f"this mesh has no dimension {', '.join(map(repr, unknown))}; it has {own}")
        if here is None:
            raise ValueError(f"rank {job.rank()} is no member of the mesh over {self.description.ranks}")
        cut = tuple(slice(None) if name in wanted else here[d] for d, name in enumerate(own))
        kept = [name for name in own if name in wanted]
        grid = self.mesh[cut].transpose([kept.index(name) for name in wanted])
        return DeviceMesh(grid, wanted, self.device_type, self.root_mesh)

    def __repr__(self) -> str:
        return f"DeviceMesh({self.mesh.tolist()}, {self.mesh_dim_names}, {self.device_type!r})"


class DTensor:
    """A tensor of which each rank of a mesh holds a part. `shape` is the full tensor's, in elements."""

    def __init__(
        self,
        local: Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        requires_grad: bool = False,
    ) -> None:
        self._local = local
        self.device_mesh, self.placements = device_mesh, tuple(placements)
        self.shape = tuple(shape)
        self.requires_grad = requires_grad
        self.grad: DTensor | None = None
        if len(self.placements) != len(device_mesh.shape):
            raise ValueError(f"{len(device_mesh.shape)} mesh dimensions need as many placements, not {placements}")

    @classmethod
    def distribute(cls, full: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
        """This rank's part of `full`, which all ranks hold alike. Nothing is sent; the local part is a copy."""
        layout = device_mesh.layout(placements, len(full.shape))
        box = layout.box(full.shape, job.rank())
        device = device_mesh.device_type if full.device != "meta" else full.device
        if box is None:
            return cls(empty((0,), full.dtype, device), device_mesh, placements, full.shape)
        part = Tensor(cut(full.array, box), full.dtype, full.device)
        return cls(part.clone(device), device_mesh, placements, full.shape)

    @property
    def dtype(self) -> str:
        """Neutral dtype name."""
        return self._local.dtype

    def to_local(self) -> Tensor:
        """This rank's part, sharing memory."""
        return self._local

    def detach(self) -> DTensor:
        """A sharded tensor that shares memory and needs no gradient."""
        return DTensor(self._local, self.device_mesh, self.placements, self.shape)

    def own_part(self, full: Array) -> Array | None:
        """This rank's region of a full array, sharing its memory; None if the rank is no member of the mesh."""
        box = self.device_mesh.layout(self.placements, len(self.shape)).box(self.shape, job.rank())
        return None if box is None else cut(full, box)

    def full_tensor(self) -> Tensor:
        """The full tensor, on every rank of the mesh, which all must make the call."""
        layout = self.device_mesh.layout(self.placements, len(self.shape))
        ranks, here = layout.mesh.ranks, job.current()
        parts = [self._local.array] if here is None else here.meet(ranks, self._local.array.copy())
        made = empty(self.shape, self.dtype, self._local.device)
        for rank, part in zip(ranks, parts, strict=True):
            box = layout.box(self.shape, rank)
            assert box is not None
            cut(made.array, box)[...] = part
        return made

    def __repr__(self) -> str:
        return f"DTensor({self.dtype}{list(self.shape)}, {self.placements} on {self.device_mesh})"


AnyTensor = Tensor | DTensor


def plain(value: Any) -> Tensor:
    """This rank's part of a plain tensor or a sharded one of whatever make, sharing memory."""
    found: Tensor = value if isinstance(value, Tensor) else value.to_local()
    return found


def like(value: Any, part: Tensor) -> Any:
    """`part` laid out as `value` is; plain where somebody else's optimizers work on local tensors."""
    if isinstance(value, DTensor):
        return DTensor(part, value.device_mesh, value.placements, value.shape)
    return part


def cut(array: Array, box: Box) -> Array:
    """The region `box` of `array`, sharing its memory."""
    if not array.ndim:
        return array
    return array[tuple(map(slice, box.start, box.stop))]
