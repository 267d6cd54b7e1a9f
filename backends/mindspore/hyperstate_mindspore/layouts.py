"""Reading sharded tensors of whatever kind, by structure alone.

Three kinds count: hyperstate's own `DTensor`, HyperParallel's (known by `device_mesh`, `placements` and
`to_local()`; never imported), and a Parameter that holds a local shard and on which `record` noted its layout.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np

from hyperstate import structure
from hyperstate.errors import UnsupportedConfigurationError
from hyperstate.layout import Layout, Mesh, Shape

from . import job
from .host import neutral_dtype, stored, tensor_over

_RECORD = "_hyperstate_shard"
WHOLE = "_hyperstate_whole"
"""Attribute of a sharded Parameter that holds the whole for a while. (Shapes can't tell: one row is its own whole.)"""


@dataclass(frozen=True)
class Record:
    """How the full tensor is laid out of which a Parameter holds this rank's part."""

    device_mesh: Any
    placements: tuple[Any, ...]
    shape: Shape
    """Of the full tensor, in elements."""
    local_shape: Shape
    """Of this rank's part; it may have no elements."""

    @property
    def padded(self) -> bool:
        """Whether the Parameter holds zeros in place of a part without elements, which optimizers refuse."""
        return 0 in self.local_shape

    @property
    def kept_shape(self) -> Shape:
        """Shape of the Parameter itself."""
        return tuple(max(size, 1) for size in self.local_shape) if self.padded else self.local_shape


def record(parameter: ms.Parameter, device_mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> Record:
    """Note on `parameter` that it holds this rank's part of a tensor of `shape`. It must get that part's shape next."""
    full = tuple(int(size) for size in shape)
    layout = Layout(mesh_of(device_mesh), structure.splits(placements, mesh_of(device_mesh).shape, len(full)))
    box = layout.box(full, job.rank())
    if box is None:
        raise ValueError(f"rank {job.rank()} is no member of the mesh over the ranks {layout.mesh.ranks}")
    made = Record(device_mesh, tuple(placements), full, box.shape)
    setattr(parameter, _RECORD, made)
    return made


def recorded(value: Any) -> Record | None:
    """What `record` noted on a Parameter. Copies of a Parameter have no record."""
    found: Record | None = getattr(value, _RECORD, None)
    return found


def is_sharded(value: Any) -> bool:
    """Whether `value` is this rank's part of a tensor, with its layout."""
    return recorded(value) is not None or structure.is_sharded(value)


def local_of(value: Any) -> Any:
    """This rank's part, sharing memory with `value` where it has elements; a plain tensor is its own part."""
    noted = recorded(value)
    if noted is not None:
        _check_kept(value, noted)
        return trimmed(value, value)
    if structure.is_sharded(value):
        found = getattr(value, "_local_tensor", None)
        return local_of(value.to_local() if found is None else found)
    return value


def _check_kept(parameter: ms.Parameter, noted: Record) -> None:
    if hasattr(parameter, WHOLE) or tuple(parameter.shape) != noted.kept_shape:
        raise UnsupportedConfigurationError(
            f"parameter {parameter.name!r} has the shape {tuple(parameter.shape)}, but its recorded shard on rank "
            f"{job.rank()} has {noted.local_shape} of {noted.shape}: the call came inside `unsharded`, or the "
            "parameter was given other data after shard_module"
        )


def trimmed(parameter: Any, value: Any) -> Any:
    """`value`, or an empty tensor of the shard's shape if it stands for a part of `parameter` without elements.

    `value` is the parameter or a tensor that an optimizer keeps like it.
    """
    noted = recorded(parameter)
    if noted is None or not noted.padded or tuple(value.shape) != noted.kept_shape:
        return value
    dtype = neutral_dtype(value.dtype)
    return tensor_over(np.zeros(noted.local_shape, stored(dtype)), dtype)


def shape_of(value: Any) -> Shape:
    """The shape of the full tensor."""
    noted = recorded(value)
    return tuple(int(size) for size in value.shape) if noted is None else noted.shape


def layout_of(value: Any) -> Layout:
    """The layout of a sharded value. Raises `UnsupportedConfigurationError` for placements that have none."""
    noted = recorded(value)
    held: Any = value if noted is None else noted
    return layout(held.device_mesh, held.placements, len(shape_of(value)))


# By identity: equal meshes may have been sliced from different roots.
_meshes: dict[int, tuple[weakref.ref[Any], Mesh, dict[Any, Layout]]] = {}


def mesh_of(device_mesh: Any) -> Mesh:
    """The core's mesh for a device mesh of any kind."""
    return _entry(device_mesh)[0]


def layout(device_mesh: Any, placements: Sequence[Any], ndim: int) -> Layout:
    """The core's layout of a tensor with `ndim` dimensions; one object per mesh, placements and `ndim`."""
    mesh, known = _entry(device_mesh)
    key = (tuple(map(structure.place_of, placements)), ndim)
    found = known.get(key)
    if found is None:
        found = known[key] = Layout(mesh, structure.splits(placements, mesh.shape, ndim))
    return found


def _entry(device_mesh: Any) -> tuple[Mesh, dict[Any, Layout]]:
    found = _meshes.get(id(device_mesh))
    if found is not None and found[0]() is device_mesh:
        return found[1], found[2]
    name = id(device_mesh)
    mesh, known = _read(device_mesh), dict[Any, Layout]()
    _meshes[name] = (weakref.ref(device_mesh, lambda _: _meshes.pop(name, None)), mesh, known)
    return mesh, known


def _read(device_mesh: Any) -> Mesh:
    names = getattr(device_mesh, "mesh_dim_names", None)
    shape = getattr(device_mesh, "mesh_shape", None)
    root = getattr(device_mesh, "root_mesh", None)
    return Mesh(
        tuple(int(size) for size in (device_mesh.shape if shape is None else shape)),
        structure.mesh_ranks(device_mesh),
        tuple(map(str, names)) if names else None,
        None if root is None or root is device_mesh else mesh_of(root),
    )
