"""Which ranks take part in a call (docs/participants.md). Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import ParticipantsError
from .layout import Mesh


def participants(
    meshes: Iterable[Mesh], me: int, world: int, *, whole_job: bool = False, explicit: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """The sorted ranks of a call that rank `me` of `world` makes for entries on `meshes`.

    `explicit` (from ``ranks=``) wins; then `whole_job`; else the mesh that contains all meshes of
    this rank; else the slice of their common root mesh. Raises `ParticipantsError` (a `ValueError`).
    """
    mine = [mesh for mesh in dict.fromkeys(meshes) if me in mesh.members]
    needed = frozenset[int]().union(*(mesh.members for mesh in mine)) | {me}
    if explicit is not None:
        return _check_explicit(explicit, needed, me, world)
    if whole_job:
        return tuple(range(world))
    if not mine:
        return (me,)
    roots = [mesh.root or mesh for mesh in mine]
    for mesh in [*mine, *roots]:
        if mesh.members == needed:
            return tuple(sorted(needed))
    if all(root == roots[0] for root in roots):
        return _slice(roots[0], needed, me)
    around = [mesh for mesh in roots if mesh.members >= needed]
    if around:
        return _slice(min(around, key=lambda mesh: len(mesh.ranks)), needed, me)
    raise ParticipantsError(
        f"rank {me} holds entries on meshes over {_several(mesh.ranks for mesh in mine)}, which no common mesh "
        "contains; name the ranks that take part with ranks="
    )


def _slice(root: Mesh, needed: frozenset[int], me: int) -> tuple[int, ...]:
    """The slice of `root` through `me` over every mesh dimension along which `needed` extends."""
    here = root.coordinate(me)
    places = [root.coordinate(rank) for rank in needed]
    if here is None or None in places:
        raise ParticipantsError(f"ranks {sorted(needed)} reach beyond their root mesh {root.ranks}; pass ranks=")
    dims = [d for d in range(len(root.shape)) if any(place[d] != here[d] for place in places if place is not None)]
    return tuple(sorted(root.slice(dims, me)))


def _check_explicit(explicit: tuple[int, ...], needed: frozenset[int], me: int, world: int) -> tuple[int, ...]:
    ranks = tuple(sorted(set(explicit)))
    if len(ranks) != len(explicit) or not ranks or ranks[0] < 0 or ranks[-1] >= world:
        raise ParticipantsError(f"ranks={list(explicit)} must be distinct ranks of a job of {world}")
    if me not in ranks:
        raise ParticipantsError(f"rank {me} makes the call but is not in ranks={list(ranks)}")
    if not needed <= set(ranks):
        raise ParticipantsError(
            f"ranks={list(ranks)} leaves out {sorted(needed - set(ranks))}, which share a mesh with rank {me}"
        )
    return ranks


def _several(sets: Iterable[tuple[int, ...]]) -> str:
    return " and ".join(str(list(ranks)) for ranks in sorted(set(sets)))
