"""MindSpore's ``.ckpt`` files, read and written a block at a time without MindSpore.

A file is a row of protobuf messages (``mindspore/train/checkpoint.proto``): per tensor, or slice of a large
tensor, ``Checkpoint{1: Value{1: tag, 2: TensorProto{1: dims, 2: type, 3: content}}}``. Slices of one tensor follow
each other and cut its flat elements anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any, Self

from ..errors import CheckpointError
from ..layout import Box, Shape
from ..schema import DTYPES, LEAF, Key
from .boxes import offset_in
from .container import MAX_NDIM
from .manifest import Saved, Stored
from .origins import Contents, Origin, blocks
from .single import appearing, open_parent
from .storage import Reader

SUFFIX = ".ckpt"
SLICE = 512 << 20
"""Bytes from which a tensor is cut, as MindSpore cuts it."""
_TYPES = {
    name: "".join(part.capitalize() for part in name.replace("uint", "u_int").replace("bfloat", "b_float").split("_"))
    for name in DTYPES
    if not name.startswith(("float8", "complex"))
}
_NEUTRAL = {stored: name for name, stored in _TYPES.items()}
_VARINT, _BYTES = 0, 2
_MAX_NAME = 1 << 16
_CRC = b"crc_num"


@dataclass
class _Found:
    """A tensor: its type, shape, and where its slices are: first byte, number of bytes."""

    dtype: str
    shape: Shape
    slices: list[tuple[int, int]]


class Ckpt:
    """A ``.ckpt`` file to read from. All its tensors count as the model's; its texts become `extra`."""

    def __init__(self, path: str) -> None:
        self._stack = ExitStack()
        store, name = open_parent(path)
        try:
            self._reader: Reader = self._stack.enter_context(store.reader(name))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        scan = _Scan(self._reader, path)
        tensors, texts = scan.all()
        self._slices = [found.slices for found in tensors.values()]
        stored = tuple(Stored("model", name, f.dtype, f.shape, False, ()) for name, f in tensors.items())
        entries: dict[Key, Saved] = {("model", t.name): Saved(LEAF, (i,)) for i, t in enumerate(stored)}
        pairs = [[name, text] for name, text in texts.items()]
        self.contents = Contents(stored, entries, (), {}, (((0,), {"{": pairs}),) if pairs else ())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, number: int, box: Box, view: memoryview) -> None:
        """See `hyperstate.checkpoint.origins.Origin`; `box` is a run of consecutive elements."""
        stored = self.contents.tensors[number]
        first = stored.itemsize * offset_in(stored.shape, box.start)
        position = 0
        for start, size in self._slices[number]:
            low, high = max(first, position), min(first + len(view), position + size)
            if low < high:
                self._reader.read_into(view[low - first : high - first], start + low - position)
            position += size


