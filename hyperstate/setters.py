"""Setters: agree, resolve, allocate, get ready, move, commit. Nothing is written before all ranks are ready."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .agree import Call, Classes
from .backend import Backend, Local, Model, Optimizer, ParamId, Place
from .collect import Held
from .describe import Values, describe, rebuild, show
from .errors import Fault, InvalidStateDictError, UnsupportedConfigurationError, fault_of
from .fields import new_fields
from .layout import Box, whole
from .plan import Move, plan
from .resolve import Mode, Resolution, Resolver, Write
from .schema import LEAF, Entry, Key, TensorSpec, counter_entry, counter_of, pack_entries, tensor_entry
from .sourcing import Source
from .statelayout import LOCAL
from .transfer import message_limit, run


class IncompatibleKeys(NamedTuple):
    """What did not match, as ``torch.nn.Module.load_state_dict`` returns it."""

    missing_keys: list[str]
    """FQNs of the target for which nothing was passed; they keep what they had."""
    unexpected_keys: list[str]
    """FQNs (or keys) that were passed and that the target does not have."""
    cleared: list[str] = []  # noqa: RUF012  (a NamedTuple default; callers get a fresh list)
    """Parameters whose optimizer state was cleared: the source had none."""


@dataclass
class Target:
    """The live objects that a setter writes into, and their description."""

    held: Held
    model: Model | None = None
    optimizer: Optimizer | None = None
    extra: frozenset[str] = frozenset()
    """FQNs of extra state."""

    def needs(self) -> list[str]:
        """The sections for which some rank must pass something."""
        model = any(key[0] == "model" for key in self.held.values.entries)
        return ["model"] * model + ["optimizer"] * bool(self.held.params)


@dataclass(slots=True)
class _Slot:
    """Memory for one tensor leaf: what this rank keeps of it, and the value to hand over if it is fresh."""

    local: Local
    box: Box
    spec: TensorSpec
    live: Any = None
    """The target's own tensor, when it is written in place."""


@dataclass
class _Prepared:
    slots: dict[tuple[Key, int], _Slot] = field(default_factory=dict)
    copies: list[tuple[Local, Local]] = field(default_factory=list)
    """From counters of the schema into memory."""
    objects: dict[Key, Any] = field(default_factory=dict)
    """Values that hold an object which JSON can't carry, copied from what this rank passes."""
    rescued: dict[tuple[Key, int], Local] = field(default_factory=dict)
    """Copies of what this rank passes that lies in memory about to be written."""


def set_all(
    call: Call,
    target: Target,
    source: Source,
    described: Values,
    mode: Mode,
    parts: dict[str, Any],
    faults: Sequence[Fault],
) -> IncompatibleKeys:
    """One setter call: all checks on all ranks, then all writes. `parts` come from `describe_parts`."""
    classes = call.describe(faults, parts)
    found = _nothing_given(classes["sources"], target)
    result, prepared = Resolution(), _Prepared()
    fields: list[dict[str, Any] | None] = []
    try:
        resolver = Resolver(mode, call.ranks, call.me, target.held.rules, classes["targets"], classes["sources"])
        if not found:
            result = resolver.resolve()
        if not (found or result.faults):
            fields, disputed = new_fields(call.backend, target.held, classes["sources"], source.groups, resolver, mode)
            found += disputed
            prepared = _prepare(call.backend, target, result)
            prepared.objects = _own_objects(described, result)
            _rescue(call.backend, described, result, prepared)
    except Exception as error:  # noqa: BLE001  # it travels to all ranks and is raised there
        found.append(fault_of(error, call.me))
    call.ready([*found, *result.faults])
    _write(call, target, described, result, prepared, fields)
    return _report(target, result)


def _own_objects(described: Values, result: Resolution) -> dict[Key, Any]:
    """Copies of the objects that JSON can't carry: this rank's own. Raises if it has none."""
    found = {}
    for key, write in result.writes.items():
        if write.source.opaque:
            own = result.names.get(key, key)
            if own not in described.objects:
                raise UnsupportedConfigurationError(f"{show(key)} can't be carried here from another rank")
            found[key] = deepcopy(described.objects[own])
    return found


