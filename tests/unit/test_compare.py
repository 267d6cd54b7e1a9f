"""Distances between tensors, against NumPy and against numbers known by heart."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperstate.cli.compare import STRETCH, Distance, compare


def distance(a: bytes, b: bytes, dtype: str) -> Distance:
    found = Distance()
    compare(memoryview(a), memoryview(b), dtype, 0, found)
    return found


def steps(a: np.ndarray, b: np.ndarray) -> int:
    """How often `nextafter` must be taken from a number to the other; for close numbers, of one sign."""
    most = 0
    for x, y in zip(a.ravel(), b.ravel(), strict=True):
        count = 0
        while x != y and x * np.sign(y) >= 0:
            x, count = np.nextafter(x, y), count + 1
        most = max(most, count)
    return most


@given(
    st.sampled_from(["float16", "float32", "float64"]),
    st.lists(st.tuples(st.floats(-2, 2), st.integers(-9, 9)), min_size=1, max_size=20),
)
def test_steps_between_floats_are_those_of_nextafter(dtype: str, pairs: list[tuple[float, int]]) -> None:
    a = np.array([value for value, _ in pairs], dtype)
    b = a.copy()
    for i, (_, count) in enumerate(pairs):
        for _ in range(abs(count)):
            b[i] = np.nextafter(b[i], np.array(math.copysign(math.inf, count), dtype))
    found = distance(a.tobytes(), b.tobytes(), dtype)
    assert steps(a, b) == found.max_ulp
    assert int((np.sign(a) * np.sign(b) < 0).sum()) == found.signs
    assert float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max()) == found.max_abs
    unequal = a.view(f"u{a.itemsize}") != b.view(f"u{a.itemsize}")
    assert int(unequal.sum()) == found.differing
    assert (int(np.argmax(unequal)) if unequal.any() else -1) == found.first


@pytest.mark.parametrize(
    ("dtype", "a", "b", "expected"),
    [
        ("bfloat16", b"\x80\x3f", b"\x81\x3f", Distance(1, 0, 2.0**-7, 1)),
        ("int8", b"\x01\xff\x05", b"\x01\x01\x05", Distance(1, 1, 2.0, 0)),
        ("bool", b"\x00\x01", b"\x01\x01", Distance(1, 0, 1.0, 0)),
        ("uint64", b"\xff" * 8, b"\x00" * 8, Distance(1, 0, float(2**64 - 1), 0)),
        ("float8_e4m3fn", b"\x01\x02", b"\x01\x03", Distance(1, 1, 0.0, 0, numeric=False)),
        ("float32", b"\x00\x00\x00\x80", b"\x00\x00\x00\x00", Distance(1, 0, 0.0, 0)),
        # Zero and the smallest number are neighbours; two numbers about zero are not measured in steps.
        ("float32", b"\x00\x00\x00\x00", b"\x01\x00\x00\x80", Distance(1, 0, 2.0**-149, 1)),
        ("float32", b"\x01\x00\x00\x00", b"\x01\x00\x00\x80", Distance(1, 0, 2.0**-148, 0, signs=1)),
        ("bfloat16", b"\x80\x3f\x80\x3f", b"\x80\xbf\x81\x3f", Distance(2, 0, 2.0, 1, signs=1)),
    ],
)
def test_small_known_distances(dtype: str, a: bytes, b: bytes, expected: Distance) -> None:
    assert expected == distance(a, b, dtype)


def test_complex_numbers_differ_by_their_parts() -> None:
    a, b = np.array([1 + 2j, 3 + 4j], np.complex64), np.array([1 + 2j, 3.5 + 4j], np.complex64)
    found = distance(a.tobytes(), b.tobytes(), "complex64")
    assert (1, 1, 0.5) == (found.differing, found.first, found.max_abs)


def test_nan_against_a_number_makes_the_largest_difference_nan_and_stays_so() -> None:
    a = np.array([1.0, math.nan, 3.0, math.nan], np.float32)
    b = np.array([2.0, 1.0, 9.0, math.nan], np.float32)
    found = distance(a.tobytes(), b.tobytes(), "float32")
    assert (3, 0) == (found.differing, found.first)
    assert math.isnan(found.max_abs)


def test_positions_count_on_over_stretches_and_blocks() -> None:
    count = 3 * STRETCH
    a = np.zeros(count, np.float32)
    b = a.copy()
    b[[STRETCH, 2 * STRETCH + 1]] = 4
    found = Distance()
    half = count // 2 * 4
    for start in (0, count // 2):
        part = slice(4 * start, 4 * start + half)
        compare(memoryview(a.tobytes()[part]), memoryview(b.tobytes()[part]), "float32", start, found)
    assert (2, STRETCH, 4.0) == (found.differing, found.first, found.max_abs)
