"""Is a checkpoint whole? Every byte is read and summed; every element of every tensor must be there once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..errors import SCREENFUL, CheckpointError
from .checksum import crc32
from .folder import TRIES, id_at, open_file, read_manifest
from .manifest import Chunk, File, Manifest, Stored
from .progress import Meter, Progress
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


def verify_at(path: Any, progress: Progress | None = None) -> Report:
    """See `hyperstate.checkpoint.verify`."""
    store = open_store(path)
    for _ in range(TRIES):
        manifest = read_manifest(store)  # refuses tensors that the chunks do not tile
        problems = _all_problems(store, manifest, progress)
        if not problems or id_at(store) in ("", manifest.id):
            break  # else somebody has saved to the path meanwhile
    if problems:
        more = [f"… and {len(problems) - SCREENFUL} more"] if len(problems) > SCREENFUL else []
        text = "\n  ".join([f"{store.path} is damaged:", *problems[:SCREENFUL], *more])
        raise CheckpointError(text)
    nbytes = sum(tensor.nbytes for tensor in manifest.tensors)
    return Report(manifest.id, manifest.writer, len(manifest.files), len(manifest.tensors), nbytes)


def _all_problems(store: Store, manifest: Manifest, progress: Progress | None) -> list[str]:
    meter = Meter(progress, sum(tensor.nbytes for tensor in manifest.tensors))
    held: dict[int, list[tuple[Stored, Chunk]]] = {number: [] for number in range(len(manifest.files))}
    for tensor in manifest.tensors:
        for chunk in tensor.chunks:
            held[chunk.file].append((tensor, chunk))
    with ThreadPoolExecutor(THREADS) as pool:
        files = manifest.files
        found = pool.map(lambda item: list(_problems(store, manifest, files[item[0]], item[1], meter)), held.items())
        return [problem for one in found for problem in one]


def _problems(
    store: Store, manifest: Manifest, file: File, held: list[tuple[Stored, Chunk]], meter: Meter
) -> Iterator[str]:
    """What is wrong with one file, which should hold these chunks and nothing else."""
    try:
        with open_file(store, manifest, file) as opened:
            reader, left = opened.reader, dict(opened.parts)
            room = bytearray(manifest.piece if reader.size > manifest.piece else reader.size)
            for tensor, chunk in sorted(held, key=lambda item: item[1].start):
                left.pop(tensor.name, None)
                if fault := opened.fault(tensor, chunk):
                    yield f"{file.name}: {fault}"
                    continue
                end = chunk.start + tensor.itemsize * chunk.box.size
                for number, wanted in enumerate(chunk.sums):
                    start = chunk.start + number * manifest.piece
                    stop = min(start + manifest.piece, end)
                    view = memoryview(room)[: stop - start]
                    reader.read_into(view, start)
                    meter.step(len(view), file.name)
                    if crc32(view) != wanted:
                        yield f"{file.name}: bytes {start} to {stop} of {tensor.name!r} are not those that were written"
            for name in left:
                yield f"{file.name}: {name!r} is not in the manifest"
    except CheckpointError as error:
        yield str(error)
