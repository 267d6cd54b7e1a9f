"""The toy framework's plain tensors: a NumPy array, a neutral dtype, and a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hyperstate.errors import UnsupportedConfigurationError

from .dtypes import Array, decode, encode, neutral, storage

CPU, SIM, META = "cpu", "sim", "meta"
"""The host; a simulated accelerator, whose memory only the framework's own functions touch; no storage at all."""
DEVICES = (CPU, SIM, META)
POISON = 0xCB
"""What fresh memory holds, byte by byte, so that reading it before it was written is seen."""


class Tensor:
    """A plain tensor. `array` holds elements in the storage type of `dtype` (`dtypes.storage`).

    Compared by identity. Tensors made from one array share its memory.
    """

    def __init__(self, array: Any, dtype: str | None = None, device: str = CPU, requires_grad: bool = False) -> None:
        stored = np.asarray(array)
        self.dtype = neutral(stored.dtype) if dtype is None else dtype
        if stored.dtype != storage(self.dtype):
            raise ValueError(f"an array of {stored.dtype} can't be the storage of {self.dtype}; see `tensor()`")
        self.array: Array = stored
        self.device = check_device(device)
        self.requires_grad = requires_grad
        self.grad: Tensor | None = None
        self.home: str | None = None
        """Where a meta tensor is to live once it has values, if the user told (``device=``)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, in elements."""
        return tuple(self.array.shape)

    def numpy(self) -> Array:
        """The numbers: shares memory for NumPy's own types, else float32 or complex64 (`dtypes.decode`)."""
        if self.device == META:
            raise ValueError("a meta tensor has no numbers")
        return decode(self.array, self.dtype)

    def tolist(self) -> Any:
        """The numbers as nested lists."""
        return self.numpy().tolist()

    def detach(self) -> Tensor:
        """A plain tensor that shares memory and needs no gradient."""
        return Tensor(self.array, self.dtype, self.device)

    def clone(self, device: str | None = None) -> Tensor:
        """A copy, on `device` if one is given."""
        target = device or self.device
        return Tensor(self.array if target == META else self.array.copy(), self.dtype, target)

    def become(self, other: Tensor) -> None:
        """Take over the memory and the device of `other`, of equal shape and dtype, staying the same object."""
        assert (self.shape, self.dtype) == (other.shape, other.dtype)
        self.array, self.device = other.array, other.device

    def __repr__(self) -> str:
        content = "" if self.device == META or self.array.size > 8 else f" {self.tolist()}"
        return f"{type(self).__name__}({self.dtype}{list(self.shape)} on {self.device}{content})"


class Parameter(Tensor):
    """A tensor that a module learns. Shares memory with the tensor that it is made from."""

    def __init__(self, value: Tensor, requires_grad: bool = True) -> None:
        super().__init__(value.array, value.dtype, value.device, requires_grad)


def check_device(name: str) -> str:
    """`name`, if it is a device."""
    if name not in DEVICES:
        raise UnsupportedConfigurationError(f"there is no device {name!r}; known are: {', '.join(DEVICES)}")
    return name


def tensor(values: Any, dtype: str = "float32", device: str = CPU) -> Tensor:
    """A fresh tensor of these numbers (nested lists or an array), rounded to `dtype`."""
    wide = np.array(values, dtype=storage(dtype) if dtype in ("bool", "int64", "uint64") else None)
    return Tensor(encode(wide, dtype).copy(), dtype, device)


def empty(shape: Sequence[int], dtype: str = "float32", device: str = CPU) -> Tensor:
    """Fresh memory, full of `POISON`; for the meta device none."""
    kind = storage(dtype)
    if device == META:
        return Tensor(np.broadcast_to(np.zeros((), kind), tuple(shape)), dtype, META)
    made = np.empty(tuple(shape), kind)
    byte_view(made).fill(POISON)
    return Tensor(made, dtype, device)


def zeros(shape: Sequence[int], dtype: str = "float32", device: str = CPU) -> Tensor:
    """A fresh tensor of zeros."""
    return Tensor(np.zeros(tuple(shape), storage(dtype)), dtype, device)


def byte_view(array: Array) -> Array:
    """The bytes of a contiguous array, sharing its memory."""
    return array.reshape(-1).view(np.uint8)
