"""What a checkpoint holds, in one neutral form, and how the metadata objects of other libraries say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import CheckpointError, UnsupportedConfigurationError
from ..layout import Shape
from ..schema import DTYPES
from .unpickle import Record

MAX_DIMS = 64
_COMPACT = {name.replace("_", ""): name for name in DTYPES}


@dataclass(frozen=True, slots=True)
class Saved:
    """One entry of a checkpoint."""

    dtype: Any = None
    """Of a tensor, as the writer named it (`neutral` translates); None for a value stored as bytes."""
    shape: Shape = ()
    """Global, in elements."""
    path: tuple[str | int, ...] | None = None
    """The keys that lead to it in the dict that was saved, if the writer recorded them."""
    skeleton: Any = None
    """With `leaves`: the value itself, taken apart (`hyperstate.schema`)."""
    leaves: tuple[Saved, ...] | None = None
    """The tensors of a value that the metadata tell; None for any other entry."""


SavedEntries = dict[str, Saved]


class Found(NamedTuple):
    """The entries of a checkpoint."""

    entries: SavedEntries
    names: str | None = None
    """Whose names they have (`StateDictOptions.names`), if the checkpoint says so."""


def neutral(dtype: Any) -> str:
    """The neutral name of a dtype as PyTorch, MindSpore or a file names it: ``torch.float32``, ``Float32``, ….

    Raises `UnsupportedConfigurationError` for any other name.
    """
    name = str(dtype).removeprefix("torch.").removeprefix("mindspore.").lower()
    found = name if name in DTYPES else _COMPACT.get(name)
    if found is None:
        raise UnsupportedConfigurationError(f"unknown dtype {str(dtype)[:60]!r}; known are: {', '.join(DTYPES)}")
    return found


def entries_of(metadata: Any, where: str) -> SavedEntries:
    """Entries of a ``Metadata`` of PyTorch's or HyperParallel's, or of the record of one."""
    table, paths = field_of(metadata, "state_dict_metadata"), field_of(metadata, "planner_data")
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{where}: {_kind(metadata)} has no table 'state_dict_metadata'")
    paths = paths if isinstance(paths, Mapping) else {}
    found: SavedEntries = {}
    for key, stored in table.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{where}: an entry is named by a {type(key).__name__}")
        path = paths.get(key)
        path = path if isinstance(path, tuple) and all(type(step) in (str, int) for step in path) else None
        properties = field_of(stored, "properties")
        if properties is None:
            found[key] = Saved(path=path)
        else:
            found[key] = Saved(_dtype_of(properties), _shape(field_of(stored, "size"), f"{where}: {key!r}"), path)
    return found


def field_of(thing: Any, name: str) -> Any:
    """A field of a metadata object or of its record; None if it has none of that name."""
    if isinstance(thing, Record):
        return thing.state.get(name) if isinstance(thing.state, dict) else None
    return getattr(thing, name, None)


def _dtype_of(properties: Any) -> Any:
    if isinstance(properties, Record) and isinstance(properties.state, tuple):
        return properties.state[0] if properties.state else "none"  # PyTorch's: (dtype, layout, …)
    found = field_of(properties, "dtype")
    return "none" if found is None else found


def _shape(size: Any, where: str) -> Shape:
    try:
        found = tuple([int(dim) for dim in size])
    except (TypeError, ValueError):
        found = (-1,)
    if len(found) > MAX_DIMS or any(not 0 <= dim < 1 << 63 for dim in found):
        raise CheckpointError(f"{where} has the size {str(size)[:60]}, which no tensor has")
    return found


def _kind(thing: Any) -> str:
    return f"a record of {thing.kind}" if isinstance(thing, Record) else f"a {type(thing).__qualname__}"
