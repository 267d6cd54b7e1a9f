"""What this rank holds, by name: models and optimizers as keyed values. No communication."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .backend import Backend, Model, Optimizer, ParamId, Tensor
from .describe import Values, describe
from .errors import IncompatibleStateError, UnsupportedConfigurationError
from .layout import Mesh
from .schema import Key, TensorSpec
from .statelayout import LOCAL, Rule, is_sharded, meshes_of, read_state, rules_for


@dataclass
class Held:
    """A model and perhaps an optimizer, described on this rank."""

    values: Values
    """("model", fqn) and ("state", fqn, key) and ("global", key) entries with their live tensors."""
    live: dict[Key, Any]
    """The same values as they are."""
    params: dict[str, TensorSpec] = field(default_factory=dict)
    """Specs of the optimizer's parameters by canonical FQN; `form` is that of fresh state."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """The parameters themselves."""
    ids: dict[str, ParamId] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Every name of a parameter -> its canonical one."""
    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)
    """FQNs and other fields of each param group."""
    fields: Values = field(default_factory=Values)
    """The group fields, taken apart, under ("group", index)."""
    rules: dict[Any, Rule] = field(default_factory=dict)
    has_optimizer: bool = False
    prefixes: tuple[str, ...] = ()
    """FQN prefixes of the submodules that were asked for."""

    def meshes(self) -> list[Mesh]:
        """Meshes on which anything of this rank lives."""
        specs = [spec for entry in self.values.entries.values() for spec in entry.leaves]
        return meshes_of([*specs, *self.params.values()])


def hold_model(
    backend: Backend,
    model: Model,
    *,
    skip_frozen: bool = False,
    only: Iterable[str] | None = None,
    contents: bool = True,
) -> Held:
    """The entries of a model; `only` are FQN prefixes (each ending in a dot) to keep. For `contents` see `describe`."""
    prefixes = None if only is None else tuple(only)
    live: dict[Key, Any] = {
        ("model", fqn): entry.value
        for fqn, entry in model.entries().items()
        if not (skip_frozen and entry.frozen) and (prefixes is None or fqn.startswith(prefixes))
    }
    names = {fqn: entry.tied or fqn for fqn, entry in model.entries().items()}
    return Held(describe(backend.tensors, live, contents=contents), dict(live), names=names, prefixes=prefixes or ())


def add_optimizer(
    backend: Backend,
    held: Held,
    model: Model,
    optimizer: Optimizer,
    state_form: str | None,
    *,
    contents: bool = True,
) -> Held:
    """`held` with the optimizer's groups and state, under the FQNs of `model`. For `contents` see `describe`."""
    names = model.parameters()
    held.has_optimizer = True
    held.rules = rules_for(optimizer.types(), optimizer.rules())
    held.names |= {alias: fqns[0] for fqns in names.values() for alias in fqns}
    for number, group in enumerate(optimizer.groups()):
        fqns = []
        for position, pid in enumerate(group.params):
            if pid not in names:
                raise IncompatibleStateError(
                    f"the optimizer's group {number} holds at position {position} a parameter that the model does not "
                    "have; build the optimizer from model.parameters() after the model was sharded"
                )
            fqns.append(names[pid][0])
            held.ids[fqns[-1]] = pid
        held.groups.append((fqns, dict(group.fields)))
    _add_params(backend, held, model, optimizer)
    by_id = {pid: fqn for fqn, pid in held.ids.items()}
    state: dict[Key, Any] = {
        ("state", by_id[pid], key): value for pid, slots in optimizer.state().items() for key, value in slots.items()
    }
    shared: dict[Key, Any] = {("global", key): value for key, value in optimizer.shared().items()}
    me = backend.fabric.rank()

    def read(key: Key, spec: TensorSpec) -> TensorSpec:
        if key[0] != "state" or spec.layout is not None:
            return spec
        return read_state(spec, held.params.get(key[1]), held.rules.get(key[2]), me)

    described = describe(backend.tensors, {**state, **shared}, read, contents=contents)
    held.values.entries |= described.entries
    held.values.tensors |= described.tensors
    held.values.counters |= described.counters
    held.live |= {**state, **shared}
    held.fields = describe(
        backend.tensors, {("group", i): fields for i, (_, fields) in enumerate(held.groups)}, _plain_field, inline=True
    )
    _choose_form(held, state_form)
    return held


def _plain_field(_: Key, spec: TensorSpec) -> TensorSpec:
    if spec.layout is not None:
        raise UnsupportedConfigurationError("a field of a param group can't be a sharded tensor")
    return spec


def _add_params(backend: Backend, held: Held, model: Model, optimizer: Optimizer) -> None:
    for fqn, pid in held.ids.items():
        held.parameters[fqn] = model.parameter(fqn)
        spec = backend.tensors.spec(held.parameters[fqn])
        if spec is None:
            raise IncompatibleStateError(f"parameter {fqn!r} is no tensor")
        form = optimizer.fresh_form(pid) if spec.layout is not None else ""
        held.params[fqn] = replace(spec, form=form) if form else spec


def _choose_form(held: Held, state_form: str | None) -> None:
    """Fresh state of sharded parameters takes the form that was asked for, else the one of state that is there."""
    if state_form is None:
        forms = {
            spec.form
            for key, entry in held.values.entries.items()
            if key[0] == "state" and is_sharded(held.params.get(key[1]))
            for spec in entry.leaves
            if spec.layout is not None or spec.form == LOCAL
        }
        if len(forms) != 1:
            return
        (form,) = forms
    else:
        form = {"sharded": "", "local": LOCAL}[state_form]
    for fqn, spec in held.params.items():
        if spec.layout is not None and spec.form != form:
            held.params[fqn] = replace(spec, form=form)
