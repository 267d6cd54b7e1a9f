"""`Tensors` for MindSpore: what a tensor is; allocate, view, copy, and bytes.

On CPU everything happens in the tensors' own memory, by NumPy. What is on a device is read whole into host memory
and written whole from there; that way was written without a device at hand and has never run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import mindspore as ms
import numpy as np

from hyperstate.errors import UnsupportedConfigurationError
from hyperstate.layout import Box, Shape
from hyperstate.schema import TensorSpec

from . import layouts, sharded
from .fabric import Buffer, MindSporeFabric
from .host import (
    Array,
    Part,
    array_of,
    converted,
    mindspore_dtype,
    neutral_dtype,
    on_host,
    part_of,
    region,
    settle,
    stored,
    tensor_over,
    typed,
)

Place = str | None
Pair = tuple[Any, Any]


class MindSporeTensors:
    """MindSpore's tensors and parameters, our sharded tensors, and HyperParallel's."""

    def __init__(self, fabric: MindSporeFabric) -> None:
        self._fabric = fabric

    def spec(self, value: Any) -> TensorSpec | None:
        """See `hyperstate.backend.Tensors`. Refuses sparse tensors and shards of another shape than their layout's."""
        if isinstance(value, Part):
            return TensorSpec(value.dtype, value.shape)
        if layouts.is_sharded(value):
            layout, shape = layouts.layout_of(value), layouts.shape_of(value)
            local = layouts.local_of(value)
            box = layout.box(shape, self._fabric.rank())
            if box is not None and tuple(local.shape) != box.shape and (box.size or local.size):
                raise UnsupportedConfigurationError(
                    f"a sharded tensor of shape {shape} keeps a local tensor of shape {tuple(local.shape)} on this "
                    f"rank, where its layout gives {box.shape}"
                )
            return TensorSpec(neutral_dtype(local.dtype), shape, layout)
        if isinstance(value, ms.Tensor):
            if -1 in value.shape:
                raise UnsupportedConfigurationError(f"a tensor of unknown shape {tuple(value.shape)}")
            return TensorSpec(neutral_dtype(value.dtype), tuple(value.shape))
        if isinstance(value, (ms.CSRTensor, ms.COOTensor, ms.RowTensor)):
            raise UnsupportedConfigurationError(f"a sparse tensor ({type(value).__qualname__}) is not supported")
        return None

    def is_meta(self, value: Any) -> bool:
        """Whether `value` is a parameter whose initializer has not run (`mindspore.nn.utils.no_init_parameters`)."""
        return bool(getattr(layouts.local_of(value), "has_init", False))

    def local(self, value: Any) -> Any:
        """This rank's part, no Parameter, sharing memory with `value`."""
        found = layouts.local_of(value)
        if not isinstance(found, ms.Parameter) or found.has_init:
            return found
        if not on_host(found):
            return found.detach()
        return tensor_over(array_of(found), neutral_dtype(found.dtype))

    def place(self, value: Any) -> Place:
        """Where `value` is, in MindSpore's words; None for the host. What has no data yet will be where it trains."""
        found = layouts.local_of(value)
        name = ms.get_context("device_target") if getattr(found, "has_init", False) else str(found.device)
        return None if name.upper().startswith("CPU") else name

    def empty(self, shape: Shape, dtype: str, place: Place) -> Any:
        """A fresh plain tensor without defined values."""
        if place is None:
            return tensor_over(np.empty(shape, stored(dtype)), dtype)
        return ms.mint.empty(shape, dtype=mindspore_dtype(dtype), device=place.split(":", maxsplit=1)[0])

    def staging(self, shape: Shape, dtype: str) -> Any:
        """A fresh tensor on the host that pieces of a device's tensor are copied into."""
        return self.empty(shape, dtype, None)

    def zeros(self, shape: Shape, dtype: str, place: Place) -> Any:
        """A fresh plain tensor of zeros."""
        made = tensor_over(np.zeros(shape, stored(dtype)), dtype)
        return made if place is None else self._moved(made, place)

    @staticmethod
    def _moved(tensor: Any, place: str) -> Any:
        return tensor.move_to(place.split(":", maxsplit=1)[0])

    def wrap(self, local: Any, spec: TensorSpec, like: Any) -> Any:
        """A sharded tensor around `local` on the mesh of `like`; `local` itself for a plain `spec`."""
        return sharded.wrap(local, spec, like)

    def view(self, local: Any, box: Box) -> Any:
        """The region `box` of `local`, sharing its memory."""
        return part_of(local, box)

    def storage(self, local: Any) -> Hashable:
        """The device and address of the storage."""
        return str(local.device), local.untyped_storage().data_ptr() if local.size else id(local)

    def same_memory(self, a: Any, b: Any) -> bool:
        """Whether two tensors of one storage are the same elements of it, read in the same way."""
        ways = [(t.data_ptr(), tuple(t.shape), tuple(t.stride()), t.dtype) for t in (a, b)]
        return ways[0] == ways[1]

    def same_storage_form(self, value: Any, spec: TensorSpec, place: Place) -> bool:
        """Whether values of `spec` at `place` can be copied into `value` as it is."""
        own = self.spec(value)
        if own is None or self.is_meta(value) or own.dtype != spec.dtype or self.place(value) != place:
            return False
        if spec.layout is not None and spec.form == "local":
            box = spec.layout.box(spec.shape, self._fabric.rank())
            return own.layout is None and box is not None and own.shape == box.shape
        return own.shape == spec.shape and own.layout == spec.layout

    def copy(self, pairs: Sequence[Pair]) -> None:
        """For each (to, from): copy values, converting the dtype."""
        if not pairs:
            return
        settle()  # what still reads the old values must have read them
        staged: dict[int, tuple[Any, Array]] = {}
        for to, source in pairs:
            target, content = part_of(to), part_of(source)
            if target.shape != content.shape:  # NumPy would broadcast
                raise ValueError(f"can't copy a region of shape {content.shape} into {target.shape}")
            self._room(target, staged)[...] = converted(content.read(), content.dtype, target.dtype)
        for owner, array in staged.values():
            owner.copy_(tensor_over(array, neutral_dtype(owner.dtype)))
        if staged:
            settle()

    @staticmethod
    def _room(target: Part, staged: dict[int, tuple[Any, Array]]) -> Array:
        """Where to write: the target's memory, or a copy of its device tensor that is to be sent back whole."""
        if target.array is not None:
            return target.array
        assert target.box is not None
        if id(target.owner) not in staged:
            staged[id(target.owner)] = (target.owner, np.array(array_of(target.owner), order="C"))
        return staged[id(target.owner)][1][region(target.box)]

    def raw(self, values: Sequence[Any]) -> list[bytes]:
        """The bytes of tensors, row-major."""
        return [part_of(value).read().tobytes() for value in values]

    def from_raw(self, data: bytes, spec: TensorSpec, place: Place) -> Any:
        """A fresh plain tensor of `spec.shape` with these bytes."""
        if len(data) != spec.nbytes:
            raise ValueError(f"{len(data)} bytes can't be a {spec.dtype}{list(spec.shape)}")
        array = np.frombuffer(bytearray(data), stored(spec.dtype)).reshape(spec.shape)
        made = tensor_over(array, spec.dtype)
        return made if place is None else self._moved(made, place)

    def buffer(self, nbytes: int) -> Buffer:
        """Fresh bytes in host memory, with room for the fabric's tag in front."""
        return Buffer(nbytes)

    def as_buffer(self, _local: Any) -> None:
        """None: each message carries a tag in front of its bytes, so it starts in a buffer of its own."""

    def host_bytes(self, local: Any) -> memoryview | None:
        """The bytes of a contiguous tensor on the host, sharing its memory."""
        part = part_of(local)
        if part.array is None or not part.array.flags.c_contiguous:
            return None
        settle()
        return part.array.reshape(-1).view(np.uint8).data

    def over(self, memory: memoryview, dtype: str, shape: Shape) -> Any:
        """A tensor on the host over these bytes."""
        return tensor_over(np.frombuffer(memory, stored(dtype)).reshape(shape), dtype)

    def windows(self, buffer: Buffer, parts: Sequence[tuple[int, Shape, str]]) -> list[Part]:
        """Typed regions over parts of `buffer`."""
        return [typed(buffer.data, offset, shape, dtype) for offset, shape, dtype in parts]
