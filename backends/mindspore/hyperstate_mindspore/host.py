"""The elements of MindSpore's tensors as NumPy arrays in host memory, and their dtypes.

On CPU an array of `array_of` is the tensor's own memory. That is how values are written: MindSpore's own in-place
operators do nothing on most views there, without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore.common.api import _pynative_executor

from hyperstate.errors import UnsupportedConfigurationError
from hyperstate.layout import Box
from hyperstate.schema import DTYPES

from .float8 import decoded, encoded

Array = npt.NDArray[Any]

_SPELLINGS = {"bool": "bool_"}
_TO_MINDSPORE: dict[str, Any] = {
    name: found for name in DTYPES if (found := getattr(ms, _SPELLINGS.get(name, name), None)) is not None
}
_TO_NEUTRAL = {dtype: name for name, dtype in _TO_MINDSPORE.items()}
_HOST = "CPU"


def settle() -> None:
    """Wait for all operators that were started; MindSpore runs them behind the script's back."""
    _pynative_executor.sync()


def mindspore_dtype(name: str) -> Any:
    """MindSpore's dtype of a neutral name."""
    found = _TO_MINDSPORE.get(name)
    if found is None:
        raise UnsupportedConfigurationError(f"MindSpore {ms.__version__} has no dtype {name!r}")
    return found


def neutral_dtype(dtype: Any) -> str:
    """The neutral name of MindSpore's dtype."""
    found = _TO_NEUTRAL.get(dtype)
    if found is None:
        raise UnsupportedConfigurationError(f"tensors of dtype {dtype} are not supported")
    return found


@cache
def stored(name: str) -> np.dtype[Any]:
    """How NumPy sees elements of a neutral dtype; those that it can't calculate with are raw bytes (float8)."""
    mindspore_dtype(name)  # refuses what MindSpore lacks
    if name == "bfloat16":
        found: np.dtype[Any] = np.dtype(ms.dtype_to_nptype(ms.bfloat16))  # MindSpore registers it with NumPy 1
        return found
    return np.dtype(np.uint8) if name.startswith("float8") else np.dtype(name)


def on_host(tensor: Any) -> bool:
    """Whether a tensor lives in host memory."""
    return str(tensor.device).upper().startswith(_HOST)


def array_of(tensor: Any) -> Array:
    """The elements of a plain tensor: its own memory on the host, a copy of a device's."""
    name = neutral_dtype(tensor.dtype)
    kind = stored(name)
    if name.startswith("float8") and on_host(tensor):  # which `asnumpy` refuses
        settle()
        return _at(tensor, kind) if tensor.size else np.empty(tuple(tensor.shape), kind)
    found: Array = tensor.asnumpy()  # waits for what is still being computed
    if not on_host(tensor):
        return found if found.dtype == kind else found.view(kind)
    if found.size and found.dtype == kind and found.__array_interface__["data"][0] == tensor.data_ptr():
        return found
    if not found.size:
        return np.empty(found.shape, kind)
    return _at(tensor, kind)


class _Memory:
    """A tensor's elements where they are, for NumPy; keeps the tensor alive."""

    def __init__(self, tensor: Any, kind: np.dtype[Any]) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * kind.itemsize for step in tensor.stride()),
            "typestr": kind.str if kind.kind in "biufc" else f"<u{kind.itemsize}",
        }


def _at(tensor: Any, kind: np.dtype[Any]) -> Array:
    """`asnumpy` copies views; this does not."""
    return np.asarray(_Memory(tensor, kind)).view(kind)


def tensor_over(array: Array, dtype: str) -> Any:
    """A tensor that shares memory with a contiguous array (`stored(dtype)`)."""
    made = ms.from_numpy(array)
    return made.view(mindspore_dtype(dtype)) if dtype.startswith("float8") else made


def parameter_over(array: Array, dtype: str, name: str | None, requires_grad: bool) -> Any:
    """A Parameter of MindSpore's with the contents of a contiguous array (`stored(dtype)`)."""
    if not dtype.startswith("float8"):
        return ms.Parameter(tensor_over(array, dtype), name=name, requires_grad=requires_grad)
    made = ms.Parameter(ms.Tensor(np.zeros(array.shape, np.uint8)), name=name, requires_grad=requires_grad)
    made.assign_value(tensor_over(array, dtype))  # the one call that takes this dtype
    return made


@dataclass(frozen=True, eq=False)
class Part:
    """A region of a tensor, or typed bytes of a buffer: what MindSpore has no tensor for, since its views copy."""

    dtype: str
    array: Array | None
    """The elements in host memory; None for a region of a tensor on a device."""
    owner: Any = None
    """The tensor on a device."""
    box: Box | None = None
    """Where in `owner` the region is."""

    @property
    def shape(self) -> tuple[int, ...]:
        if self.array is not None:
            return self.array.shape
        assert self.box is not None
        return self.box.shape

    def read(self) -> Array:
        """The elements; a copy if they are on a device."""
        if self.array is not None:
            return self.array
        assert self.box is not None
        return array_of(self.owner)[region(self.box)]


def region(box: Box) -> tuple[slice, ...]:
    """The index of a box in an array."""
    return tuple(map(slice, box.start, box.stop))


def part_of(local: Any, box: Box | None = None) -> Part:
    """A plain tensor, or the region `box` of one, or of a part, as a part."""
    if isinstance(local, Part):
        if box is None:
            return local
        if local.array is not None:
            return Part(local.dtype, local.array[region(box)])
        assert local.box is not None
        start = tuple(a + b for a, b in zip(local.box.start, box.start, strict=True))
        stop = tuple(a + b for a, b in zip(local.box.start, box.stop, strict=True))
        return Part(local.dtype, None, local.owner, Box(start, stop))
    dtype = neutral_dtype(local.dtype)
    if on_host(local):
        array = array_of(local)
        return Part(dtype, array if box is None else array[region(box)])
    shape = tuple(local.shape)
    return Part(dtype, None, local, Box((0,) * len(shape), shape) if box is None else box)


def typed(data: npt.NDArray[np.uint8], offset: int, shape: tuple[int, ...], dtype: str) -> Part:
    """A part of a row of bytes, from byte `offset` on."""
    kind = stored(dtype)
    return Part(dtype, data[offset : offset + prod(shape) * kind.itemsize].view(kind).reshape(shape))


def converted(array: Array, source: str, target: str) -> Array:
    """Values of one dtype in another, rounded to nearest."""
    if source == target:
        return array
    if source.startswith("float8"):
        return converted(decoded(array, source), "float32", target)
    if target.startswith("float8"):
        return encoded(converted(array, source, "float32"), target)
    with np.errstate(all="ignore"):  # out of range becomes infinite, as the framework's own cast does
        if "bfloat16" in (source, target):  # NumPy knows its way to and from float32 alone
            array = array.astype(np.float32)
        return array.astype(stored(target))
