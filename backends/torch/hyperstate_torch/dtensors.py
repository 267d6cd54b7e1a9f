"""Reading and making sharded tensors of whatever kind, by structure alone.

PyTorch's DTensor and HyperParallel's have no common base. Both have `device_mesh`, `placements` and
`to_local()`; meshes and placements differ in spelling, and this module is where that ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from hyperstate.errors import UnsupportedConfigurationError
from hyperstate.layout import Layout, Mesh, Shape
from hyperstate.schema import TensorSpec
from hyperstate.structure import Splits, factors, is_sharded, mesh_ranks, place_of, rebuilt, splits


def is_native(value: Any) -> bool:
    """Whether `value` is built as PyTorch's own DTensor is: a local tensor and a spec with tensor metadata."""
    return hasattr(getattr(value, "_spec", None), "tensor_meta")


def local_of(value: Any) -> torch.Tensor:
    """The local tensor of a sharded one, without autograd."""
    found = getattr(value, "_local_tensor", None)
    if found is None:
        found = value.to_local()
    if type(found) is not torch.Tensor and hasattr(found, "wait") and hasattr(found, "elem"):
        found = found.wait()  # torch.distributed._functional_collectives.AsyncCollectiveTensor: not yet arrived
    local: torch.Tensor = found
    return local


class Meshes:
    """Meshes and layouts of the process' sharded tensors, read once each."""

    def __init__(self) -> None:
        # By identity: equal device meshes may have been sliced from different roots.
        self._meshes: dict[int, tuple[weakref.ref[Any], Mesh, dict[Any, TensorSpec], dict[Any, Layout]]] = {}

    def layout(self, value: Any) -> Layout:
        """Layout of a sharded tensor. Raises `UnsupportedConfigurationError` for a placement that has none."""
        spec = getattr(value, "_spec", None)
        if spec is None or not hasattr(spec, "tensor_meta"):
            return self._foreign_layout(value)
        placements, order = spec.placements, spec.shard_order
        ndim = len(spec.tensor_meta.shape) if spec.tensor_meta is not None else value.ndim
        mesh, _, known = self._entry(spec.mesh)
        key = (placements, ndim, order)
        layout = known.get(key)
        if layout is None:
            layout = known[key] = Layout(mesh, _splits(placements, mesh.shape, ndim, order))
        return layout

    def seen(self, value: Any) -> tuple[dict[Any, TensorSpec] | None, Any]:
        """Specs of sharded tensors on the mesh of `value` by what decides them, and what decides that of `value`.

        None for kinds that have to be read each time.
        """
        spec, inner = getattr(value, "_spec", None), getattr(value, "_local_tensor", None)
        if type(inner) is not torch.Tensor or getattr(spec, "tensor_meta", None) is None:
            return None, None
        assert spec is not None
        if inner.layout is not torch.strided or inner.is_nested:
            return None, None
        sign = (spec.placements, spec.shard_order, value.shape, value.dtype, inner.shape)
        return self._entry(spec.mesh)[1], sign

    def _foreign_layout(self, value: Any) -> Layout:
        mesh, _, known = self._entry(value.device_mesh)
        ndim = len(value.shape)
        described = tuple(map(place_of, value.placements))
        layout = known.get((described, ndim))
        if layout is None:
            layout = known[described, ndim] = Layout(mesh, splits(value.placements, mesh.shape, ndim))
        return layout

    def mesh(self, device_mesh: Any) -> Mesh:
        """The core's mesh for a device mesh of either kind."""
        return self._entry(device_mesh)[0]

    def _entry(self, device_mesh: Any) -> tuple[Mesh, dict[Any, TensorSpec], dict[Any, Layout]]:
        found = self._meshes.get(id(device_mesh))
        if found is not None and found[0]() is device_mesh:
            return found[1:]
        name = id(device_mesh)
        mesh = self._read(device_mesh)
        specs: dict[Any, TensorSpec] = {}
        layouts: dict[Any, Layout] = {}
        self._meshes[name] = (weakref.ref(device_mesh, lambda _: self._meshes.pop(name, None)), mesh, specs, layouts)
        return mesh, specs, layouts

    def _read(self, device_mesh: Any) -> Mesh:
        names = getattr(device_mesh, "mesh_dim_names", None)
        shape = getattr(device_mesh, "mesh_shape", None)
        if shape is None:
            shape = device_mesh.shape
        root, sizes, ranks = _root(device_mesh), tuple(int(size) for size in shape), mesh_ranks(device_mesh)
        return Mesh(
            sizes,
            group_order(sizes, ranks) if type(device_mesh).__module__.startswith("torch.") else ranks,
            tuple(map(str, names)) if names else None,
            None if root is None else self.mesh(root),
        )


