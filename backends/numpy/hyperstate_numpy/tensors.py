"""`Tensors` of the reference backend: what a tensor is; allocate, view, copy, and bytes.

A sharded tensor is whatever has `to_local()`, `device_mesh` and `placements`, the toy framework's own or not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from hyperstate.errors import UnsupportedConfigurationError
from hyperstate.layout import Box, Layout, Mesh, Shape
from hyperstate.schema import TensorSpec
from hyperstate.structure import splits

from . import arrays
from .arrays import CPU, META, Tensor, byte_view
from .dtypes import convert, storage
from .fabric import NumpyFabric
from .sharded import DTensor, Placement, Replicate, Shard, StridedShard, cut

Place = str | None
Pair = tuple[Tensor, Tensor]

LOCAL = "local"
"""`TensorSpec.form` of a shard that is kept as a plain tensor of the local shape."""


def is_sharded(value: Any) -> bool:
    """Whether `value` is a sharded tensor of some kind around a local `Tensor`."""
    return isinstance(value, DTensor) or (
        hasattr(value, "placements")
        and hasattr(value, "device_mesh")
        and hasattr(value, "to_local")
        and isinstance(value.to_local(), Tensor)
    )


class NumpyTensors:
    """See `hyperstate.backend.Tensors`. NumPy arrays that a user passes count as plain tensors on the host."""

    def __init__(self, fabric: NumpyFabric) -> None:
        self._fabric = fabric

    def spec(self, value: Any) -> TensorSpec | None:
        """What `value` is, or None if it is no tensor."""
        if isinstance(value, Tensor):
            return TensorSpec(value.dtype, value.shape)
        if isinstance(value, np.ndarray):
            return TensorSpec(Tensor(value).dtype, tuple(value.shape))
        if is_sharded(value):
            return TensorSpec(value.dtype, tuple(value.shape), layout_of(value))
        return None

    def is_meta(self, value: Any) -> bool:
        """Whether `value` has no storage."""
        return self.local(value).device == META

    def local(self, value: Any) -> Tensor:
        """This rank's part, sharing memory with `value`."""
        if isinstance(value, Tensor):
            return value.detach() if value.requires_grad else value
        if isinstance(value, np.ndarray):
            return Tensor(value)
        found: Tensor = value.to_local()
        return found

    def place(self, value: Any) -> Place:
        """The device of `value`, None for the host; of a meta tensor, its mesh's device or its `home`."""
        device = self.local(value).device
        if device == META and is_sharded(value):
            kind = value.device_mesh.device_type
            device = kind() if callable(kind) else kind
        elif device == META:
            if value.home is None:
                raise UnsupportedConfigurationError(
                    "a meta tensor without a mesh does not tell where it is to live; pass device="
                )
            device = value.home
        return None if device == CPU else device

    def empty(self, shape: Shape, dtype: str, place: Place) -> Tensor:
        """Fresh memory, recognisably unwritten (`arrays.POISON`)."""
        return arrays.empty(shape, dtype, place or CPU)

    def zeros(self, shape: Shape, dtype: str, place: Place) -> Tensor:
        """A fresh tensor of zeros."""
        return arrays.zeros(shape, dtype, place or CPU)

    def staging(self, shape: Shape, dtype: str) -> Tensor:
        """Fresh memory on the host; nothing is faster here."""
        return self.empty(shape, dtype, None)

    def wrap(self, local: Tensor, spec: TensorSpec, like: Any) -> Any:
        """A sharded tensor around `local`, of the kind and on the mesh of `like`; `local` itself for a plain `spec`."""
        if spec.layout is None:
            return local
        if not is_sharded(like):
            raise UnsupportedConfigurationError(f"a shard of {spec.layout} can't be made from a plain tensor's mesh")
        own = layout_of(like)
        if own.mesh != spec.layout.mesh:
            raise UnsupportedConfigurationError(
                f"a sharded tensor on the mesh {spec.layout.mesh} can't be made: the tensor it goes with "
                f"lives on {own.mesh}"
            )
        same = own == spec.layout
        if isinstance(like, DTensor):
            placements = like.placements if same else _placements(spec.layout)
            return DTensor(local, like.device_mesh, placements, spec.shape)
        return _wrap_foreign(local, spec, like, same)

    def fresh_form(self, param: Any) -> str:
        """How an optimizer that never stepped keeps state of `param`: foreign ones update local tensors."""
        return LOCAL if is_sharded(param) and not isinstance(param, DTensor) else ""

    def view(self, local: Tensor, box: Box) -> Tensor:
        """The region `box` of `local`, sharing its memory."""
        return Tensor(cut(local.array, box), local.dtype, local.device)

    def same_storage_form(self, value: Any, spec: TensorSpec, place: Place) -> bool:
        """Whether values of `spec` at `place` can be copied into `value` as it is."""
        own = self.spec(value)
        if own is None or self.is_meta(value) or own.dtype != spec.dtype or self.place(value) != place:
            return False
        return own.shape == spec.shape and own.layout == spec.layout

    def storage(self, local: Tensor) -> Hashable:
        """The array that owns the elements, by identity."""
        owner = local.array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return id(owner if owner.base is None else owner.base)

    def same_memory(self, a: Tensor, b: Tensor) -> bool:
        """Whether two tensors are the same elements of one storage, read in the same way."""
        arrays = (a.array, b.array)
        ways = [(array.__array_interface__["data"][0], array.shape, array.strides) for array in arrays]
        return ways[0] == ways[1] and a.dtype == b.dtype

    def copy(self, pairs: Sequence[Pair]) -> None:
        """For each (to, from): copy values, converting the dtype."""
        for to, source in pairs:
            if to.shape != source.shape:  # NumPy would broadcast
                raise ValueError(f"can't copy a region of shape {source.shape} into {to.shape}")
            if META in (to.device, source.device):
                raise ValueError(f"can't copy from {source!r} to {to!r}: one has no storage")
            to.array[...] = convert(source.array, source.dtype, to.dtype)

    def raw(self, values: Sequence[Tensor]) -> list[bytes]:
        """The bytes of tensors, row-major."""
        return [value.array.tobytes() for value in values]

    def from_raw(self, data: bytes, spec: TensorSpec, place: Place) -> Tensor:
        """A fresh plain tensor of `spec.shape` with these bytes."""
        if len(data) != spec.nbytes:
            raise ValueError(f"{len(data)} bytes can't be a {spec.dtype}{list(spec.shape)}")
        stored = np.frombuffer(data, storage(spec.dtype)).reshape(spec.shape).copy()
        return Tensor(stored, spec.dtype, place or CPU)

    def buffer(self, nbytes: int) -> Tensor:
        """Fresh bytes where the fabric sends from."""
        return arrays.empty((nbytes,), "uint8", self._fabric.wire())

    def as_buffer(self, local: Tensor) -> Tensor | None:
        """`local`'s own bytes; None if it is not contiguous or lives elsewhere than the fabric sends from."""
        if local.device != self._fabric.wire() or not local.array.flags.c_contiguous:
            return None
        return Tensor(byte_view(local.array), "uint8", local.device)

    def host_bytes(self, local: Tensor) -> memoryview | None:
        """`local`'s own bytes; None if it is not contiguous or lives elsewhere than on the host."""
        if local.device != CPU or not local.array.flags.c_contiguous:
            return None
        return byte_view(local.array).data

    def over(self, memory: memoryview, dtype: str, shape: Shape) -> Tensor:
        """A tensor on the host over these bytes."""
        return Tensor(np.frombuffer(memory, storage(dtype)).reshape(shape), dtype)

    def windows(self, buffer: Tensor, parts: Sequence[tuple[int, Shape, str]]) -> list[Tensor]:
        """Typed tensors over parts of `buffer`."""
        found = []
        for offset, shape, dtype in parts:
            kind = storage(dtype)
            part = buffer.array[offset : offset + prod(shape) * kind.itemsize]
            found.append(Tensor(part.view(kind).reshape(shape), dtype, buffer.device))
        return found


