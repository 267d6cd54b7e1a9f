"""Getters: sharded form without communication, full form under one verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from math import prod
from typing import Any

from .agree import Call
from .backend import Backend, Local, Place
from .collect import Held
from .describe import content_digest, rebuild, show
from .errors import Fault, TransferError, UnsupportedConfigurationError, raise_faults
from .layout import Box, whole
from .merge import Variant, Variants, by_key, check_alike, check_groups, merge, root_of
from .plan import Move, Route, plan, to_ranks
from .schema import LEAF, Entry, Key, TensorSpec, counter_of, tensor_entry
from .statelayout import AMBIGUOUS, HOOK, LOCAL, is_sharded
from .transfer import message_limit, run
from .wire import pack_entries

Result = dict[Key, Any]
Warn = Callable[[str], None]


# -- sharded -----------------------------------------------------------------------------------------


def sharded(backend: Backend, held: Held, *, to_host: bool, warn: Warn) -> Result:
    """The values as the ranks hold them; local state of sharded parameters becomes sharded tensors.

    Without `to_host` the tensors are live; with it they are copies.
    """
    copies: list[tuple[Local, Local]] = []
    result = {key: _sharded_value(backend, held, key, to_host, copies, warn) for key in held.values.entries}
    backend.tensors.copy(copies)
    return result


def _sharded_value(
    backend: Backend, held: Held, key: Key, to_host: bool, copies: list[tuple[Local, Local]], warn: Warn
) -> Any:
    tensors = backend.tensors
    entry, live = held.values.entries[key], held.values.tensors[key]
    counters: Iterator[Any] = iter(held.values.counters.get(key, ()))

    def leaf(i: int) -> Any:
        spec, value = entry.leaves[i], live[i]
        if spec.form == AMBIGUOUS:
            warn(f"{show(key)} stays plain because its layout is unknown; use {HOOK % key[-1]}")
        local = tensors.local(value)
        if to_host and not tensors.is_meta(value):
            local = _copy_later(backend, local, None, copies)
        if spec.layout is None or _replicated_counter(key, spec):
            return local
        return tensors.wrap(local, replace(spec, form=""), held.parameters[key[1]] if spec.form == LOCAL else value)

    def counter(spec: TensorSpec, data: bytes) -> Any:
        value = next(counters)
        return tensors.from_raw(data, spec, None) if to_host else tensors.local(value)

    plain = all(spec.form not in (LOCAL, AMBIGUOUS) and not _replicated_counter(key, spec) for spec in entry.leaves)
    if entry.opaque:
        return deepcopy(held.live[key]) if to_host else held.live[key]
    # A model's values share memory with its parameters, but are not those objects: users may write into them.
    if plain and not to_host and key[0] != "model":
        return held.live[key]
    return rebuild(entry.skeleton, leaf, counter)


def _replicated_counter(key: Key, spec: TensorSpec) -> bool:
    """Counters come back plain, also from optimizers that keep them as sharded tensors."""
    return key[0] == "state" and spec.layout is not None and not spec.layout.used and prod(spec.shape) == 1


def _copy_later(backend: Backend, local: Local, place: Place, copies: list[tuple[Local, Local]]) -> Local:
    """A fresh tensor like `local` on `place`, filled when `copies` are made."""
    spec = backend.tensors.spec(local)
    assert spec is not None
    fresh = backend.tensors.empty(spec.shape, spec.dtype, place)
    copies.append((fresh, local))
    return fresh


# -- full --------------------------------------------------------------------------------------------


def describe_held(call: Call, held: Held, *, root_only: bool) -> dict[str, Any]:
    """What this rank tells the others in a full getter. Raises for values without data."""
    for key, values in held.values.tensors.items():
        if any(map(call.backend.tensors.is_meta, values)):
            raise UnsupportedConfigurationError(
                f"{show(key)} is a meta tensor: it has no data yet; load the model first"
            )
    _mark_replicas(call.backend, held, every=not root_only and not call.alone)
    params = {
        ("param", fqn): tensor_entry(replace(spec, form="") if spec.form else spec) for fqn, spec in held.params.items()
    }
    groups = [[fqns, held.fields.entries[("group", i)].skeleton] for i, (fqns, _) in enumerate(held.groups)]
    return {"entries": pack_entries({**held.values.entries, **params}), "groups": groups}


def full(
    call: Call, held: Held, parts: dict[str, Any], faults: Sequence[Fault], *, root_only: bool, flat: bool
) -> tuple[Result, dict[str, bool]]:
    """Full tensors on every holder, or (`root_only`, on the host) on the root rank of each entry.

    `parts` come from `describe_held`. Also tells which parameters of the optimizer this rank answers for in
    `param_groups`.
    """
    classes = call.describe(faults, parts)
    variants = by_key(merge(classes["entries"]))
    raise_faults([*check_alike(variants, call.ranks), *check_groups(classes["groups"])], call.what)
    if flat:
        check_twins(call, held, variants)
    # By identity: names under which ranks hold alike have the same variants.
    found = {id(same): same for same in variants.values()}
    root_by = {number: root_of(same) for number, same in found.items()}
    mine_by = {number: _wanted(same, call.me, root_by[number], root_only) for number, same in found.items()}
    roots = {key: root_by[id(same)] for key, same in variants.items()}
    answered = {key[1]: not root_only or root == call.me for key, root in roots.items() if key[0] == "param"}
    wanted = {
        key: mine for key, same in variants.items() if (mine := mine_by[id(same)]) is not None and key[0] != "param"
    }
    return _Gather(call, held, variants, roots, root_only).run(wanted), answered


def check_twins(call: Call, held: Held, variants: Variants) -> None:
    """Refuse optimizer state that two meshes hold under one FQN with different contents: a flat dict has one place.

    Meshes of one shape are compared shard by shard. All ranks reach the same answer, with one more meeting at most.
    """
    twins = [
        key for key, same in variants.items() if key[0] == "state" and len({v.layout() for v in same} - {None}) > 1
    ]
    if not twins:
        return
    posts: dict[str, str] = {}
    for key in twins:
        entry = held.values.entries.get(key, Entry(None))
        for i, spec in enumerate(entry.leaves):
            if spec.layout is not None and (box := spec.layout.box(spec.shape, call.me)):
                name = f"{show(key)} {i} {box.start} {box.stop}"
                posts[name] = content_digest(call.backend.tensors, held.values.tensors[key][i])
    faults = [
        Fault(
            ranks[1][0],
            "DisagreementError",
            f"{name}: ranks {ranks[0]} and {ranks[1]} hold different contents under "
            "one name, and a flat dict has one place for it; use the nested form, or ranks= for each stage",
        )
        for name, ranks in call.compare(posts).items()
        if len(ranks) > 1
    ]
    raise_faults(faults, call.what)


def _mark_replicas(backend: Backend, held: Held, *, every: bool) -> None:
    """Add a digest of the contents to plain tensors, so that ranks whose contents differ see it.

    Plain state of sharded parameters that no rule explains is no replicated statistic if it differs,
    whatever its shape. Of all others (`every`) the root's contents count.
    """
    for key, entry in held.values.entries.items():
        unexplained = key[0] == "state" and key[2] not in held.rules and is_sharded(held.params.get(key[1]))
        if not entry.leaves or not (unexplained or every):
            continue
        mark = "replica " if unexplained else "content "
        leaves = tuple(
            replace(spec, form=mark + content_digest(backend.tensors, value))
            if spec.layout is None and not spec.form
            else spec
            for spec, value in zip(entry.leaves, held.values.tensors[key], strict=True)
        )
        held.values.entries[key] = Entry(entry.skeleton, leaves)


def _wanted(same: Sequence[Variant], me: int, root: int | None, root_only: bool) -> Variant | None:
    """The variant from which rank `me` builds its result; None if it gets none."""
    if root_only:
        return next((v for v in same if me in v.holders()), None) if root == me else None
    for variant in same:
        layout = variant.layout()
        if me in variant.holders() or (layout is not None and me in layout.mesh.members):
            return variant
    return None


class _Gather:
    """Moves the leaves of all entries and builds this rank's values."""

    def __init__(
        self, call: Call, held: Held, variants: Variants, roots: dict[Key, int | None], root_only: bool
    ) -> None:
        self.call, self.held, self.variants, self.roots, self.root_only = call, held, variants, roots, root_only
        self.backend = call.backend
        self.moves: list[Move] = []
        self.routes: dict[tuple[int, tuple[int, ...]], Route] = {}
        """By identity of the spec, which equal entries share, and receivers."""
        self.sources: dict[int, tuple[Local, Box]] = {}
        self.targets: dict[int, tuple[Local, Box]] = {}
        self.full: dict[tuple[Key, int], Local] = {}
        self.copies: list[tuple[Local, Local]] = []

    def run(self, wanted: dict[Key, Variant]) -> Result:
        for key, same in self.variants.items():
            if key[0] != "param":
                self._add_moves(key, same, wanted.get(key))
        self.backend.tensors.copy(self.copies)
        stages = plan(self.moves, self.call.me, message_limit(len(self.call.ranks)))
        try:
            run(self.backend, stages, self.sources.__getitem__, self.targets.__getitem__, self.call.timeout)
        except TransferError as error:
            raise TransferError(f"{self.call.what} was interrupted: {error}; nothing was changed") from error
        order = [key for key in self.held.values.entries if key in wanted]
        order += [key for key in wanted if key not in self.held.values.entries]
        return {key: self._build(key, self._first(key, wanted[key]).entry) for key in order}

    def _first(self, key: Key, mine: Variant) -> Variant:
        """The variant whose plain contents count: the root's."""
        if mine.layout() is not None or mine.entry.opaque:
            return mine
        return next((v for v in self.variants[key] if v.layout() is None and self.roots[key] in v.ranks), mine)

    def _add_moves(self, key: Key, same: Sequence[Variant], mine: Variant | None) -> None:
        root = self.roots[key]
        for variant in same:
            layout = variant.layout()
            if layout is not None and self.call.me in layout.mesh.members:
                if not self.root_only or root in layout.mesh.members:
                    self._add_sharded(key, variant, [root] if self.root_only else layout.mesh.ranks)
        if mine is None:
            return
        first = self._first(key, mine)
        others = [] if self.root_only else sorted(r for v in same if v is not first for r in v.ranks)
        for i, (spec, value) in enumerate(zip(mine.entry.leaves, self.held.values.tensors.get(key, []), strict=False)):
            if spec.layout is None:
                place = None if self.root_only else self.backend.tensors.place(value)
                local = self.backend.tensors.local(value)
                if mine is first:
                    self.full[key, i] = _copy_later(self.backend, local, place, self.copies)
                else:
                    self.full[key, i] = self.backend.tensors.empty(spec.shape, spec.dtype, place)
                if others and self.call.me in (root, *others):
                    self._add_replica(key, i, first.entry.leaves[i], local, [root], others)

    def _add_replica(
        self, key: Key, i: int, spec: TensorSpec, local: Local, root: Sequence[Any], others: Sequence[int]
    ) -> None:
        """Ranks whose plain tensor has other contents than the root's get the root's."""
        index, full = len(self.moves), whole(spec.shape)
        route = Route(spec.dtype, spec.shape, to_ranks(root, spec.shape), to_ranks(others, spec.shape))
        self.moves.append(Move(index, route))
        self.sources[index] = (local, full)
        if self.call.me in others:
            self.targets[index] = (self.full[key, i], full)

    def _add_sharded(self, key: Key, variant: Variant, ranks: Sequence[Any]) -> None:
        me, tensors = self.call.me, self.backend.tensors
        live = self.held.values.tensors.get(key, [])
        for i, spec in enumerate(variant.entry.leaves):
            if spec.layout is None:
                continue
            index = len(self.moves)
            self.moves.append(Move(index, self._route(spec, tuple(ranks))))
            box = spec.layout.box(spec.shape, me)
            if i < len(live) and box is not None:
                self.sources[index] = (tensors.local(live[i]), box)
            if me in ranks:
                place = None if self.root_only else self._place(key, i)
                self.full[key, i] = tensors.empty(spec.shape, spec.dtype, place)
                self.targets[index] = (self.full[key, i], whole(spec.shape))

    def _route(self, spec: TensorSpec, ranks: tuple[int, ...]) -> Route:
        assert spec.layout is not None
        route = self.routes.get((id(spec), ranks))
        if route is None:
            route = Route(spec.dtype, spec.shape, spec.layout, to_ranks(ranks, spec.shape))
            self.routes[id(spec), ranks] = route
        return route

    def _place(self, key: Key, i: int) -> Place:
        live = self.held.values.tensors.get(key) or [self.held.parameters[key[1]]]
        return self.backend.tensors.place(live[min(i, len(live) - 1)])

    def _build(self, key: Key, entry: Entry) -> Any:
        if entry.skeleton == LEAF:
            return self.full[key, 0]
        if entry.opaque:
            return deepcopy(self.held.live[key])
        counters = iter(self.held.values.counters.get(key, ()))

        def counter(spec: TensorSpec, data: bytes) -> Any:
            value = next(counters, None)
            place = None if self.root_only or value is None else self.backend.tensors.place(value)
            return self.backend.tensors.from_raw(data, spec, place)

        if entry.single is not None:
            return counter(*counter_of(entry.skeleton))
        return rebuild(entry.skeleton, lambda i: self.full[key, i], counter)
