"""`Tensors` for PyTorch: what a tensor is; allocate, view, copy, and bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hyperstate.errors import UnsupportedConfigurationError
from hyperstate.layout import Box, Layout, Shape
from hyperstate.schema import DTYPES, TensorSpec
from hyperstate.structure import is_sharded

from . import dtensors
from .fabric import TorchFabric

ALIGNMENT = 16
"""Buffers are allocated in multiples of the largest element, so that each can be seen as any dtype."""

Place = torch.device | None
Pair = tuple[torch.Tensor, torch.Tensor]

_TO_TORCH: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_TO_NEUTRAL = {dtype: name for name, dtype in _TO_TORCH.items()}
_HOST = torch.device("cpu")
_ORDINARY = torch.Tensor.__torch_dispatch__
"""What classes have that keep their elements in plain storage; subclasses with a content of their own override it."""


class TorchTensors:
    """PyTorch's tensors, PyTorch's and HyperParallel's sharded tensors."""

    def __init__(self, fabric: TorchFabric) -> None:
        self._fabric = fabric
        self._meshes = dtensors.Meshes()
        self.meta_place: tuple[Place] | None = None
        """Where plain meta tensors are to live in the call under way, if its ``device=`` tells."""

    def spec(self, value: Any) -> TensorSpec | None:
        """See `hyperstate.backend.Tensors`. Refuses sparse, nested, lazy, quantised tensors and opaque subclasses."""
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            _check_storage(value)
            return _spec(value.dtype, value.shape, None)
        if is_sharded(value):
            known, sign = self._meshes.seen(value)
            if known is not None and sign in known:
                return known[sign]
            layout = self._meshes.layout(value)
            inner = getattr(value, "_local_tensor", None)
            if inner is not None and type(inner) is not torch.Tensor and not hasattr(inner, "elem"):
                _check_storage(inner)
            box = layout.box(value.shape, self._fabric.rank())
            if inner is not None and box is not None and inner.shape != box.shape and (box.size or inner.numel()):
                raise UnsupportedConfigurationError(
                    f"a sharded tensor of shape {tuple(value.shape)} and placements {tuple(value.placements)} keeps a "
                    f"local tensor of shape {tuple(inner.shape)} on this rank, where its layout gives {box.shape}"
                )
            spec = _spec(value.dtype, value.shape, layout)
            if known is not None:
                known[sign] = spec
            return spec
        if not isinstance(value, torch.Tensor):
            return None
        _check_storage(value)
        return _spec(value.dtype, value.shape, None)

    def mesh(self, device_mesh: Any) -> Any:
        """The core's mesh for a device mesh."""
        return self._meshes.mesh(device_mesh)

    def is_meta(self, value: Any) -> bool:
        """Whether `value` has no storage yet."""
        return bool(self._storage(value).is_meta)

    def _storage(self, value: Any) -> torch.Tensor:
        """The tensor that has `value`'s elements on this rank, perhaps requiring gradient."""
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter or not is_sharded(value):
            found: torch.Tensor = value
            return found
        return dtensors.local_of(value)

    def local(self, value: Any) -> torch.Tensor:
        """This rank's part, detached, sharing memory with `value`."""
        found = self._storage(value)
        return found if type(found) is torch.Tensor and not found.requires_grad else found.detach()

    def place(self, value: Any) -> Place:
        """The device of `value`, None for the host; of a meta tensor, its mesh's device or the call's ``device=``."""
        device = self._storage(value).device
        if device.type == "meta":
            if not is_sharded(value):
                if self.meta_place is not None:
                    return self.meta_place[0]
                raise UnsupportedConfigurationError(
                    "a meta tensor without a mesh does not tell where it is to live; pass device="
                )
            device = dtensors.device_of(value.device_mesh)
        return None if device.type == "cpu" else device

    def place_named(self, device: Any) -> Place:
        """The place that a user's ``device=`` names."""
        found = torch.device(device)
        if found.type == "cpu":
            return None
        return found if found.index is not None else dtensors.current_device(found.type)

    def empty(self, shape: Shape, dtype: str, place: Place) -> torch.Tensor:
        """A fresh plain tensor without defined values."""
        if torch.is_inference_mode_enabled():
            # State made inside inference mode could never be trained on: in-place updates are refused for good.
            with torch.inference_mode(False):
                return torch.empty(shape, dtype=_torch_dtype(dtype), device=place or "cpu")
        return torch.empty(shape, dtype=_torch_dtype(dtype), device=place or "cpu")

    def zeros(self, shape: Shape, dtype: str, place: Place) -> torch.Tensor:
        """A fresh plain tensor of zeros."""
        return self.empty(shape, dtype, place).zero_()

    def staging(self, shape: Shape, dtype: str) -> torch.Tensor:
        """A fresh tensor on the host, pinned where an accelerator runs."""
        return torch.empty(shape, dtype=_torch_dtype(dtype), pin_memory=self._fabric.pins())

    def wrap(self, local: torch.Tensor, spec: TensorSpec, like: Any) -> Any:
        """A sharded tensor around `local` on the mesh of `like`; `local` itself for a plain `spec`."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # as in `empty`
                return dtensors.wrap(local, spec, like, self._meshes)
        return dtensors.wrap(local, spec, like, self._meshes)

    def fresh_form(self, param: Any) -> str:
        """How an optimizer that never stepped keeps state of `param`: HyperParallel's update local tensors."""
        return "local" if is_sharded(param) and not dtensors.is_native(param) else ""

    def view(self, local: torch.Tensor, box: Box) -> torch.Tensor:
        """The region `box` of `local`; `local` itself if that is all of it."""
        index = _index(box, local.shape)
        return local[index] if index else local

    def storage(self, local: torch.Tensor) -> Hashable:
        """The device and address of the storage."""
        return local.device, local.untyped_storage().data_ptr()

    def same_memory(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether two tensors are the same elements of one storage, read in the same way."""
        ways = [(t.storage_offset(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()) for t in (a, b)]
        return ways[0] == ways[1] and self.storage(a) == self.storage(b)

    def same_storage_form(self, value: Any, spec: TensorSpec, place: Place) -> bool:
        """Whether values of `spec` at `place` can be copied into `value` as it is."""
        own = self.spec(value)
        if own is None or self.is_meta(value) or own.dtype != spec.dtype or self.place(value) != place:
            return False
        if spec.layout is not None and spec.form == "local":
            box = spec.layout.box(spec.shape, self._fabric.rank())
            return own.layout is None and box is not None and own.shape == box.shape
        return own.shape == spec.shape and own.layout == spec.layout

    @torch.no_grad()
    def copy(self, pairs: Sequence[Pair]) -> None:
        """For each (to, from): copy values; equal dtypes on one device in one batch, devices synchronised once."""
        batches: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        crossed: set[torch.device] = set()
        for to, source in pairs:
            if to.shape != source.shape:  # copy_ would broadcast
                raise ValueError(f"can't copy a region of shape {tuple(source.shape)} into {tuple(to.shape)}")
            if to.dtype != source.dtype:
                to.copy_(source)
            elif to.device == source.device:
                if to is not source:
                    batch = batches.setdefault((to.dtype, to.device), ([], []))
                    batch[0].append(to)
                    batch[1].append(source)
            else:
                to.copy_(source, non_blocking=True)
                crossed |= {device for device in (to.device, source.device) if device.type != "cpu"}
        for targets, sources in batches.values():
            torch._foreach_copy_(targets, sources)
        for device in crossed:
            torch.get_device_module(device).current_stream(device).synchronize()

    def raw(self, values: Sequence[torch.Tensor]) -> list[bytes]:
        """The bytes of tensors, with one copy to the host per device."""
        found: list[bytes] = [b""] * len(values)
        places: dict[torch.device, list[int]] = {}
        for i, value in enumerate(values):
            if value.device == _HOST and value.numel() == 1 and not (value.is_conj() or value.is_neg()):
                found[i] = ctypes.string_at(value.data_ptr(), value.element_size())
            else:
                places.setdefault(value.device, []).append(i)
        for numbers in places.values():
            parts = [_bytes_of(_settled(values[i])) for i in numbers]
            host = (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu()
            content = ctypes.string_at(host.data_ptr(), host.numel()) if host.numel() else b""
            start = 0
            for i, part in zip(numbers, parts, strict=True):
                found[i] = content[start : start + part.numel()]
                start += part.numel()
        return found

    def from_raw(self, data: bytes, spec: TensorSpec, place: Place) -> torch.Tensor:
        """A fresh plain tensor of `spec.shape` with these bytes."""
        made = self.empty(spec.shape, spec.dtype, place)
        if len(data) != made.numel() * made.element_size():
            raise ValueError(f"{len(data)} bytes can't be a {spec.dtype}{list(spec.shape)}")
        if data and made.device == _HOST:
            ctypes.memmove(made.data_ptr(), data, len(data))
        elif data:
            _bytes_of(made).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return made

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Fresh bytes where the fabric sends from: on the host (pinned where an accelerator runs), or on the device."""
        room = -(-nbytes // ALIGNMENT) * ALIGNMENT
        wire = self._fabric.wire()
        pinned = wire.type == "cpu" and self._fabric.pins()
        return torch.empty(room, dtype=torch.uint8, device=wire, pin_memory=pinned)[:nbytes]

    def as_buffer(self, local: torch.Tensor) -> torch.Tensor | None:
        """`local`'s own bytes; None if it is not contiguous or lives elsewhere than the fabric sends from."""
        if local.device != self._fabric.wire() or not local.is_contiguous() or local.is_conj() or local.is_neg():
            return None
        return _bytes_of(local.detach())

    def host_bytes(self, local: torch.Tensor) -> memoryview | None:
        """`local`'s own bytes; None if it is not contiguous or lives elsewhere than on the host."""
        if local.device != _HOST or not local.is_contiguous() or local.is_conj() or local.is_neg():
            return None
        nbytes = local.numel() * local.element_size()
        if not nbytes:
            return memoryview(bytearray())
        held = (ctypes.c_ubyte * nbytes).from_address(local.data_ptr())
        held.owner = local  # type: ignore[attr-defined]  # keeps the memory while the view is in use
        return memoryview(held).cast("B")

    def over(self, memory: memoryview, dtype: str, shape: Shape) -> torch.Tensor:
        """A tensor on the host over these bytes."""
        return torch.frombuffer(memory, dtype=torch.uint8).view(_torch_dtype(dtype)).reshape(shape)

    def windows(self, buffer: torch.Tensor, parts: Sequence[tuple[int, Shape, str]]) -> list[torch.Tensor]:
        """Typed tensors over parts of `buffer`, whose offsets are multiples of `ALIGNMENT`."""
        typed: dict[str, tuple[torch.Tensor, int, int]] = {}
        found = []
        for offset, shape, dtype in parts:
            seen = typed.get(dtype)
            if seen is None:
                itemsize = DTYPES[dtype][0]
                whole = buffer[: buffer.numel() // itemsize * itemsize].view(_torch_dtype(dtype))
                seen = typed[dtype] = (whole, itemsize, int(whole.storage_offset()))
            whole, itemsize, start = seen
            found.append(whole.as_strided(shape, _stride(shape), start + offset // itemsize))
        return found


@lru_cache(maxsize=1 << 12)
def _index(box: Box, shape: torch.Size) -> tuple[slice, ...]:
    """What cuts `box` out of a tensor of `shape`; empty if it is all. Slices alone would be clipped in silence."""
    if any(not 0 <= start <= stop <= size for start, stop, size in zip(box.start, box.stop, shape, strict=True)):
        raise IndexError(f"{box} reaches beyond a tensor of shape {tuple(shape)}")
    index = [slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True)]
    while index and (index[-1].start, index[-1].stop) == (0, shape[len(index) - 1]):
        index.pop()
    return tuple(index)


_stride = lru_cache(maxsize=1 << 12)(dtensors.contiguous_stride)


@lru_cache(maxsize=1 << 12)
def _spec(dtype: torch.dtype, shape: torch.Size, layout: Layout | None) -> TensorSpec:
    return TensorSpec(_neutral(dtype), tuple(shape), layout)


def _neutral(dtype: torch.dtype) -> str:
    found = _TO_NEUTRAL.get(dtype)
    if found is None:
        raise UnsupportedConfigurationError(f"tensors of dtype {dtype} are not supported")
    return found


def _torch_dtype(name: str) -> torch.dtype:
    found = _TO_TORCH.get(name)
    if found is None:
        raise UnsupportedConfigurationError(f"this PyTorch has no dtype {name!r}")
    return found


def _check_storage(value: torch.Tensor) -> None:
    """Refuse what is no strided tensor with elements of its own."""
    if value.layout is torch.strided and type(value).__torch_dispatch__ is _ORDINARY and not value.is_nested:
        if type(value) is torch.Tensor or not is_lazy(value):
            return
        raise UnsupportedConfigurationError(
            f"a {type(value).__qualname__} has no shape yet; run the lazy module once before"
        )
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise UnsupportedConfigurationError(
            f"a tensor with the layout {kind!r} in memory; only strided ones are supported"
        )
    raise UnsupportedConfigurationError(
        f"a tensor of the class {type(value).__module__}.{type(value).__qualname__}, whose elements are not in plain "
        "storage; convert it to an ordinary tensor first"
    )


def _settled(value: torch.Tensor) -> torch.Tensor:
    """`value` contiguous and with pending conjugation and negation carried out."""
    return value.detach().resolve_conj().resolve_neg().contiguous()


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, sharing its memory.

    `Tensor.view(dtype)` needs one dimension at least and a last stride of 1, which a contiguous
    tensor with dimensions of size 1 need not have.
    """
    return value.as_strided((value.numel(),), (1,)).view(torch.uint8)