def _rescue(backend: Backend, described: Values, result: Resolution, prepared: _Prepared) -> None:
    """Copy what this rank passes out of memory that is about to be written, unless it is written with itself.

    A caller may pass the target's own live values, under other names or laid out in another way.
    """
    tensors, pairs = backend.tensors, []
    written = {tensors.memory(slot.local)[0] for slot in prepared.slots.values() if slot.live is not None}
    for one in result.deliveries if written else ():
        passed = described.tensors.get(result.names.get(one.key, one.key), ())
        if one.number >= len(passed):
            continue
        local = tensors.local(passed[one.number])
        memory = tensors.memory(local)
        if memory[0] not in written:
            continue
        slot = prepared.slots.get((one.key, one.number))
        itself = slot is not None and one.source_layout == one.target_layout and tensors.memory(slot.local) == memory
        spec = tensors.spec(local)
        if not itself and spec is not None:
            fresh = tensors.empty(spec.shape, spec.dtype, tensors.place(local))
            prepared.rescued[one.key, one.number] = fresh
            pairs.append((fresh, local))
    tensors.copy(pairs)


# -- descriptions ------------------------------------------------------------------------------------


def describe_parts(
    backend: Backend, target: Target, source: Source, described: Values, carry_objects: bool
) -> dict[str, Any]:
    """What this rank tells the others: its target, and what it passes."""
    return {"targets": _target_part(target), "sources": _source_part(backend, source, described, carry_objects)}


def _target_part(target: Target) -> dict[str, Any]:
    held = target.held
    entries: dict[Key, Entry] = {("param", fqn): tensor_entry(spec) for fqn, spec in held.params.items()}
    for key, entry in held.values.entries.items():
        if key[0] == "state":
            entries[key] = _without_content(entry)
        elif key[0] == "model" and held.names.get(key[1], key[1]) == key[1]:
            entries[key] = Entry({"?": "extra"}) if key[1] in target.extra else _without_content(entry)
    aliases = {alias: fqn for alias, fqn in held.names.items() if alias != fqn}
    return {"entries": pack_entries(entries), "names": dict(sorted(aliases.items()))}


def _without_content(entry: Entry) -> Entry:
    """An entry whose counters show dtype and shape alone: targets are replaced, so their values don't matter."""
    spec = entry.single
    return entry if spec is None or entry.leaves else counter_entry(spec, b"")


def _source_part(backend: Backend, source: Source, described: Values, carry_objects: bool) -> dict[str, Any]:
    fields = {("group", i): fields for i, (_, fields) in enumerate(source.groups)}
    groups = describe(backend.tensors, fields, carry_objects=carry_objects, inline=True)
    return {
        "given": sorted(source.given),
        "entries": pack_entries(described.entries),
        "groups": [[fqns, groups.entries[("group", i)].skeleton] for i, (fqns, _) in enumerate(source.groups)],
    }


def _nothing_given(sources: Classes, target: Target) -> list[Fault]:
    given = {section for _, source in sources for section in source["given"]}
    return [
        Fault(
            sources[0][0][0],
            InvalidStateDictError.__name__,
            f"no participating rank passes a state dict for the {section}; with broadcast_from_rank0=True the root "
            "must",
        )
        for section in target.needs()
        if section not in given
    ]


# -- memory ------------------------------------------------------------------------------------------


def _prepare(backend: Backend, target: Target, result: Resolution) -> _Prepared:
    """Memory for every value of this rank: the target's own, or fresh. What can fail fails here."""
    prepared = _Prepared()
    me = backend.fabric.rank()
    contents: dict[Entry, Local] = {}
    for key, write in result.writes.items():
        single = write.source.single
        for i, spec in enumerate(write.targets):
            slot = _slot(backend, target, key, spec, single is not None, me)
            if slot is None:
                continue
            prepared.slots[key, i] = slot
            if single is not None and write.source.skeleton != LEAF:
                if write.source not in contents:
                    have, data = counter_of(write.source.skeleton)
                    contents[write.source] = backend.tensors.from_raw(data, have, None)
                if slot.box.size:
                    prepared.copies.append((slot.local, backend.tensors.view(contents[write.source], slot.box)))
    return prepared


def _slot(backend: Backend, target: Target, key: Key, spec: TensorSpec, single: bool, me: int) -> _Slot | None:
    """Where this rank keeps its part of one tensor; None if it has no part."""
    box = whole(spec.shape) if spec.layout is None else spec.layout.box(spec.shape, me)
    if box is None:
        return None
    tensors = backend.tensors
    if key[0] == "model":
        assert target.model is not None
        live = target.model.writer(key[1])
        if live is not None:
            return _Slot(tensors.local(live), box, spec, live)
        value = target.held.live[key]
        place = None if tensors.spec(value) is None else tensors.place(value)
        return _Slot(tensors.empty(box.shape, spec.dtype, place), box, spec)
    old = target.held.live.get(key)
    kept = target.held.values.entries.get(key)
    if single and kept is not None:
        was = kept.single
        if was is not None and (was == spec or (was.layout, was.shape, was.dtype) == (None, box.shape, spec.dtype)):
            return _Slot(tensors.local(old), box, spec, old)
    return _Slot(tensors.empty(box.shape, spec.dtype, _fresh_place(backend, target, key, spec)), box, spec)


