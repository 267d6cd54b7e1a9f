"""A live state as a picture: in notebooks by itself, in terminals with ``print``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..backend import Backend, choose
from ..errors import InvalidStateDictError
from ..schema import TensorSpec
from .drawing import Drawn, drawn
from .picture import Picture


def visualize_sharding(state: Any, *, title: str = "") -> Picture:
    """Which rank holds what of `state`: a state dict of a model or an optimizer (nested ones too), or a model.

    The result shows itself in notebooks, is text when printed, and ``.html()`` is a page of its own. This rank alone
    draws it, from the layouts: nothing is sent. Raises `InvalidStateDictError` if there is no tensor in it,
    `BackendError` for objects of no backend.
    """
    if not isinstance(state, Mapping):
        backend = choose(state[0] if isinstance(state, (list, tuple)) and state else state)
        values = {name: entry.value for name, entry in backend.model(state).entries().items()}
    else:
        values = dict(_flat(state, ""))
        backend = choose(*_tensors_first(values))
    specs = {name: spec for name, value in values.items() if (spec := backend.tensors.spec(value)) is not None}
    if not specs:
        raise InvalidStateDictError("there is no tensor in it to draw")
    return _picture(backend, specs, title)


def _picture(backend: Backend, specs: Mapping[str, TensorSpec], title: str) -> Picture:
    meshes = [spec.layout.mesh for spec in specs.values() if spec.layout is not None]
    mesh = max(meshes, key=lambda one: len(one.ranks), default=None)
    ranks = max([backend.fabric.world(), *(max(one.ranks) + 1 for one in meshes)])
    tensors: list[Drawn] = [
        drawn(name, spec.dtype, spec.shape, spec.layout, range(ranks)) for name, spec in specs.items()
    ]
    title = title or f"{len(tensors)} tensor{'s' * (len(tensors) > 1)} on {ranks} rank{'s' * (ranks > 1)}"
    return Picture(title, tuple(tensors), tuple(f"rank {n}" for n in range(ranks)), mesh)


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The values inside mappings, named by the keys that lead to them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple)


def _tensors_first(values: Mapping[str, Any]) -> list[Any]:
    """One value that may be a tensor, for the choice of the backend."""
    return [value for value in values.values() if not isinstance(value, _PLAIN)][:1]
