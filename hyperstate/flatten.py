"""An optimizer's dict in one level and back. Plain dicts; values are neither copied nor looked into.

    {"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn, …], field: value}], "global": {key: value}}

becomes ``state.<FQN>.<key>``, ``param_group.<FQN>.<field>`` (PyTorch writes ``param_groups.``) and
``global.<key>``. FQNs and keys may contain dots: reading splits at the longest known FQN.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from .errors import (
    IncompatibleStateError,
    InvalidStateDictError,
    OptionError,
    UnsupportedConfigurationError,
)
from .fqn import split_key

_STATE, _GLOBAL = "state", "global"
_GROUP, _TORCH_GROUP = "param_group", "param_groups"
_DIALECTS = {"hyperstate": _GROUP, "torch": _TORCH_GROUP}
_FLAT = (f"{_STATE}.", f"{_GROUP}.", f"{_TORCH_GROUP}.")
_SHOWN = 20


class _Part(NamedTuple):
    """One entry of the flat form: ``<prefix>.<fqn>.<name>``."""

    prefix: str
    fqn: str
    name: Any
    value: Any

    def __str__(self) -> str:
        return f"{self.name!r} of {self.fqn!r} (in {self.prefix})"


def flatten_optim_state_dict(state: Mapping[str, Any], *, dialect: str = "hyperstate") -> dict[str, Any]:
    """The flat form of a nested optimizer dict. The input is not changed and values are the same objects.

    Nested values (dicts, lists, tuples) stay values. ``dialect="torch"`` writes the group prefix that
    PyTorch reads. An empty dict stays empty.

    Not kept, because nothing in a flat dict could say it: which parameters share a group whose fields
    equal another's; an empty ``state[fqn]`` (the same as no state, as long as a group field still names the FQN).

    Raises `UnsupportedConfigurationError`, naming the FQN and key, for what would be lost or misread: a
    group without parameters, a parameter with neither state nor a group field, a key or FQN that is no
    string, two entries with one flat key, a key that would be split elsewhere; with ``dialect="torch"``
    also a state key with a dot, which that form reads as a nested dict. Raises `OptionError` for an
    unknown dialect, `InvalidStateDictError` for a dict that is no nested optimizer dict.
    """
    if dialect not in _DIALECTS:
        raise OptionError(f"dialect={dialect!r} must be one of {sorted(_DIALECTS)}")
    _check_nested(state)
    parts = [*_state_parts(state.get(_STATE) or {}), *_group_parts(state.get(_TORCH_GROUP) or [], _DIALECTS[dialect])]
    _check_named(state, parts)
    flat: dict[str, Any] = {}
    fqns = {part.fqn for part in parts}
    for part in parts:
        prefix, fqn, name, value = part
        if type(fqn) is not str or type(name) is not str or "." in name:
            _check_part(part, fqns, dialect)
        flat[f"{prefix}.{fqn}.{name}"] = value
    if len(flat) < len(parts):
        _refuse_twins(parts)
    for name, value in (state.get(_GLOBAL) or {}).items():
        if not isinstance(name, str):
            raise UnsupportedConfigurationError(f"the key {name!r} in 'global' is no string: it has no flat form")
        flat[f"{_GLOBAL}.{name}"] = value
    return flat


def _check_nested(state: Mapping[str, Any]) -> None:
    """Refuse what is no nested optimizer dict."""
    foreign = [key for key in state if key not in (_STATE, _TORCH_GROUP, _GLOBAL)]
    if foreign:
        raise InvalidStateDictError(
            f"a nested optimizer dict has 'state', 'param_groups' and perhaps 'global'; this one has {foreign[:5]}"
        )
    for fqn, slots in (state.get(_STATE) or {}).items():
        if not isinstance(slots, Mapping):
            raise InvalidStateDictError(f"state[{fqn!r}] is a {type(slots).__qualname__}, not a dict of state keys")
    for number, group in enumerate(state.get(_TORCH_GROUP) or []):
        if not isinstance(group, Mapping) or "params" not in group:
            raise InvalidStateDictError(f"param group {number} is no dict with the field 'params'")


def _state_parts(state: Mapping[Any, Mapping[Any, Any]]) -> Iterator[_Part]:
    for fqn, slots in state.items():
        for key, value in slots.items():
            yield _Part(_STATE, fqn, key, value)


def _group_parts(groups: Iterable[Mapping[str, Any]], prefix: str) -> Iterator[_Part]:
    for number, group in enumerate(groups):
        if not group["params"]:
            raise UnsupportedConfigurationError(
                f"param group {number} has no parameters, so the flat form has no name for its fields; "
                "remove the group, or use the nested form"
            )
        fields = [(field, value) for field, value in group.items() if field != "params"]
        for fqn in group["params"]:
            for field, value in fields:
                yield _Part(prefix, fqn, field, value)


def _check_named(state: Mapping[str, Any], parts: Iterable[_Part]) -> None:
    """Refuse parameters that no flat key would name."""
    named = {part.fqn for part in parts}
    groups = state.get(_TORCH_GROUP) or []
    for fqn in [*(state.get(_STATE) or {}), *(fqn for group in groups for fqn in group["params"])]:
        if fqn not in named:
            raise UnsupportedConfigurationError(
                f"the parameter {fqn!r} has no state and its param group has no field, so nothing of it "
                "would be left in the flat form; use the nested form"
            )


def _check_part(part: _Part, fqns: Container[str], dialect: str) -> None:
    """Refuse a part that reading the flat form would not give back."""
    if not isinstance(part.fqn, str):
        raise UnsupportedConfigurationError(
            f"the parameter {part.fqn!r} is named by a {type(part.fqn).__qualname__}, the flat form needs FQNs: "
            "use hyperstate.get_optim_state_dict(model, optimizer)"
        )
    if not isinstance(part.name, str):
        raise UnsupportedConfigurationError(
            f"the key {part} is a {type(part.name).__qualname__}, no string: it has no flat form; use the nested form"
        )
    if "." not in part.name:
        return
    found = split_key(f"{part.fqn}.{part.name}", fqns)
    if found != (part.fqn, part.name):
        raise UnsupportedConfigurationError(f"{part} would be read as a key of {found[0] if found else None!r}")
    if dialect == "torch" and part.prefix == _STATE:
        raise UnsupportedConfigurationError(
            f"{part} has a dot in its key, which PyTorch's flat form reads as a nested dict"
        )


def _refuse_twins(parts: Iterable[_Part]) -> NoReturn:
    """Name the first two parts with one flat key."""
    seen: dict[str, _Part] = {}
    for part in parts:
        key = f"{part.prefix}.{part.fqn}.{part.name}"
        if key in seen:
            raise UnsupportedConfigurationError(f"{seen[key]} and {part} would both become the flat key {key!r}")
        seen[key] = part
    raise AssertionError("no two parts have one flat key")


def is_flat(state_dict: Mapping[Any, Any]) -> bool:
    """Whether this is a flat optimizer dict: no ``state``, no ``param_groups``, and some key with a flat prefix."""
    if _STATE in state_dict or _TORCH_GROUP in state_dict:
        return False
    return any(isinstance(key, str) and key.startswith(_FLAT) for key in state_dict)


def unflatten_optim_state_dict(
    flat: Mapping[Any, Any],
    known: Container[str],
    groups: Sequence[Sequence[str]] | None = None,
    *,
    strict: bool = True,
) -> tuple[dict[str, Any], list[Any]]:
    """(nested dict, unexpected keys) of a flat dict in either dialect; the inverse of `flatten_optim_state_dict`.

    `known` are the FQNs of the model, with all names of tied parameters. Keys of other FQNs or under
    other prefixes are unexpected: an `IncompatibleStateError` that lists them if `strict`, else returned.

    What follows the FQN is one state key, dots and all. Only for FQNs whose fields stand under PyTorch's
    ``param_groups.`` do further dots make nested dicts, as PyTorch's writer splits them.

    Groups: with the target's grouping `groups` those come back, with the FQNs that `flat` names (a group
    of which it names none is left out, one that is empty in the target stays). FQNs of one group that
    have unequal values for a field: `IncompatibleStateError` if `strict`, else a warning and the first value;
    an FQN without the field has no say. FQNs that are in no group of `groups`, or all without `groups`,
    form groups by equal fields, in order of first appearance. Without any group field in `flat`,
    ``param_groups`` is empty: a setter then keeps the target's fields.

    Raises `UnsupportedConfigurationError` for an empty dict.
    """
    if not flat:
        raise UnsupportedConfigurationError("an empty flat dict holds no optimizer state")
    state, fields, shared, unexpected = _read(flat, known)
    if unexpected and strict:
        listed = ", ".join(map(repr, unexpected[:_SHOWN]))
        more = f" and {len(unexpected) - _SHOWN} more" if len(unexpected) > _SHOWN else ""
        raise IncompatibleStateError(f"unexpected keys in the flat optimizer dict, not of this model: {listed}{more}")
    nested: dict[str, Any] = {_STATE: state, _TORCH_GROUP: []}
    if fields:
        named = {fqn: fields.get(fqn, {}) for fqn in {**fields, **state}}
        nested[_TORCH_GROUP] = _grouped(named, groups or (), strict)
    if shared:
        nested[_GLOBAL] = shared
    return nested, unexpected


_ByFqn = dict[str, dict[str, Any]]


def _read(flat: Mapping[Any, Any], known: Container[str]) -> tuple[_ByFqn, _ByFqn, dict[str, Any], list[Any]]:
    """State by FQN, group fields by FQN, global values, and the keys that are none of these."""
    state: _ByFqn = {}
    fields: _ByFqn = {}
    shared: dict[str, Any] = {}
    unexpected = []
    torch_form = set()
    for key, value in flat.items():
        prefix, dot, rest = key.partition(".") if isinstance(key, str) else ("", "", "")
        if prefix == _GLOBAL and dot:
            shared[rest] = value
            continue
        found = split_key(rest, known) if prefix in (_STATE, _GROUP, _TORCH_GROUP) else None
        if found is None:
            unexpected.append(key)
            continue
        fqn, name = found
        target = (state if prefix == _STATE else fields).setdefault(fqn, {})
        if name in target:
            raise IncompatibleStateError(
                f"the field {name!r} of {fqn!r} stands under both {_GROUP!r} and {_TORCH_GROUP!r}"
            )
        target[name] = value
        if prefix == _TORCH_GROUP:
            torch_form.add(fqn)
    for fqn in torch_form & state.keys():
        if any("." in name for name in state[fqn]):
            state[fqn] = _deepen(fqn, state[fqn])
    return state, fields, shared, unexpected


def _deepen(fqn: str, slots: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": value}`` as ``{"a": {"b": value}}``."""
    result: dict[str, Any] = {}
    made = {id(result)}
    for name, value in slots.items():
        *path, last = name.split(".")
        inner = result
        for step in path:
            if step not in inner:
                inner[step] = {}
                made.add(id(inner[step]))
            inner = inner[step]
            if id(inner) not in made:
                break
        if id(inner) not in made or last in inner:
            raise IncompatibleStateError(f"the state of {fqn!r} has the key {name!r} and another that is part of it")
        inner[last] = value
    return result


