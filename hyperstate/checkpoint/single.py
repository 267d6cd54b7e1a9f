"""Files that stand for themselves: by path or URL, written so that they appear when they are complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError
from .storage import Local, Store, Writer, open_store


def local_path(path: str) -> str:
    """The path of the system that a ``file://`` URL names; anything else as it is."""
    kind, separator, rest = path.partition("://")
    return rest if separator and kind in ("file", "local") else path


def open_parent(path: str) -> tuple[Store, str]:
    """The folder in which a file lies, and its name there."""
    path = local_path(path)
    kind, separator, rest = path.partition("://")
    if separator:
        parent, _, name = rest.rpartition("/")
        return open_store(f"{kind}://{parent}"), name
    return open_store(str(Path(path).parent)), Path(path).name


@contextmanager
def appearing(store: Store, name: str) -> Iterator[Writer]:
    """A file to write, which takes its name at the end of the block; after an error it is not there."""
    if isinstance(store, Local):
        temporary = name + ".new"
        store.remove(temporary)
        try:
            with store.writer(temporary) as file:
                yield file
        except BaseException:
            with suppress(CheckpointError):
                store.remove(temporary)
            raise
        store.replace(temporary, name)
        return
    try:
        with store.writer(name) as file:
            yield file
    except BaseException:
        with suppress(CheckpointError):
            store.remove(name)
        raise
