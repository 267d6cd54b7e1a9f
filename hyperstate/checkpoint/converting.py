"""Conversion between checkpoint formats: streaming, a block at a time, no framework but where a format is one's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self

from .. import backend as backends
from ..errors import CheckpointError, OptionError
from ..layout import Box, whole
from ..schema import Key
from . import ckpt, folder, origins
from .checksum import crc32
from .container import SAVE, lay_out
from .manifest import NAME, PIECE, SECTIONS, Chunk, File, Manifest, Stored, dump, parse
from .origins import Contents, Origin, blocks
from .progress import Meter, Progress
from .single import appearing, open_parent
from .storage import Store, Writer, local_path, open_store

Names = Mapping[str, str] | Callable[[str], str] | None
FORMATS = ("own", "safetensors", "ckpt", "dcp")
FILE_BYTES = 5 << 30


class FileFormat(Protocol):
    """A format that belongs to a framework: an entry of the backend's `file_formats`."""

    def matches(self, path: str) -> bool:
        """Whether a file or folder is of this format."""

    def open(self, path: str) -> Origin:
        """Read one."""

    def write(self, origin: Origin, path: str) -> None:
        """Write one."""


def convert_at(
    source: Any,
    target: Any,
    to: str,
    names: Names,
    section: str,
    file_bytes: int,
    progress: Progress | None = None,
) -> None:
    """See `hyperstate.checkpoint.convert`."""
    if to not in FORMATS or section not in SECTIONS:
        raise OptionError(f"to={to!r} must be one of {FORMATS}, section={section!r} one of {SECTIONS}")
    with open_origin(os.fspath(source)) as origin:
        origin = _Renamed(origin, names) if names is not None else origin
        path = local_path(os.fspath(target))
        only = section if to in ("safetensors", "ckpt") else ""
        _check_some(origin, os.fspath(source), only)
        origin = origin if progress is None else _Watched(origin, progress, only)
        if to == "own":
            write_own(origin, open_store(path))
        elif to == "safetensors":
            write_safetensors(origin, path, section, file_bytes)
        elif to == "ckpt":
            ckpt.write(origin, path, section)
        else:
            _check_local(path)
            _foreign("torch", to).write(origin, path)


def _check_local(path: str) -> None:
    if "://" in path:
        raise CheckpointError(f"{path}: a folder of PyTorch's DCP must be on a file system, not behind a URL")


def _check_some(origin: Origin, source: str, section: str) -> None:
    """Refuse to write a checkpoint of nothing. `section` is the one wanted; empty: any."""
    if section and not any(stored.section == section for stored in origin.contents.tensors):
        raise CheckpointError(f"{source} holds no tensors of the section {section!r}")
    if not origin.contents.entries:
        raise CheckpointError(f"{source} holds no values of a model or optimizer")


def open_origin(path: str) -> Origin:
    """A checkpoint of any known format. Raises `CheckpointError` if it is none."""
    path = local_path(path)
    if path.endswith(ckpt.SUFFIX):
        return ckpt.Ckpt(path)
    store = open_store(path)
    if store.size(NAME) is not None:
        return origins.own(store)
    if store.size(".metadata") is not None:
        _check_local(path)
        return _foreign("torch", "dcp").open(path)
    return origins.safetensors(path)


def _foreign(backend: str, name: str) -> FileFormat:
    formats: Mapping[str, FileFormat] = getattr(backends.load(backend), "file_formats", {})
    if name not in formats:
        raise CheckpointError(f"the backend {backend!r} does not know the format {name!r}")
    return formats[name]


class _Renamed:
    """An origin under other FQNs."""

    def __init__(self, origin: Origin, names: Names) -> None:
        self._origin = origin
        rename = names if callable(names) else lambda fqn: (names or {}).get(fqn, fqn)
        old = origin.contents
        owners = {number: key for key, entry in old.entries.items() for number in entry.tensors}

        def key_of(key: Key) -> Key:
            return key if key[0] == "global" else (key[0], rename(key[1]), *key[2:])

        def stored_of(number: int, stored: Stored) -> Stored:
            key = owners.get(number)
            if key is None or key[0] == "global":
                return stored
            before, after = ".".join(map(str, key)), ".".join(map(str, key_of(key)))
            name = stored.name.removeprefix(before if key[0] == "state" else key[1])
            return replace(stored, name=(after if key[0] == "state" else rename(key[1])) + name)

        entries = {key_of(key): entry for key, entry in old.entries.items()}
        if len(entries) != len(old.entries):
            raise OptionError("names= gives two entries one name")
        self.contents = replace(
            old,
            tensors=tuple(stored_of(i, stored) for i, stored in enumerate(old.tensors)),
            entries=entries,
            groups=tuple((tuple(map(rename, fqns)), fields) for fqns, fields in old.groups),
            tied={rename(alias): rename(fqn) for alias, fqn in old.tied.items()},
        )
        self.read = origin.read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._origin.__exit__(*error)


