"""Where checkpoints are kept: a local folder, or any URL that fsspec knows. Names are relative, with slashes.

A store tells what failed by `CheckpointError`, which names the file.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from ..backend import how_to_install
from ..errors import CheckpointError
from .aside import Aside

BUFFER = 1 << 20
"""Writes of fewer bytes are collected."""
FLUSH = 64 << 20
"""How many bytes are written before the medium is asked to take them."""
MAX_CALL = 1 << 30
"""The system reads less than 2 GiB a call."""


class Reader(Protocol):
    """An open file."""

    size: int

    def read_into(self, view: memoryview, start: int) -> None:
        """Fill `view` (bytes) with what stands from byte `start`. Raises `CheckpointError` if the file ends before."""

    def map(self, start: int, nbytes: int) -> memoryview | None:
        """Some bytes of the file as memory, which may be written to without changing the file; None if it can't be."""


class Writer(Protocol):
    """A file that is being written."""

    def write(self, data: Any) -> Any:
        """Append bytes."""


class Store(Protocol):
    """A folder of files."""

    path: str
    """As users know it."""
    name: str
    """The last part of its path."""
    atomic: bool
    """Whether `move` is one step."""

    def reader(self, name: str) -> Any:
        """A context manager that gives a `Reader`. Raises `FileNotFoundError` if there is no such file."""

    def writer(self, name: str) -> Any:
        """A context manager that gives a `Writer` of a new file; the bytes are safe on the medium when it ends."""

    def publish(self, name: str, data: bytes) -> None:
        """Make `data` the content of a file: readers see the old content or the new."""

    def read(self, name: str) -> bytes | None:
        """All of a file; None if there is none."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none. What can't be looked at is an error: it may well be there."""

    def names(self, name: str = "") -> list[str]:
        """Names in a folder; none if there is no such folder."""

    def move(self, old: str, new: str) -> None:
        """Rename a folder; `new` must not exist."""

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it, if it exists."""

    def settle(self, name: str = "") -> None:
        """Make the names in a folder safe on the medium."""

    def sibling(self, name: str) -> Store:
        """The store of a folder beside this one."""

    def siblings(self) -> list[str]:
        """Names of the other folders beside this one. A link is none: what is behind it lies elsewhere."""


def open_store(path: Any) -> Store:
    """The store at `path`: a path of the system, or a URL (``s3://…``, ``memory://…``) for which fsspec is needed."""
    try:
        text = os.fspath(path)
    except TypeError:
        raise CheckpointError(f"a checkpoint's path is a path or a URL, not {type(path).__qualname__}") from None
    if isinstance(text, bytes):
        text = os.fsdecode(text)
    if not text:
        raise CheckpointError("a checkpoint's path is empty; '.' is the current folder")
    where = local_path(text)
    return Remote(text) if where == text and "://" in text else Local(where)


def local_path(path: str) -> str:
    """The path of the system that a ``file://`` URL names; anything else as it is."""
    kind, separator, rest = path.partition("://")
    return rest if separator and kind in ("file", "local") else path


@contextmanager
def _telling(path: str, what: str) -> Iterator[None]:
    """System errors as `CheckpointError` that says what could not be done to which file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"can't {what} {path}: {error.strerror or error}") from error


class Local:
    """A folder of the system."""

    atomic = True

    def __init__(self, path: str) -> None:
        self.path = path
        self._root = Path(path).absolute()
        self.name = self._root.name

    def reader(self, name: str) -> Any:
        return _reading(self._root / name)

    @contextmanager
    def writer(self, name: str) -> Iterator[Writer]:
        path = self._root / name
        try:
            with _telling(str(path), "write"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb", buffering=BUFFER) as file, Aside() as disk:
                    flushing = _Flushing(file, disk)
                    yield flushing
                    flushing.finish()
        except FileNotFoundError as error:
            raise CheckpointError(f"can't write {path}: its folder was removed") from error

    def publish(self, name: str, data: bytes) -> None:
        temporary = name + ".new"
        self.remove(temporary)
        with self.writer(temporary) as file:
            file.write(data)
        self.replace(temporary, name)
        self.settle("..")  # where this folder itself may be new

    def replace(self, old: str, new: str) -> None:
        """Give a file another's name, in one step."""
        with _telling(str(self._root / new), "write"):
            (self._root / old).replace(self._root / new)
        self.settle()

    def read(self, name: str) -> bytes | None:
        with _telling(str(self._root / name), "read"):
            try:
                with open(self._root / name, "rb", opener=_regular) as file:
                    return file.read()
            except FileNotFoundError:
                return None

    def size(self, name: str) -> int | None:
        with _telling(str(self._root / name), "look at"):
            try:
                return (self._root / name).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self, name: str = "") -> list[str]:
        with _telling(str(self._root / name), "list"):
            try:
                return sorted(each.name for each in (self._root / name).iterdir())
            except (FileNotFoundError, NotADirectoryError):
                if not name and self._root.is_file():
                    raise CheckpointError(f"{self.path} is a file, and a checkpoint is a folder") from None
                return []

    def move(self, old: str, new: str) -> None:
        with _telling(str(self._root / old), "rename"):
            (self._root / old).rename(self._root / new)

    def remove(self, name: str) -> None:
        import shutil  # slow to import, and a load needs it not

        path = self._root / name
        with _telling(str(path), "remove"), suppress(FileNotFoundError, NotADirectoryError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def settle(self, name: str = "") -> None:
        with _telling(str(self._root / name), "flush"):
            folder = os.open(self._root / name, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def sibling(self, name: str) -> Store:
        return Local(str(self._root.parent / name))

    def siblings(self) -> list[str]:
        here = self._root.resolve()  # this path itself may be a link to one of them
        folders = [each for each in self._root.parent.iterdir() if each.is_dir() and not each.is_symlink()]
        return sorted(each.name for each in folders if each.resolve() != here)


class _Flushing:
    """Writes buffers of any size (some systems take less than 2 GiB at a time), and flushes beside the writing."""

    def __init__(self, file: IO[bytes], disk: Aside) -> None:
        self._file, self._disk = file, disk
        self._flushes: list[Future[Any]] = []
        self._since = 0

    def write(self, data: Any) -> None:
        view = memoryview(data)
        for start in range(0, len(view), FLUSH):
            part = view[start : start + FLUSH]
            self._file.write(part)
            self._since += len(part)
            if self._since >= FLUSH:
                self._flush()

    def _flush(self) -> None:
        self._flushes.append(self._disk.submit(os.fsync, self._file.fileno()))
        self._since = 0

    def finish(self) -> None:
        """Return when all is on the medium. A system tells of a failed write once: any flush may be the one told."""
        self._file.flush()
        self._flush()
        for flush in self._flushes:
            flush.result()


def _regular(path: str, flags: int) -> int:
    """Open a file for reading, and nothing else: a pipe in a folder of others would hold a load for ever."""
    number = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is no file")
    return number


@contextmanager
def _reading(path: Path) -> Iterator[Reader]:
    with _telling(str(path), "read"), open(path, "rb", buffering=0, opener=_regular) as file:
        yield _LocalReader(file, str(path))


class _LocalReader:
    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self._map: mmap.mmap | None = None

    def read_into(self, view: memoryview, start: int) -> None:
        done = 0
        while done < len(view):
            with _telling(self._path, "read"):
                count = os.preadv(self._file.fileno(), [view[done : done + MAX_CALL]], start + done)
            if not count:
                raise CheckpointError(f"{self._path} ends at byte {start + done}, inside what should be there")
            done += count

    def map(self, start: int, nbytes: int) -> memoryview | None:
        if not 0 < nbytes <= self.size - start:
            return None
        if self._map is None:
            try:
                self._map = mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_COPY)
            except (OSError, ValueError):
                return None  # no address space, or a file system that can't
        if hasattr(self._map, "madvise"):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, first, start + nbytes - first)
        return memoryview(self._map)[start : start + nbytes]


