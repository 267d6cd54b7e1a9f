"""Is a checkpoint whole? Every byte is read and summed; every element of every tensor must be there once."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..errors import SCREENFUL, CheckpointError
from .container import Part, stored_form
from .folder import open_file, read_manifest
from .manifest import Chunk, File, Manifest, Stored
from .storage import Store, open_store

THREADS = 4


@dataclass(frozen=True)
class Report:
    """What `verify` has found to be whole."""

    id: str
    writer: str
    files: int
    tensors: int
    nbytes: int
    """Bytes of all tensors."""


def verify_at(path: Any) -> Report:
    """See `hyperstate.checkpoint.verify`."""
    store = open_store(path)
    manifest = read_manifest(store)  # refuses tensors that the chunks do not tile
    held: dict[int, list[tuple[Stored, Chunk]]] = {number: [] for number in range(len(manifest.files))}
    for tensor in manifest.tensors:
        for chunk in tensor.chunks:
            held[chunk.file].append((tensor, chunk))
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda item: list(_problems(store, manifest, manifest.files[item[0]], item[1])), held.items())
        problems = [problem for one in found for problem in one]
    if problems:
        more = [f"… and {len(problems) - SCREENFUL} more"] if len(problems) > SCREENFUL else []
        text = "\n  ".join([f"{store.path} is damaged:", *problems[:SCREENFUL], *more])
        raise CheckpointError(text)
    nbytes = sum(tensor.nbytes for tensor in manifest.tensors)
    return Report(manifest.id, manifest.writer, len(manifest.files), len(manifest.tensors), nbytes)


def _problems(store: Store, manifest: Manifest, file: File, held: list[tuple[Stored, Chunk]]) -> Iterator[str]:
    """What is wrong with one file, which should hold these chunks and nothing else."""
    try:
        with open_file(store, manifest, file) as (reader, parts):
            left = dict(parts)
            room = bytearray(manifest.piece if reader.size > manifest.piece else reader.size)
            for tensor, chunk in sorted(held, key=lambda item: item[1].start):
                part = left.pop(tensor.name, None)
                if part is None or _differs(part, tensor, chunk):
                    there = "no tensor" if part is None else f"{part.dtype}{list(part.shape)} at byte {part.start}"
                    yield f"{file.name}: its header has {there} where the manifest has {tensor.name!r}"
                    continue
                for number, wanted in enumerate(chunk.sums):
                    start = part.start + number * manifest.piece
                    stop = min(start + manifest.piece, part.stop)
                    view = memoryview(room)[: stop - start]
                    reader.read_into(view, start)
                    if zlib.crc32(view) != wanted:
                        yield f"{file.name}: bytes {start} to {stop} of {tensor.name!r} are not those that were written"
            for name in left:
                yield f"{file.name}: {name!r} is not in the manifest"
    except CheckpointError as error:
        yield str(error)


def _differs(part: Part, tensor: Stored, chunk: Chunk) -> bool:
    """Whether a header's entry is not the one that was written for a chunk."""
    return (*stored_form(part.dtype, part.shape), part.start) != (
        *stored_form(tensor.dtype, chunk.box.shape),
        chunk.start,
    )
