"""Sharded tensors of whatever make, told by their structure: what the adapters share in reading and making them.

A sharded tensor has `device_mesh`, `placements` and `to_local()`; a placement has `is_replicate()`, `is_partial()`,
`dim` and perhaps `split_factor`; a mesh tells its ranks by `rank_list` or by `mesh`, a grid of them. It imports none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from .errors import UnsupportedConfigurationError
from .layout import Layout, Shape, splits_of

Splits = tuple[tuple[int, ...], ...]


def is_sharded(value: Any) -> bool:
    """Whether `value` is a sharded tensor of some make."""
    return _declares_sharding(type(value)) or _has_parts(value)  # type: ignore[arg-type]  # mypy doubts that a class has a hash


@lru_cache
def _declares_sharding(kind: type) -> bool:
    """Whether all instances of a class are sharded tensors: the quick answer."""
    return _has_parts(kind)


def _has_parts(value: Any) -> bool:
    return hasattr(value, "placements") and hasattr(value, "device_mesh") and hasattr(value, "to_local")


def place_of(placement: Any) -> tuple[int, int] | None:
    """None for a replicated mesh dimension, else (tensor dimension, split factor).

    Raises `UnsupportedConfigurationError` for ``Partial`` and whatever else has no final values.
    """
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if placement.is_partial() or dim is None:
        raise UnsupportedConfigurationError(
            f"a tensor with the placement {placement!r} can't be saved or loaded: its values are not final; "
            "redistribute it to Replicate() or Shard() first"
        )
    return int(dim), int(getattr(placement, "split_factor", 1))


def splits(placements: Sequence[Any], mesh_shape: Shape, ndim: int) -> Splits:
    """`Layout.splits` for a tensor of `ndim` dimensions. Raises `UnsupportedConfigurationError` if there are none."""
    if len(placements) != len(mesh_shape):
        raise UnsupportedConfigurationError(
            f"a mesh of shape {mesh_shape} needs {len(mesh_shape)} placements, not {tuple(placements)}"
        )
    try:
        return splits_of([place_of(placement) for placement in placements], mesh_shape, ndim)
    except ValueError as error:
        raise UnsupportedConfigurationError(f"placements {tuple(placements)}: {error}") from error


def factors(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Of each splitting mesh dimension: itself, the tensor dimension, and its split factor (inverse of `splits`)."""
    for dim, split in enumerate(layout.splits):
        for i, d in enumerate(split):
            yield d, dim, prod(layout.mesh.shape[e] for e in split[:i] if e > d)


def mesh_ranks(device_mesh: Any) -> tuple[int, ...]:
    """The global ranks of a mesh, row-major."""
    ranks = getattr(device_mesh, "rank_list", None)
    if ranks is None:
        ranks = device_mesh.mesh
        ranks = ranks.asnumpy() if hasattr(ranks, "asnumpy") else ranks
        ranks = ranks.tolist() if hasattr(ranks, "tolist") else ranks
    return tuple(_flat(ranks)) if ranks is not None else ()


def _flat(ranks: Any) -> Iterator[int]:
    for item in ranks:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield int(item)


def rebuilt(kind: Any, local: Any, shape: Shape, layout: Layout, like: Any) -> Any:
    """A sharded tensor of the class `kind` around `local`, on the mesh of `like`, laid out as `layout`.

    Raises `UnsupportedConfigurationError` where `kind` would take it for a tensor of another shape.
    """
    made = kind.from_local(local, like.device_mesh, _placements_like(layout, like))
    if tuple(made.shape) != shape:
        raise UnsupportedConfigurationError(
            f"{kind.__module__}.{kind.__qualname__} splits evenly only: a shard of shape {tuple(local.shape)} would "
            f"stand for {tuple(made.shape)} instead of {shape}"
        )
    return made


def _placements_like(layout: Layout, like: Any) -> tuple[Any, ...]:
    """Placements made with the classes that `like`'s own placements have; its own if they say the same."""
    own = tuple(like.placements)
    if splits(own, layout.mesh.shape, len(layout.splits)) == layout.splits:
        return own
    shard = next((type(p) for p in own if getattr(p, "dim", None) is not None), None)
    replicate = next((type(p) for p in own if p.is_replicate()), None)
    wanted = {d: (dim, factor) for d, dim, factor in factors(layout)}
    count = len(layout.mesh.shape)
    if (
        (wanted and shard is None)
        or (len(wanted) < count and replicate is None)
        or any(factor != 1 for _, factor in wanted.values())
    ):
        raise UnsupportedConfigurationError(
            f"a tensor laid out as {layout.splits} can't be made from the placements {own}"
        )
    return tuple(shard(wanted[d][0]) if d in wanted else replicate() for d in range(count))  # type: ignore[misc]  # checked above
