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
from .schema import LEAF, Entry, Key, TensorSpec, counter_of, tensor_entry
from .sourcing import Source
from .statelayout import LOCAL
from .transfer import message_limit, run
from .wire import pack_entries


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
            found += [*disputed, *_unfit(call.backend, target, result, fields, mode)]
            prepared = _prepare(call.backend, target, result)
            prepared.objects = _own_objects(described, result)
            _rescue(call.backend, described, result, prepared)
    except Exception as error:  # noqa: BLE001  # it travels to all ranks and is raised there
        found.append(fault_of(error, call.me))
    call.ready([*found, *result.faults])
    _write(call, target, described, result, prepared, fields)
    return _report(target, result)


def _unfit(
    backend: Backend, target: Target, result: Resolution, fields: Sequence[dict[str, Any] | None], mode: Mode
) -> list[Fault]:
    """What an optimizer whose state has a fixed form says that it can't keep: faults if strict, else warnings."""
    refusals = getattr(target.optimizer, "unfit", None)
    if refusals is None or not target.held.has_optimizer:
        return []
    ids = target.held.ids
    state: dict[ParamId, dict[Any, Any]] = {}
    shared: dict[Any, Any] = {}
    for key, write in result.writes.items():
        if key[0] == "state":
            state.setdefault(ids[key[1]], {})[key[2]] = _announced(backend, write)
        elif key[0] == "global":
            shared[key[1]] = _announced(backend, write)
    names = {pid: f"{fqn!r}: " for fqn, pid in ids.items()}
    cleared = [ids[fqn] for fqn in result.cleared]
    texts = [names.get(pid, "") + text for pid, text in refusals(state, cleared, fields, shared)]
    if mode.strict:
        return [Fault(backend.fabric.rank(), "IncompatibleStateError", text) for text in texts]
    if texts:
        warnings.warn(f"left out: {'; '.join(texts[:20])}", stacklevel=5)
    return []


def _announced(backend: Backend, write: Write) -> Any:
    """A value before its tensors have arrived: their specs in their places; None if it can't be carried."""
    if write.source.opaque:
        return None
    return rebuild(
        write.source.skeleton,
        lambda i: write.targets[i],
        lambda spec, data: backend.tensors.from_raw(data, spec, None),
    )


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
    if not any(described.tensors.values()):
        return
    tensors, pairs = backend.tensors, []
    written = {tensors.storage(slot.local) for slot in prepared.slots.values() if slot.live is not None}
    for key, number, route in result.deliveries if written else ():
        passed = described.tensors.get(result.names.get(key, key), ())
        if number >= len(passed):
            continue
        local = tensors.local(passed[number])
        if tensors.storage(local) not in written:
            continue
        slot = prepared.slots.get((key, number))
        itself = slot is not None and route.source == route.target and tensors.same_memory(slot.local, local)
        spec = tensors.spec(local)
        if not itself and spec is not None:
            fresh = tensors.empty(spec.shape, spec.dtype, tensors.place(local))
            prepared.rescued[key, number] = fresh
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
            entries[key] = entry
        elif key[0] == "model" and held.names.get(key[1], key[1]) == key[1]:
            entries[key] = Entry({"?": "extra"}) if key[1] in target.extra else entry
    aliases = {alias: fqn for alias, fqn in held.names.items() if alias != fqn}
    return {"entries": pack_entries(entries), "names": dict(sorted(aliases.items()))}


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
    boxes: dict[Write, list[tuple[TensorSpec, Box | None]]] = {}
    contents: dict[Write, Local | None] = {}
    fits: dict[tuple[int, int], bool] = {}
    for key, write in result.writes.items():
        if write not in boxes:
            boxes[write] = [(spec, _box_of(spec, me)) for spec in write.targets]
            contents[write] = _content(backend, write)
        content = contents[write]
        for i, (spec, box) in enumerate(boxes[write]):
            if box is None:
                continue
            old = _written(target, key, spec, box, fits) if write.source.single is not None else None
            slot = prepared.slots[key, i] = _slot(backend, target, key, spec, box, old)
            if content is not None and box.size:
                prepared.copies.append((slot.local, backend.tensors.view(content, box)))
    return prepared


def _box_of(spec: TensorSpec, me: int) -> Box | None:
    """This rank's part of one tensor; None if it has none."""
    return whole(spec.shape) if spec.layout is None else spec.layout.box(spec.shape, me)


def _content(backend: Backend, write: Write) -> Local | None:
    """The tensor that came in the schema, for a value that is a counter."""
    if write.source.single is None or write.source.skeleton == LEAF:
        return None
    have, data = counter_of(write.source.skeleton)
    return backend.tensors.from_raw(data, have, None)


def _written(target: Target, key: Key, spec: TensorSpec, box: Box, fits: dict[tuple[int, int], bool]) -> Any:
    """The value that is written in place, if any. `fits` keeps what was found out, by identity of what decides."""
    if key[0] == "model":
        return None if target.model is None else target.model.writer(key[1])
    kept = target.held.values.entries.get(key)
    if kept is None:
        return None
    sign = (id(kept), id(spec))
    if sign not in fits:
        was = kept.single
        plain = (None, box.shape, spec.dtype)
        fits[sign] = was is not None and (was == spec or (was.layout, was.shape, was.dtype) == plain)
    return target.held.live[key] if fits[sign] else None


def _slot(backend: Backend, target: Target, key: Key, spec: TensorSpec, box: Box, old: Any) -> _Slot:
    """Where this rank keeps its part of one tensor: in `old`, if given."""
    tensors = backend.tensors
    if old is not None:
        return _Slot(tensors.local(old), box, spec, old)
    if key[0] == "model":
        value = target.held.live[key]
        place = None if tensors.spec(value) is None else tensors.place(value)
        return _Slot(tensors.empty(box.shape, spec.dtype, place), box, spec)
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
    moves = [Move(index, one.route) for index, one in enumerate(result.deliveries)]

    def source(index: int) -> tuple[Local, Box]:
        one = result.deliveries[index]
        box = one.route.source.box(one.route.shape, me)
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
