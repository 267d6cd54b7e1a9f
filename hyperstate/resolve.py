"""What a setter has to do, from what all ranks hold and pass. Pure: every rank reaches the same answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .agree import Classes
from .describe import show
from .errors import Fault
from .merge import Variant, Variants, brief, check_present, merge
from .plan import Route, to_ranks
from .schema import Entry, Key, TensorSpec, keeps_meaning, number_fits
from .statelayout import AMBIGUOUS, HOOK, OPAQUE, Rule, fresh_state


class Mode(NamedTuple):
    """The options that decide how a setter reads what it is given."""

    full: bool
    broadcast: bool
    strict: bool
    check_sources: bool = False


@dataclass(frozen=True, eq=False)
class Write:
    """What this rank gets under a key: the source's entry, and where each of its tensors goes.

    `targets` has one spec per tensor leaf, or one for a value that is a single tensor.
    """

    source: Entry
    targets: tuple[TensorSpec, ...]


class Delivery(NamedTuple):
    """One tensor leaf on its way; `number` is the position of `key`'s leaf."""

    key: Key
    number: int
    route: Route


class _Decision(NamedTuple):
    """How one value is delivered. Values that ranks hold and pass alike share a decision."""

    routes: tuple[Route, ...]
    write: Write | None
    """None where this rank keeps no part."""


@dataclass
class Resolution:
    """Everything that follows from one agreement, for rank `me`; `faults` are all ranks'."""

    faults: list[Fault] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    writes: dict[Key, Write] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)
    names: dict[Key, Key] = field(default_factory=dict)
    """The key under which an entry was passed, where it is another name of a tied parameter."""
    ignored: list[Key] = field(default_factory=list)
    """Entries that other ranks than the source pass too."""


_Specs = Callable[[Key, Variant, Entry, Sequence[Variant]], tuple[TensorSpec, ...] | None]
"""Where the tensors of a value go that `target` gets from `chosen`; None after noting a fault."""


