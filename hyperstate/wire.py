"""The form in which ranks tell each other what they hold: entries as JSON bytes, no pickle."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeVar

from .errors import InvalidStateDictError
from .layout import Layout, Mesh
from .schema import DTYPES, Entry, Key, TensorSpec, put_together, refuse_leaf, take_apart

Place = tuple[str, Any]
"""The section and the name of a value: the first two parts of its key."""

K = TypeVar("K")
T = TypeVar("T")


def pack_entries(entries: Mapping[Key, Entry]) -> dict[str, Any]:
    """A JSON-able form of `entries`, equal for equal entries whatever their order of insertion.

    Kinds, specs, layouts and meshes stand in tables, for most entries share them, and so do profiles: all that is kept
    under one name of a section, as ``[section, [kind, *rest of the key], …]``. Each of `names` has a profile in `rows`.
    """
    if not _plain(entries):
        entries = {tuple(map(_packed_part, key)): entry for key, entry in entries.items()}
    by_name: dict[Key, list[Any]] = {}
    """By section and name: the rest of a key and the identity of its entry, in turn."""
    for key, entry in entries.items():
        by_name.setdefault(key[:2], []).extend((key[2:], id(entry)))
    meshes, layouts, specs, kinds = _Table[Mesh](), _Table[Layout](), _Table[TensorSpec](), _Table[tuple[Any, ...]]()
    profiles = _Table[tuple[Any, ...]]()
    numbers: dict[tuple[Any, ...], int] = {}  # by identity of the entries, for most are the same objects
    rows, names = [], []
    for place in sorted(by_name):
        section, name = place
        sign = (section, *by_name[place])
        number = numbers.get(sign)
        if number is None:
            parts = []
            for rest in sorted(by_name[place][::2]):
                entry = entries[place + rest]
                kind = kinds.add(entry.kind, [entry.skeleton, [specs.add(spec) for spec in entry.leaves]])
                parts.append((kind, *rest))
            number = numbers[sign] = profiles.add((section, *parts), [section, *parts])
        rows.append(number)
        names.append(name)
    packed_specs = [
        [spec.dtype, list(spec.shape), None if spec.layout is None else layouts.add(spec.layout), spec.form]
        for spec in specs
    ]
    packed_layouts = [[meshes.add(layout.mesh), [list(split) for split in layout.splits]] for layout in layouts]
    return {
        "meshes": [[list(mesh.shape), list(mesh.ranks)] for mesh in meshes],
        "layouts": packed_layouts,
        "specs": packed_specs,
        "kinds": list(kinds.packed),
        "profiles": list(profiles.packed),
        "rows": rows,
        "names": names,
    }


class _Table(dict[K, int]):
    """Distinct things, numbered as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[Any] = []

    def add(self, thing: K, packed: Any = None) -> int:
        number = self.get(thing)
        if number is None:
            number = self[thing] = len(self)
            self.packed.append(packed)
        return number


def _plain(keys: Iterable[Iterable[Any]]) -> bool:
    """Whether all parts of all keys stand for themselves on the wire, as nearly always."""
    return set(map(type, chain.from_iterable(keys))) <= {str} and _MARK not in "".join(chain.from_iterable(keys))


_MARK = "\0"
"""Begins a part of a key that is no text, or that begins so itself."""


def _packed_part(part: Any) -> str:
    plain = type(part) is str and part[:1] != _MARK
    return part if plain else _MARK + json.dumps(take_apart((part,), refuse_leaf))


def _unpacked_part(part: str) -> Any:
    return put_together(json.loads(part[1:]), refuse_leaf)[0] if part[:1] == _MARK else part


def unpack_entries(packed: Mapping[str, Any], make: Callable[[Entry], T]) -> dict[Place, Mapping[Key, T]]:
    """What `make` makes of the entries, once of each that differs: by section and name, by the rest of the key.

    Names with equal profiles have the very same mapping; equal specs are the same objects.
    Raises `InvalidStateDictError` for what `pack_entries` can't have made.
    """
    try:
        return _unpack(packed, make)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, InvalidStateDictError):
            raise
        raise InvalidStateDictError(f"malformed entries: {type(error).__name__}: {error}") from error


def _unpack(packed: Mapping[str, Any], make: Callable[[Entry], T]) -> dict[Place, Mapping[Key, T]]:
    meshes = [Mesh(tuple(shape), tuple(ranks)) for shape, ranks in packed["meshes"]]
    layouts = [Layout(meshes[mesh], tuple(map(tuple, splits))) for mesh, splits in packed["layouts"]]
    specs = [
        TensorSpec(_dtype(dtype), tuple(shape), None if layout is None else layouts[layout], form)
        for dtype, shape, layout, form in packed["specs"]
    ]
    kinds = [make(Entry(skeleton, tuple([specs[i] for i in leaves]))) for skeleton, leaves in packed["kinds"]]
    profiles = [
        (section, {tuple(map(_unpacked_part, rest)): kinds[kind] for kind, *rest in parts})
        for section, *parts in packed["profiles"]
    ]
    names = packed["names"]
    if _MARK in "".join(names):
        names = list(map(_unpacked_part, names))
    found = {}
    for number, name in zip(packed["rows"], names, strict=True):
        section, profile = profiles[number]
        found[section, name] = profile
    return found


def _dtype(name: Any) -> str:
    if name not in DTYPES:
        raise InvalidStateDictError(f"unknown dtype {name!r}")
    return str(name)


def canonical(value: Any) -> bytes:
    """JSON bytes of a JSON-able value, equal for equal values."""
    return json.dumps(value, separators=(",", ":")).encode()


def to_wire(text: bytes) -> bytes:
    """The message that carries `canonical` bytes."""
    return zlib.compress(text, 1)


def from_wire(data: bytes) -> Any:
    """The value in a message of `to_wire`. Raises `InvalidStateDictError` for other bytes."""
    try:
        return json.loads(zlib.decompress(data))
    except (zlib.error, ValueError, RecursionError) as error:
        raise InvalidStateDictError(f"{len(data)} bytes are no message of this library: {error}") from error


def digest(data: bytes) -> str:
    """A short name of `data`; equal for equal bytes."""
    return blake2b(data, digest_size=16).hexdigest()