class _Scan:
    """Finds the tensors of a file; reads everything but their contents."""

    def __init__(self, reader: Reader, path: str) -> None:
        self._reader, self._path = reader, path

    def all(self) -> tuple[dict[str, _Found], dict[str, str]]:
        tensors: dict[str, _Found] = {}
        texts: dict[str, str] = {}
        at, size = 0, self._reader.size
        while at < size and self._take(at, min(size - at, len(_CRC))) != _CRC:
            for field, start, stop in self._fields(at, size, 1):
                if field != 1:
                    raise self._damaged(at, f"an unknown field {field}")
                self._value(start, stop, tensors, texts)
                at = stop
        for name, found in tensors.items():
            have = sum(length for _, length in found.slices)
            if have != DTYPES[found.dtype][0] * prod(found.shape):
                raise CheckpointError(
                    f"{self._path}: {name!r} is {found.dtype}{list(found.shape)}, but has {have} bytes"
                )
        return tensors, texts

    def _value(self, start: int, stop: int, tensors: dict[str, _Found], texts: dict[str, str]) -> None:
        parts = {field: (a, b) for field, a, b in self._fields(start, stop)}
        if set(parts) != {1, 2}:
            raise self._damaged(start, "a value that is no tensor with a name (map parameters are not supported)")
        name = self._text(*parts[1])
        dims: list[int] = []
        kind, content = "", (0, 0)
        for field, a, b in self._fields(*parts[2]):
            if field == 1:
                dims += self._numbers(a, b)
            elif field == 2:
                kind = self._text(a, b)
            elif field == 3:
                content = (a, b - a)
        if kind == "str":
            texts[name] = self._take(content[0], min(content[1], _MAX_NAME)).decode("utf-32-le", "replace")
            return
        dims = [] if dims == [0] and content[1] else dims
        if kind not in _NEUTRAL or len(dims) > MAX_NDIM or any(not 0 <= dim < 1 << 63 for dim in dims):
            raise self._damaged(start, f"{name!r} of the type {kind!r} and the shape {dims[:MAX_NDIM]}")
        found = tensors.setdefault(name, _Found(_NEUTRAL[kind], tuple(dims), []))
        if (found.dtype, found.shape) != (_NEUTRAL[kind], tuple(dims)):
            raise self._damaged(start, f"{name!r} stands twice and differs")
        found.slices.append(content)

    def _fields(self, at: int, end: int, count: int = 1 << 62) -> Iterator[tuple[int, int, int]]:
        """Number of each field of a message, and the bytes between which its content stands."""
        while at < end and count:
            tag, at = self._varint(at)
            if tag & 7 == _BYTES:
                size, at = self._varint(at)
                start, at = at, at + size
            elif tag & 7 == _VARINT:
                start, (_, at) = at, self._varint(at)
            else:
                raise self._damaged(at, f"a field of wire type {tag & 7}")
            if at > end:
                raise self._damaged(start, f"{at - start} bytes are announced, {end - start} are left")
            yield tag >> 3, start, at
            count -= 1

    def _varint(self, at: int) -> tuple[int, int]:
        data = self._take(at, max(0, min(10, self._reader.size - at)))
        value = 0
        for i, byte in enumerate(data):
            value |= (byte & 0x7F) << 7 * i
            if byte < 0x80:
                return value, at + i + 1
        raise self._damaged(at, "a number without an end")

    def _numbers(self, at: int, end: int) -> list[int]:
        found: list[int] = []
        while at < end and len(found) <= MAX_NDIM:
            number, at = self._varint(at)
            found.append(number)
        return found

    def _text(self, start: int, stop: int) -> str:
        if stop - start > _MAX_NAME:
            raise self._damaged(start, f"a name of {stop - start} bytes")
        return self._take(start, stop - start).decode(errors="replace")

    def _take(self, start: int, size: int) -> bytes:
        data = bytearray(size)
        self._reader.read_into(memoryview(data), start)
        return bytes(data)

    def _damaged(self, at: int, text: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is no .ckpt file of MindSpore: at byte {at}: {text}")


# -- writing -----------------------------------------------------------------------------------------


def write(origin: Origin, path: str, section: str) -> None:
    """One section as a ``.ckpt`` file."""
    store, name = open_parent(path)
    tensors = [(n, stored) for n, stored in enumerate(origin.contents.tensors) if stored.section == section]
    lacking = sorted({stored.dtype for _, stored in tensors} - set(_TYPES))
    if lacking:
        raise CheckpointError(f"a .ckpt file can't hold tensors of {', '.join(lacking)}")
    with appearing(store, name) as file:
        for number, stored in tensors:
            _write_tensor(origin, number, stored, file)


def _write_tensor(origin: Origin, number: int, stored: Stored, file: Any) -> None:
    runs = blocks(stored.shape, stored.dtype)
    while runs or not stored.nbytes:
        taken, size = 0, 0
        while taken < len(runs) and (not taken or size + stored.itemsize * runs[taken].size <= SLICE):
            size += stored.itemsize * runs[taken].size
            taken += 1
        file.write(_head(stored, size))
        for box in runs[:taken]:
            data = bytearray(stored.itemsize * box.size)
            origin.read(number, box, memoryview(data))
            file.write(data)
        runs = runs[taken:]
        if not runs:
            return


def _head(stored: Stored, size: int) -> bytes:
    """What stands before `size` bytes of content."""
    dims = b"".join(b"\x08" + _varint(dim) for dim in stored.shape)
    tensor = dims + _field(2, _TYPES[stored.dtype].encode()) + b"\x1a" + _varint(size)
    value = _field(1, stored.name.encode()) + b"\x12" + _varint(len(tensor) + size) + tensor
    return b"\x0a" + _varint(len(value) + size) + value


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
