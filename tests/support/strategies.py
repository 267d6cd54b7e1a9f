"""Random meshes, shapes and layouts: small, uneven, with empty shards, in every order of cutting."""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

from hyperstate.layout import Layout, Mesh


@st.composite
def meshes(draw, ranks=None, max_dims=3):
    """A mesh of 1 to 3 dimensions over distinct ranks, not in order."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=max_dims)))
    if ranks is not None:
        while prod(shape) > len(ranks):
            shape = shape[1:] or (len(ranks),)
    members = draw(st.permutations(range(prod(shape) + 2) if ranks is None else ranks))
    return Mesh(shape, tuple(members[: prod(shape)]))


def shapes(max_dims=3, max_size=7):
    return st.lists(st.integers(0, max_size), min_size=0, max_size=max_dims).map(tuple)


@st.composite
def splits(draw, mesh_dims, ndim):
    """Some of the mesh dimensions, in any order, spread over the tensor dimensions."""
    chosen = draw(st.permutations(range(mesh_dims)))
    homes = [draw(st.integers(-1, ndim - 1)) for _ in chosen]
    return tuple(tuple(d for d, home in zip(chosen, homes, strict=True) if home == dim) for dim in range(ndim))


@st.composite
def layouts(draw, shape=None, ranks=None):
    """(layout, shape)."""
    shape = draw(shapes()) if shape is None else shape
    mesh = draw(meshes(ranks))
    return Layout(mesh, draw(splits(len(mesh.shape), len(shape)))), shape