class _Watched:
    """An origin that tells how far its reader is."""

    def __init__(self, origin: Origin, progress: Progress, section: str) -> None:
        self._origin = origin
        self.contents = origin.contents
        wanted = [stored for stored in self.contents.tensors if section in ("", stored.section)]
        self._meter = Meter(progress, sum(stored.nbytes for stored in wanted))

    def read(self, number: int, box: Box, view: memoryview) -> None:
        """See `hyperstate.checkpoint.origins.Origin`."""
        self._origin.read(number, box, view)
        self._meter.step(len(view), self.contents.tensors[number].name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._origin.__exit__(*error)


# -- writing our own ---------------------------------------------------------------------------------


def write_own(origin: Origin, store: Store) -> None:
    """A checkpoint of one rank, as safe against crashes as `save` is."""
    contents = origin.contents
    used = sorted({number for entry in contents.entries.values() for number in entry.tensors})
    position = {number: i for i, number in enumerate(used)}
    order = folder.look(store, os.urandom(16).hex())
    folder.tidy(store, order)
    files: list[File] = []
    tensors: dict[int, Stored] = {}
    for section in SECTIONS:
        mine = [number for number in used if contents.tensors[number].section == section]
        if mine:
            name = f"{section}/shard-00001-model-00001-of-00001.safetensors"
            size, chunks = _write_file(origin, store, order, name, mine, len(files))
            tensors |= {number: replace(contents.tensors[number], chunks=(chunk,)) for number, chunk in chunks.items()}
            files.append(File(name, size))
            store.settle((order.stage + name).rpartition("/")[0])
    made = Manifest(
        order.id,
        "hyperstate, converted",
        contents.naming,
        tuple(files),
        tuple(tensors[number] for number in used),
        {key: replace(e, tensors=tuple(position[n] for n in e.tensors)) for key, e in contents.entries.items()},
        contents.groups,
        contents.tied,
        contents.extra,
    )
    data = dump(made)
    parse(data, "the new manifest")
    folder.show(store, order, made, data)


def _write_file(
    origin: Origin, store: Store, order: folder.Order, name: str, numbers: Sequence[int], file_number: int
) -> tuple[int, dict[int, Chunk]]:
    tensors = origin.contents.tensors
    described = [(tensors[n].name, tensors[n].dtype, tensors[n].shape, (0,) * len(tensors[n].shape)) for n in numbers]
    first, starts = lay_out(described, {SAVE: order.id})
    size, chunks = len(first), {}
    with store.writer(order.stage + name) as file:
        file.write(first)
        for number in sorted(numbers, key=lambda n: (starts[tensors[n].name], tensors[n].nbytes)):
            sums = _Sums(file)
            size += _stream(origin, number, sums.write)
            chunks[number] = Chunk(
                file_number, whole(tensors[number].shape), starts[tensors[number].name], sums.found()
            )
    return size, chunks


class _Sums:
    """Writes blocks to a file, and sums them by piece."""

    def __init__(self, file: Writer) -> None:
        self._file = file
        self._done: list[int] = []
        self._sum = self._filled = 0

    def write(self, data: memoryview) -> None:
        self._file.write(data)
        while len(data):
            part = data[: PIECE - self._filled]
            self._sum = crc32(part, self._sum)
            self._filled += len(part)
            data = data[len(part) :]
            if self._filled == PIECE:
                self._done.append(self._sum)
                self._sum = self._filled = 0

    def found(self) -> tuple[int, ...]:
        return (*self._done, self._sum) if self._filled else tuple(self._done)


def _stream(origin: Origin, number: int, take: Callable[[memoryview], Any]) -> int:
    """Hand all bytes of a tensor to `take`, block by block; their number."""
    stored = origin.contents.tensors[number]
    total, room = 0, bytearray(min(stored.nbytes, origins.BLOCK))
    for box in blocks(stored.shape, stored.dtype):
        size = stored.itemsize * box.size
        if size > len(room):  # a row that can't be cut
            room = bytearray(size)
        view = memoryview(room)[:size]
        origin.read(number, box, view)
        take(view)
        total += size
    return total


# -- writing safetensors -----------------------------------------------------------------------------


def write_safetensors(origin: Origin, path: str, section: str, file_bytes: int) -> None:
    """One section in ordinary safetensors files: one, or several with an index, as Hugging Face has them."""
    contents = origin.contents
    numbers = [number for number, stored in enumerate(contents.tensors) if stored.section == section]
    single = path.endswith(origins.SUFFIX)
    parts = _split(contents, numbers, None if single else file_bytes)
    place, name = open_parent(path) if single else (open_store(path), "model.safetensors")
    names = [name]
    if len(parts) > 1:
        names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        _write_plain(origin, place, name, part)
    if len(parts) > 1:
        where = {contents.tensors[n].name: name for name, part in zip(names, parts, strict=True) for n in part}
        total = sum(contents.tensors[n].nbytes for n in numbers)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        place.publish("model.safetensors.index.json", json.dumps(index, indent=2).encode())


def _split(contents: Contents, numbers: Sequence[int], limit: int | None) -> list[list[int]]:
    """The tensors in files of at most `limit` bytes, in order; a larger tensor has its own."""
    parts: list[list[int]] = [[]]
    filled = 0
    for number in numbers:
        size = contents.tensors[number].nbytes
        if parts[-1] and limit is not None and filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(number)
        filled += size
    return parts


def _write_plain(origin: Origin, store: Store, name: str, numbers: Sequence[int]) -> None:
    tensors = origin.contents.tensors
    described = [(tensors[n].name, tensors[n].dtype, tensors[n].shape) for n in numbers]
    first, starts = lay_out([(*one, (0,) * len(one[2])) for one in described], {}, sharded=False)
    with appearing(store, name) as file:
        file.write(first)
        for number in sorted(numbers, key=lambda n: (starts[tensors[n].name], tensors[n].nbytes)):
            _stream(origin, number, file.write)