def _root(device_mesh: Any) -> Any:
    find = getattr(device_mesh, "_get_root_mesh", None)
    root = getattr(device_mesh, "root_mesh", None) if find is None else find()
    return None if root is device_mesh else root


def group_order(shape: Shape, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """A mesh's ranks with each dimension in the order of its process groups, which PyTorch sorts by rank.

    FSDP2 and `DTensor.full_tensor` cut and join shards by the position in the group, not by mesh coordinate.
    Raises `UnsupportedConfigurationError` where no order of the dimensions says that.
    """
    for d, size in enumerate(shape):
        step = prod(shape[d + 1 :])
        starts = [i for i in range(len(ranks)) if i // step % size == 0]
        orders = {tuple(sorted(range(size), key=lambda k: ranks[i + k * step])) for i in starts}
        if len(orders) > 1:
            raise UnsupportedConfigurationError(
                f"a mesh of shape {shape} over the ranks {ranks}: the rows of dimension {d} are in different orders, "
                "while PyTorch's process groups are sorted by rank; arrange the ranks in one order"
            )
        (order,) = orders or {tuple(range(size))}
        ranks = tuple(ranks[i + (order[i // step % size] - i // step % size) * step] for i in range(len(ranks)))
    return ranks


def _splits(placements: Sequence[Any], mesh_shape: Shape, ndim: int, order: Any) -> Splits:
    if order is not None and all(item is None or item[1] == 1 for item in map(place_of, placements)):
        # DTensorSpec.shard_order: (tensor dimension, mesh dimensions in order of execution); it may differ
        # from left to right although the placements are plain Shards.
        ordered = {entry.tensor_dim: tuple(entry.mesh_dims) for entry in order}
        return tuple(ordered.get(dim, ()) for dim in range(ndim))
    return splits(placements, mesh_shape, ndim)


def device_of(device_mesh: Any) -> torch.device:
    """The device on which this process' shards of a mesh live."""
    kind = device_mesh.device_type
    return current_device(kind() if callable(kind) else kind)


def current_device(kind: str) -> torch.device:
    """This process' device of a kind: the current one, since a global rank says nothing about a machine's devices."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def wrap(local: torch.Tensor, spec: TensorSpec, like: Any, meshes: Meshes) -> Any:
    """A sharded tensor of the kind of `like` and on its mesh, around `local`."""
    if spec.layout is None:
        return local
    if not is_sharded(like):
        raise UnsupportedConfigurationError(f"a shard of {spec.layout} can't be made from a plain tensor's mesh")
    same = meshes.layout(like) == spec.layout
    if not same and meshes.mesh(like.device_mesh) != spec.layout.mesh:
        raise UnsupportedConfigurationError(
            f"a sharded tensor on the mesh {spec.layout.mesh} can't be made: the tensor it goes with lives on "
            f"{meshes.mesh(like.device_mesh)}"
        )
    return (
        _wrap_native(local, spec, like, same)
        if is_native(like)
        else rebuilt(type(like), local, spec.shape, spec.layout, like)
    )


def _wrap_native(local: torch.Tensor, spec: TensorSpec, like: Any, same: bool) -> Any:
    own = like._spec
    stride = contiguous_stride(spec.shape)
    meta = own.tensor_meta
    if same and meta is not None and (meta.shape, meta.stride, meta.dtype) == (spec.shape, stride, local.dtype):
        return type(like)(local, own, requires_grad=False)
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    if same:
        order = own.shard_order
        placements = own.placements
    else:
        assert spec.layout is not None
        order = None
        placements = _native_placements(spec.layout)
    tensor_meta = TensorMeta(torch.Size(spec.shape), stride, local.dtype)
    made = DTensorSpec(own.mesh, placements, tensor_meta=tensor_meta, shard_order=order)
    return type(like)(local, made, requires_grad=False)


def _native_placements(layout: Layout) -> tuple[Any, ...]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: list[Any] = [Replicate()] * len(layout.mesh.shape)
    for d, dim, factor in factors(layout):
        found[d] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
    return tuple(found)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, as `torch.empty` makes them."""
    stride = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        stride[d] = stride[d + 1] * max(shape[d + 1], 1)
    return tuple(stride)
