"""What a setter has to do, from what all ranks hold and pass. Pure: every rank reaches the same answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .agree import Classes
from .describe import show
from .errors import Fault
from .merge import Places, Variant, brief, check_present, merge
from .plan import Route, to_ranks
from .schema import Entry, Key, TensorSpec, keeps_meaning, number_fits
from .statelayout import AMBIGUOUS, HOOK, OPAQUE, Rule, fresh_state
from .wire import Place


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
    """How one value is delivered. Names that ranks hold and pass alike share decisions."""

    rest: Key
    """Of its key, after section and name."""
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
        self._namings: dict[tuple[tuple[int, ...], int], frozenset[int]] = {}
        self.names: dict[str, str] = {k: v for _, target in targets for k, v in target["names"].items()}
        """Further names of tied parameters -> the first."""
        self.targets = merge([(ranks, target["entries"]) for ranks, target in targets])
        self.sources = self._canonical(merge([(ranks, source["entries"]) for ranks, source in sources]))

    def _canonical(self, sources: Places) -> Places:
        """Source entries under the target's first names; the first name itself wins over further ones."""
        result = {place: same for place, same in sources.items() if place[0] == "global" or place[1] not in self.names}
        for place in sources if self.names else ():
            if place in result:
                continue
            first = (place[0], self.names[place[1]])
            known = result.get(first, {})
            new = {rest: same for rest, same in sources[place].items() if rest not in known}
            result[first] = {**known, **new}
            self.out.names |= {first + rest: place + rest for rest in new}
        return result

    def resolve(self) -> Resolution:
        """All keys; faults first, for they end the call. Names that ranks hold and pass alike are decided once."""
        known: dict[tuple[Any, ...], list[_Decision]] = {}
        for place, held in self.targets.items():
            section, name = place
            if section not in ("model", "param"):
                continue
            about = [place] if section == "model" else [("named", name), ("state", name)]
            passed = [id(self.sources.get(one)) for one in about]
            sign = (section, id(held), *passed, id(self.targets.get(("state", name))))
            decisions = known.get(sign)
            if decisions is None:
                before = self._notes()
                decisions = self._decisions(place, held[()])
                if before == self._notes():  # what was noted belongs to this name alone
                    known[sign] = decisions
            self._deliver(section if section == "model" else "state", name, decisions)
        self._shared()
        self._unexpected()
        return self.out

    def _decisions(self, place: Place, held: list[Variant]) -> list[_Decision]:
        """What becomes of all that is passed under one name of a target."""
        self.out.faults += check_present(place, held, frozenset(self.ranks))
        if place[0] == "param":
            return [decision for variant in held for decision in self._parameter(place[1], variant)]
        return list(filter(None, [self._decided(place, variant, self._model_specs) for variant in held]))

    def _deliver(self, section: str, name: Any, decisions: Iterable[_Decision]) -> None:
        for rest, routes, write in decisions:
            key = (section, name, *rest)
            for i, route in enumerate(routes):
                self.out.deliveries.append(Delivery(key, i, route))
            if write is not None:
                self.out.writes[key] = write

    def _notes(self) -> tuple[int, ...]:
        return len(self.out.faults), len(self.out.missing), len(self.out.ignored), len(self.out.cleared)

    # -- which source ---------------------------------------------------------------------------------

    def _chosen(self, key: Key, target: Variant) -> list[Variant]:
        """The source variants that serve `target`; empty if there is none."""
        given = self.sources.get(key[:2], {}).get(key[2:], [])
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

    def _parameter(self, fqn: str, target: Variant) -> list[_Decision]:
        named = self._named_by(fqn, target)
        if not named:
            self._missing(fqn, target)
            return []
        found = [
            self._decided(("state", fqn, *rest), target, self._state_specs)
            for rest, same in self.sources.get(("state", fqn), {}).items()
            if not self.mode.broadcast or any(named.intersection(variant.ranks) for variant in same)
        ]
        decided = list(filter(None, found))
        if not decided and self.me in target.ranks:
            self.out.cleared.append(fqn)
        return decided

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
        for variant in self.targets.get(key[:2], {}).get(key[2:], ()):
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
        for (section, name), passed in self.sources.items():
            for rest in passed if section == "global" else ():
                decided = self._decided((section, name, *rest), target, lambda _, __, entry, ___: _plain(entry))
                self._deliver(section, name, filter(None, [decided]))

    # -- the rest -------------------------------------------------------------------------------------

    def _decided(self, key: Key, target: Variant, specs: _Specs) -> _Decision | None:
        """What becomes of one value; None if there is none, or after noting a fault."""
        chosen = self._chosen(key, target)
        entry = self._served(key, target, chosen)
        goals = None if entry is None else specs(key, target, entry, chosen)
        if entry is None or goals is None:
            return None
        ranks = chosen[0].ranks
        if len(chosen) > 1:
            ranks = tuple(sorted({rank for variant in chosen for rank in variant.ranks}))
        routes = []
        for have, want in zip(entry.leaves, goals, strict=False):
            source = have.layout.held_by(have.shape, ranks) if have.layout else None
            source = source or to_ranks(ranks, have.shape)
            goal = want.layout or to_ranks(target.holders(), want.shape)
            routes.append(Route(have.dtype, have.shape, source, goal, want.dtype))
        return _Decision(key[2:], tuple(routes), Write(entry, goals) if self.me in target.holders() else None)

    def _unexpected(self) -> None:
        expected: set[tuple[str, int, int]] = set()
        for (section, name), passed in self.sources.items():
            if section == "global":
                continue
            place = ("param" if section in ("state", "named") else section, name)
            sign = (place[0], id(passed), id(self.targets.get(place)))
            if sign in expected:
                continue
            ranks = next(filter(None, [self._surprised(same, place) for same in passed.values()]), None)
            if ranks is None:
                expected.add(sign)
            elif name not in self.out.unexpected:
                if self.me in ranks:
                    self.out.unexpected.append(name)
                if self.mode.strict:
                    self._fault(ranks[0], f"unexpected: {name!r} is in the state dict, not in the target")

    def _surprised(self, same: Iterable[Variant], place: Place) -> list[int]:
        """The ranks that pass in vain what belongs to `place`."""
        passing = sorted({rank for variant in same for rank in variant.ranks})
        fits = place in self.targets
        if self.mode.broadcast:
            return [] if fits else list(self.ranks)
        if any(variant.layout() is not None for variant in same):
            return [] if fits else passing
        holding = {rank for variant in self.targets[place][()] for rank in variant.ranks} if fits else set()
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
