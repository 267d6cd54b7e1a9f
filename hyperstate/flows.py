"""How a getter and a setter run, step by step. `api.py` is the public face of this."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import isfinite
from threading import RLock
from typing import Any, TypeVar

from .agree import Call
from .backend import Backend, Optimizer, choose, choose_for_call
from .collect import Held, add_optimizer, hold_model
from .describe import Values, rebuild
from .errors import InvalidStateDictError, OptionError, fault_of
from .flatten import flatten_optim_state_dict
from .getters import Result, describe_held, full, sharded
from .layout import Mesh
from .options import StateDictOptions, read_options
from .participants import participants
from .resolve import Mode
from .schema import Key, is_opaque
from .setters import IncompatibleKeys, Target, describe_parts, set_all
from .sourcing import Source, describe_source, read_model, read_optimizer

StateDict = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """What the caller of a setter passes, and which of the two it sets."""

    model_dict: Any = None
    optim_dict: Any = None
    sections: tuple[str, ...] = ()
    state_form: str | None = None
    device: Any = None
    check_sources: bool = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Calls make many small objects that live until they end; the cyclic garbage collector would walk them in vain."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# -- getters -------------------------------------------------------------------------------------------


@collector_paused()
def get(
    name: str,
    model: Any,
    optimizer: Any,
    submodules: Any,
    options: Any,
    ranks: Any,
    timeout: float | None,
    dialect: str = "hyperstate",
) -> tuple[StateDict, StateDict]:
    """One getter call, whatever it gets. `dialect` is that of `flatten_optim_state_dict`."""
    backend, refusal = choose_for_call(first_of(model), first_of(optimizer))
    faults = Faults(backend, refusal)
    opts = faults.guard(lambda: read_options(options)) or lenient(options)
    held = Held(Values(), {})
    if refusal is None:
        wanted = submodules, opts, name, dialect
        held = faults.guard(lambda: hold_for_get(backend, model, optimizer, *wanted)) or held
    if not opts.full_state_dict:
        faults.raise_here()
        values = sharded(backend, held, to_host=opts.cpu_offload, warn=lambda text: warnings.warn(text, stacklevel=5))
        answered = {fqn: True for fqn in held.params}
    else:
        whole_job = opts.cpu_offload and not held.meshes()
        meshes = meshes_in_use(backend, model, held.meshes(), faults)
        with turn(backend):
            call = open_call(backend, _what(name, opts), meshes, faults, ranks, timeout, whole_job)
            parts = faults.guard(lambda: describe_held(call, held, root_only=opts.cpu_offload)) or {}
            flat = opts.flatten_optimizer_state_dict
            values, answered = full(call, held, parts, faults.found, root_only=opts.cpu_offload, flat=flat)
    strip = () if opts.keep_submodule_prefixes else held.prefixes
    model_dict = {_strip(key[1], strip): value for key, value in values.items() if key[0] == "model"}
    if optimizer is None:
        return model_dict, {}
    optim_dict = _optim_dict(backend, held, values, answered, opts)
    if opts.flatten_optimizer_state_dict:
        optim_dict = flatten_optim_state_dict(optim_dict, dialect=dialect)
    return model_dict, optim_dict


def hold_for_get(
    backend: Backend,
    model: Any,
    optimizer: Any,
    submodules: Any,
    opts: StateDictOptions,
    name: str,
    dialect: str = "hyperstate",
) -> Held:
    """What a getter reads. Raises for what it can't give."""
    port = backend.model(model, names=opts.names)
    if name == "get_optim_state_dict":
        held = Held(Values(), {})
    else:
        only = None if submodules is None else port.prefixes(submodules)
        held = hold_model(backend, port, skip_frozen=opts.ignore_frozen_params, only=only)
    if optimizer is None:
        return held
    optimizer_port = backend.optimizer(optimizer, names=opts.names)
    if dialect == "torch":
        _show_first_state(optimizer_port)
    add_optimizer(backend, held, port, optimizer_port, None)
    if opts.flatten_optimizer_state_dict:
        _check_flat(held, dialect)
    return held


def _show_first_state(optimizer: Optimizer) -> None:
    """As in PyTorch, one that never stepped has entries for a checkpoint library to load into. It is not stepped."""
    show = getattr(optimizer, "show_first_state", None)
    unknown = [kind.__qualname__ for kind in show()] if show is not None else []
    if unknown:
        warnings.warn(
            f"{', '.join(unknown)} never stepped, and what state it makes is not known: its state dict has no state "
            "for a checkpoint library to load into; make it with hyperstate.build_optim_load_template",
            stacklevel=6,
        )


def _check_flat(held: Held, dialect: str) -> None:
    """Refuse before the verdict, on all ranks, what has no flat form."""
    groups = [{"params": fqns, **fields} for fqns, fields in held.groups]
    flatten_optim_state_dict({**_nested(dict.fromkeys(held.live)), "param_groups": groups}, dialect=dialect)


