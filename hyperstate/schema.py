"""What a value is, without its data: `TensorSpec`, `Entry`. The form in which ranks send them: `wire`.

A value is a tree of dicts, lists, tuples and scalars with tensors as leaves. `take_apart` splits it
into a *skeleton* that JSON can carry and the tensors; `put_together` is its inverse. Python types
survive: a tuple stays a tuple, an integer key an integer key, ``True`` is not ``1``. Plain tensors
of one element (counters) are part of the skeleton, content and all.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isfinite, prod
from typing import Any

from .errors import InvalidStateDictError, UnsupportedConfigurationError
from .layout import Layout, Shape

DTYPES: dict[str, tuple[int, str]] = {
    "bool": (1, "bool"),
    **{f"{u}int{bits}": (bits // 8, "int") for u in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float8_{kind}": (1, "float") for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")},
    "float16": (2, "float"),
    "bfloat16": (2, "float"),
    "float32": (4, "float"),
    "float64": (8, "float"),
    "complex32": (4, "complex"),
    "complex64": (8, "complex"),
    "complex128": (16, "complex"),
}
"""Neutral dtype name -> (bytes per element, kind)."""


def keeps_meaning(source: str, target: str) -> bool:
    """Whether values of dtype `source` may be converted to `target`: never to bool, float to int, complex to real."""
    if source == target:
        return True
    order = {"int": 0, "float": 1, "complex": 2}
    a, b = DTYPES[source][1], DTYPES[target][1]
    return b != "bool" and (a == "bool" or order[a] <= order[b])


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is: neutral dtype name, global shape in elements, and layout (None: a plain tensor)."""

    dtype: str
    shape: Shape
    layout: Layout | None = None
    form: str = ""
    """How a shard is kept: "" as the framework's sharded tensor, "local" as a plain tensor of the local shape."""

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][0]

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return self.itemsize * prod(self.shape)


_NUMBERS = {int: "int64", float: "float64", "f": "float64", "c": "complex128"}


def number_fits(skeleton: Any, old: TensorSpec) -> bool:
    """Whether a plain value may come where the target keeps the tensor `old`; numbers, if it is a counter for them."""
    tag = next(iter(skeleton), None) if isinstance(skeleton, dict) else type(skeleton)
    if tag not in _NUMBERS:
        return tag != "i"  # an integer of more than 1024 bits
    if prod(old.shape) != 1 or not keeps_meaning(_NUMBERS[tag], old.dtype):
        return False
    size, kind = DTYPES[old.dtype]
    top = 2 ** (8 * size - (not old.dtype.startswith("u"))) if kind == "int" else 2**63
    return tag is not int or (0 if old.dtype.startswith("u") else -top) <= skeleton < top


LEAF: Any = {"t": 0}
"""Skeleton of a value that is one tensor."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A value without its data: skeleton plus the spec of each tensor leaf, in order of the skeleton.

    Entries of ``True``, ``1`` and ``1.0`` differ.
    """

    skeleton: Any
    leaves: tuple[TensorSpec, ...] = ()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Entry) and self.kind == other.kind)

    def __hash__(self) -> int:
        return hash(self.kind)

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """What equal entries have in common, hashable."""
        return self.leaves if self.skeleton == LEAF else (sign(self.skeleton), *self.leaves)

    @cached_property
    def layout(self) -> Layout | None:
        """Layout of its sharded leaves, if any; one value's leaves share a mesh."""
        return next((spec.layout for spec in self.leaves if spec.layout is not None), None)

    @cached_property
    def opaque(self) -> bool:
        """Whether the value holds an object that only its own rank has."""
        return self.skeleton != LEAF and is_opaque(self.skeleton)

    @cached_property
    def single(self) -> TensorSpec | None:
        """The spec of a value that is one tensor, counters included; None for any other value."""
        if self.skeleton == LEAF:
            return self.leaves[0]
        if isinstance(self.skeleton, dict) and "T" in self.skeleton:
            return counter_of(self.skeleton)[0]
        return None


@lru_cache(maxsize=1 << 14)
def tensor_entry(spec: TensorSpec) -> Entry:
    """The entry of a value that is one tensor of `spec`."""
    return Entry(LEAF, (spec,))


@lru_cache(maxsize=1 << 14)
def counter_entry(spec: TensorSpec, content: bytes) -> Entry:
    """The entry of a value that is one counter."""
    return Entry(tiny_skeleton(spec, content))


def counter_of(skeleton: Any) -> tuple[TensorSpec, bytes]:
    """Spec and bytes of a tensor that travels in its skeleton."""
    dtype, shape, content = skeleton["T"]
    return TensorSpec(dtype, tuple(shape)), bytes.fromhex(content)


TakeLeaf = Callable[[Any], Any]

LONG_BITS = 1024
"""Longer integers travel in hexadecimal: Python reads and writes no decimal number of over 4300 digits."""


