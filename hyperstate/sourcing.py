"""What a caller passes to a setter, read into one neutral form. Never changes or keeps the caller's dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .backend import Tensors
from .collect import Held
from .describe import Values, content_digest, describe
from .errors import IncompatibleStateError, InvalidStateDictError
from .flatten import is_flat, unflatten_optim_state_dict
from .fqn import split_key
from .schema import Entry, Key, TensorSpec
from .statelayout import AMBIGUOUS, LIKE_PARAM, REPLICATED, read_state

IMPLEMENTATION_FIELDS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Group fields that choose an implementation, not a result: the target keeps its own."""
OWN_FIELDS = IMPLEMENTATION_FIELDS | {"params", "param_names"}


_NAMED = Entry(None)
"""That a dict names an FQN."""


@dataclass
class Source:
    """What one rank passes, by name."""

    given: tuple[str, ...] = ()
    """"model" and "optimizer", where something was passed for them."""
    values: dict[Key, Any] = field(default_factory=dict)
    names: dict[Key, Entry] = field(default_factory=dict)
    """("named", fqn) for every FQN that the optimizer dict names, in `state` or in a group."""
    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)

    def add(self, other: Source) -> None:
        """Take in what `other` brings."""
        self.given += other.given
        self.values |= other.values
        self.names |= other.names
        self.groups += other.groups


def read_model(state_dict: Any) -> Source:
    """A model's state dict. Raises `InvalidStateDictError` if it is no mapping of strings."""
    if state_dict is None:
        return Source()
    if not isinstance(state_dict, Mapping):
        raise InvalidStateDictError(f"a model state dict must be a dict by FQN, not {_type(state_dict)}")
    for fqn in state_dict:
        if not isinstance(fqn, str):
            raise InvalidStateDictError(f"a model state dict has the key {fqn!r}; keys are FQNs")
    return Source(("model",) if state_dict else (), {("model", fqn): value for fqn, value in state_dict.items()})


def read_optimizer(tensors: Tensors, state_dict: Any, held: Held) -> Source:
    """An optimizer's state dict: nested or flat, keyed by FQN or by the integers of the framework's own form.

    Integer keys are matched through the order of the groups of the target `held`.
    """
    if state_dict is None or (isinstance(state_dict, Mapping) and not state_dict):
        return Source()
    if not isinstance(state_dict, Mapping):
        raise InvalidStateDictError(f"an optimizer state dict must be a dict, not {_type(state_dict)}")
    source = Source(("optimizer",))
    if is_flat(state_dict):
        state_dict = _unflatten(state_dict, held, source)
    elif "state" not in state_dict and "param_groups" not in state_dict:
        raise InvalidStateDictError(
            f"an optimizer state dict has 'state' and 'param_groups', or flat keys; this one has "
            f"{[str(key) for key in list(state_dict)[:5]]}"
        )
    state, groups = state_dict.get("state") or {}, state_dict.get("param_groups") or []
    _check_form(state, groups)
    names = _integer_names(tensors, state, groups, held)
    for name, slots in state.items():
        fqn = names.get(name, name)
        source.names[("named", fqn)] = _NAMED
        for key, value in slots.items():
            source.values[("state", fqn, key)] = value
    for group in groups:
        fqns = [names.get(name, name) for name in group["params"]]
        source.names |= {("named", fqn): _NAMED for fqn in fqns}
        source.groups.append((fqns, {k: v for k, v in group.items() if k not in OWN_FIELDS}))
    for key, value in (state_dict.get("global") or {}).items():
        source.values[("global", key)] = value
    return source


def _unflatten(flat: Mapping[str, Any], held: Held, source: Source) -> Mapping[str, Any]:
    """Nested form of a flat dict. FQNs that this model lacks (other stages', or none's) are cut at the last dot."""
    known = set(held.names)
    for key in flat:
        prefix, _, rest = key.partition(".")
        if prefix in ("state", "param_group", "param_groups") and split_key(rest, known) is None and "." in rest:
            known.add(rest.rpartition(".")[0])
    nested: Mapping[str, Any]
    nested, unexpected = unflatten_optim_state_dict(flat, known, strict=False)
    source.names |= {("named", key): _NAMED for key in unexpected}
    return nested


