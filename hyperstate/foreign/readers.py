"""The metadata of a checkpoint, from whatever a caller has: a storage reader of another library, or a path."""

from __future__ import annotations

import os
from typing import Any

from ..errors import OptionTypeError
from .metadata import Found, entries_of


def read(reader: Any, rank: int, section: str) -> Found:
    """What a checkpoint holds. `reader` is a path, or an object with ``read_metadata()`` or ``load_metadata()``.

    Of a checkpoint that keeps "model" and "optim" apart, `section` is read. A reader that finds no file is asked
    for the metadata of this `rank` alone. Raises `OptionTypeError` for another object, `CheckpointError` for
    metadata that can't be made out, and whatever the reader itself raises.
    """
    if isinstance(reader, (str, os.PathLike)):
        from .folders import read_path

        return read_path(reader, rank, section)
    for name in ("read_metadata", "load_metadata"):
        method = getattr(reader, name, None)
        if callable(method):
            return Found(entries_of(_called(method, rank), type(reader).__qualname__))
    raise OptionTypeError(
        f"reader is a {type(reader).__qualname__} with neither read_metadata() (PyTorch) nor load_metadata() "
        "(HyperParallel); pass a storage reader or the checkpoint's path"
    )


def _called(method: Any, rank: int) -> Any:
    try:
        return method()
    except FileNotFoundError as error:
        try:
            return method(rank=rank)
        except TypeError:
            raise error from None