def _fresh_place(backend: Backend, target: Target, key: Key, spec: TensorSpec) -> Place:
    if key[0] != "state":
        return None
    assert target.optimizer is not None
    if spec.layout is None and whole(spec.shape).size == 1:
        return target.optimizer.counter_place(target.held.ids[key[1]])
    return backend.tensors.place(target.held.parameters[key[1]])


# -- writing -----------------------------------------------------------------------------------------


def _write(
    call: Call, target: Target, described: Values, result: Resolution, prepared: _Prepared, fields: Sequence[Any]
) -> None:
    error: Exception | None = None
    try:
        call.backend.tensors.copy(prepared.copies)
        _transfer(call, described, result, prepared)
        _commit(call.backend, target, result, prepared, fields)
    except Exception as caught:  # noqa: BLE001  # `finish` tells the others and raises
        error = caught
    call.finish(error)


def _transfer(call: Call, described: Values, result: Resolution, prepared: _Prepared) -> None:
    tensors, me = call.backend.tensors, call.me
    moves: list[tuple[Move, str]] = []
    for index, one in enumerate(result.deliveries):
        have = one.source
        move = Move(index, have.dtype, have.shape, one.source_layout, one.target_layout)
        moves.append((move, one.target.dtype))

    def source(index: int) -> tuple[Local, Box]:
        one = result.deliveries[index]
        box = one.source_layout.box(one.source.shape, me)
        assert box is not None
        rescued = prepared.rescued.get((one.key, one.number))
        return tensors.local(_passed(described, one.key, target_names)[one.number]) if rescued is None else rescued, box

    def target(index: int) -> tuple[Local, Box]:
        one = result.deliveries[index]
        slot = prepared.slots[one.key, one.number]
        return slot.local, slot.box

    target_names = result.names
    stages = plan(moves, me, message_limit(len(call.ranks)))
    run(call.backend, stages, source, target, call.timeout)


def _passed(described: Values, key: Key, names: dict[Key, Key]) -> list[Any]:
    return described.tensors[names.get(key, key)]


def _commit(backend: Backend, target: Target, result: Resolution, prepared: _Prepared, fields: Sequence[Any]) -> None:
    handed: dict[str, Any] = {}
    state: dict[ParamId, dict[Any, Any]] = {}
    shared: dict[Any, Any] = {}
    for key, write in result.writes.items():
        value = _value(backend, target, key, write, prepared)
        if key[0] == "model":
            if _written_in_place(prepared, key):
                continue
            handed[key[1]] = value
        elif key[0] == "state":
            state.setdefault(target.held.ids[key[1]], {})[key[2]] = value
        else:
            shared[key[1]] = value
    if target.model is not None and any(key[0] == "model" for key in result.writes):
        target.model.assign(handed)
    if target.optimizer is not None and target.held.has_optimizer:
        cleared = [target.held.ids[fqn] for fqn in result.cleared]
        target.optimizer.commit(state, cleared, fields, shared or None)


def _written_in_place(prepared: _Prepared, key: Key) -> bool:
    """Whether the target's own tensor has received the value already."""
    slot = prepared.slots.get((key, 0))
    return slot is not None and slot.live is not None


def _value(backend: Backend, target: Target, key: Key, write: Write, prepared: _Prepared) -> Any:
    """The Python value of one entry, built from the memory that was filled."""
    if key in prepared.objects:
        return prepared.objects[key]

    def leaf(i: int) -> Any:
        slot = prepared.slots[key, i]
        if slot.live is not None:
            return slot.live
        if slot.spec.layout is None or slot.spec.form == LOCAL:
            return slot.local
        like = target.held.parameters[key[1]] if key[0] == "state" else target.held.live[key]
        return backend.tensors.wrap(slot.local, replace(slot.spec, form=""), like)

    if write.source.single is not None:
        return leaf(0)

    def counter(spec: TensorSpec, data: bytes) -> Any:
        return backend.tensors.from_raw(data, spec, _fresh_place(backend, target, key, spec))

    return rebuild(write.source.skeleton, leaf, counter)


def _report(target: Target, result: Resolution) -> IncompatibleKeys:
    had = {key[1] for key in target.held.values.entries if key[0] == "state"}
    cleared = [fqn for fqn in result.cleared if fqn in had]
    if cleared:
        warnings.warn(f"optimizer state was cleared because the source has none: {cleared[:20]}", stacklevel=4)
    if result.ignored:
        names = sorted({show(key) for key in result.ignored})[:20]
        warnings.warn(f"only the source's values were used; other ranks pass these too: {names}", stacklevel=4)
    return IncompatibleKeys(result.missing, result.unexpected, cleared)
