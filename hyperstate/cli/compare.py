"""How far two runs of numbers are apart, from their bytes. Pure Python: only stretches that differ are decoded."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

from ..schema import DTYPES

STRETCH = 4096
"""Bytes compared at once before anything is decoded."""
_FORMATS = {
    "bool": "?",
    **{f"int{bits}": code for bits, code in ((8, "b"), (16, "h"), (32, "i"), (64, "q"))},
    **{f"uint{bits}": code for bits, code in ((8, "B"), (16, "H"), (32, "I"), (64, "Q"))},
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "complex64": "f",
    "complex128": "d",
    "complex32": "e",
}
_BITS = {1: "B", 2: "H", 4: "I", 8: "Q"}


@dataclass
class Distance:
    """What is known of two tensors of one dtype after some of their elements."""

    differing: int = 0
    """Elements that differ, bit by bit."""
    first: int = -1
    """Position of the first of them, row-major; -1 if there is none."""
    max_abs: float = 0.0
    """Largest absolute difference; NaN if a number stands where the other has none."""
    max_ulp: int = 0
    """Most steps from one floating-point number to the next between two values of one sign (zeros have both); 0 for
    integers and bools. Across zero lie billions of tiny numbers, which would say nothing."""
    signs: int = 0
    """Elements of which one is above zero and the other below."""
    numeric: bool = True
    """False where the dtype's numbers can't be told here: then only `differing` counts."""


def compare(a: memoryview, b: memoryview, dtype: str, start: int, found: Distance) -> None:
    """Take in the elements of `a` and `b` (little-endian, equally many); the first has the position `start`."""
    itemsize = DTYPES[dtype][0]
    step = STRETCH // itemsize * itemsize
    for at in range(0, len(a), step):
        one, two = bytes(a[at : at + step]), bytes(b[at : at + step])
        if one != two:
            _stretch(one, two, dtype, start + at // itemsize, found)


def _stretch(a: bytes, b: bytes, dtype: str, start: int, found: Distance) -> None:
    itemsize, kind = DTYPES[dtype]
    unequal = [
        i
        for i in range(len(a) // itemsize)
        if a[i * itemsize : (i + 1) * itemsize] != b[i * itemsize : (i + 1) * itemsize]
    ]
    found.differing += len(unequal)
    if unequal and found.first < 0:
        found.first = start + unequal[0]
    parts = 2 if kind == "complex" else 1
    left, right = numbers(a, dtype), numbers(b, dtype)
    if left is None or right is None:
        found.numeric = False
        return
    lines = (_line(a, itemsize // parts), _line(b, itemsize // parts)) if kind in ("float", "complex") else None
    for i in unequal:
        for j in range(i * parts, (i + 1) * parts):
            x, y = left[j], right[j]
            if isnan(x) != isnan(y):
                found.max_abs = float("nan")
            elif not (isnan(x) or isnan(found.max_abs)):
                found.max_abs = max(found.max_abs, float(abs(x - y)) if x != y else 0.0)
            if lines is None or isnan(x) or isnan(y):
                continue
            if (x < 0 < y) or (y < 0 < x):
                found.signs += 1
            else:
                found.max_ulp = max(found.max_ulp, abs(lines[0][j] - lines[1][j]))


def numbers(data: bytes, dtype: str) -> Sequence[float] | None:
    """The numbers; of complex ones both parts in turn. None for dtypes that Python can't read."""
    if dtype == "bfloat16":
        bits = struct.unpack(f"<{len(data) // 2}H", data)
        return struct.unpack(f"<{len(bits)}f", struct.pack(f"<{len(bits)}I", *(one << 16 for one in bits)))
    code = _FORMATS.get(dtype)
    if code is None:
        return None
    return struct.unpack(f"<{len(data) // struct.calcsize('<' + code)}{code}", data)


def _line(data: bytes, width: int) -> list[int]:
    """Floating-point numbers of `width` bytes by their place on the line of all of them; 0 and -0 share one."""
    bits = struct.unpack(f"<{len(data) // width}{_BITS[width]}", data)
    sign = 1 << (8 * width - 1)
    return [one if one < sign else sign - one for one in bits]
