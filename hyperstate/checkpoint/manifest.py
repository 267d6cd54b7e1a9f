"""The manifest: one JSON file that says what a checkpoint holds and where (docs/format.md).

Everything read from one is checked before it is used: sizes against the files' sizes, names against the
few that this library writes, boxes against the tensor that they must tile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

from ..errors import CheckpointError, HyperstateError
from ..layout import Box, Shape
from ..schema import DTYPES, Key, counter_of, put_together, refuse_leaf, take_apart
from .boxes import tiling_fault
from .container import shape_of, whole_number

T = TypeVar("T")

NAME = "hyperstate.json"
FORMAT = "hyperstate checkpoint"
VERSION = 1
SECTIONS = ("model", "optim")
CHECKSUM = "crc32"
PIECE = 64 << 20
"""Bytes of a chunk that share one checksum."""
_FILE = re.compile(r"(model|optim)/[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_ID = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True)
class File:
    """A safetensors file, by its name in the checkpoint's folder, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor in a file."""

    file: int
    """Position in `Manifest.files`."""
    box: Box
    start: int
    """First byte in the file."""
    sums: tuple[int, ...]
    """CRC-32 of each piece of `Manifest.piece` bytes."""


@dataclass(frozen=True)
class Stored:
    """One tensor: neutral dtype, global shape, and the chunks that tile it."""

    section: str
    name: str
    """Its name in the files of its section."""
    dtype: str
    shape: Shape
    sharded: bool
    """Whether it was a sharded tensor (or part of one) when it was saved."""
    chunks: tuple[Chunk, ...]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype][0]

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return self.itemsize * prod(self.shape)


@dataclass(frozen=True)
class Saved:
    """One value: its skeleton (`hyperstate.schema`) and the numbers of the tensors that are its leaves."""

    skeleton: Any
    tensors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    id: str
    """Names the save: each file's header repeats it."""
    writer: str
    """Who wrote it, for people."""
    naming: str
    """"own" or "neutral": what things are called (`StateDictOptions.names`)."""
    files: tuple[File, ...]
    tensors: tuple[Stored, ...]
    entries: Mapping[Key, Saved]
    """By ("model", FQN), ("state", FQN, key) and ("global", key)."""
    groups: tuple[tuple[tuple[str, ...], Any], ...] = ()
    """FQNs and skeleton of the fields of each param group."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied parameters -> the name under which the value stands."""
    extra: tuple[tuple[tuple[int, ...], Any], ...] = ()
    """The caller's own values: ranks, skeleton."""
    piece: int = PIECE

    @cached_property
    def names(self) -> frozenset[str]:
        """FQNs that the optimizer's part names, in state or in a group."""
        state = {key[1] for key in self.entries if key[0] == "state"}
        return frozenset(state).union(*(fqns for fqns, _ in self.groups))


def dump(manifest: Manifest) -> bytes:
    """The manifest as JSON, one tensor and one entry a line."""
    tensors = [
        [t.section, t.name, t.dtype, list(t.shape), t.sharded, [_packed(chunk) for chunk in t.chunks]]
        for t in manifest.tensors
    ]
    entries = [
        [[part if type(part) is str else take_apart((part,), refuse_leaf) for part in key], e.skeleton, list(e.tensors)]
        for key, e in manifest.entries.items()
    ]
    head = {
        "format": FORMAT,
        "version": VERSION,
        "id": manifest.id,
        "writer": manifest.writer,
        "names": manifest.naming,
        "checksum": CHECKSUM,
        "piece": manifest.piece,
    }
    tables = {
        "files": [[file.name, file.size] for file in manifest.files],
        "tensors": tensors,
        "entries": entries,
        "groups": [[list(fqns), skeleton] for fqns, skeleton in manifest.groups],
        "tied": [list(pair) for pair in sorted(manifest.tied.items())],
        "extra": [[list(ranks), skeleton] for ranks, skeleton in manifest.extra],
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name, rows in tables.items():
        body = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in rows)
        lines.append(f"{json.dumps(name)}: [\n  {body}\n ]" if rows else f"{json.dumps(name)}: []")
    return ("{\n " + ",\n ".join(lines) + "\n}\n").encode()


def _packed(chunk: Chunk) -> list[Any]:
    return [chunk.file, list(chunk.box.start), list(chunk.box.stop), chunk.start, list(chunk.sums)]


# -- reading -----------------------------------------------------------------------------------------


def parse(data: bytes, where: str) -> Manifest:
    """The manifest in `data`. Raises `CheckpointError` naming `where` for anything that `dump` can't have made."""
    try:
        found = json.loads(data)
        return _read(found)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (HyperstateError, ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{where} is no manifest of a checkpoint: {type(error).__name__}: {error}") from None


def _read(found: Any) -> Manifest:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f"is no manifest of a checkpoint: its format is not {FORMAT!r}")
    if found["version"] != VERSION or type(found["version"]) is not int:
        raise CheckpointError(f"has the format version {found['version']!r}; this release reads version {VERSION}")
    if found["checksum"] != CHECKSUM:
        raise CheckpointError(f"has checksums of the kind {found['checksum']!r}; this release knows {CHECKSUM!r}")
    if not isinstance(found["id"], str) or not _ID.fullmatch(found["id"]):
        raise CheckpointError("its id is no row of hexadecimal digits")
    if found["names"] not in ("own", "neutral"):
        raise CheckpointError(f"its names are of the unknown kind {str(found['names'])[:60]!r}")
    piece = whole_number(found["piece"])
    if piece < 1:
        raise CheckpointError("its pieces have no size")
    files = _rows(found, "files", _file)
    if len({file.name for file in files}) != len(files):
        raise CheckpointError("lists a file twice")
    tensors = _rows(found, "tensors", lambda row: _tensor(row, files, piece))
    _check_files(files, tensors)
    entries = dict(_rows(found, "entries", lambda row: _entry(row, len(tensors))))
    if len(entries) != len(found["entries"]):
        raise CheckpointError("lists an entry twice")
    owned = [number for entry in entries.values() for number in entry.tensors]
    if len(set(owned)) != len(owned):  # else a load could take many times the files' bytes
        raise CheckpointError("gives one tensor to two entries")
    return Manifest(
        found["id"],
        _text(found["writer"]),
        found["names"],
        files,
        tensors,
        entries,
        _rows(found, "groups", _group),
        dict(_rows(found, "tied", lambda row: (_text(row[0]), _text(row[1])))),
        _rows(found, "extra", lambda row: (tuple(map(whole_number, row[0])), _skeleton(row[1], 0))),
        piece,
    )


