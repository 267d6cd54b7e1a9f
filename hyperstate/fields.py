"""Fields of param groups: which value each of the target's groups gets. Matched by FQN, never by position."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from math import prod
from typing import Any

from .agree import Classes
from .backend import Backend
from .collect import Held
from .describe import rebuild
from .errors import Fault
from .merge import Variant, brief, check_groups
from .resolve import Mode, Resolver
from .schema import Entry, alike, counter_of, is_opaque, keeps_meaning, number_fits, put_together, refuse_leaf
from .sourcing import OWN_FIELDS

Skeletons = dict[str, Any]
Groups = list[tuple[list[str], dict[str, Any]]]


def new_fields(
    backend: Backend, held: Held, sources: Classes, own: Groups, resolver: Resolver, mode: Mode
) -> tuple[list[dict[str, Any] | None], list[Fault]]:
    """By target group the fields to set (None: leave the group alone), and what contradicts itself.

    `own` are the groups that this rank passes: values that JSON can't carry are taken from there.
    """
    me = backend.fabric.rank()
    named = [(ranks, _by_fqn(source["groups"], resolver)) for ranks, source in sources]
    by_rank = {rank: fields for ranks, fields in named for rank in ranks}
    empty = {rank: [_pairs(g[1]) for g in source["groups"] if not g[0]] for ranks, source in sources for rank in ranks}
    # Where each rank takes what it passes, unequal fields would leave the ranks training at different rates.
    faults = [] if mode.broadcast or len(sources) < 2 else check_groups([(ranks, s["groups"]) for ranks, s in sources])
    result: list[dict[str, Any] | None] = []
    nameless = iter(empty.get(resolver.source_rank(me, empty), []))
    for number, (fqns, _) in enumerate(held.groups):
        if not fqns:
            chosen = next(nameless, None)
        else:
            chosen, seen = None, set[int]()
            for fqn, fields in _sourced(fqns, me, by_rank, resolver):
                if id(fields) in seen:
                    continue
                seen.add(id(fields))
                chosen = _agreed(chosen, fields, number, fqn, me, mode.strict, faults)
        kept = _pairs(held.fields.entries[("group", number)].skeleton)
        for name, value in (chosen or {}).items():
            if name in kept and not _fits(value, kept[name]):
                text = f"field {name!r} of param group {number}: {_short(value)} can't become {_short(kept[name])}"
                faults.append(Fault(me, "IncompatibleStateError", f"{text} without losing its meaning"))
        result.append(None if chosen is None else _build(backend, chosen, _objects(own, fqns, resolver)))
    return result, faults


def _by_fqn(groups: Any, resolver: Resolver) -> dict[str, Skeletons]:
    return {
        resolver.names.get(fqn, fqn): fields
        for fqns, skeleton in groups
        for fields in [_pairs(skeleton)]
        for fqn in fqns
    }


def _pairs(skeleton: Any) -> Skeletons:
    return {name: value for name, value in skeleton["{"] if name not in OWN_FIELDS}


def _sourced(
    fqns: list[str], me: int, by_rank: dict[int, dict[str, Skeletons]], resolver: Resolver
) -> Iterator[tuple[str, Skeletons]]:
    mine: dict[int, Variant] = {}  # by identity: parameters that ranks hold alike share their variants
    for fqn in fqns:
        held = resolver.targets["param", fqn][()]
        target = mine.get(id(held))
        if target is None:
            target = mine[id(held)] = next((v for v in held if me in v.ranks), Variant(Entry(None), (me,)))
        rank = resolver.named_source(fqn, target)
        fields = by_rank.get(rank, {}).get(fqn) if rank is not None else None
        if fields is not None:
            yield fqn, fields


def _agreed(
    first: Skeletons | None, fields: Skeletons, number: int, fqn: str, me: int, strict: bool, faults: list[Fault]
) -> Skeletons:
    """`first`, extended by fields that it lacks; a contradiction is a fault or a warning."""
    if first is None:
        return dict(fields)
    names = sorted(name for name in fields if name in first and not alike(first[name], fields[name]))
    if names:
        values = ", ".join(f"{name}: {_short(first[name])} and {_short(fields[name])}" for name in names)
        text = (
            f"param group {number} of the target gets two values for {values} ({fqn!r} disagrees with those before it)"
        )
        if strict:
            faults.append(Fault(me, "IncompatibleStateError", text))
        else:
            warnings.warn(text + "; the first is used", stacklevel=6)
    return {**fields, **first}


def _fits(new: Any, old: Any) -> bool:
    """Whether a field that is kept as `old` (tensors keep their dtype, floats stay floats) can take the value `new`."""
    given = counter_of(new)[0] if _is_tensor(new) else None
    if _is_tensor(old):
        kept = counter_of(old)[0]
        return number_fits(new, replace(kept, shape=())) if given is None else keeps_meaning(given.dtype, kept.dtype)
    if given is not None:
        return type(old) is not float or prod(given.shape) != 1 or keeps_meaning(given.dtype, "float64")
    items, were = _items(new), _items(old)
    return len(items) != len(were) or all(map(_fits, items, were))


def _is_tensor(skeleton: Any) -> bool:
    return isinstance(skeleton, dict) and "T" in skeleton


def _items(skeleton: Any) -> list[Any]:
    """The items of a list or tuple."""
    found = skeleton.get("(") if isinstance(skeleton, dict) else skeleton
    return found if isinstance(found, list) else []


def _short(skeleton: Any) -> str:
    if _is_tensor(skeleton):
        return brief(counter_of(skeleton)[0])
    if isinstance(skeleton, dict) and "c" in skeleton:
        return str(put_together(skeleton, refuse_leaf))
    return str(skeleton)[:40]


def _objects(own: Groups, fqns: list[str], resolver: Resolver) -> dict[str, Any]:
    """The fields that this rank itself passes for a group of `fqns`."""
    found: dict[str, Any] = {}
    for names, fields in own:
        if {resolver.names.get(name, name) for name in names} & set(fqns) or not (names or fqns):
            found = {**fields, **found}
    return found


def _build(backend: Backend, fields: Skeletons, own: dict[str, Any]) -> dict[str, Any]:
    def refuse(_: int) -> Any:
        raise AssertionError("fields carry their tensors inline")

    def value(name: str, skeleton: Any) -> Any:
        if is_opaque(skeleton) and name in own:
            return deepcopy(own[name])
        return rebuild(skeleton, refuse, lambda spec, data: backend.tensors.from_raw(data, spec, None))

    return {name: value(name, skeleton) for name, skeleton in fields.items()}
