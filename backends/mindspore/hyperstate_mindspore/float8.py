"""float8 values as float32 and back: neither NumPy nor MindSpore on CPU converts them."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_TOP = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}
"""The code above the largest value: nan in e4m3fn, which has no infinity, infinity in e5m2."""
_LARGEST = {"float8_e4m3fn": 0x7E, "float8_e5m2": 0x7C}
"""What becomes of values that are too large; as in PyTorch 2.13."""


@cache
def _values(name: str) -> Floats:
    """The value of each of the 128 codes without sign."""
    codes = np.arange(128)
    if name == "float8_e5m2":  # the upper half of a float16
        halves: Floats = (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
        return halves
    exponent, fraction = codes >> 3, codes & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    found: Floats = np.where(exponent > 0, normal, np.ldexp(fraction / 8, -6)).astype(np.float32)
    found[_TOP[name]] = np.nan
    return found


def decoded(array: Bytes, name: str) -> Floats:
    """The values of float8 bytes."""
    found: Floats = np.copysign(_values(name)[array & 0x7F], np.where(array & 0x80, np.float32(-1), np.float32(1)))
    return found


def encoded(array: Floats, name: str) -> Bytes:
    """float32 values as float8 bytes, rounded to nearest, halves to even."""
    top = _TOP[name]
    finite = _values(name)[:top].astype(np.float64)
    steps = np.append(finite, 2 * finite[-1] - finite[-2])  # the first value that is too large
    size = np.abs(np.nan_to_num(array, nan=0.0, posinf=None, neginf=None)).astype(np.float64)
    middles = (steps[1:] + steps[:-1]) / 2
    code = np.searchsorted(middles, size, side="left")
    half = (code < top) & (size == middles[np.minimum(code, top - 1)])
    code = np.where(half & (code % 2 == 1), code + 1, code)
    code = np.where(np.isnan(array), 0x7F, np.minimum(code, _LARGEST[name]))
    found: Bytes = (code | (np.signbit(array).astype(np.int64) << 7)).astype(np.uint8)
    return found