MAX_DEPTH = 100
"""Deepest nesting of lists, tuples and dicts. Readers and writers of JSON, and Python itself, fail at about 300."""


def take_apart(value: Any, leaf: TakeLeaf, depth: int = 0) -> Any:
    """The skeleton of `value`. `leaf` gets each non-plain object and returns its skeleton, or raises.

    Raises `UnsupportedConfigurationError` for a value that is nested too deep, or holds itself.
    """
    kind = type(value)
    if kind not in PLAIN:
        return leaf(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() <= LONG_BITS else {"i": hex(value)}
    if kind is float:
        return value if isfinite(value) else {"f": struct.pack("<d", value).hex()}
    if kind is complex:
        return {"c": struct.pack("<dd", value.real, value.imag).hex()}
    if kind is bytes:
        return {"b": base64.b85encode(value).decode()}
    if depth == MAX_DEPTH:
        raise UnsupportedConfigurationError(f"a value nested more than {MAX_DEPTH} levels deep, or holding itself")
    inner = depth + 1
    if kind is list:
        return [take_apart(item, leaf, inner) for item in value]
    if kind is tuple:
        return {"(": [take_apart(item, leaf, inner) for item in value]}
    return {"{": [[take_apart(key, leaf, inner), take_apart(item, leaf, inner)] for key, item in value.items()]}


PLAIN = frozenset({type(None), bool, str, int, float, list, tuple, dict, complex, bytes})
"""Types of values that JSON carries, or that are taken apart."""


def put_together(skeleton: Any, leaf: TakeLeaf) -> Any:
    """The value of a skeleton. `leaf` gets each skeleton that `take_apart`'s own `leaf` made."""
    if isinstance(skeleton, list):
        return [put_together(item, leaf) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) != 1:
        raise InvalidStateDictError(f"malformed skeleton with the tags {sorted(map(str, skeleton))}")
    ((tag, inner),) = skeleton.items()
    if tag == "(":
        return tuple([put_together(item, leaf) for item in _list(tag, inner)])
    if tag == "{":
        pairs = [_list(tag, item) for item in _list(tag, inner)]
        if any(len(pair) != 2 for pair in pairs):
            raise InvalidStateDictError("malformed skeleton: a dict needs pairs of key and value")
        return {_hashable(put_together(key, leaf)): put_together(item, leaf) for key, item in pairs}
    if tag in _SCALARS:
        try:
            return _SCALARS[tag](inner)
        except (TypeError, ValueError, AttributeError, struct.error) as error:
            raise InvalidStateDictError(f"malformed skeleton under the tag {tag!r}: {error}") from error
    return leaf(skeleton)


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "i": lambda text: int(text, 16),
    "f": lambda text: struct.unpack("<d", bytes.fromhex(text))[0],
    "c": lambda text: complex(*struct.unpack("<dd", bytes.fromhex(text))),
    "b": base64.b85decode,
}


def _list(tag: str, inner: Any) -> list[Any]:
    if not isinstance(inner, list):
        raise InvalidStateDictError(f"malformed skeleton: {tag!r} holds a {type(inner).__name__}, not a list")
    return inner


def _hashable(key: Any) -> Any:
    try:
        hash(key)
    except TypeError:
        raise InvalidStateDictError(f"malformed skeleton: a {type(key).__name__} as key of a dict") from None
    return key


def alike(a: Any, b: Any) -> bool:
    """Whether two skeletons are of equal values: ``True`` is not ``1``, ``-0.0`` not ``0.0``."""
    return sign(a) == sign(b)


def sign(skeleton: Any) -> str:
    """A text that is equal for equal values alone."""
    return json.dumps(skeleton)


def is_opaque(skeleton: Any) -> bool:
    """Whether a value holds an object that only its own rank has."""
    if isinstance(skeleton, list):
        return any(map(is_opaque, skeleton))
    if not isinstance(skeleton, dict):
        return False
    ((tag, inner),) = skeleton.items()
    return tag == "?" or (tag in "({" and is_opaque(inner))


def refuse_leaf(value: Any) -> Any:
    """A `leaf` for values that may hold no tensor and no foreign object."""
    raise UnsupportedConfigurationError(f"a value of type {type(value).__module__}.{type(value).__qualname__}")


Key = tuple[Any, ...]
"""Name of a value on the wire: ("model", fqn), ("state", fqn, key), …"""


def tiny(spec: TensorSpec) -> bool:
    """Whether a tensor travels inside the skeleton: plain, and of one element."""
    return spec.layout is None and prod(spec.shape) == 1


def tiny_skeleton(spec: TensorSpec, content: bytes) -> Any:
    """Skeleton of a counter: dtype, shape and raw bytes."""
    return {"T": [spec.dtype, list(spec.shape), content.hex()]}
