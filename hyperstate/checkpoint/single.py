"""Files that stand for themselves: by path or URL, written so that they appear when they are complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError
from .storage import Local, Store, Writer, local_path, open_store


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
    written = name
    if isinstance(store, Local):
        written = name + ".new"
        store.remove(written)
    try:
        with store.writer(written) as file:
            yield file
    except BaseException:
        with suppress(CheckpointError):
            store.remove(written)
        raise
    if isinstance(store, Local):
        store.replace(written, name)