def _grouped(
    named: Mapping[str, dict[str, Any]], target: Sequence[Sequence[str]], strict: bool
) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    placed = set()
    for number, fqns in enumerate(target):
        members = [fqn for fqn in fqns if fqn in named]
        placed.update(members)
        if members or not fqns:
            result.append({"params": members, **_agreed(number, members, named, strict)})
    rest = {fqn: fields for fqn, fields in named.items() if fqn not in placed}
    return result + [{"params": fqns, **rest[fqns[0]]} for fqns in _by_equal_fields(rest)]


def _agreed(number: int, fqns: Iterable[str], named: Mapping[str, dict[str, Any]], strict: bool) -> dict[str, Any]:
    """The fields of one target group."""
    chosen: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for fqn in fqns:
        for field, value in named[fqn].items():
            first = owner.setdefault(field, fqn)
            if first is fqn or alike(chosen[field], value):
                chosen.setdefault(field, value)
                continue
            text = (
                f"param group {number} of the target gets two values for {field!r}: "
                f"{_short(chosen[field])} of {first!r} and {_short(value)} of {fqn!r}"
            )
            if strict:
                raise IncompatibleStateError(text)
            warnings.warn(f"{text}; the first is used", stacklevel=4)
    return chosen


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _by_equal_fields(named: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    """FQNs with equal fields together, in order of first appearance."""
    groups: list[list[str]] = []
    same_objects: dict[Any, list[str]] = {}
    candidates: dict[Any, list[list[str]]] = {}
    for fqn, fields in named.items():
        identity = tuple((field, id(value)) for field, value in fields.items())
        group = same_objects.get(identity)
        if group is None:
            bucket = candidates.setdefault(frozenset((field, _mark(value)) for field, value in fields.items()), [])
            group = next((found for found in bucket if alike(named[found[0]], fields)), None)
            if group is None:
                group = []
                groups.append(group)
                bucket.append(group)
            same_objects[identity] = group
        group.append(fqn)
    return groups


def _mark(value: Any) -> Any:
    """Something hashable that alike values share: the work of grouping stays linear."""
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(map(_mark, value)))
    if isinstance(value, float):
        return (float, struct.pack("<d", value))
    return (type(value), value) if isinstance(value, (bool, int, str, bytes)) else type(value)


def alike(a: Any, b: Any) -> bool:
    """Whether two values are the same: type and content, ``True`` is not ``1``, ``-0.0`` not ``0.0``, nan is nan.

    Tensors must have equal dtype, shape and content. What can't be compared counts as different.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return alike(a.real, b.real) and alike(a.imag, b.imag)
    if isinstance(a, dict):
        left, right = ({(type(key), key): value for key, value in each.items()} for each in (a, b))
        return left.keys() == right.keys() and all(alike(value, right[key]) for key, value in left.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return _equal_objects(a, b)


def _equal_objects(a: Any, b: Any) -> bool:
    if any(getattr(a, name, None) != getattr(b, name, None) for name in ("shape", "dtype")):
        return False
    try:
        equal = a == b
        if not hasattr(equal, "all"):
            return bool(equal)
        return bool((equal | ((a != a) & (b != b))).all())  # noqa: PLR0124  # nan alone differs from itself
    except Exception:  # noqa: BLE001  # a foreign type's ==: devices that differ, no truth value, …
        return False