def _check_form(state: Any, groups: Any) -> None:
    if not isinstance(state, Mapping) or not all(isinstance(slots, Mapping) for slots in state.values()):
        raise InvalidStateDictError("'state' of an optimizer state dict must map each parameter to a dict")
    if not isinstance(groups, Sequence) or not all(isinstance(g, Mapping) and "params" in g for g in groups):
        raise InvalidStateDictError("'param_groups' of an optimizer state dict must be a list of dicts with 'params'")


def _integer_names(tensors: Tensors, state: Mapping[Any, Any], groups: Sequence[Any], held: Held) -> dict[Any, str]:
    """FQNs of integer keys, through the order of the groups; empty if there are no integer keys."""
    listed = [list(group["params"]) for group in groups]
    numbers = [name for name in [*state, *(name for names in listed for name in names)] if isinstance(name, int)]
    if not numbers:
        return {}
    how = "names are needed: save with hyperstate.get_optim_state_dict(model, optimizer)"
    want = [fqns for fqns, _ in held.groups]
    if [len(names) for names in listed] != [len(fqns) for fqns in want]:
        raise IncompatibleStateError(
            f"integer keys can't be matched: groups of {[len(n) for n in listed]} parameters were passed, the "
            f"optimizer has groups of {[len(f) for f in want]}; {how}"
        )
    names = {name: fqn for ids, fqns in zip(listed, want, strict=True) for name, fqn in zip(ids, fqns, strict=True)}
    for number in numbers:
        if number not in names:
            raise IncompatibleStateError(f"state key {number} is in no param group; {how}")
    for name, slots in state.items():
        for key, value in slots.items():
            _check_shape(tensors.spec(value), held, names.get(name, name), key, how)
    return names


def _check_shape(spec: TensorSpec | None, held: Held, fqn: str, key: Any, how: str) -> None:
    param = held.params.get(fqn)
    if spec is None or param is None or not spec.shape:
        return
    rule = held.rules.get(key)
    if rule == LIKE_PARAM or (rule is None and len(spec.shape) == len(param.shape)):
        if spec.shape != param.shape:
            raise IncompatibleStateError(
                f"integer keys can't be matched: {key!r} of shape {spec.shape} falls to {fqn!r} of shape "
                f"{param.shape}; {how}"
            )


def describe_source(
    tensors: Tensors, source: Source, broadcast: bool, digests: bool, held: Held | None = None, me: int = 0
) -> Values:
    """The entries that `source` brings. Under `broadcast` a meta tensor counts as absent, else it is an error.

    With `held`, the target of a sharded dict, a plain tensor that could be rank `me`'s shard of its parameter
    and a statistic as well is AMBIGUOUS: it is that shard if other ranks pass theirs as sharded tensors.

    With `digests` the specs carry a digest of the contents, for `check_sources=`.
    """

    def read(key: Key, spec: TensorSpec) -> TensorSpec:
        if held is None or key[0] != "state" or held.rules.get(key[2]) == REPLICATED:
            return spec
        fqn: str = key[1]
        seen = read_state(spec, held.params.get(held.names.get(fqn, fqn)), None, me)
        return seen if seen.form == AMBIGUOUS else spec

    described = describe(tensors, source.values, read, carry_objects=broadcast)
    for key in [key for key, values in described.tensors.items() if any(map(tensors.is_meta, values))]:
        if not broadcast:
            raise InvalidStateDictError(f"the value of {key[1]!r} is a meta tensor: it has no data")
        del described.entries[key], described.tensors[key]
    if digests:
        for key, entry in described.entries.items():
            marks = [content_digest(tensors, value) for value in described.tensors[key]]
            leaves = tuple(replace(spec, form=mark) for spec, mark in zip(entry.leaves, marks, strict=True))
            described.entries[key] = Entry(entry.skeleton, leaves)
    described.entries |= source.names
    return described


def _type(value: Any) -> str:
    return f"a {type(value).__qualname__}"
