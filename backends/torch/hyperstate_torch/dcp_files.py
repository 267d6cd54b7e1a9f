"""Folders of PyTorch's DCP (``FileSystemWriter``) as a format to convert from and to (`hyperstate.checkpoint.convert`).

The metadata are read by `hyperstate.foreign.unpickle`, which runs no pickle, and what stands in the data files by
``torch.load(weights_only=True)``. One chunk of a data file is in memory at a time.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from hyperstate.checkpoint.boxes import tiling_fault
from hyperstate.checkpoint.manifest import Saved, Stored
from hyperstate.checkpoint.origins import Contents, Origin, blocks
from hyperstate.errors import CheckpointError
from hyperstate.flatten import is_flat, unflatten_optim_state_dict
from hyperstate.foreign import unpickle
from hyperstate.foreign.metadata import entries_of, field_of, neutral
from hyperstate.layout import Box, intersect, whole
from hyperstate.schema import LEAF, Key, TensorSpec, counter_of, put_together, take_apart, tiny_skeleton

from .tensors import _torch_dtype

METADATA = ".metadata"
MODEL, OPTIMIZER = ("model",), ("optim", "optimizer")
"""Names under which scripts keep the two dicts."""
INLINE = 1 << 20
"""Largest tensor in bytes that may stand in a value which is no tensor."""


class Files:
    """See `hyperstate.checkpoint.converting.FileFormat`."""

    def matches(self, path: str) -> bool:
        return (Path(path) / METADATA).is_file()

    def open(self, path: str) -> Origin:
        return Folder(Path(path))

    def write(self, origin: Origin, path: str) -> None:
        write(origin, Path(path))


# -- reading -----------------------------------------------------------------------------------------


class _Ref:
    """A tensor of the checkpoint, as a leaf of a value."""

    def __init__(self, key: str, number: int) -> None:
        self.key, self.number = key, number


def _unwrapped(tree: dict[Any, Any]) -> dict[Any, Any]:
    """`tree` without a dict around it, under which a whole object was saved: ``{"app": {"model": …, "optim": …}}``."""
    while len(tree) == 1 and not tree.keys() & {*MODEL, *OPTIMIZER}:
        (inner,) = tree.values()
        if not isinstance(inner, dict) or not inner.keys() & {*MODEL, *OPTIMIZER}:
            break
        tree = inner
    return tree


class Folder:
    """A DCP folder to read from.

    A dict that was saved under "model" is the model's, one under "optim" or "optimizer" the optimizer's, nested or
    flat, both perhaps inside one further dict ("app"); where neither is there, all tensors are the model's.
    Everything else becomes `extra`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        where = str(path / METADATA)
        found = unpickle.loads((path / METADATA).read_bytes(), where)
        self._places: dict[str, dict[tuple[int, ...] | None, tuple[str, int, int]]] = {}
        storage = field_of(found, "storage_data")
        for index, info in storage.items() if isinstance(storage, Mapping) else ():
            offset = field_of(index, "offset")
            place = self._place(info, where)
            self._places.setdefault(str(field_of(index, "fqn")), {})[None if offset is None else tuple(offset)] = place
        self._boxes: list[list[tuple[Box, tuple[str, int, int]]]] = []
        self._stored: list[Stored] = []
        self._last: tuple[Any, torch.Tensor] | None = None
        self.contents = self._contents(entries_of(found, where), field_of(found, "state_dict_metadata"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._last = None

    def _place(self, info: Any, where: str) -> tuple[str, int, int]:
        name, offset, length = (field_of(info, field) for field in ("relative_path", "offset", "length"))
        if field_of(info, "transform_descriptors"):
            raise CheckpointError(f"{where}: its data are transformed ({field_of(info, 'transform_descriptors')})")
        if not isinstance(name, str) or Path(name).name != name or type(offset) is not int or type(length) is not int:
            raise CheckpointError(f"{where}: {str(name)[:60]!r} is no file beside it")
        return name, offset, length

    def _contents(self, entries: Mapping[str, Any], table: Mapping[str, Any]) -> Contents:
        tree: dict[Any, Any] = {}
        for key, saved in entries.items():
            value = self._value(key) if saved.dtype is None else _Ref(key, self._add(key, saved, table[key]))
            _put(tree, saved.path or (key,), value)
        tree = _unwrapped(tree)
        model = next((tree.pop(name) for name in MODEL if isinstance(tree.get(name), dict)), None)
        optimizer: dict[Any, Any] = next((tree.pop(name) for name in OPTIMIZER if isinstance(tree.get(name), dict)), {})
        if model is None:
            model = {key: tree.pop(key) for key, value in list(tree.items()) if isinstance(value, _Ref)}
        self._entries: dict[Key, Saved] = {}
        for fqn, value in _flat(model).items():
            self._enter(("model", fqn), value)
        groups = self._optimizer(optimizer, {key[1] for key in self._entries})
        extra = take_apart(_listed(tree), self._inline) if tree else None
        return Contents(self._stored, self._entries, groups, {}, (((0,), extra),) if tree else ())

    def _add(self, key: str, saved: Any, properties: Any) -> int:
        """Note a tensor; its number."""
        parts = []
        for chunk in field_of(properties, "chunks") or ():
            start, sizes = tuple(field_of(chunk, "offsets")), tuple(field_of(chunk, "sizes"))
            place = self._places.get(key, {}).get(start)
            if place is None:
                raise CheckpointError(f"{self._path}: {key!r} has no data at {start}")
            parts.append((Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True))), place))
        fault = tiling_fault(saved.shape, [box for box, _ in parts])
        if fault:
            raise CheckpointError(f"{self._path}: {key!r}: {fault}")
        self._boxes.append(parts)
        self._stored.append(Stored("model", key, neutral(saved.dtype), saved.shape, len(parts) > 1, ()))
        return len(self._stored) - 1

    def _enter(self, key: Key, value: Any) -> None:
        """One entry of the checkpoint to be."""
        numbers: list[int] = []

        def leaf(item: Any) -> Any:
            if not isinstance(item, _Ref):
                raise CheckpointError(f"{self._path}: {key} holds a {type(item).__qualname__}, which no file may hold")
            numbers.append(item.number)
            return {"t": len(numbers) - 1}

        skeleton = take_apart(value, leaf)
        section = "model" if key[0] == "model" else "optim"
        for i, number in enumerate(numbers):
            name = key[1] if key[0] == "model" else ".".join(map(str, key))
            old = self._stored[number]
            name = name if skeleton == LEAF else f"{name}.{i}"
            self._stored[number] = Stored(section, name, old.dtype, old.shape, old.sharded, ())
        self._entries[key] = Saved(skeleton, tuple(numbers))

    def _optimizer(self, found: Mapping[str, Any], known: set[str]) -> tuple[tuple[tuple[str, ...], Any], ...]:
        if found and is_flat(found):
            names = known or {key.partition(".")[2].rpartition(".")[0] for key in found}
            found = unflatten_optim_state_dict(found, names, strict=False)[0]
        for fqn, slots in (found.get("state") or {}).items():
            for key, value in slots.items():
                self._enter(("state", str(fqn), key), _listed(value))
        for key, value in (found.get("global") or {}).items():
            self._enter(("global", key), _listed(value))
        groups = []
        for group in _listed(found.get("param_groups") or []):
            fields = dict(group)
            fqns = fields.pop("params", [])
            if not all(isinstance(fqn, str) for fqn in fqns):
                text = "its optimizer names parameters by number; save it with get_optimizer_state_dict(model, …)"
                raise CheckpointError(f"{self._path}: {text}")
            groups.append((tuple(fqns), take_apart(fields, self._inline)))
        return tuple(groups)

    def _inline(self, item: Any) -> Any:
        """A tensor inside a value that is none, with its bytes."""
        if not isinstance(item, _Ref):
            raise CheckpointError(f"{self._path}: a {type(item).__qualname__} can't stand in a file")
        old = self._stored[item.number]
        if old.nbytes > INLINE:
            raise CheckpointError(f"{self._path}: {item.key!r} is neither the model's nor the optimizer's")
        data = bytearray(old.nbytes)
        self.read(item.number, whole(old.shape), memoryview(data))
        self._stored[item.number] = Stored("none", old.name, old.dtype, old.shape, False, ())
        return tiny_skeleton(TensorSpec(old.dtype, old.shape), bytes(data))

    def _blob(self, place: tuple[str, int, int]) -> io.BytesIO:
        name, offset, length = place
        path = self._path / name
        if not (offset >= 0 and length >= 0 and offset + length <= path.stat().st_size):
            raise CheckpointError(f"{path} has no bytes {offset} to {offset + length}")
        with path.open("rb") as file:
            file.seek(offset)
            return io.BytesIO(file.read(length))

    def _load(self, place: tuple[str, int, int]) -> Any:
        try:
            return torch.load(self._blob(place), map_location="cpu", weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
            raise CheckpointError(f"{self._path / place[0]}: byte {place[1]}: {error}") from error

    def _value(self, key: str) -> Any:
        place = self._places.get(key, {}).get(None)
        if place is None:
            raise CheckpointError(f"{self._path}: {key!r} has no data")
        return self._load(place)

    def read(self, number: int, box: Box, view: memoryview) -> None:
        """See `hyperstate.checkpoint.origins.Origin`."""
        stored = self._stored[number]
        into = torch.frombuffer(view, dtype=torch.uint8).view(_torch_dtype(stored.dtype)).reshape(box.shape)
        for part, place in self._boxes[number]:
            common = intersect(part, box)
            if common is not None:
                if self._last is None or self._last[0] != place:
                    self._last = (place, self._load(place))
                chunk = self._last[1]
                if tuple(chunk.shape) != part.shape or chunk.dtype != into.dtype:
                    raise CheckpointError(f"{self._path}: {stored.name!r} is not what its metadata say")
                into[_slices(common.within(box))] = chunk[_slices(common.within(part))]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(*box, strict=True))


