"""The metadata of a checkpoint in files: of this library, PyTorch DCP, HyperParallel, safetensors, Hugging Face.

Only metadata and headers are read, and what they announce is checked against the sizes of the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from ..checkpoint import container, manifest
from ..checkpoint.folder import read_manifest
from ..checkpoint.storage import open_store
from ..errors import CheckpointError
from ..layout import Shape
from ..schema import DTYPES, LEAF
from . import unpickle
from .metadata import Found, Saved, SavedEntries, entries_of, field_of

_SHOWN = 5


def read_path(place: Any, rank: int, section: str) -> Found:
    """Entries of a folder or of one file in it; behind a URL, of a checkpoint of this library."""
    if "://" in str(place) or (Path(place) / manifest.NAME).is_file():
        own = read_manifest(open_store(place))
        return Found(_of_manifest(own, section), own.naming)
    return Found(_of_others(Path(place), rank))


def _of_others(path: Path, rank: int) -> SavedEntries:
    if path.is_file():
        if path.name.endswith(".safetensors"):
            return _of_shards([path])
        if path.name.endswith(".safetensors.index.json"):
            return _of_index(path)
        return _of_pickle(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder")
    for name in (".metadata", f".rank{rank}_metadata", f"__{rank}.metadata"):
        if (path / name).is_file():
            return _of_pickle(path / name)
    for index in sorted(path.glob("*.safetensors.index.json")):
        return _of_index(index)
    for folder in (path, path / "sharded"):
        files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
        if files:
            return _of_shards(files)
    listed = ", ".join(sorted(entry.name for entry in path.iterdir())[:_SHOWN])
    raise CheckpointError(
        f"{path}: no checkpoint of a known form: neither {manifest.NAME}, nor .metadata (PyTorch, HyperParallel), nor "
        f".rank{rank}_metadata, nor *.safetensors; it holds: {listed or 'nothing'}"
    )


def _of_manifest(found: manifest.Manifest, section: str) -> SavedEntries:
    """A checkpoint of this library: values that are no tensors stand in the manifest itself."""
    tensors = [Saved(tensor.dtype, tensor.shape) for tensor in found.tensors]
    entries: SavedEntries = {}
    for key, value in found.entries.items():
        if (key[0] == "model") == (section == "model"):
            path = key[1:] if key[0] == "model" else key
            leaves = tuple([tensors[number] for number in value.tensors])
            single = value.skeleton == LEAF
            entries[".".join(map(str, path))] = (
                replace(leaves[0], path=path) if single else Saved(None, (), path, value.skeleton, leaves)
            )
    for index, (fqns, fields) in enumerate(found.groups if section == "optim" else ()):
        for name, skeleton in [["params", list(fqns)], *fields["{"]]:
            path = ("param_groups", index, name)
            entries[".".join(map(str, path))] = Saved(None, (), path, skeleton, ())
    return entries


def _of_pickle(path: Path) -> SavedEntries:
    size = path.stat().st_size
    if size > unpickle.LIMIT:
        raise CheckpointError(f"{path}: {size} bytes of metadata; more than {unpickle.LIMIT} are refused")
    record = unpickle.loads(path.read_bytes(), str(path))
    found = entries_of(record, str(path))
    if not _compressed(record):
        _check_room(found, path)
    return found


def _compressed(record: unpickle.Record) -> bool:
    storage = field_of(record, "storage_data")
    items = storage.values() if isinstance(storage, dict) else ()
    return any(field_of(item, "transform_descriptors") for item in items)


def _check_room(entries: SavedEntries, path: Path) -> None:
    """No tensor may be larger than all files beside the metadata together."""
    room = sum(file.stat().st_size for file in path.parent.iterdir() if file.is_file())
    for key, saved in entries.items():
        name = str(saved.dtype).removeprefix("torch.").lower()
        if saved.dtype is not None and name in DTYPES and DTYPES[name][0] * prod(saved.shape) > room:
            raise CheckpointError(
                f"{path}: {key!r} is said to be {name}{list(saved.shape)}, more than the {room} bytes of the folder"
            )


def _of_index(path: Path) -> SavedEntries:
    """A Hugging Face folder: an index of which file holds which tensor."""
    try:
        if path.stat().st_size > container.MAX_HEADER:
            raise ValueError("it is too long")
        weight_map = json.loads(path.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
        if any(name != os.path.basename(name) or name in ("", ".", "..") for name in names):  # noqa: PTH119  # of a name, not a path
            raise ValueError("it names a file outside its folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: no index of safetensors files: {error}") from None
    found = _of_shards([path.parent / name for name in names])
    lacking = sorted(key for key in weight_map if key not in found)
    if lacking:
        raise CheckpointError(f"{path}: {len(lacking)} tensors are in none of the files, such as {lacking[:_SHOWN]}")
    return found


def _of_shards(files: list[Path]) -> SavedEntries:
    """Safetensors files: whole tensors, or the shards that PyTorch's `HuggingFaceStorageWriter` writes."""
    dtypes: dict[str, str] = {}
    boxes: dict[str, dict[Shape, Shape]] = {}
    for name, dtype, offsets, shape, file in _parts(files):
        here = boxes.setdefault(name, {})
        if dtypes.setdefault(name, dtype) != dtype or len(next(iter(here), offsets)) != len(offsets):
            raise CheckpointError(f"{file}: {name!r} is {dtype}{list(shape)}, unlike in another file")
        if offsets in here and prod(shape) > 0:  # several ranks may hold the same nothing
            raise CheckpointError(f"{file}: {name!r} at {list(offsets)} stands in another file, too")
        here[offsets] = shape
    found = {}
    for name, parts in boxes.items():
        ends = [[a + b for a, b in zip(offsets, shape, strict=True)] for offsets, shape in parts.items()]
        whole: Shape = tuple([max(stops) for stops in zip(*ends, strict=True)])
        held: int = sum(prod(shape) for shape in parts.values())
        if held != prod(whole):
            raise CheckpointError(
                f"{files[0].parent}: the shards of {name!r} make up {held} elements of {list(whole)}; files are "
                "missing or overlap"
            )
        found[name] = Saved(dtypes[name], whole)
    return found


def _parts(files: list[Path]) -> Iterator[tuple[str, str, Shape, Shape, Path]]:
    """(name, dtype, offsets, shape, file) of every tensor in `files`."""
    for file in files:
        try:
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                length = container.header_length(stream.read(container.LENGTH_BYTES), size, str(file))
                tensors, metadata = container.parse(stream.read(length), size, str(file))
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror or error}") from None
        offsets = _offsets(metadata, str(file))
        for name, part in tensors.items():
            at = offsets.get(name, (0,) * len(part.shape))
            if len(at) != len(part.shape):
                raise CheckpointError(f"{file}: {name!r} of shape {list(part.shape)} has the offsets {list(at)}")
            yield name, part.dtype, at, part.shape, file


def _offsets(metadata: Mapping[str, str], where: str) -> dict[str, Shape]:
    if container.SHARDING not in metadata:
        return {}
    try:
        sharding = json.loads(metadata[container.SHARDING])
        return {name: container.shape_of(entry[container.OFFSETS]) for name, entry in sharding.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: malformed {container.SHARDING}: {error!r}") from None
