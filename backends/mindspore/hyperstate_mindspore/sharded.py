"""Sharded tensors for eager MindSpore, which ships none: meshes, placements, `DTensor`. In PyTorch's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
import numpy.typing as npt

from hyperstate import structure
from hyperstate.errors import UnsupportedConfigurationError
from hyperstate.layout import Box, Layout, Shape
from hyperstate.schema import TensorSpec

from . import groups, job, layouts
from .host import array_of, neutral_dtype, tensor_over


class Placement:
    """What one mesh dimension does to a tensor."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether it splits tensor dimension `dim` (any, if None)."""
        return isinstance(self, Shard) and (dim is None or dim == self.dim)

    def is_replicate(self) -> bool:
        """Whether all its ranks hold the same."""
        return isinstance(self, Replicate)

    def is_partial(self) -> bool:
        """Whether its ranks hold addends. Never: gradients are reduced before they become tensors of this kind."""
        return False


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank holds the same."""


@dataclass(frozen=True)
class Shard(Placement):
    """Cuts tensor dimension `dim` as ``torch.chunk`` does: the last parts may be smaller or have no elements."""

    dim: int


@dataclass(frozen=True)
class StridedShard(Shard):
    """A shard of a dimension that later mesh dimensions, of `split_factor` ranks together, have split before."""

    split_factor: int = 1


class DeviceMesh:
    """A grid of global ranks, row-major; ``mesh["dp"]`` is the slice through this rank along some mesh dimensions."""

    def __init__(
        self, mesh: Any, mesh_dim_names: Sequence[str] | None = None, *, root_mesh: DeviceMesh | None = None
    ) -> None:
        self.mesh: npt.NDArray[np.int64] = np.asarray(mesh, dtype=np.int64)
        self.mesh_dim_names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        self.root_mesh = self if root_mesh is None else root_mesh
        if self.mesh_dim_names is not None and len(self.mesh_dim_names) != self.mesh.ndim:
            raise ValueError(f"{self.mesh.ndim} mesh dimensions were given the names {self.mesh_dim_names}")
        if self.mesh.size and (self.mesh.min() < 0 or self.mesh.max() >= job.world()):
            raise ValueError(f"the mesh {self.mesh.tolist()} names ranks that a job of {job.world()} does not have")
        layouts.mesh_of(self)  # refuses a rank that appears twice

    @property
    def shape(self) -> Shape:
        """Number of ranks along each mesh dimension."""
        return tuple(int(size) for size in self.mesh.shape)

    @property
    def ndim(self) -> int:
        """Number of mesh dimensions."""
        return int(self.mesh.ndim)

    @property
    def device_type(self) -> str:
        """Where this process' tensors live, in MindSpore's word: "CPU", "Ascend", …"""
        return str(ms.get_context("device_target"))

    def size(self, dim: int | str | None = None) -> int:
        """Number of ranks along a mesh dimension; of all, if None."""
        return int(self.mesh.size) if dim is None else self.shape[self._number(dim)]

    def get_coordinate(self) -> Shape | None:
        """This rank's place, or None if it is no member."""
        return layouts.mesh_of(self).coordinate(job.rank())

    def get_local_rank(self, dim: int | str = 0) -> int:
        """This rank's place along a mesh dimension."""
        return self._here()[self._number(dim)]

    def get_group(self, dim: int | str = 0) -> str | None:
        """The process group along a mesh dimension, for `mindspore.mint.distributed`. All its ranks must call."""
        mesh = layouts.mesh_of(self)
        self._here()
        return groups.group(mesh.slice([self._number(dim)], job.rank()))

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        wanted = (names,) if isinstance(names, str) else tuple(names)
        here, own = self._here(), self.mesh_dim_names or ()
        if len(set(wanted)) != len(wanted):
            raise KeyError(f"a mesh dimension is named twice in {wanted}")
        numbers = [self._number(name) for name in wanted]
        if wanted == own:
            return self
        cut = tuple(slice(None) if d in numbers else here[d] for d in range(self.ndim))
        kept = sorted(numbers)
        grid = self.mesh[cut].transpose([kept.index(number) for number in numbers])
        return DeviceMesh(grid, wanted, root_mesh=self.root_mesh)

    def _number(self, dim: int | str) -> int:
        names = self.mesh_dim_names or ()
        if isinstance(dim, str):
            if dim not in names:
                raise KeyError(f"this mesh has no dimension {dim!r}; it has {names}")
            return names.index(dim)
        if not -self.ndim <= dim < self.ndim:
            raise IndexError(f"this mesh has {self.ndim} dimensions, so no dimension {dim}")
        return dim % self.ndim

    def _here(self) -> Shape:
        found = self.get_coordinate()
        if found is None:
            raise ValueError(f"rank {job.rank()} is no member of the mesh {self.mesh.tolist()}")
        return found

    def __repr__(self) -> str:
        return f"DeviceMesh({self.mesh.tolist()}, {self.mesh_dim_names})"