def _strip(fqn: str, prefixes: Iterable[str]) -> str:
    for prefix in prefixes:
        if fqn.startswith(prefix):
            return fqn[len(prefix) :]
    return fqn


def _optim_dict(
    backend: Backend, held: Held, values: Result, answered: Mapping[str, bool], opts: StateDictOptions
) -> StateDict:
    """The nested optimizer dict of what this rank got; empty if it answers for no parameter."""
    if held.params and not any(answered.get(fqn) for fqn in held.params):
        return {}
    groups = []
    for i, (fqns, live) in enumerate(held.groups):
        mine = [fqn for fqn in fqns if answered.get(fqn)]
        if mine or not fqns:
            groups.append({"params": mine, **_fields(backend, held, i, live, opts)})
    return {"state": {}, "param_groups": groups, **_nested(values)}


def _nested(values: Mapping[Key, Any]) -> StateDict:
    """The sections "state" and "global" of an optimizer dict; a section without values is left out."""
    found: StateDict = {}
    for section, *path, last in values:
        if section in ("state", "global"):
            slots = found.setdefault(section, {})
            for name in path:
                slots = slots.setdefault(name, {})
            slots[last] = values[(section, *path, last)]
    return found


def _fields(backend: Backend, held: Held, i: int, fields: dict[str, Any], opts: StateDictOptions) -> dict[str, Any]:
    skeleton = held.fields.entries[("group", i)].skeleton
    if is_opaque(skeleton) or not (opts.full_state_dict or opts.cpu_offload):
        return dict(fields)
    live: Iterator[Any] = iter(held.fields.counters.get(("group", i), ()))

    def tensor(spec: Any, data: bytes) -> Any:
        place = backend.tensors.place(next(live))
        return backend.tensors.from_raw(data, spec, None if opts.cpu_offload else place)

    result: dict[str, Any] = rebuild(skeleton, lambda _: None, tensor)
    return result


# -- setters -------------------------------------------------------------------------------------------


@collector_paused()
def put(
    name: str, model: Any, optimizer: Any, given: Given, options: Any, ranks: Any, timeout: float | None
) -> IncompatibleKeys:
    """One setter call, whatever it sets."""
    backend, refusal = choose_for_call(first_of(model), first_of(optimizer))
    faults = Faults(backend, refusal)
    opts = faults.guard(lambda: read_options(options)) or lenient(options)
    target = Target(Held(Values(), {}))
    if refusal is None:
        target = faults.guard(lambda: hold_for_set(backend, model, optimizer, given, opts.names)) or target
    source, described = Source(), Values()
    if not faults.found:
        source = faults.guard(lambda: _read(backend, given, target.held, opts)) or source
        described = (
            faults.guard(
                lambda: describe_source(
                    backend.tensors,
                    source,
                    opts.broadcast_from_rank0,
                    given.check_sources,
                    None if opts.full_state_dict else target.held,
                    faults.rank,
                )
            )
            or described
        )
    parts = (
        {}
        if faults.found
        else faults.guard(lambda: describe_parts(backend, target, source, described, opts.broadcast_from_rank0)) or {}
    )
    passed = [spec.layout.mesh for e in described.entries.values() for spec in e.leaves if spec.layout is not None]
    meshes = meshes_in_use(backend, model, [*target.held.meshes(), *passed], faults)
    mode = Mode(opts.full_state_dict, opts.broadcast_from_rank0, opts.strict, given.check_sources)
    with turn(backend):
        call = open_call(backend, _what(name, opts), meshes, faults, ranks, timeout, opts.broadcast_from_rank0)
        return set_all(call, target, source, described, mode, parts, faults.found)


def hold_for_set(backend: Backend, model: Any, optimizer: Any, given: Given, names: str) -> Target:
    if given.state_form not in (None, "sharded", "local"):
        raise OptionError(f"state_form={given.state_form!r} must be 'sharded', 'local' or None")
    port = backend.model(model, device=given.device, names=names)
    target = Target(Held(Values(), {}), port)
    if "model" in given.sections:
        target.held = hold_model(backend, port, contents=False)
        target.extra = frozenset(fqn for fqn, entry in port.entries().items() if entry.kind == "extra")
    if optimizer is not None:
        target.optimizer = backend.optimizer(optimizer, names=names)
        add_optimizer(backend, target.held, port, target.optimizer, given.state_form, contents=False)
    return target


def _read(backend: Backend, given: Given, held: Held, opts: StateDictOptions) -> Source:
    """What was passed. A rank that passes nothing where every rank must is told which option it means."""
    source = Source()
    if "model" in given.sections:
        source.add(read_model(given.model_dict))
    if "optimizer" in given.sections:
        source.add(read_optimizer(backend.tensors, given.optim_dict, held))
    needed = {"model": bool(held.values.entries), "optimizer": bool(held.params)}
    lacking = [section for section in given.sections if needed[section] and section not in source.given]
    if lacking and opts.full_state_dict and not opts.broadcast_from_rank0:
        raise InvalidStateDictError(
            f"no {' and no '.join(lacking)} state dict was passed; full_state_dict=True needs it on every rank. If "
            "only the root rank holds it, set broadcast_from_rank0=True"
        )
    return source


