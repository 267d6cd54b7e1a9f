"""Loading: read the manifest, find out which boxes this rank needs, read those, and set them under one verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ..agree import Call, Classes
from ..backend import Backend, Local, Tensors, choose_for_call
from ..collect import Held
from ..describe import Values, show
from ..errors import (
    AmbiguousLayoutError,
    CheckpointError,
    DisagreementError,
    Fault,
    IncompatibleStateError,
    raise_faults,
)
from ..flows import (
    Faults,
    Given,
    collector_paused,
    first_of,
    hold_for_set,
    lenient,
    meshes_in_use,
    open_call,
    put,
    turn,
)
from ..layout import Box, intersect, whole
from ..merge import brief
from ..options import StateDictOptions, read_options
from ..schema import LEAF, Key, TensorSpec, counter_of, put_together
from ..setters import IncompatibleKeys, Target
from ..statelayout import AMBIGUOUS, OPAQUE, fresh_state
from .boxes import offset_in, reads
from .folder import TRIES, id_at, open_file, read_manifest
from .manifest import Manifest, Saved, Stored
from .progress import Meter, Progress
from .storage import Reader, Store, open_store

BLOCK = 64 << 20
"""Bytes that are read at a time where a box is no run of bytes of the file."""


@dataclass(frozen=True)
class Loaded:
    """What `load` found besides the state that it has put in place."""

    keys: IncompatibleKeys
    """What did not match (not strict), and whose optimizer state was cleared."""
    extra: Any = None
    """What this rank gave as ``extra=`` when it saved; for a rank that did not save, what the lowest one gave."""
    extras: Mapping[int, Any] = field(default_factory=dict)
    """The same by the rank that gave it."""


@dataclass(frozen=True)
class Load:
    """What the caller of `load` asks for."""

    path: Any
    options: Any = None
    ranks: Any = None
    timeout: float | None = None
    device: Any = None
    state_form: str | None = None
    progress: Progress | None = None


class _ReplacedError(Exception):
    """Another checkpoint came to the path while this one was read."""


@collector_paused()
def load_into(model: Any, optimizer: Any, wish: Load) -> Loaded:
    """See `hyperstate.checkpoint.load`."""
    for _ in range(TRIES - 1):
        with suppress(_ReplacedError):
            return _load(model, optimizer, wish, again=True)
    return _load(model, optimizer, wish, again=False)


def _load(model: Any, optimizer: Any, wish: Load, *, again: bool) -> Loaded:
    """One try. With `again`, `_ReplacedError` on all ranks if it failed because somebody saves to the path."""
    backend, refusal = choose_for_call(first_of(model), first_of(optimizer))
    faults = Faults(backend, refusal)
    store = faults.guard(lambda: open_store(wish.path))
    manifest = None if store is None else faults.guard(lambda: read_manifest(store))
    options = wish.options
    if options is None:
        options = StateDictOptions(names="neutral" if manifest is None else manifest.naming)
    opts = faults.guard(lambda: read_options(options)) or lenient(options)
    sections = ("model",) if optimizer is None else ("model", "optimizer")
    given = Given(sections=sections, state_form=wish.state_form, device=wish.device)
    target = Target(Held(Values(), {}))
    if refusal is None:
        target = faults.guard(lambda: hold_for_set(backend, model, optimizer, given, opts.names)) or target
    match = None if manifest is None else _Match(manifest, target.held, sections)
    meshes = meshes_in_use(backend, model, target.held.meshes(), faults)
    with turn(backend):
        call = open_call(backend, "load", meshes, faults, wish.ranks, wish.timeout, whole_job=True)
        try:
            plan = None if match is None else faults.guard(lambda: _plan(backend, target, match))
            unexpected = _agree(call, faults.found, match, strict=opts.strict)
            assert store is not None and manifest is not None and match is not None and plan is not None
            model_dict, optim_dict = {}, {}
            read = faults.guard(lambda: _read(backend, store, manifest, plan, wish.progress))
            if read is not None:
                model_dict, optim_dict = faults.guard(lambda: match.state_dicts(backend, read)) or ({}, {})
            call.ready(faults.found)
        except (CheckpointError, DisagreementError) as error:
            if again and _replaced(call, store, manifest):
                raise _ReplacedError from error
            raise
        # What the checkpoint names and this rank's target lacks was left out above, so what is told here is missing.
        keys = put(
            "load",
            model,
            optimizer,
            replace(given, model_dict=model_dict, optim_dict=optim_dict if optimizer is not None else None),
            StateDictOptions(strict=opts.strict, names=opts.names),
            call.ranks,
            wish.timeout,
        )
    extras = {rank: put_together(skeleton, _counter(backend)) for ranks, skeleton in manifest.extra for rank in ranks}
    extra = extras.get(call.me, extras[min(extras)] if extras else None)
    return Loaded(keys._replace(unexpected_keys=[*keys.unexpected_keys, *unexpected]), extra, extras)


def _replaced(call: Call, store: Store | None, manifest: Manifest | None) -> bool:
    """Whether all ranks now see a checkpoint, and some another one than before. All ranks get the same answer."""
    now = (id_at(store) if store is not None else "") or "-"
    seen = [ids.split() for ids in call.compare({f"{'-' if manifest is None else manifest.id} {now}": ""})]
    return all(now != "-" for _, now in seen) and any(was != now for was, now in seen)


def _agree(call: Call, faults: list[Fault], match: _Match | None, *, strict: bool) -> list[str]:
    """One verdict on what every rank can tell before it reads. Returns names that no rank has a place for."""
    parts: dict[str, Any] = {} if match is None else match.description()
    classes = call.describe(faults, parts | {"strict": strict})
    found = _same_checkpoint(classes["checkpoint"])
    if len(classes["strict"]) > 1:
        said = ", ".join(f"rank {ranks[0]}: {value}" for ranks, value in classes["strict"])
        text = f"strict= must be the same on all ranks ({said})"
        raise_faults([*found, Fault(classes["strict"][1][0][0], "DisagreementError", text)], call.what)
    lacking = [set(names) for _, names in classes["lacks"]]
    unexpected = sorted(set.intersection(*lacking))
    if strict:
        leader = call.leader
        for name in unexpected:
            text = f"unexpected: {name!r} is in the checkpoint, not in the target"
            found.append(Fault(leader, "IncompatibleStateError", text))
        for ranks, names in classes["misses"]:
            for name in names:
                text = f"missing: {name!r} is in the target, not in the checkpoint"
                found.append(Fault(ranks[0], "IncompatibleStateError", text))
    raise_faults(found, call.what)
    return unexpected


def _same_checkpoint(classes: Classes) -> list[Fault]:
    if len(classes) == 1:
        return []
    said = ", ".join(f"rank {ranks[0]}: {name}" for ranks, name in classes)
    return [Fault(classes[1][0][0], "DisagreementError", f"the ranks read different checkpoints ({said})")]


# -- what belongs to what ----------------------------------------------------------------------------


class _Match:
    """Names of a checkpoint beside those of this rank's target, tied parameters under any of their names."""

    def __init__(self, manifest: Manifest, held: Held, sections: tuple[str, ...]) -> None:
        self.manifest, self.held = manifest, held
        self.optimizer = "optimizer" in sections
        aliases: dict[str, list[str]] = {}
        for alias, fqn in held.names.items():
            aliases.setdefault(fqn, [fqn]).append(alias)
        self._aliases = aliases
        self._saved_as: dict[str, list[str]] = {}
        for alias, fqn in manifest.tied.items():
            self._saved_as.setdefault(fqn, [fqn]).append(alias)
        models = {str(key[1]) for key in manifest.entries if key[0] == "model"}
        wanted = {str(held.names.get(key[1], key[1])) for key in held.values.entries if key[0] == "model"}
        self.models = self._matched(wanted, models)
        self.params = self._matched(held.params, manifest.names) if self.optimizer else {}
        self.lacks = self._unclaimed(models, {key[1] for key in held.values.entries if key[0] == "model"})
        if self.optimizer:
            self.lacks += self._unclaimed(manifest.names, set(held.params))
        self.misses = [fqn for fqn in sorted(wanted) if fqn not in self.models]
        self.misses += [fqn for fqn in held.params if fqn not in self.params] if self.optimizer else []

    def _matched(self, wanted: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
        """The target's name -> the name under which the checkpoint has it."""
        have = set(saved)
        found = {}
        for fqn in wanted:
            for name in self._aliases.get(fqn, [fqn]):
                stands = name if name in have else self.manifest.tied.get(name)
                if stands in have:
                    found[fqn] = stands
                    break
        return found

    def _unclaimed(self, saved: Iterable[str], own: set[str]) -> list[str]:
        own = own | {alias for fqn in own for alias in self._aliases.get(fqn, [])}
        return [name for name in sorted(saved) if own.isdisjoint(self._saved_as.get(name, [name]))]

    def description(self) -> dict[str, Any]:
        """What this rank tells the others."""
        return {"checkpoint": self.manifest.id, "lacks": self.lacks, "misses": sorted(set(self.misses))}

    def entries(self) -> Iterator[tuple[Key, Saved]]:
        """What this rank takes from the checkpoint, under the target's names."""
        models = {saved: fqn for fqn, saved in self.models.items()}
        params = {saved: fqn for fqn, saved in self.params.items()}
        for key, saved in self.manifest.entries.items():
            if key[0] == "model" and key[1] in models:
                yield ("model", models[key[1]]), saved
            elif key[0] == "state" and key[1] in params:
                yield ("state", params[key[1]], key[2]), saved
            elif key[0] == "global" and self.optimizer:
                yield key, saved

    def state_dicts(self, backend: Backend, read: Mapping[tuple[Key, int], Any]) -> tuple[dict[str, Any], Any]:
        """The dicts for the setter, from the tensors that were read."""
        model: dict[str, Any] = {}
        state: dict[str, dict[Any, Any]] = {}
        shared: dict[Any, Any] = {}
        counter = _counter(backend)
        for key, saved in self.entries():

            def leaf(item: Any, key: Key = key) -> Any:
                return read[key, item["t"]] if "t" in item else counter(item)

            value = put_together(saved.skeleton, leaf)
            if key[0] == "model":
                model[key[1]] = value
            elif key[0] == "state":
                state.setdefault(key[1], {})[key[2]] = value
            else:
                shared[key[1]] = value
        params = {saved: fqn for fqn, saved in self.params.items()}
        groups = []
        for fqns, skeleton in self.manifest.groups:
            mine = [params[fqn] for fqn in fqns if fqn in params]
            if mine or not fqns:
                groups.append({"params": mine, **put_together(skeleton, counter)})
        return model, {"state": state, "param_groups": groups, **({"global": shared} if shared else {})}


def _counter(backend: Backend) -> Any:
    def make(item: Any) -> Any:
        spec, data = counter_of(item)
        return backend.tensors.from_raw(data, spec, None)

    return make


# -- what to read ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """One tensor for this rank: where it stands, what the target makes of it."""

    key: Key
    leaf: int
    stored: Stored
    spec: TensorSpec
    """Saved dtype and shape in the target's layout."""
    box: Box
    like: Any
    """The target's sharded tensor, where it has one."""

    def held_by(self, chunk: int) -> int:
        """Bytes of it that stand in the chunk of that number."""
        common = intersect(self.box, self.stored.chunks[chunk].box)
        return 0 if common is None else self.stored.itemsize * common.size


def _plan(backend: Backend, target: Target, match: _Match) -> list[_Wanted]:
    """The tensors that this rank reads. Raises for those that can't fit."""
    found = []
    me = backend.fabric.rank()
    for key, saved in match.entries():
        for i, number in enumerate(saved.tensors):
            stored = match.manifest.tensors[number]
            spec, like = _target(key, stored, target, single=saved.skeleton == LEAF)
            box = whole(spec.shape) if spec.layout is None else spec.layout.box(spec.shape, me)
            if box is not None:
                found.append(_Wanted(key, i, stored, spec, box, like))
    return found


def _target(key: Key, stored: Stored, target: Target, *, single: bool) -> tuple[TensorSpec, Any]:
    """How a saved tensor lies in the target, and the target's tensor on whose mesh it lies."""
    plain, held = TensorSpec(stored.dtype, stored.shape), target.held
    kept = held.values.entries[key].single if single and key in held.values.entries else None
    if key[0] == "global" or (key[0] == "model" and (kept is None or key[1] in target.extra)):
        return plain, None
    if kept is not None and kept.form not in (OPAQUE, AMBIGUOUS):
        if kept.shape != stored.shape:
            raise IncompatibleStateError(f"{show(key)}: {brief(plain)} was saved for {brief(kept)}; the shapes differ")
        layout = kept.layout
    else:
        spec = fresh_state(stored.dtype, stored.shape, held.params[key[1]], held.rules.get(key[2]))
        if spec.form in (OPAQUE, AMBIGUOUS) and stored.sharded:
            raise AmbiguousLayoutError(
                f"{show(key)}: how {brief(plain)} lies over the ranks of its parameter is unknown; use "
                f"hyperstate.register_state_layout(<optimizer class>, {{{key[2]!r}: …}})"
            )
        layout = spec.layout
    if layout is None:
        return plain, None
    return replace(plain, layout=layout), held.parameters[key[1]] if key[0] == "state" else held.live[key]


# -- reading -----------------------------------------------------------------------------------------


def _read(
    backend: Backend, store: Store, manifest: Manifest, plan: list[_Wanted], progress: Progress | None
) -> dict[tuple[Key, int], Any]:
    """The tensors of `plan`, on the host; sharded ones hold this rank's part alone."""
    tensors = backend.tensors
    meter = Meter(progress, sum(wanted.stored.itemsize * wanted.box.size for wanted in plan))
    locals_: dict[int, Local] = {}
    by_file: dict[int, list[tuple[int, int]]] = {}
    for i, wanted in enumerate(plan):
        for j, chunk in enumerate(wanted.stored.chunks):
            if wanted.box.size and intersect(wanted.box, chunk.box) is not None:
                by_file.setdefault(chunk.file, []).append((i, j))
    for file in sorted(by_file):
        with open_file(store, manifest, manifest.files[file]) as opened:
            reader = opened.reader
            for i, j in by_file[file]:
                if fault := opened.fault(plan[i].stored, plan[i].stored.chunks[j]):
                    raise CheckpointError(f"{store.path}/{manifest.files[file].name}: {fault}")
                mapped = None if i in locals_ else _mapped(tensors, reader, plan[i], j)
                if mapped is not None:
                    locals_[i] = mapped
                else:
                    if i not in locals_:
                        locals_[i] = tensors.empty(plan[i].box.shape, plan[i].stored.dtype, None)
                    _read_chunk(tensors, reader, plan[i], j, locals_[i])
                meter.step(plan[i].held_by(j), manifest.files[file].name)
    for i, wanted in enumerate(plan):
        if i not in locals_:
            locals_[i] = tensors.empty(wanted.box.shape, wanted.stored.dtype, None)
    return {(w.key, w.leaf): tensors.wrap(locals_[i], w.spec, w.like) for i, w in enumerate(plan)}


def _mapped(tensors: Tensors, reader: Reader, wanted: _Wanted, number: int) -> Local | None:
    """This rank's part as a tensor over the file itself, if it is one run of bytes in it."""
    chunk, itemsize = wanted.stored.chunks[number], wanted.stored.itemsize
    if intersect(wanted.box, chunk.box) != wanted.box:
        return None
    nbytes = itemsize * wanted.box.size
    runs = list(islice(reads(chunk.box.shape, wanted.box.within(chunk.box), itemsize, nbytes), 2))
    if len(runs) != 1 or runs[0].cover != runs[0].box:
        return None
    start = chunk.start + itemsize * offset_in(chunk.box.shape, runs[0].cover.start)
    memory = reader.map(start, nbytes) if start % itemsize == 0 else None
    return None if memory is None else tensors.over(memory, wanted.stored.dtype, wanted.box.shape)


def _read_chunk(tensors: Tensors, reader: Reader, wanted: _Wanted, number: int, local: Local) -> None:
    """Fill the part of `local` that a chunk holds."""
    chunk, itemsize = wanted.stored.chunks[number], wanted.stored.itemsize
    common = intersect(wanted.box, chunk.box)
    assert common is not None
    for cover, box in reads(chunk.box.shape, common.within(chunk.box), itemsize, BLOCK):
        start = chunk.start + itemsize * offset_in(chunk.box.shape, cover.start)
        place = Box(*(tuple(a + b for a, b in zip(end, chunk.box.start, strict=True)) for end in box))
        into = tensors.view(local, place.within(wanted.box))
        view = tensors.host_bytes(into) if cover == box else None
        if view is not None:
            reader.read_into(view, start)
            continue
        block = tensors.empty(cover.shape, wanted.stored.dtype, None)
        view = tensors.host_bytes(block)
        if view is not None:
            reader.read_into(view, start)
        else:
            data = bytearray(itemsize * cover.size)
            reader.read_into(memoryview(data), start)
            block = tensors.from_raw(bytes(data), TensorSpec(wanted.stored.dtype, cover.shape), None)
        tensors.copy([(into, tensors.view(block, box.within(cover)))])