def _rows(found: Mapping[str, Any], table: str, read: Callable[[Any], T]) -> tuple[T, ...]:
    if not isinstance(found[table], list):
        raise CheckpointError(f"its {table!r} is no list")
    made = []
    for number, row in enumerate(found[table]):
        try:
            made.append(read(row))
        except (HyperstateError, ValueError, TypeError, KeyError, IndexError) as error:
            name = row[1] if table == "tensors" and isinstance(row, list) and len(row) > 1 else number
            raise CheckpointError(f"{table} {str(name)[:200]!r}: {error}") from None
    return tuple(made)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:60]} is no text")
    return value


def _file(row: Any) -> File:
    name, size = row
    if not _FILE.fullmatch(_text(name)):
        raise CheckpointError(f"{name[:200]!r} is no name of a file in a checkpoint's folder")
    return File(name, whole_number(size))


def _tensor(row: Any, files: Sequence[File], piece: int) -> Stored:
    section, name, dtype, sizes, sharded, rows = row
    if section not in SECTIONS or dtype not in DTYPES or type(sharded) is not bool:
        raise CheckpointError(f"unknown section {section!r}, dtype {dtype!r} or mark {sharded!r}")
    shape = shape_of(sizes)
    chunks = tuple(_chunk(one, files, section) for one in rows)
    for chunk in chunks:
        size = DTYPES[dtype][0] * chunk.box.size
        if chunk.start + size > files[chunk.file].size:
            raise CheckpointError(f"bytes {chunk.start} to {chunk.start + size} lie beyond {files[chunk.file].name}")
        if len(chunk.sums) != -(-size // piece):
            raise CheckpointError(f"has {len(chunk.sums)} checksums for {size} bytes")
    fault = tiling_fault(shape, [chunk.box for chunk in chunks])
    if fault:
        raise CheckpointError(fault)
    return Stored(section, _text(name), dtype, shape, sharded, chunks)


def _chunk(row: Any, files: Sequence[File], section: str) -> Chunk:
    file, start, stop, first, sums = row
    number = whole_number(file)
    if not files[number].name.startswith(section + "/"):
        raise CheckpointError(f"a chunk of {section!r} stands in {files[number].name}")
    return Chunk(number, Box(shape_of(start), shape_of(stop)), whole_number(first), tuple(map(whole_number, sums)))


def _check_files(files: Sequence[File], tensors: Sequence[Stored]) -> None:
    """No byte of a file may serve two chunks, so that reading all of a checkpoint never takes more than its files."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for tensor in tensors:
        for chunk in tensor.chunks:
            stop = chunk.start + tensor.itemsize * chunk.box.size
            spans.setdefault(chunk.file, []).append((chunk.start, stop, tensor.name))
    for file, found in spans.items():
        found.sort()
        for (_, stop, name), (start, _, other) in pairwise(found):
            if start < stop:
                raise CheckpointError(f"{name!r} and {other!r} overlap at byte {start} of {files[file].name}")
    if len({(tensor.section, tensor.name) for tensor in tensors}) != len(tensors):
        raise CheckpointError("lists a tensor twice")


_LENGTHS = {"model": 2, "state": 3, "global": 2}


def _entry(row: Any, count: int) -> tuple[Key, Saved]:
    parts, skeleton, numbers = row
    key = tuple([part if type(part) is str else put_together(part, refuse_leaf)[0] for part in parts])
    if _LENGTHS.get(key[0]) != len(key) or (key[0] != "global" and not isinstance(key[1], str)):
        raise CheckpointError(f"{str(key)[:100]} is no key of an entry")
    tensors = tuple(map(whole_number, numbers))
    if any(number >= count for number in tensors):
        raise CheckpointError(f"{str(key)[:100]} names a tensor that is not listed")
    return key, Saved(_skeleton(skeleton, len(tensors)), tensors)


def _group(row: Any) -> tuple[tuple[str, ...], Any]:
    fqns, skeleton = row
    if not isinstance(skeleton, dict) or list(skeleton) != ["{"]:
        raise CheckpointError("the fields of a param group are no dict")
    return tuple(map(_text, fqns)), _skeleton(skeleton, 0)


def _skeleton(skeleton: Any, leaves: int) -> Any:
    """`skeleton`, checked: it holds plain values, tensors of its own, and those of `leaves` alone."""

    def check(item: Any) -> None:
        ((tag, inner),) = item.items()
        if tag == "T":
            spec, data = counter_of(item)
            if spec.dtype not in DTYPES or len(data) != DTYPES[spec.dtype][0] * prod(shape_of(list(spec.shape))):
                raise CheckpointError(f"a tensor {spec.dtype}{list(spec.shape)} in a value has {len(data)} bytes")
        elif tag != "t" or type(inner) is not int or not 0 <= inner < leaves:
            raise CheckpointError(f"a value holds {str(item)[:60]}, which no checkpoint may hold")

    put_together(skeleton, check)
    return skeleton
