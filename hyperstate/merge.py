"""Do ranks that hold one thing hold it alike? Pure: equal inputs give equal answers on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from .agree import Classes
from .describe import show
from .errors import Fault
from .layout import Layout
from .schema import Entry, Key, TensorSpec, alike, sign, tensor_entry
from .statelayout import AMBIGUOUS, HOOK, LOCAL, OPAQUE
from .wire import Place, unpack_entries


class Variant(NamedTuple):
    """An entry as some ranks hold it."""

    entry: Entry
    ranks: tuple[int, ...]

    def layout(self) -> Layout | None:
        """Layout of its sharded leaves, if any; one value's leaves share a mesh."""
        return self.entry.layout

    def holders(self) -> tuple[int, ...]:
        """The ranks that hold data: those with a coordinate, where there is a mesh."""
        layout = self.layout()
        return self.ranks if layout is None else tuple(r for r in self.ranks if r in layout.mesh.members)


Variants = Mapping[Key, list[Variant]]
Places = dict[Place, Variants]
"""What ranks hold under each name of a section, by the rest of the key."""


def merge(classes: Classes) -> Places:
    """The distinct entries that ranks hold, lowest rank first.

    Names under which ranks hold alike have the very same variants, so that what follows from them need be found out
    once.
    """
    found: Places = {}
    joined: dict[tuple[int, int], Variants] = {}
    kept: list[Any] = []  # `joined` names objects by identity: they must live as long
    for ranks, packed in classes:
        places = unpack_entries(packed, partial(_alone, ranks))
        for place, new in places.items() if found else ():
            before = found.get(place)
            if before is None:
                found[place] = new
                continue
            both = joined.get((id(before), id(new)))
            if both is None:
                both = joined[id(before), id(new)] = _both(before, new)
                kept += (before, new)
            found[place] = both
        found = found or places
    return found if len(classes) == 1 else _settled(found)


def by_key(places: Places) -> dict[Key, list[Variant]]:
    """The variants by their whole keys."""
    return {place + rest: same for place, variants in places.items() for rest, same in variants.items()}


def _alone(ranks: tuple[int, ...], entry: Entry) -> list[Variant]:
    return [Variant(entry, ranks)]


def _both(before: Variants, new: Variants) -> Variants:
    result = dict(before)
    for rest, variants in new.items():
        result[rest] = _add(result[rest], variants[0]) if rest in result else variants
    return result


def _settled(found: Places) -> Places:
    done: dict[tuple[int, int], Variants] = {}
    result: Places = {}
    for place, variants in found.items():
        params = found.get(("param", place[1])) if place[0] == "state" else None
        about = id(variants), id(params)
        if about not in done:
            param = _parameter(params)
            done[about] = {rest: settle(same, param) if len(same) > 1 else same for rest, same in variants.items()}
        result[place] = done[about]
    return result


def _parameter(params: Variants | None) -> TensorSpec | None:
    """The parameter to which a state value belongs, if all ranks have it on one mesh."""
    same = [] if params is None else params[()]
    return same[0].entry.leaves[0] if len(same) == 1 else None


def _add(variants: list[Variant], new: Variant) -> list[Variant]:
    """`variants` with `new` joined to the one that is equal, if there is one."""
    for i, old in enumerate(variants):
        if old.entry == new.entry:
            joined = Variant(old.entry, _joined(old.ranks, new.ranks))
            return [*variants[:i], joined, *variants[i + 1 :]]
    return [*variants, new]


@lru_cache(maxsize=1 << 10)
def _joined(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted((*a, *b)))


def settle(variants: list[Variant], param: TensorSpec | None) -> list[Variant]:
    """Read tensors that decide nothing alone as the other ranks' part of the same value is read.

    A statistic has one shape on all ranks. So parts of different shapes, each that of its rank's shard of
    `param`, are shards.
    """
    shards = None if param is None or param.layout is None else TensorSpec("", param.shape, param.layout, LOCAL)
    apart = len({entry.leaves[0].shape for entry, _ in variants if entry.leaves}) > 1
    merged: list[Variant] = []
    for entry, ranks in variants:
        if entry.leaves and entry.leaves[0].form == AMBIGUOUS:
            spec = entry.leaves[0]
            others = [v.entry for v in variants]
            if apart and shards is not None:
                others.append(tensor_entry(replace(shards, dtype=spec.dtype)))
            entry = next((other for other in others if _could_be(spec, other, ranks)), entry)
        merged = _add(merged, Variant(entry, ranks))
    return merged


def _could_be(spec: TensorSpec, other: Entry, ranks: Sequence[int]) -> bool:
    """Whether a tensor of unclear layout on `ranks` can be their part of what `other` describes."""
    if not other.leaves:
        return _counter(other.skeleton) and other.skeleton["T"][:2] == [spec.dtype, list(spec.shape)]
    full = other.leaves[0]
    if full.form not in ("", LOCAL) or full.layout is None or full.dtype != spec.dtype:
        return False
    boxes = [full.layout.box(full.shape, rank) for rank in ranks]
    return all(box is not None and box.shape == spec.shape for box in boxes)


def root_of(variants: Sequence[Variant]) -> int | None:
    """The lowest rank that holds the entry's data; None if no participant does."""
    return min((rank for variant in variants for rank in variant.holders()), default=None)


def check_alike(variants: Variants, ranks: Sequence[int]) -> list[Fault]:
    """What participants of a full getter must agree on: presence, shapes, dtypes, layouts, counters."""
    faults: list[Fault] = []
    members = frozenset(ranks)
    fine: set[tuple[str, int]] = set()
    for key, held in variants.items():
        if (key[0], id(held)) in fine:
            continue
        found = [*_unclear(key, held), *_contradictions(key, held), *check_present(key, held, members)]
        if found:
            faults += found
        else:
            fine.add((key[0], id(held)))
    return faults


