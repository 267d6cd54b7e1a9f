"""The safetensors container: 8 bytes with the header's length, a JSON header, then the tensors' bytes.

Written and read with the standard library alone, after https://github.com/huggingface/safetensors
(README, "Format"). Headers that we write also carry what PyTorch's ``HuggingFaceStorageWriter`` writes
(``torch/distributed/checkpoint/_hf_utils.py``), so that its reader puts shards together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..errors import CheckpointError
from ..layout import Shape
from ..schema import DTYPES

LENGTH_BYTES = 8
ALIGNMENT = 64
"""Data start at a multiple of this many bytes, so that a mapped file can be read as any dtype."""
MAX_HEADER = 100_000_000
"""Longest header in bytes that safetensors itself reads."""
MAX_NDIM = 64
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
SAVE = "hyperstate_save"
"""Header key for the id of the save that wrote the file."""

NAMES: dict[str, str] = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{letter}{bits}" for sign, letter in (("", "I"), ("u", "U")) for bits in (8, 16, 32, 64)},
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
"""Neutral dtype name -> safetensors'. Other dtypes are stored as bytes, with one more dimension."""
_NEUTRAL = {stored: name for name, stored in NAMES.items()} | {
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
}


@dataclass(frozen=True)
class Part:
    """One tensor of a file. `dtype` is neutral; `start` and `stop` count bytes from the start of the file."""

    name: str
    dtype: str
    shape: Shape
    start: int
    stop: int


def stored_form(dtype: str, shape: Shape) -> tuple[str, Shape]:
    """How a tensor stands in a header: safetensors' dtype and shape."""
    if dtype in NAMES:
        return NAMES[dtype], shape
    return "U8", (*shape, DTYPES[dtype][0])


def lay_out(
    tensors: Sequence[tuple[str, str, Shape, Shape]], metadata: Mapping[str, str], *, sharded: bool = True
) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file, and where each tensor starts in it.

    `tensors` are (name, neutral dtype, shape, offsets of the shard in the full tensor). They stand in order
    of falling element size, so that each is aligned to its own elements. Not `sharded`: the header is an
    ordinary one, and the offsets are not told.
    """
    order = sorted(tensors, key=lambda tensor: (-DTYPES[tensor[1]][0], tensor[0]))
    header: dict[str, Any] = {}
    sharding: dict[str, Any] = {}
    starts: dict[str, int] = {}
    position = 0
    for name, dtype, shape, offsets in order:
        size = DTYPES[dtype][0] * prod(shape)
        kind, stored = stored_form(dtype, shape)
        header[name] = {"dtype": kind, "shape": list(stored), "data_offsets": [position, position + size]}
        sharding[name] = {OFFSETS: [*offsets, *[0] * (len(stored) - len(shape))]}
        starts[name] = position
        position += size
    known = {"format": "pt", **metadata}
    if sharded:
        known = {SHARDING: json.dumps(sharding), "DCP_VERSION": "1.0", **known}
    text = json.dumps({"__metadata__": known, **header}, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER - ALIGNMENT:
        raise CheckpointError(f"a file of {len(tensors)} tensors would need a header of {len(text)} bytes")
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    first = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return first, {name: len(first) + start for name, start in starts.items()}


def header_length(first: bytes, size: int, where: str) -> int:
    """Length in bytes of the header, from the first 8 bytes of a file of `size` bytes."""
    if len(first) != LENGTH_BYTES:
        raise CheckpointError(f"{where}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(first, "little")
    if length > min(MAX_HEADER, size - LENGTH_BYTES):
        raise CheckpointError(f"{where}: a header of {length} bytes does not fit a file of {size} bytes")
    return length


def parse(header: bytes, size: int, where: str) -> tuple[dict[str, Part], dict[str, str]]:
    """The tensors of a file of `size` bytes by name, and the header's metadata.

    Raises `CheckpointError`, which names the file (`where`), for a header that is no safetensors header, and for
    tensors that lie outside the file, overlap or leave holes.
    """
    found = _load(header, where)
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ is no table of strings")
    begin = LENGTH_BYTES + len(header)
    parts = {name: _part(name, entry, begin, where) for name, entry in found.items()}
    position = begin
    for part in sorted(parts.values(), key=lambda part: (part.start, part.stop)):
        if part.start != position:
            raise CheckpointError(f"{where}: {part.name!r} starts at byte {part.start}, not at {position}")
        position = part.stop
    if position != size:
        raise CheckpointError(f"{where}: its tensors end at byte {position}, the file at {size}")
    return parts, metadata


def offsets_of(metadata: Mapping[str, str], where: str) -> dict[str, tuple[int, ...]]:
    """Where in its tensor each box of a file starts, if the header's `metadata` say so."""
    if SHARDING not in metadata:
        return {}
    try:
        found = json.loads(metadata[SHARDING])
        return {name: tuple(map(int, entry[OFFSETS])) for name, entry in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{where}: {SHARDING} in its header can't be read") from None


def _load(header: bytes, where: str) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            raise ValueError("a name stands twice")
        return made

    try:
        found = json.loads(header, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: its header is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: its header is no JSON object")
    return found


def _part(name: str, entry: Any, begin: int, where: str) -> Part:
    try:
        dtype, shape = _NEUTRAL[entry["dtype"]], shape_of(entry["shape"])
        start, stop = (whole_number(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: malformed entry {name!r}: {error!r}") from None
    if stop - start != DTYPES[dtype][0] * prod(shape):
        raise CheckpointError(f"{where}: {name!r} is {dtype}{list(shape)}, but has {stop - start} bytes")
    return Part(name, dtype, shape, begin + start, begin + stop)


def shape_of(sizes: Any) -> Shape:
    """A shape from JSON. Raises `ValueError` or `TypeError` for what is none."""
    if not isinstance(sizes, list) or len(sizes) > MAX_NDIM:
        raise ValueError(f"{str(sizes)[:60]} is no shape")
    return tuple(map(whole_number, sizes))


def whole_number(value: Any) -> int:
    """A non-negative integer of at most 64 bits from JSON. Raises `ValueError` for anything else."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:60]} is no size")
    return value