# -- both ----------------------------------------------------------------------------------------------


class Faults:
    """What went wrong on this rank before the ranks could agree."""

    def __init__(self, backend: Backend, refusal: Exception | None = None) -> None:
        self.rank = backend.fabric.rank()
        self.found = [] if refusal is None else [fault_of(refusal, self.rank)]
        self._first = refusal

    def guard(self, step: Callable[[], T]) -> T | None:
        """The result of `step`, or None after noting its failure."""
        try:
            return step()
        except Exception as error:  # noqa: BLE001  # it travels to all ranks and is raised there
            self.found.append(fault_of(error, self.rank))
            self._first = self._first or error
            return None

    def raise_here(self) -> None:
        """Raise the first failure as it was: no other rank is involved."""
        if self._first is not None:
            raise self._first


def meshes_in_use(backend: Backend, model: Any, found: Sequence[Mesh], faults: Faults) -> Sequence[Mesh] | None:
    """Meshes in use; after a fault, the model's own. None if nobody can tell."""
    if found or not faults.found:
        return found
    try:
        return hold_model(backend, backend.model(model)).meshes()
    except Exception:  # noqa: BLE001  # another fault is under way already
        return None


_turns: dict[tuple[str, int], RLock] = {}


def turn(backend: Backend) -> RLock:
    """Held while this rank makes a collective call: messages of calls from two threads must not mix."""
    return _turns.setdefault((backend.name, backend.fabric.rank()), RLock())


def open_call(
    backend: Backend,
    what: str,
    meshes: Sequence[Mesh] | None,
    faults: Faults,
    ranks: Any,
    timeout: float | None,
    whole_job: bool,
) -> Call:
    """Open a collective call. A rank that can't tell who takes part tells the whole job so.

    Raises at once on a rank that is not in `ranks`: nobody waits for it.
    """
    me, world = backend.fabric.rank(), backend.fabric.world()
    limit = None if timeout is None else faults.guard(lambda: _seconds(timeout))
    limit = backend.fabric.timeout() if limit is None else limit
    explicit = None if ranks is None else faults.guard(lambda: tuple(backend.ranks_of(ranks)))
    whole_job = whole_job or meshes is None
    members = faults.guard(lambda: participants(meshes or (), me, world, whole_job=whole_job, explicit=explicit))
    if members is None and explicit and set(explicit) <= set(range(world)) and len(set(explicit)) == len(explicit):
        if me not in explicit:
            faults.raise_here()
        members = tuple(sorted(explicit))
    return Call(backend, members or tuple(range(world)), what, limit)


def _seconds(timeout: Any) -> float:
    limit = float(timeout)
    if not (isfinite(limit) and limit >= 0):
        raise OptionError(f"timeout={timeout!r} must be a number of seconds")
    return limit


def _what(name: str, opts: StateDictOptions) -> str:
    """The call as participants must all make it."""
    default = StateDictOptions()
    chosen = [
        f"{f.name}={getattr(opts, f.name)}" for f in fields(opts) if getattr(opts, f.name) != getattr(default, f.name)
    ]
    return f"{name}({', '.join(chosen)})"


def lenient(options: Any) -> StateDictOptions:
    """The readable part of options that were refused: enough to find the other ranks and tell them."""

    def is_set(name: str) -> bool:
        try:
            return getattr(options, name, False) is True
        except Exception:  # noqa: BLE001  # reading it is what was refused
            return False

    broadcast = is_set("broadcast_from_rank0")
    return StateDictOptions(
        full_state_dict=broadcast or is_set("full_state_dict"),
        cpu_offload=is_set("cpu_offload"),
        broadcast_from_rank0=broadcast,
    )


def first_of(value: Any) -> Any:
    """The object that tells the backend: the first of a sequence of modules or optimizers."""
    if isinstance(value, (list, tuple)):
        return value[0] if value else None
    return value


def names_of(model: Any, optimizer: Any, names: str) -> tuple[set[str], list[list[str]] | None]:
    """All parameter names of `model`, and the grouping of `optimizer` by FQN."""
    backend = choose(first_of(model), first_of(optimizer))
    port = backend.model(model, names=names)
    known = {fqn for fqns in port.parameters().values() for fqn in fqns}
    if optimizer is None:
        return known, None
    held = add_optimizer(backend, Held(Values(), {}), port, backend.optimizer(optimizer, names=names), None)
    return known, [fqns for fqns, _ in held.groups]


def prefixes_of(model: Any, submodules: Iterable[Any]) -> Sequence[str]:
    """FQN prefixes, each ending in a dot, of modules inside `model`."""
    return choose(first_of(model)).model(model).prefixes(submodules)