def _contradictions(key: Key, held: Sequence[Variant]) -> list[Fault]:
    faults = []
    for other in held[1:]:
        text = _difference(key, held[0], other)
        if text:
            kind = "AmbiguousLayoutError" if "register_state_layout" in text else "DisagreementError"
            faults.append(Fault(other.ranks[0], kind, f"{show(key)}: {text}"))
    return faults


def _unclear(key: Key, held: Sequence[Variant]) -> list[Fault]:
    for variant in held:
        for spec in variant.entry.leaves:
            if spec.form == OPAQUE:
                text = "is registered as opaque_local, so it has no full form; use the sharded form"
                return [Fault(variant.ranks[0], "AmbiguousLayoutError", f"{show(key)} {text}")]
            if spec.form == AMBIGUOUS:
                text = f"has the shape {spec.shape}, which does not tell its layout; use " + HOOK % key[-1]
                return [Fault(variant.ranks[0], "AmbiguousLayoutError", f"{show(key)} {text}")]
    return []


def _difference(key: Key, a: Variant, b: Variant) -> str:
    """How two variants of one key contradict each other; empty if they may stand side by side."""
    left, right = a.entry, b.entry
    if len(left.leaves) == len(right.leaves):
        for x, y in zip(left.leaves, right.leaves, strict=True):
            if (x.dtype, x.shape) != (y.dtype, y.shape):
                return (
                    f"{_says(a)} has {brief(x)}, {_says(b)} has {brief(y)}; names that are local to a stage need ranks="
                )
            if (x.layout is None) != (y.layout is None):
                return f"it is sharded on {_says(a)} and plain on {_says(b)}"
            if x.form != y.form and "replica" in x.form + y.form:
                who = f"{_says(a)} and {_says(b)}"
                return f"a plain tensor of shape {x.shape} differs between {who}; tell what it is: {HOOK % key[-1]}"
    if key[0] == "model" and _shape_of(left.skeleton) == _shape_of(right.skeleton):
        return ""  # buffers and extra state of replicas may differ: the root's counts
    if not alike(left.skeleton, right.skeleton):
        return f"{_says(a)} has {_value(left.skeleton)}, {_says(b)} has {_value(right.skeleton)}"
    return ""


def check_present(key: Key, held: Sequence[Variant], ranks: frozenset[int]) -> list[Fault]:
    """Each rank of a value's mesh must take part and hold the value, unless its shard is empty."""
    for variant in held:
        if _complete(variant, ranks):
            continue
        for spec in variant.entry.leaves:
            if spec.layout is None or not variant.holders():
                continue
            members, layout, shape = spec.layout.mesh.members, spec.layout, spec.shape
            if members - ranks:
                text = f"its mesh {sorted(members)} reaches beyond the participants {sorted(ranks)}; pass ranks="
                return [Fault(variant.ranks[0], "ParticipantsError", f"{show(key)}: {text}")]
            absent = members - set(variant.ranks)
            missing = sorted(r for r in absent if (box := layout.box(shape, r)) is not None and box.size)
            if missing:
                text = f"ranks {list(variant.ranks)} hold it as {brief(spec)}, {missing} of the same mesh do not"
                return [Fault(missing[0], "DisagreementError", f"{show(key)}: {text}")]
    return []


@lru_cache(maxsize=1 << 12)
def _complete(variant: Variant, ranks: frozenset[int]) -> bool:
    """The usual case, told at once: all ranks of the mesh take part and hold the value."""
    return all(
        spec.layout is None or (spec.layout.mesh.members <= ranks and spec.layout.mesh.members <= set(variant.ranks))
        for spec in variant.entry.leaves
    )


def check_groups(classes: Classes) -> list[Fault]:
    """Every FQN must stand in a group with the same fields wherever it stands."""
    seen: dict[str, tuple[int, Any, str]] = {}
    faults = []
    for ranks, groups in classes:
        for fqns, skeleton in groups:
            here = (ranks[0], skeleton, sign(skeleton))
            for fqn in fqns:
                rank, other, said = seen.setdefault(fqn, here)
                if said != here[2]:
                    mine, theirs = dict(map(_pair, skeleton["{"])), dict(map(_pair, other["{"]))
                    names = sorted(n for n in {**mine, **theirs} if not alike(mine.get(n), theirs.get(n)))
                    text = f"group fields {names} of {fqn!r} differ between rank {rank} and rank {ranks[0]}"
                    faults.append(Fault(ranks[0], "DisagreementError", text))
    return faults


def _pair(item: Any) -> tuple[Any, Any]:
    return item[0], item[1]


def _shape_of(skeleton: Any) -> Any:
    """A skeleton without the contents of counters, and without what extra state holds."""
    if isinstance(skeleton, dict) and "T" in skeleton:
        return skeleton["T"][:2]
    return skeleton if skeleton == {"t": 0} else None


def brief(spec: TensorSpec) -> str:
    """A tensor in a few words."""
    return f"{spec.dtype}{list(spec.shape)}"


def _value(skeleton: Any) -> str:
    text = f"{skeleton['T'][0]}{skeleton['T'][1]} bytes {skeleton['T'][2]}" if _counter(skeleton) else str(skeleton)
    return text if len(text) < 80 else text[:77] + "…"


def _counter(skeleton: Any) -> bool:
    return isinstance(skeleton, dict) and "T" in skeleton


def _says(variant: Variant) -> str:
    return f"rank {variant.ranks[0]}"
