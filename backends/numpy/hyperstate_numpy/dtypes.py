"""Number formats: each neutral dtype as a NumPy storage type, and values in and out of it.

NumPy has no bfloat16, float8 or complex32. Their arrays hold the bits (uint16, uint8, uint32), so that
their bytes are those of any other framework; `decode` gives numbers and `encode` rounds to nearest even.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperstate.errors import UnsupportedConfigurationError
from hyperstate.schema import DTYPES

Array = npt.NDArray[Any]

_BITS = {"bfloat16": np.uint16, "complex32": np.uint32} | {
    name: np.uint8 for name in DTYPES if name.startswith("float8_")
}
_STORAGE: dict[str, np.dtype[Any]] = {name: np.dtype(_BITS.get(name, name)) for name in DTYPES}
_NATIVE = {dtype: name for name, dtype in _STORAGE.items() if name not in _BITS}


def storage(name: str) -> np.dtype[Any]:
    """The NumPy type that holds elements of the neutral dtype `name`, of the same size."""
    found = _STORAGE.get(name)
    if found is None:
        raise UnsupportedConfigurationError(f"there is no dtype {name!r}; known are: {', '.join(DTYPES)}")
    return found


def neutral(dtype: np.dtype[Any]) -> str:
    """The neutral name of a NumPy type. Raises `UnsupportedConfigurationError` for strings, objects, dates…"""
    found = _NATIVE.get(dtype.newbyteorder("="))
    if found is None:
        raise UnsupportedConfigurationError(f"arrays of dtype {dtype} are not supported")
    return found


def decode(stored: Array, name: str) -> Array:
    """Numbers of a stored array: itself for NumPy's own types, else float32 (complex64)."""
    if name not in _BITS:
        return stored
    if name == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "complex32":
        halves = np.ascontiguousarray(stored).reshape(-1).view(np.float16).astype(np.float32)
        return halves.view(np.complex64).reshape(stored.shape)
    table: Array = _float8(name)[0][stored]
    return table


def encode(values: Array, name: str) -> Array:
    """`values` as a stored array of the neutral dtype `name`; values beyond its range become inf or NaN."""
    kind = storage(name)
    with np.errstate(all="ignore"):
        if name not in _BITS:
            return values.astype(kind, copy=False)
        if name == "complex32":
            pairs = np.ascontiguousarray(values.astype(np.complex64)).reshape(-1).view(np.float32)
            return pairs.astype(np.float16).view(kind).reshape(values.shape)
        numbers = values.astype(np.float32)
        return _to_bfloat16(numbers) if name == "bfloat16" else _to_float8(numbers, name)


def convert(stored: Array, source: str, target: str) -> Array:
    """A stored array of dtype `source` as one of dtype `target`."""
    return stored if source == target else encode(decode(stored, source), target)


def _to_bfloat16(numbers: Array) -> Array:
    bits = numbers.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    found: Array = np.where(np.isnan(numbers), np.uint32(0x7FC0), rounded).astype(np.uint16)
    return found


@lru_cache
def _float8(name: str) -> tuple[Array, Array]:
    """Of a float8 format: the number of each code, and the positive ones in order with the first beyond the range.

    Names follow ml_dtypes and PyTorch: exponent and mantissa bits, ``fn`` no infinity, ``uz`` no negative
    zero (0x80 is NaN, and the exponent bias is one larger).
    """
    if name == "float8_e8m0fnu":  # powers of two alone: no sign, no zero (OCP MX scale)
        table = np.exp2(np.minimum(np.arange(256), 254) - 127.0).astype(np.float32)
        table[255] = np.nan
        return table, np.append(table[:255], np.float32(np.inf))
    unsigned_zero, mantissa_bits = name.endswith("uz"), int(name[len("float8_e4m")])
    bias = (1 << (6 - mantissa_bits)) - 1 + unsigned_zero
    codes = np.arange(129)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    scale = np.exp2(np.maximum(exponent, 1) - bias - mantissa_bits)
    positive = (mantissa + (exponent > 0) * (1 << mantissa_bits)) * scale
    table = np.concatenate([positive[:128], -positive[:128]]).astype(np.float32)
    if unsigned_zero:
        last, table[128] = 127, np.nan
    elif name.endswith("fn"):
        last, table[127], table[255] = 126, np.nan, np.nan
    else:  # IEEE: the largest exponent means infinity and NaN
        last = 0x7B
        table[0x7C:0x80], table[0xFC:] = [np.inf, np.nan, np.nan, np.nan], [-np.inf, np.nan, np.nan, np.nan]
    return table, positive[: last + 2].astype(np.float32)


def _to_float8(numbers: Array, name: str) -> Array:
    size = np.abs(numbers.astype(np.float64))
    if name == "float8_e8m0fnu":
        return _to_exponent(numbers, size)
    ladder = _float8(name)[1].astype(np.float64)
    above = np.clip(np.searchsorted(ladder, size), 1, len(ladder) - 1)
    low, high = ladder[above - 1], ladder[above]
    nearer = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    code = np.where(nearer | (size >= high), above, above - 1)
    negative = np.signbit(numbers)
    beyond = code == len(ladder) - 1
    if name.endswith("uz"):
        found = np.where(beyond | np.isnan(numbers), 0x80, code + 128 * (negative & (code > 0)))
    else:  # one past the largest number stands infinity (IEEE), or NaN
        found = np.where(np.isnan(numbers), 0x7F, code) + 128 * negative
    return found.astype(np.uint8)


def _to_exponent(numbers: Array, size: Array) -> Array:
    """The nearest power of two, ties upwards but at the bottom; NaN for what has none."""
    fraction, exponent = np.frexp(size)
    code = np.clip(exponent - 1 + 127 + (fraction >= 0.75), 0, 255)
    bad = ~np.isfinite(numbers)
    found: Array = np.where(bad, 255, np.where(size == 0, 0, code)).astype(np.uint8)
    return found