def _put(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    for step in path[:-1]:
        tree = tree.setdefault(step, {})
    tree[path[-1]] = value


def _listed(tree: Any) -> Any:
    """`tree`, in which a dict with the keys 0, 1, … that stands for a list is one."""
    if not isinstance(tree, dict):
        return tree
    found = {key: _listed(value) for key, value in tree.items()}
    return [found[i] for i in range(len(found))] if found and set(found) == set(range(len(found))) else found


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """A model's dict by FQN, however deep it was nested."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


# -- writing -----------------------------------------------------------------------------------------


def write(origin: Origin, path: Path) -> None:
    """A DCP folder with the dicts "model", "optim" (nested) and "extra", as ``dcp.save`` makes it in one process."""
    path.mkdir(parents=True, exist_ok=True)
    (path / METADATA).unlink(missing_ok=True)
    with (path / "__0_0.distcp").open("wb") as file:
        found = _Writer(origin, file).write_all()
        file.flush()
        os.fsync(file.fileno())
    temporary = path / (METADATA + ".tmp")
    with temporary.open("wb") as file:
        pickle.dump(found, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path / METADATA)


class _Writer:
    def __init__(self, origin: Origin, file: Any) -> None:
        self._origin, self._file = origin, file
        self._table: dict[str, Any] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._storage: dict[Any, Any] = {}

    def write_all(self) -> dcp.Metadata:
        contents = self._origin.contents
        for key, saved in contents.entries.items():
            path = ("model", key[1]) if key[0] == "model" else ("optim", *key)
            if saved.skeleton == LEAF:
                self._tensor(path, saved.tensors[0])
            else:
                self._value(path, put_together(saved.skeleton, self._leaf(saved.tensors)))
        for i, (fqns, skeleton) in enumerate(contents.groups):
            fields = put_together(skeleton, self._leaf(()))
            for name, value in {**fields, "params": list(fqns)}.items():
                self._value(("optim", "param_groups", i, name), value)
        if contents.extra:
            self._value(("extra",), put_together(contents.extra[0][1], self._leaf(())))
        for alias, fqn in contents.tied.items():
            self._alias(("model", alias), ".".join(("model", fqn)))
        return dcp.Metadata(self._table, self._paths, self._storage, dcp.StorageMeta(), "1.0.0")

    def _leaf(self, numbers: Sequence[int]) -> Callable[[Any], torch.Tensor]:
        def make(item: Any) -> torch.Tensor:
            if "T" in item:
                spec, data = counter_of(item)
                return _tensor_of(bytearray(data), spec.dtype, spec.shape)
            stored = self._origin.contents.tensors[numbers[item["t"]]]
            room = bytearray(stored.nbytes)
            self._origin.read(numbers[item["t"]], whole(stored.shape), memoryview(room))
            return _tensor_of(room, stored.dtype, stored.shape)

        return make

    def _name(self, path: tuple[Any, ...]) -> str:
        name = ".".join(map(str, path))
        self._paths[name] = path
        return name

    def _append(self, value: Any) -> _StorageInfo:
        start = self._file.tell()
        blob = io.BytesIO()
        torch.save(value, blob)
        self._file.write(blob.getbuffer())
        return _StorageInfo("__0_0.distcp", start, blob.getbuffer().nbytes)

    def _value(self, path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._chunks(path, value.dtype, tuple(value.shape), [(whole(tuple(value.shape)), lambda: value)])
            return
        name = self._name(path)
        self._table[name] = dcp.BytesStorageMetadata()
        self._storage[dcp.MetadataIndex(name)] = self._append(value)

    def _tensor(self, path: tuple[Any, ...], number: int) -> None:
        stored = self._origin.contents.tensors[number]

        def block(box: Box) -> torch.Tensor:
            data = bytearray(stored.itemsize * box.size)
            self._origin.read(number, box, memoryview(data))
            return _tensor_of(data, stored.dtype, box.shape)

        boxes = blocks(stored.shape, stored.dtype) or [whole(stored.shape)]
        parts = [(box, lambda box=box: block(box)) for box in boxes]
        self._chunks(path, _torch_dtype(stored.dtype), stored.shape, parts)

    def _chunks(
        self,
        path: tuple[Any, ...],
        dtype: torch.dtype,
        shape: tuple[int, ...],
        parts: Sequence[tuple[Box, Callable[[], torch.Tensor]]],
    ) -> None:
        name, chunks = self._name(path), []
        for i, (box, make) in enumerate(parts):
            chunks.append(dcp.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)))
            self._storage[dcp.MetadataIndex(name, torch.Size(box.start), i)] = self._append(make())
        self._table[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype), torch.Size(shape), chunks)

    def _alias(self, path: tuple[Any, ...], first: str) -> None:
        """A further name for a tensor that is there."""
        if first not in self._table:
            return
        name = self._name(path)
        self._table[name] = self._table[first]
        for index, info in list(self._storage.items()):
            if index.fqn == first:
                self._storage[dcp.MetadataIndex(name, index.offset, index.index)] = info


def _tensor_of(data: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=_torch_dtype(dtype))
    return torch.frombuffer(data, dtype=torch.uint8).view(_torch_dtype(dtype)).reshape(shape)
