"""Where a conversion reads from: any checkpoint seen as tensors that can be read box by box, and values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol, Self

from ..errors import CheckpointError
from ..layout import Box, intersect
from ..schema import DTYPES, LEAF, Key
from .boxes import offset_in, reads, tiling_fault
from .container import Part, offsets_of
from .folder import Opened, open_file, read_header, read_manifest
from .manifest import NAME, Chunk, File, Manifest, Saved, Stored
from .single import open_parent
from .storage import Reader, Store, open_store

BLOCK = 16 << 20
"""Bytes that a conversion holds at a time, twice at most."""
SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, without the tensors' bytes."""

    tensors: Sequence[Stored]
    entries: Mapping[Key, Saved]
    groups: tuple[tuple[tuple[str, ...], Any], ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[tuple[tuple[int, ...], Any], ...] = ()
    naming: str = "neutral"


class Origin(Protocol):
    """A checkpoint to read from. A context manager: files are open inside its block."""

    contents: Contents

    def __enter__(self) -> Self:
        """Open."""

    def __exit__(self, *error: object) -> None:
        """Close all files."""

    def read(self, number: int, box: Box, view: memoryview) -> None:
        """Fill `view` with the bytes of a box of the tensor with that number, row-major."""


class Chunked:
    """An origin whose tensors are chunks of files, each row-major."""

    def __init__(self, contents: Contents, store: Store, manifest: Manifest, own: bool) -> None:
        self.contents = contents
        self.files = tuple(file.name for file in manifest.files)
        self._store, self._manifest, self._own = store, manifest, own
        self._stack, self._open = ExitStack(), dict[int, Reader]()
        self._headers = dict[int, Opened]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()
        self._stack.close()

    def _reader(self, number: int) -> Reader:
        if number not in self._open:
            file = self._manifest.files[number]
            if self._own:
                self._headers[number] = self._stack.enter_context(open_file(self._store, self._manifest, file))
                reader = self._headers[number].reader
            else:
                reader = self._stack.enter_context(self._store.reader(file.name))
            self._open[number] = reader
        return self._open[number]

    def read(self, number: int, box: Box, view: memoryview) -> None:
        stored = self.contents.tensors[number]
        for chunk in stored.chunks:
            common = intersect(box, chunk.box)
            if common is not None:
                self._read_chunk(stored, chunk, common, box, view)

    def _read_chunk(self, stored: Stored, chunk: Chunk, common: Box, box: Box, view: memoryview) -> None:
        """The part `common` of a chunk, into `view`, which holds `box`."""
        reader, size = self._reader(chunk.file), stored.itemsize
        if self._own and (fault := self._headers[chunk.file].fault(stored, chunk)):
            raise CheckpointError(f"{self._store.path}/{self.files[chunk.file]}: {fault}")
        for cover, part in reads(chunk.box.shape, common.within(chunk.box), size, BLOCK):
            start = chunk.start + size * offset_in(chunk.box.shape, cover.start)
            place = Box(*(tuple(a + b for a, b in zip(end, chunk.box.start, strict=True)) for end in part))
            target = place.within(box)
            inner = list(reads(box.shape, target, size, 1 << 62))
            if cover == part and len(inner) == 1 and inner[0].cover == target:
                first = size * offset_in(box.shape, target.start)
                reader.read_into(view[first : first + size * target.size], start)
            else:
                data = bytearray(size * cover.size)
                reader.read_into(memoryview(data), start)
                copy_box(memoryview(data), cover, part, view, box.shape, target, size)


def copy_box(
    data: memoryview, cover: Box, part: Box, view: memoryview, shape: tuple[int, ...], target: Box, size: int
) -> None:
    """Copy the box `part` out of `data`, which holds `cover`, to the box `target` of `view`, which has `shape`."""
    inner = part.within(cover)
    if not inner.start:
        view[:size] = data[:size]
        return
    width = size * inner.shape[-1]
    for row in product(*map(range, inner.shape[:-1])):
        here = (*(a + i for a, i in zip(inner.start, row, strict=False)), inner.start[-1])
        there = (*(a + i for a, i in zip(target.start, row, strict=False)), target.start[-1])
        a, b = size * offset_in(cover.shape, here), size * offset_in(shape, there)
        view[b : b + width] = data[a : a + width]


# -- own checkpoints ---------------------------------------------------------------------------------


def own(store: Store) -> Origin:
    """A checkpoint of this library."""
    m = read_manifest(store)
    return Chunked(Contents(m.tensors, m.entries, m.groups, m.tied, m.extra, m.naming), store, m, own=True)


# -- safetensors -------------------------------------------------------------------------------------


def safetensors(path: str) -> Origin:
    """A safetensors file, or a folder of them: sharded as PyTorch's DCP does, in several files as Hugging Face does.

    All tensors are the model's. Raises `CheckpointError` for tensors that the files do not hold exactly once.
    """
    store, names = _files(path)
    files, chunks, kinds = [], dict[str, list[Chunk]](), dict[str, tuple[str, bool]]()
    for number, name in enumerate(names):
        try:
            with store.reader(name) as reader:
                parts, metadata = read_header(reader, f"{store.path}/{name}")
                files.append(File(name, reader.size))
        except FileNotFoundError:
            raise CheckpointError(f"{store.path}/{name} is missing") from None
        offsets = offsets_of(metadata, f"{store.path}/{name}")
        for part in parts.values():
            start = offsets.get(part.name, (0,) * len(part.shape))
            box = _box(start, part, f"{store.path}/{name}")
            chunks.setdefault(part.name, []).append(Chunk(number, box, part.start, ()))
            kind = kinds.setdefault(part.name, (part.dtype, bool(offsets)))
            if kind[0] != part.dtype:
                raise CheckpointError(
                    f"{store.path}: {part.name!r} is {kind[0]} in one file and {part.dtype} in another"
                )
    tensors = tuple(_stored(store, name, *kinds[name], found) for name, found in chunks.items())
    entries: dict[Key, Saved] = {("model", t.name): Saved(LEAF, (i,)) for i, t in enumerate(tensors)}
    manifest = Manifest("0" * 8, "", "neutral", tuple(files), tensors, entries)
    return Chunked(Contents(tensors, entries), store, manifest, own=False)


def _files(path: str) -> tuple[Store, list[str]]:
    """The folder and the names of the files in it that belong together."""
    if path.endswith((SUFFIX, INDEX)):
        store, name = open_parent(path)
        names = [name]
    else:
        store = open_store(path)
        names = [name for name in store.names() if name.endswith((SUFFIX, INDEX))]
    for index in [name for name in names if name.endswith(INDEX)]:
        data = store.read(index)
        with suppress(ValueError, TypeError, AttributeError):
            found = sorted(set(json.loads(data or b"")["weight_map"].values()))
            if found and all(isinstance(name, str) and "/" not in name and "\\" not in name for name in found):
                return store, found
        raise CheckpointError(f"{store.path}/{index} is no index of safetensors files")
    if not names:
        raise CheckpointError(f"{path} holds neither {NAME} nor safetensors files")
    return store, names


def _box(start: tuple[int, ...], part: Part, where: str) -> Box:
    if len(start) != len(part.shape) or any(not 0 <= a < 1 << 63 for a in start):
        raise CheckpointError(f"{where}: {part.name!r} of shape {part.shape} starts at {start}")
    return Box(start, tuple(a + n for a, n in zip(start, part.shape, strict=True)))


def _stored(store: Store, name: str, dtype: str, sharded: bool, chunks: list[Chunk]) -> Stored:
    shape = tuple(max(ends) for ends in zip(*(chunk.box.stop for chunk in chunks), strict=True))
    fault = tiling_fault(shape, [chunk.box for chunk in chunks])
    if fault:
        raise CheckpointError(f"{store.path}: {name!r}: {fault}")
    return Stored("model", name, dtype, shape, sharded, tuple(chunks))


def blocks(shape: tuple[int, ...], dtype: str) -> Sequence[Box]:
    """A tensor in consecutive runs of bytes of at most `BLOCK`."""
    whole = Box((0,) * len(shape), shape)
    return [box for _, box in reads(shape, whole, DTYPES[dtype][0], BLOCK)] if 0 not in shape else []