def init_device_mesh(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str] | None = None) -> DeviceMesh:
    """A mesh over all ranks of the job, row-major. Raises `ValueError` if their number is another."""
    shape = tuple(int(size) for size in mesh_shape)
    count = int(np.prod(shape))
    if count != job.world():
        raise ValueError(f"a mesh of shape {shape} has {count} ranks, the job has {job.world()}")
    return DeviceMesh(np.arange(count).reshape(shape), mesh_dim_names)


class DTensor:
    """A tensor of which each rank of a mesh holds a part. `shape` is the full tensor's, in elements."""

    def __init__(self, local: Any, device_mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> None:
        self._local_tensor, self.device_mesh, self.placements = local, device_mesh, tuple(placements)
        self.shape = tuple(int(size) for size in shape)

    @classmethod
    def from_local(
        cls, local: Any, device_mesh: Any, placements: Sequence[Any], shape: Sequence[int] | None = None
    ) -> DTensor:
        """Around this rank's part, sharing its memory. Nothing is sent.

        Without `shape` the parts are taken to be equal. Raises `ValueError` if the part has another shape than the
        layout gives this rank.
        """
        part = tuple(int(size) for size in local.shape)
        layout = layouts.layout(device_mesh, placements, len(part))
        if shape is None:
            factors = [[layout.mesh.shape[d] for d in split] for split in layout.splits]
            shape = [size * int(np.prod(factor)) for size, factor in zip(part, factors, strict=True)]
        made = cls(local, device_mesh, placements, shape)
        box = layout.box(made.shape, job.rank()) if len(made.shape) == len(part) else None
        if len(made.shape) != len(part) or (box is not None and box.shape != part):
            raise ValueError(
                f"rank {job.rank()}: a part of shape {part} does not fit {tuple(placements)} of a tensor of shape "
                f"{made.shape}" + (f", where it has {box.shape}" if box is not None else "")
            )
        return made

    @property
    def dtype(self) -> Any:
        """MindSpore's dtype."""
        return self._local_tensor.dtype

    @property
    def ndim(self) -> int:
        """Number of tensor dimensions."""
        return len(self.shape)

    @property
    def layout(self) -> Layout:
        """The core's layout."""
        return layouts.layout(self.device_mesh, self.placements, len(self.shape))

    def to_local(self) -> Any:
        """This rank's part, sharing memory."""
        return layouts.local_of(self)

    def full_tensor(self) -> Any:
        """The full tensor, a fresh plain one, on every rank of the mesh, which all must make the call."""
        return from_numpy(gather([self])[0], self.dtype)

    def redistribute(self, *arguments: Any) -> DTensor:
        """A fresh copy with other placements: ``redistribute(placements)`` or ``redistribute(mesh, placements)``.

        All ranks of the mesh must call. The mesh must be the tensor's own: `hyperstate.set_model_state_dict` moves
        values between meshes.
        """
        *mesh, placements = arguments
        if mesh and layouts.mesh_of(mesh[0]) != layouts.mesh_of(self.device_mesh):
            raise ValueError(f"a tensor on {self.device_mesh} can't be redistributed to another mesh, {mesh[0]}")
        layouts.layout(self.device_mesh, placements, len(self.shape))  # refuses before anything is sent
        return distribute_tensor(self.full_tensor(), self.device_mesh, placements)

    def __repr__(self) -> str:
        return f"DTensor({self.dtype}{list(self.shape)}, {self.placements} on {self.device_mesh})"


def distribute_tensor(tensor: Any, device_mesh: Any, placements: Sequence[Any]) -> DTensor:
    """This rank's part of `tensor`, which all ranks hold alike, as a copy. Nothing is sent."""
    shape = tuple(int(size) for size in tensor.shape)
    box = layouts.layout(device_mesh, placements, len(shape)).box(shape, job.rank())
    if box is None:
        raise ValueError(f"rank {job.rank()} is no member of {device_mesh}")
    part = from_numpy(cut(array_of(tensor), box), tensor.dtype)
    return DTensor(part, device_mesh, placements, shape)


def wrap(local: Any, spec: TensorSpec, like: Any) -> Any:
    """A sharded tensor of `spec` around this rank's `local`, on the mesh (and of the kind) of `like`."""
    if spec.layout is None:
        return local
    if not layouts.is_sharded(like):
        raise UnsupportedConfigurationError(f"a shard of {spec.layout} can't be made from a plain tensor's mesh")
    noted = layouts.recorded(like)
    held: Any = like if noted is None else noted
    if layouts.mesh_of(held.device_mesh) != spec.layout.mesh:
        raise UnsupportedConfigurationError(
            f"a sharded tensor on the mesh {spec.layout.mesh} can't be made: the tensor it goes with lives on "
            f"{layouts.mesh_of(held.device_mesh)}"
        )
    same = layouts.layout_of(like) == spec.layout
    if noted is not None or isinstance(like, DTensor):
        placements = held.placements if same else _own_placements(spec.layout)
        return DTensor(local, held.device_mesh, placements, spec.shape)
    # A Parameter made from a sharded tensor has a class derived from both.
    kind = next(k for k in type(like).__mro__ if hasattr(k, "from_local") and not issubclass(k, ms.Parameter))
    return structure.rebuilt(kind, local, spec.shape, spec.layout, like)


def _own_placements(wanted: Layout) -> tuple[Any, ...]:
    found: list[Any] = [Replicate()] * len(wanted.mesh.shape)
    for d, dim, factor in structure.factors(wanted):
        found[d] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    return tuple(found)


def gather(values: Sequence[Any]) -> list[npt.NDArray[Any]]:
    """The full contents of sharded values, fresh: one collective per mesh, however many values.

    All ranks of the meshes must call, with the same values in the same order.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for i, value in enumerate(values):
        rows.setdefault(_replica(layouts.layout_of(value)), []).append(i)
    result: list[Any] = [None] * len(values)
    for ranks, members in rows.items():
        found = _gather_row([values[i] for i in members], ranks)
        for i, full in zip(members, found, strict=True):
            result[i] = full
    return result


def _replica(layout: Layout) -> tuple[int, ...]:
    """This rank's replica group: the ranks that hold every element once."""
    if job.rank() not in layout.mesh.members:
        raise ValueError(f"rank {job.rank()} is no member of the mesh over the ranks {layout.mesh.ranks}")
    return layout.mesh.slice(layout.used, job.rank())


def _gather_row(values: Sequence[Any], ranks: tuple[int, ...]) -> list[npt.NDArray[Any]]:
    parts = [np.ascontiguousarray(array_of(layouts.local_of(value))) for value in values]
    specs = [(layouts.layout_of(v), layouts.shape_of(v), p.dtype) for v, p in zip(values, parts, strict=True)]
    sizes = {rank: sum(_nbytes(spec, rank) for spec in specs) for rank in ranks}
    mine = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])
    arrived = groups.all_gather(mine, sizes)
    result = []
    offsets = dict.fromkeys(ranks, 0)
    for spec in specs:
        layout, shape, dtype = spec
        full = np.empty(shape, dtype)
        for rank in ranks:
            box = layout.box(shape, rank)
            assert box is not None
            start, stop = offsets[rank], offsets[rank] + _nbytes(spec, rank)
            offsets[rank] = stop
            full[region(box)] = arrived[rank][start:stop].copy().view(dtype).reshape(box.shape)
        result.append(full)
    return result


def _nbytes(spec: tuple[Layout, Shape, np.dtype[Any]], rank: int) -> int:
    layout, shape, dtype = spec
    box = layout.box(shape, rank)
    assert box is not None
    return box.size * dtype.itemsize


def region(box: Box) -> tuple[slice, ...]:
    """The index of a box in an array."""
    return tuple(map(slice, box.start, box.stop))


def cut(array: npt.NDArray[Any], box: Box) -> npt.NDArray[Any]:
    """A fresh copy of the region `box`."""
    return np.array(array[region(box)], order="C")


def from_numpy(array: npt.NDArray[Any], dtype: Any) -> Any:
    """A fresh tensor with the contents and the shape of `array`, which has MindSpore's `dtype`."""
    made = tensor_over(np.array(array, order="C"), neutral_dtype(dtype))
    assert tuple(made.shape) == array.shape
    return made