class Remote:
    """A folder behind a URL, through fsspec. A file appears when it is complete."""

    atomic = False

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # ships no types
        except ImportError:
            raise CheckpointError(f"{url} needs fsspec: {how_to_install('fsspec')}") from None
        self.path = url
        try:
            self._fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"no store for {url}: {error}") from error
        self._root = str(root).rstrip("/")
        self.name = self._root.rpartition("/")[2]

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def reader(self, name: str) -> Iterator[Reader]:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(self._at(name))
        yield _RemoteReader(self._fs, self._at(name), size)

    @contextmanager
    def writer(self, name: str) -> Iterator[Writer]:
        with _telling(self._at(name), "write"):
            self._fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
            with self._fs.open(self._at(name), "wb") as file:
                yield file

    def publish(self, name: str, data: bytes) -> None:
        with _telling(self._at(name), "write"):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(self._at(name), data)

    def read(self, name: str) -> bytes | None:
        with _telling(self._at(name), "read"):
            try:
                found: bytes = self._fs.cat_file(self._at(name))
            except FileNotFoundError:
                return None
        return found

    def size(self, name: str) -> int | None:
        self._fs.invalidate_cache()
        with _telling(self._at(name), "look at"):
            try:
                found = self._fs.size(self._at(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return None if found is None else int(found)

    def names(self, name: str = "") -> list[str]:
        self._fs.invalidate_cache()
        with _telling(self._at(name), "list"):
            try:
                found = self._fs.ls(self._at(name), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(each.rstrip("/").rpartition("/")[2] for each in found)

    def move(self, old: str, new: str) -> None:
        with _telling(self._at(old), "move"):
            self._fs.mv(self._at(old), self._at(new), recursive=True)

    def remove(self, name: str) -> None:
        with _telling(self._at(name), "remove"), suppress(FileNotFoundError):
            self._fs.rm(self._at(name), recursive=True)

    def settle(self, name: str = "") -> None:
        """What a URL names is safe once it is there."""

    def sibling(self, name: str) -> Store:
        return Remote(f"{self.path.rstrip('/').rpartition('/')[0]}/{name}")

    def siblings(self) -> list[str]:
        self._fs.invalidate_cache()
        found = self._fs.ls(self._root.rpartition("/")[0], detail=True)
        return sorted(each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory")


class _RemoteReader:
    def __init__(self, fs: Any, path: str, size: int) -> None:
        self._fs, self._path, self.size = fs, path, size

    def read_into(self, view: memoryview, start: int) -> None:
        with _telling(self._path, "read"):
            data = self._fs.cat_file(self._path, start=start, end=start + len(view)) if len(view) else b""
        if len(data) != len(view):
            raise CheckpointError(f"{self._path} ends at byte {start + len(data)}, inside what should be there")
        view[:] = data

    def map(self, start: int, nbytes: int) -> memoryview | None:  # noqa: ARG002  # nothing here is memory
        return None
