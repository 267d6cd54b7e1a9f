"""`hyperstate.backend.Tensors` for toy: what a tensor is; allocate, view, copy."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import Any

import numpy as np
from toy import Tensor

from hyperstate.errors import UnsupportedConfigurationError
from hyperstate.layout import Box, Shape
from hyperstate.schema import DTYPES, TensorSpec


class ToyTensors:
    """All tensors are whole and on the host, so a place is always None."""

    def spec(self, value: Any) -> TensorSpec | None:
        """Dtype and shape. A framework with sharded tensors adds their layout."""
        return TensorSpec(value.dtype, value.shape) if isinstance(value, Tensor) else None

    def is_meta(self, value: Tensor) -> bool:  # noqa: ARG002  # toy has no tensors without memory
        """Whether `value` has no storage yet."""
        return False

    def local(self, value: Tensor) -> Tensor:
        """Another object around the same memory: who writes into a result must not hold the parameter itself."""
        return Tensor(value.array)

    def place(self, value: Tensor) -> None:
        """Where `value` lives."""

    def empty(self, shape: Shape, dtype: str, place: None = None) -> Tensor:  # noqa: ARG002  # the host
        """Fresh memory. A dtype that toy lacks is refused, so that the core can tell all ranks."""
        return Tensor(np.empty(shape, _numpy(dtype)))

    def zeros(self, shape: Shape, dtype: str, place: None = None) -> Tensor:
        """Fresh zeros."""
        made = self.empty(shape, dtype, place)
        made.array.fill(0)
        return made

    def staging(self, shape: Shape, dtype: str) -> Tensor:
        """Memory that devices copy to fast: there are no devices."""
        return self.empty(shape, dtype)

    def wrap(self, local: Tensor, spec: TensorSpec, like: Tensor) -> Tensor:  # noqa: ARG002  # nothing is sharded
        """A sharded tensor around `local`; a plain one is it already."""
        return local

    def view(self, local: Tensor, box: Box) -> Tensor:
        """A region, sharing memory."""
        region = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        return Tensor(local.array[(*region, ...)])

    def storage(self, local: Tensor) -> Hashable:
        """The object that owns the memory, by identity; equal for all views of it."""
        owner = local.array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return id(owner if owner.base is None else owner.base)

    def same_memory(self, a: Tensor, b: Tensor) -> bool:
        """Whether two tensors are the same elements, read in the same way."""
        ways = [(x.array.__array_interface__["data"][0], x.shape, x.array.strides, x.dtype) for x in (a, b)]
        return ways[0] == ways[1]

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """For each (to, from): copy, converting the dtype."""
        for to, source in pairs:
            to.array[...] = source.array.astype(to.array.dtype, copy=False)

    def raw(self, values: Sequence[Tensor]) -> list[bytes]:
        """The bytes of small tensors."""
        return [value.array.tobytes() for value in values]

    def from_raw(self, data: bytes, spec: TensorSpec, place: None = None) -> Tensor:  # noqa: ARG002  # the host
        """A fresh tensor with these bytes."""
        return Tensor(np.frombuffer(data, _numpy(spec.dtype)).reshape(spec.shape).copy())

    def buffer(self, nbytes: int) -> Tensor:
        """Bytes to send or receive."""
        return self.empty((nbytes,), "uint8")

    def as_buffer(self, local: Tensor) -> Tensor | None:  # noqa: ARG002  # nothing is ever sent
        """`local`'s own bytes as a buffer, or None: then the core packs them."""
        return None

    def host_bytes(self, local: Tensor) -> memoryview | None:
        """`local`'s own bytes, or None where they do not lie in one piece."""
        return local.array.reshape(-1).view(np.uint8).data if local.array.flags.c_contiguous else None

    def over(self, memory: memoryview, dtype: str, shape: Shape) -> Tensor:
        """A tensor over bytes of a file, sharing them."""
        return Tensor(np.frombuffer(memory, _numpy(dtype)).reshape(shape))

    def windows(self, buffer: Tensor, parts: Sequence[tuple[int, Shape, str]]) -> list[Tensor]:
        """Typed tensors over parts of a buffer, each (byte offset, shape, dtype)."""
        sizes = [DTYPES[dtype][0] * prod(shape) for _, shape, dtype in parts]
        data = buffer.array.data
        return [self.over(data[at : at + n], dtype, s) for (at, s, dtype), n in zip(parts, sizes, strict=True)]


def _numpy(dtype: str) -> np.dtype[Any]:
    if dtype not in DTYPES or dtype in ("bfloat16", "complex32") or dtype.startswith("float8_"):
        raise UnsupportedConfigurationError(f"toy has no dtype {dtype!r}")
    return np.dtype(dtype)
