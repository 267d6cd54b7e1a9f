"""A checkpoint of any known format, opened for the commands that look into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import manifest
from ..checkpoint.converting import open_origin
from ..checkpoint.manifest import SECTIONS, Chunk, Saved, Stored
from ..checkpoint.origins import INDEX, SUFFIX, Contents, Origin
from ..checkpoint.storage import local_path, open_store
from ..errors import CheckpointError
from ..foreign import unpickle
from ..foreign.metadata import entries_of, field_of, neutral
from ..layout import Box
from ..schema import LEAF, Key
from .common import RefusedError, matches

METADATA = ".metadata"
_OPTIMIZER = ("optim.", "optimizer.", "state.", "param_group.", "param_groups.")


@dataclass(frozen=True)
class Opened:
    """What a checkpoint holds."""

    format: str
    contents: Contents
    files: tuple[str, ...]
    """By the number that chunks have."""
    origin: Origin | None = None
    """To read values from; None where only metadata were asked for and tell enough."""

    def nbytes_of(self, key: Key) -> int:
        """Bytes of the tensors of one value; 0 for a value that is not there."""
        entry = self.contents.entries.get(key)
        return sum(self.contents.tensors[number].nbytes for number in entry.tensors) if entry else 0

    @property
    def summed(self) -> bool:
        """Whether chunks carry checksums."""
        return self.format == "hyperstate"


@contextmanager
def open_contents(path: str, *, values: bool = False) -> Iterator[Opened]:
    """Open a checkpoint; with `values` so that its tensors can be read.

    Metadata and headers alone are read, and no framework is needed, unless `values` of a folder of PyTorch's DCP are
    asked for. Raises `CheckpointError`.
    """
    kind = format_of(path)
    if kind == "PyTorch DCP" and not values:
        yield _of_dcp(path)
        return
    with open_origin(path) as origin:
        yield Opened(kind, origin.contents, getattr(origin, "files", ()), origin)


def format_of(path: str) -> str:
    """What kind of checkpoint lies at `path`, by its files. Raises `NoCheckpointError` where there is none."""
    where = local_path(path)
    if "://" not in where and not Path(where).exists():
        raise NoCheckpointError(f"{path}: no such file or folder")
    if where.endswith(".ckpt"):
        return "MindSpore"
    if where.endswith((SUFFIX, INDEX)):
        return "safetensors"
    store = open_store(where)
    if "://" not in where and not Path(where).is_dir():
        raise NoCheckpointError(f"{path} is a file, but neither a .safetensors nor a .ckpt file, so no checkpoint")
    if store.size(manifest.NAME) is not None:
        return "hyperstate"
    if store.size(METADATA) is not None:
        return "PyTorch DCP"
    if any(name.endswith((SUFFIX, INDEX)) for name in store.names()):
        return "safetensors"
    raise NoCheckpointError(f"{path} holds neither {manifest.NAME} nor {METADATA} nor safetensors files")


class NoCheckpointError(CheckpointError):
    """There is nothing to look at."""


def is_of_optimizer(key: str) -> bool:
    """Whether a checkpoint of another library keeps optimizer state under `key`."""
    return key.startswith(_OPTIMIZER)


def _of_dcp(path: str) -> Opened:
    """From PyTorch's metadata: tensors, and which file has which chunk."""
    where = f"{path}/{METADATA}"
    record = unpickle.loads(open_store(path).read(METADATA) or b"", where)
    table = field_of(record, "state_dict_metadata")
    places, files = _places(field_of(record, "storage_data"))
    tensors: list[Stored] = []
    entries: dict[Key, Saved] = {}
    for name, saved in entries_of(record, where).items():
        section = "optim" if is_of_optimizer(name) else "model"
        key = ("model" if section == "model" else "global", name)
        if saved.dtype is None:
            entries[key] = Saved("stored as bytes")
            continue
        chunks = tuple(_chunks(name, field_of(table[name], "chunks"), places, where))
        entries[key] = Saved(LEAF, (len(tensors),))
        tensors.append(Stored(section, name, neutral(saved.dtype), saved.shape, len(chunks) > 1, chunks))
    return Opened("PyTorch DCP", Contents(tensors, entries), files)


def _places(table: Any) -> tuple[dict[tuple[str, tuple[int, ...]], int], tuple[str, ...]]:
    """Number of the file of each chunk, by FQN and offset; names of the files."""
    files: dict[str, int] = {}
    places = {}
    for index, info in (table if isinstance(table, Mapping) else {}).items():
        file, offset = field_of(info, "relative_path"), field_of(index, "offset")
        number = files.setdefault(str(file), len(files))
        places[str(field_of(index, "fqn")), tuple(offset) if offset is not None else ()] = number
    return places, tuple(files)


def _chunks(name: str, chunks: Any, places: Mapping[tuple[str, tuple[int, ...]], int], where: str) -> Iterator[Chunk]:
    for chunk in chunks if isinstance(chunks, (list, tuple)) else ():
        try:
            start = tuple(int(n) for n in field_of(chunk, "offsets"))
            stop = tuple(a + int(n) for a, n in zip(start, field_of(chunk, "sizes"), strict=True))
        except (TypeError, ValueError):
            raise CheckpointError(f"{where}: {name!r} has a chunk without place") from None
        yield Chunk(places.get((name, start), 0), Box(start, stop), 0, ())


@dataclass(frozen=True)
class Wanted:
    """What the options leave of a checkpoint."""

    pattern: str | None
    section: str | None

    def __post_init__(self) -> None:
        if self.section not in (None, *SECTIONS):
            raise RefusedError(f"--section {self.section}: must be {' or '.join(SECTIONS)}")

    @property
    def some(self) -> bool:
        """Whether there may be more than what is shown."""
        return self.pattern is not None or self.section is not None

    def __str__(self) -> str:
        options = {"filter": self.pattern, "section": self.section}
        return " with ".join(f"--{name} {value}" for name, value in options.items() if value is not None)

    def takes(self, section: str, name: str) -> bool:
        return self.section in (None, section) and matches(name, self.pattern)

    def key(self, key: Key) -> bool:
        """Whether a value of a checkpoint is shown; its name is that of its tensor, had it one."""
        model = key[0] == "model"
        return self.takes("model" if model else "optim", str(key[1]) if model else ".".join(map(str, key)))

    def params(self, contents: Contents, fqns: Sequence[str]) -> list[str]:
        """Parameters of a group that are shown: by their own names, or by those of their state."""
        if self.section == "model":
            return []
        state = {str(key[1]) for key in contents.entries if key[0] == "state" and self.key(key)}
        return [fqn for fqn in fqns if fqn in state or matches(fqn, self.pattern)]