# -- anybody's meshes and placements -------------------------------------------------------------------


def mesh_of(device_mesh: Any) -> Mesh:
    """The core's mesh for a device mesh of any kind."""
    known = getattr(device_mesh, "description", None)
    if isinstance(known, Mesh):
        return known
    shape = getattr(device_mesh, "mesh_shape", None)
    ranks = getattr(device_mesh, "rank_list", None)
    names, root = getattr(device_mesh, "mesh_dim_names", None), getattr(device_mesh, "root_mesh", None)
    return Mesh(
        tuple(map(int, device_mesh.mesh.shape if shape is None else shape)),
        tuple(map(int, device_mesh.mesh.reshape(-1) if ranks is None else ranks)),
        tuple(map(str, names)) if names else None,
        None if root is None or root is device_mesh else mesh_of(root),
    )


def layout_of(value: Any) -> Layout:
    """The core's layout of a sharded tensor. Raises `UnsupportedConfigurationError` for a placement that has none."""
    if isinstance(value, DTensor):
        return value.device_mesh.layout(value.placements, len(value.shape))
    mesh = mesh_of(value.device_mesh)
    return _interned(mesh, splits(value.placements, mesh.shape, len(value.shape)))


_interned = lru_cache(maxsize=1 << 10)(Layout)


def _factors(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Of each splitting mesh dimension: itself, the tensor dimension, and its split factor (inverse of `splits`)."""
    for dim, split in enumerate(layout.splits):
        for i, d in enumerate(split):
            yield d, dim, prod(layout.mesh.shape[e] for e in split[:i] if e > d)


def _placements(layout: Layout) -> list[Placement]:
    found: list[Placement] = [Replicate()] * len(layout.mesh.shape)
    for d, dim, factor in _factors(layout):
        found[d] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    return found


def _wrap_foreign(local: Tensor, spec: TensorSpec, like: Any, same: bool) -> Any:
    """Made with the classes that `like` and its own placements have."""
    placements = tuple(like.placements)
    if not same:
        shard = next((type(p) for p in placements if p.is_shard()), None)
        replicate = next((type(p) for p in placements if p.is_replicate()), None)
        assert spec.layout is not None
        wanted = {d: (dim, factor) for d, dim, factor in _factors(spec.layout)}
        plain_dims = len(placements) - len(wanted)
        if (wanted and shard is None) or (plain_dims and replicate is None) or any(f != 1 for _, f in wanted.values()):
            raise UnsupportedConfigurationError(
                f"a tensor laid out as {spec.layout.splits} can't be made from the placements {placements}"
            )
        kinds: Any = (shard, replicate)
        placements = tuple(kinds[0](wanted[d][0]) if d in wanted else kinds[1]() for d in range(len(placements)))
    made = type(like).from_local(local, like.device_mesh, placements)
    if tuple(made.shape) != spec.shape:
        raise UnsupportedConfigurationError(
            f"{type(like).__module__}.{type(like).__qualname__} splits evenly only: a shard of shape {local.shape} "
            f"would stand for {tuple(made.shape)} instead of {spec.shape}"
        )
    return made