class Resolver:
    """Matches sources to targets for one setter call."""

    def __init__(
        self, mode: Mode, ranks: Sequence[int], me: int, rules: Mapping[Any, Rule], targets: Classes, sources: Classes
    ) -> None:
        self.mode, self.ranks, self.me, self.rules = mode, ranks, me, rules
        self.out = Resolution()
        self._decisions: dict[tuple[Any, ...], _Decision] = {}
        """By what the ranks hold and pass: the very objects, which equal entries share (see `merge`)."""
        self._namings: dict[tuple[tuple[int, ...], int], frozenset[int]] = {}
        self.names: dict[str, str] = {}
        """Further names of tied parameters -> the first."""
        for _, target in targets:
            self.names |= target["names"]
        self.targets = merge([(ranks, target["entries"]) for ranks, target in targets])
        self.sources = self._canonical(merge([(ranks, source["entries"]) for ranks, source in sources]))
        self.states: dict[str, dict[Key, list[Variant]]] = {}
        for key, same in self.sources.items():
            if key[0] == "state":
                self.states.setdefault(key[1], {})[key] = same

    def _canonical(self, sources: Variants) -> Variants:
        """Source entries under the target's first names; the first name itself wins over further ones."""
        result = {key: same for key, same in sources.items() if key[0] == "global" or key[1] not in self.names}
        for key, same in sources.items():
            if key[0] != "global" and key[1] in self.names:
                name = (key[0], self.names[key[1]], *key[2:])
                if name not in result:
                    result[name] = same
                    self.out.names[name] = key
        return result

    def resolve(self) -> Resolution:
        """All keys; faults first, for they end the call."""
        present: set[int] = set()
        for key, same in self.targets.items():
            if key[0] not in ("model", "param"):
                continue
            if id(same) not in present:
                faults = check_present(key, same, frozenset(self.ranks))
                self.out.faults += faults
                if not faults:
                    present.add(id(same))
            for variant in same:
                if key[0] == "model":
                    self._decided(key, key, variant, None, self._model_specs)
                else:
                    self._parameter(key[1], variant)
        self._shared()
        self._unexpected()
        return self.out

    # -- which source ---------------------------------------------------------------------------------

    def _chosen(self, key: Key, target: Variant) -> list[Variant]:
        """The source variants that serve `target`; empty if there is none."""
        given = self.sources.get(key, [])
        if len(given) == 1 and len(given[0].ranks) == 1 and self.mode.broadcast:
            return given
        passing = {rank: variant for variant in given for rank in variant.ranks}
        if not passing:
            return []
        if not self.mode.broadcast:
            sharded = [v for v in given if v.layout() is not None]
            near = [v for v in sharded if set(v.ranks) & set(target.ranks)] or sharded[:1]
            own = [v for v in given if set(v.ranks) & set(target.ranks)]
            return near or own or (given[:1] if key[0] == "named" else [])
        members = set(target.ranks) & set(passing)
        lowest = self.ranks[0]
        root = lowest if lowest in passing else min(members or passing)
        if len(passing) > 1 and passing[root].layout() is None and key[0] != "named":
            self.out.ignored.append(key)
            if self.mode.check_sources and len(given) > 1:
                other = next(rank for rank in sorted(passing) if passing[rank].entry != passing[root].entry)
                self._fault(
                    other, f"{show(key)}: what rank {other} passes differs from what the source, rank {root}, does"
                )
        chosen = passing[root]
        if chosen.layout() is None:
            return [Variant(chosen.entry, (root,))]
        return [chosen, *(v for v in given if v is not chosen and v.layout() == chosen.layout())]

    def named_source(self, fqn: str, target: Variant) -> int | None:
        """The rank whose group fields `fqn` takes: for `target`'s own rank, or the source under broadcast."""
        ranks = self._named_by(fqn, target)
        return None if not ranks else (self.me if self.me in ranks else min(ranks))

    def source_rank(self, me: int, passing: Mapping[int, Any]) -> int:
        """The rank whose nameless groups count."""
        given = [rank for rank in sorted(passing) if passing[rank]]
        return me if (not self.mode.broadcast and me in given) or not given else given[0]

    def _served(self, key: Key, target: Variant, chosen: Sequence[Variant]) -> Entry | None:
        """The entry that `target` gets, or None (missing, or a fault that is noted)."""
        if not chosen:
            self._missing(key[1], target)
            return None
        if self.mode.broadcast or chosen[0].layout() is not None:
            return chosen[0].entry if self._complete(key, chosen) else None
        mine = {rank: variant.entry for variant in chosen for rank in variant.ranks}
        lacking = [rank for rank in target.ranks if rank not in mine]
        if lacking:
            self._fault(lacking[0], f"{show(key)} is passed on ranks {sorted(mine)}, not on {lacking}")
        whole = self.mode.full or key[0] == "model"  # plain state in a sharded dict is each rank's own business
        if len(chosen) > 1 and whole and (target.layout() is not None or key[0] == "state"):
            kinds = " and ".join(f"rank {v.ranks[0]} passes {_brief(v.entry)}" for v in chosen)
            self._fault(chosen[1].ranks[0], f"{show(key)}: {kinds}", "DisagreementError")
        return mine.get(self.me, chosen[0].entry)

    def _complete(self, key: Key, chosen: Sequence[Variant]) -> bool:
        """Whether the ranks that pass a sharded value hold all of it; a fault is noted otherwise."""
        if chosen[0].layout() is None:
            return True
        passing = {rank for variant in chosen for rank in variant.ranks}
        for spec in chosen[0].entry.leaves:
            if spec.layout is not None and spec.layout.held_by(spec.shape, passing) is None:
                lacking = sorted(spec.layout.mesh.members - passing)
                text = f"ranks {sorted(passing)} pass shards of {brief(spec)}, ranks {lacking} of the same mesh do not"
                self._fault(lacking[0], f"{show(key)}: {text}")
                return False
        return True

    def _missing(self, name: str, target: Variant) -> None:
        if self.mode.strict:
            self._fault(target.ranks[0], f"missing: {name!r} is in the target, not in the state dict")
        if self.me in target.ranks:
            self.out.missing.append(name)

    def _fault(self, rank: int, text: str, kind: str = "IncompatibleStateError") -> None:
        self.out.faults.append(Fault(rank, kind, text))

    # -- models ---------------------------------------------------------------------------------------

    def _model_specs(
        self, key: Key, target: Variant, entry: Entry, chosen: Sequence[Variant]
    ) -> tuple[TensorSpec, ...] | None:
        """Where the tensors of one value go; None after noting a fault."""
        want = target.entry.single
        if want is None:  # extra state: any value will do
            return _plain(entry)
        for variant in chosen:
            self._check_tensor(key, variant, want)
        return None if entry.single is None else (want,)

    def _check_tensor(self, key: Key, source: Variant, want: TensorSpec) -> None:
        have, rank = source.entry.single, source.ranks[0]
        if have is None:
            self._fault(rank, f"{show(key)}: {_brief(source.entry)} was passed for a tensor {brief(want)}")
        elif have.shape != want.shape:
            self._fault(rank, f"{show(key)}: {brief(have)} was passed for {brief(want)}; the shapes differ")
        elif not keeps_meaning(have.dtype, want.dtype):
            self._fault(rank, f"{show(key)}: {brief(have)} can't become {want.dtype} without losing its meaning")
        elif not self.mode.full and have.layout is None and want.layout is not None and want.layout.used:
            self._fault(
                rank, f"{show(key)}: a plain tensor was passed for a sharded one; for full values: full_state_dict=True"
            )

    # -- optimizers -----------------------------------------------------------------------------------

    def _parameter(self, fqn: str, target: Variant) -> None:
        saved = self.states.get(fqn, {})
        named, wrote = self._named_by(fqn, target), False
        if not named:
            self._missing(fqn, target)
            return
        for key, same in saved.items():
            if self.mode.broadcast and all(named.isdisjoint(variant.ranks) for variant in same):
                continue
            wrote |= self._decided(key, key[2], target, self._kept(key, target), self._state_specs)
        if not wrote and self.me in target.ranks:
            self.out.cleared.append(fqn)

    def _named_by(self, fqn: str, target: Variant) -> frozenset[int]:
        """The ranks whose groups name the parameter, of those that serve `target`."""
        sign = (target.ranks, id(self.sources.get(("named", fqn))))
        found = self._namings.get(sign)
        if found is None:
            chosen = self._chosen(("named", fqn), target)
            found = self._namings[sign] = frozenset(rank for variant in chosen for rank in variant.ranks)
        return found

    def _kept(self, key: Key, target: Variant) -> Variant | None:
        """What the ranks of `target` keep under `key`."""
        for variant in self.targets.get(key, ()):
            if _meet(variant.ranks, target.ranks):
                return variant
        return None

    def _state_specs(
        self, key: Key, target: Variant, entry: Entry, chosen: Sequence[Variant]
    ) -> tuple[TensorSpec, ...] | None:
        """Where the tensors of one state value go; None after noting a fault."""
        (param,) = target.entry.leaves
        kept = self._kept(key, target)
        old = None if kept is None else kept.entry.single
        have = entry.single
        if have is None:
            if old is not None and not number_fits(entry.skeleton, old):
                self._fault(chosen[0].ranks[0], f"{show(key)}: {_brief(entry)} was passed for {brief(old)}")
            return tuple(self._fresh(key, chosen, spec, param) for spec in entry.leaves)
        if old is not None and not (old.form in (OPAQUE, AMBIGUOUS) and not self.mode.full):
            if old.form in (OPAQUE, AMBIGUOUS):
                self._unclear(key, target.ranks[0], old)
                return None
            for variant in chosen:
                self._check_tensor(key, variant, old)
            return (old,)
        if old is not None and have.shape != old.shape:
            self._fault(chosen[0].ranks[0], f"{show(key)}: {brief(have)} was passed for {brief(old)}")
            return None
        return (self._fresh(key, chosen, have, param),)

    def _fresh(self, key: Key, chosen: Sequence[Variant], have: TensorSpec, param: TensorSpec) -> TensorSpec:
        """Where a tensor goes for which the target keeps nothing yet."""
        rank = chosen[0].ranks[0]
        spec = fresh_state(have.dtype, have.shape, param, self.rules.get(key[2]))
        if have.layout is not None and param.layout is not None and have.layout.mesh == param.layout.mesh:
            if spec.form in (OPAQUE, AMBIGUOUS):
                return TensorSpec(have.dtype, have.shape, have.layout, param.form)
        if not self.mode.full and have.layout is None:
            if spec.layout is not None and spec.layout.used:
                text = "a plain tensor was passed for sharded state; for full values: full_state_dict=True"
                self._fault(rank, f"{show(key)}: {text}")
            return TensorSpec(have.dtype, have.shape)
        if spec.form in (OPAQUE, AMBIGUOUS):
            self._unclear(key, rank, have)
        return spec

    def _unclear(self, key: Key, rank: int, spec: TensorSpec) -> None:
        self._fault(
            rank,
            f"{show(key)}: how {brief(spec)} lies over the ranks of its parameter is unknown; use {HOOK % key[-1]}",
            "AmbiguousLayoutError",
        )

    def _shared(self) -> None:
        """Values that belong to the optimizer as a whole: each rank of an optimizer gets all of them."""
        target = Variant(Entry(None), tuple(self.ranks))
        for key in self.sources:
            if key[0] == "global":
                self._decided(key, key, target, None, lambda _, __, entry, ___: _plain(entry))

    # -- the rest -------------------------------------------------------------------------------------

    def _decided(self, key: Key, kind: Any, target: Variant, kept: Variant | None, specs: _Specs) -> bool:
        """Note what becomes of one value; whether there is one. Equal cases (of one `kind`) are decided once."""
        same = self.sources.get(key)
        sign = (kind if key[0] == "state" else key[0], id(target), id(kept), id(same))
        decision = self._decisions.get(sign)
        if decision is None:
            before = self._notes()
            chosen = self._chosen(key, target)
            entry = self._served(key, target, chosen)
            goals = None if entry is None else specs(key, target, entry, chosen)
            if entry is None or goals is None:
                return entry is not None
            decision = self._decide(target, chosen, entry, goals)
            if before == self._notes():  # what was noted belongs to this key alone
                self._decisions[sign] = decision
        routes, write = decision
        self.out.deliveries += [Delivery(key, i, route) for i, route in enumerate(routes)]
        if write is not None:
            self.out.writes[key] = write
        return True

    def _notes(self) -> tuple[int, ...]:
        return len(self.out.faults), len(self.out.missing), len(self.out.ignored)

    def _decide(
        self, target: Variant, chosen: Sequence[Variant], entry: Entry, specs: tuple[TensorSpec, ...]
    ) -> _Decision:
        ranks = chosen[0].ranks
        if len(chosen) > 1:
            ranks = tuple(sorted({rank for variant in chosen for rank in variant.ranks}))
        routes = []
        for have, want in zip(entry.leaves, specs, strict=False):
            source = have.layout.held_by(have.shape, ranks) if have.layout else None
            source = source or to_ranks(ranks, have.shape)
            goal = want.layout or to_ranks(target.holders(), want.shape)
            routes.append(Route(have.dtype, have.shape, source, goal, want.dtype))
        return _Decision(tuple(routes), Write(entry, specs) if self.me in target.holders() else None)

    def _unexpected(self) -> None:
        known = {(key[0], key[1]) for key in self.targets}
        expected: set[tuple[str, int, int]] = set()
        for key, same in self.sources.items():
            if key[0] == "global":
                continue
            place = ("param" if key[0] in ("state", "named") else key[0], key[1])
            sign = (place[0], id(same), id(self.targets.get(place)))
            if sign in expected:
                continue
            ranks = self._surprised(same, place, place in known)
            if not ranks:
                expected.add(sign)
            elif key[1] not in self.out.unexpected:
                if self.me in ranks:
                    self.out.unexpected.append(key[1])
                if self.mode.strict:
                    self._fault(ranks[0], f"unexpected: {key[1]!r} is in the state dict, not in the target")

    def _surprised(self, same: Iterable[Variant], place: Key, fits: bool) -> list[int]:
        """The ranks that pass in vain what belongs to `place`."""
        passing = sorted({rank for variant in same for rank in variant.ranks})
        if self.mode.broadcast:
            return [] if fits else list(self.ranks)
        if any(variant.layout() is not None for variant in same):
            return [] if fits else passing
        holding = {rank for variant in self.targets.get(place, []) for rank in variant.ranks}
        return [rank for rank in passing if rank not in holding]


def _meet(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two sets of ranks have one in common."""
    return a is b or a == b or bool(set(a) & set(b))


def _plain(entry: Entry) -> tuple[TensorSpec, ...]:
    """Every tensor of a value, whole on each rank."""
    single = entry.single
    return tuple(TensorSpec(s.dtype, s.shape) for s in (entry.leaves if single is None else (single,)))


def _brief(entry: Entry) -> str:
    spec = entry.single
    return brief(spec) if spec is not None else f"a value {str(entry.skeleton)[:60]}"
