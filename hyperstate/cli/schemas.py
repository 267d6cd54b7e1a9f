"""The tensors that a command is to plan or draw for: from a checkpoint's metadata, or from a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ..checkpoint import manifest
from ..checkpoint.container import shape_of
from ..checkpoint.origins import INDEX
from ..checkpoint.single import open_parent
from ..checkpoint.storage import local_path
from ..foreign.metadata import SavedEntries, neutral
from ..foreign.readers import read
from ..schema import DTYPES
from ..simulate.costs import Tensor
from .common import RefusedError
from .contents import METADATA, Opened, is_of_optimizer, open_contents

_BUFFERS = ("running_mean", "running_var", "inv_freq")
_EXAMPLE = '{"layers.0.weight": {"dtype": "bfloat16", "shape": [4096, 4096]}}'


SCHEMA = "A checkpoint, a folder or file of safetensors (path or URL), or JSON: {FQN: {dtype, shape}}."


def read_schema(path: str) -> list[Tensor]:
    """The model's tensors at `path`, sorted by FQN. Raises `RefusedError`, `CheckpointError`.

    Of a checkpoint only metadata and headers are read. Which tensors are buffers, and so plain, is taken from our own
    checkpoints and JSON; elsewhere integers and the usual names of statistics are.
    """
    folder = Path(local_path(path))
    if is_schema(path):
        found = _of_json(path)
    elif (folder / ".rank0_metadata").is_file() and not (folder / METADATA).is_file():  # HyperParallel's
        found = _of_entries(read(folder, 0, "model").entries)
    else:
        with open_contents(path) as opened:
            found = _of_contents(opened)
    if not found:
        raise RefusedError(f"{path} holds no tensor of a model")
    return sorted(found, key=lambda tensor: tensor.fqn)


def _of_contents(opened: Opened) -> list[Tensor]:
    """If nothing was sharded, the model was a plain one, and which tensors are parameters is not known."""
    tensors = [tensor for tensor in opened.contents.tensors if tensor.section == "model"]
    told = opened.format == "hyperstate" and any(tensor.sharded for tensor in tensors)
    return [Tensor(t.name, t.dtype, t.shape, t.sharded if told else _is_parameter(t.name, t.dtype)) for t in tensors]


def _of_entries(entries: SavedEntries) -> list[Tensor]:
    found = []
    for key, saved in entries.items():
        if saved.dtype is not None and not is_of_optimizer(key):
            dtype = neutral(saved.dtype)
            found.append(Tensor(key, dtype, saved.shape, _is_parameter(key, dtype)))
    return found


def _is_parameter(fqn: str, dtype: str) -> bool:
    return DTYPES[dtype][1] in ("float", "complex") and fqn.rpartition(".")[2] not in _BUFFERS


def is_schema(path: str) -> bool:
    """Whether `path` names JSON of names and shapes: no index and no manifest of a checkpoint."""
    return path.endswith(".json") and not path.endswith((INDEX, manifest.NAME))


def _of_json(path: str) -> list[Tensor]:
    store, name = open_parent(path)
    data = store.read(name)
    if data is None:
        raise RefusedError(f"{path}: no such file")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise RefusedError(f"{path}: a schema is an object by FQN, such as {_EXAMPLE}")
    return [_tensor(path, fqn, entry) for fqn, entry in found.items()]


def _tensor(path: str, fqn: str, entry: Any) -> Tensor:
    if not isinstance(entry, Mapping) or not {"dtype", "shape"} <= set(entry) <= {"dtype", "shape", "sharded"}:
        raise RefusedError(f"{path}: {fqn!r} needs dtype and shape (and perhaps sharded), as in {_EXAMPLE}")
    try:
        dtype, shape = neutral(entry["dtype"]), shape_of(entry["shape"])
    except (TypeError, ValueError) as error:
        raise RefusedError(f"{path}: {fqn!r}: {error}") from None
    if prod(shape) * DTYPES[dtype][0] >= 1 << 63:
        raise RefusedError(f"{path}: {fqn!r} of shape {list(shape)} is too large")
    sharded = entry.get("sharded", True)
    if type(sharded) is not bool:
        raise RefusedError(f"{path}: {fqn!r}: sharded is true or false, not {sharded!r}")
    return Tensor(fqn, dtype, shape, sharded)
