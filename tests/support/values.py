"""Random plain values, and a way to compare them that nothing slips through."""

from __future__ import annotations

import struct

from hypothesis import strategies as st


class Tensor:
    """Stands for a tensor: anything that is no plain value."""

    def __init__(self, number=0):
        self.number = number

    def __eq__(self, other):
        return isinstance(other, Tensor) and self.number == other.number

    def __hash__(self):
        return hash(self.number)


def bits(value, ordered=True):
    """A value as text that tells types, signs of zero, payloads of nan and (`ordered`) orders of dicts apart."""
    if isinstance(value, float):
        return f"float:{struct.pack('<d', value).hex()}"
    if isinstance(value, complex):
        return f"complex:{bits(value.real)},{bits(value.imag)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{','.join(bits(item, ordered) for item in value)}]"
    if isinstance(value, dict):
        items = [f"{bits(key, ordered)}={bits(item, ordered)}" for key, item in value.items()]
        return f"dict[{','.join(items if ordered else sorted(items))}]"
    if isinstance(value, Tensor):
        return f"tensor {value.number}"
    return f"{type(value).__name__}:{hex(value) if type(value) is int else repr(value)}"


any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates too
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 2000), 1 << 2000)
    | st.floats()
    | st.complex_numbers()
    | any_text
    | st.binary()
)
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)
values = st.recursive(
    scalars | st.integers(0, 9).map(Tensor),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)

look_alikes = st.recursive(
    st.sampled_from([0, 0.0, -0.0, False, None, "", (), [], {}, float("nan"), 1, True, 1.0, 1 + 0j, complex(1, -0.0)]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from("ab"), inner)
    ),
    max_leaves=3,
)
"""Values of which Python calls many equal that are not the same."""
