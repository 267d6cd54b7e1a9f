"""What the keys of a checkpoint name in an optimizer. Pure; the values are not looked at.

Nested dicts are stored as ``state.<FQN>.<key>[.<inner>…]`` and ``param_groups.<index>.<field>``, flat ones as
``state.<FQN>.<key>`` and ``param_group.<FQN>.<field>`` (or ``param_groups.``, PyTorch's). Where the writer recorded
the path of each key (PyTorch DCP's ``planner_data``) that decides; else keys are cut at the longest known FQN.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .fqn import split_key

Path = tuple[str | int, ...]

GROUPS = ("param_group", "param_groups")


class Named(NamedTuple):
    """One key. `path` leads from the parameter, the group or the shared state to the value."""

    key: str
    owner: str | int
    """FQN, or index of a group; "" for shared state."""
    path: Path


@dataclass
class OptimKeys:
    """The keys of a checkpoint that belong to an optimizer of this model."""

    state: list[Named] = field(default_factory=list)
    groups: list[Named] = field(default_factory=list)
    shared: list[Named] = field(default_factory=list)
    by_fqn: bool | None = None
    """Whether group fields stand under FQNs (flat) or under indices (nested); None if there are none."""
    seen: bool = False
    """Whether any key is an optimizer's, be it of parameters that this model lacks."""


def read_keys(keys: Mapping[str, Path | None], known: Container[str]) -> OptimKeys:
    """Sort the keys of an optimizer out; `known` are the FQNs of the model. Other models' and other keys are left out.

    The values of `keys` are the recorded paths, None where there is none.
    """
    found = OptimKeys()
    keys = {key: path if path is not None and ".".join(map(str, path)) == key else None for key, path in keys.items()}
    parts = {key: _parts(key, path) for key, path in keys.items()}
    found.by_fqn = _by_fqn([(parts[key], path) for key, path in keys.items() if parts[key][0] in GROUPS], known)
    for key, (section, *rest) in parts.items():
        if not rest or section not in ("state", "global", *GROUPS):
            continue
        found.seen = True
        if section == "global":
            found.shared.append(Named(key, "", tuple(rest)))
        elif section == "state":
            found.state += _of_fqn(key, rest, known)
        elif found.by_fqn:
            found.groups += _of_fqn(key, rest, known)
        else:
            found.groups += _of_index(key, rest)
    return found


def _parts(key: str, path: Path | None) -> Path:
    """(section, all that follows it as one string), or the recorded path if it has more than one step."""
    if path is not None and len(path) > 1:
        return path
    section, dot, rest = key.partition(".")
    return (section, rest) if dot else (section,)


def _by_fqn(groups: Iterable[tuple[Path, Path | None]], known: Container[str]) -> bool | None:
    """Which form the group keys are in. A nested group always has ``params``, and a flat field has no such name."""
    answer = None
    for (_, *rest), path in groups:
        if len(rest) > 1:
            return not isinstance(rest[0], int)
        if path is not None and len(path) == 1:
            return True
        name = str(rest[0]) if rest else ""
        index, _, field_name = name.partition(".")
        if index.isdecimal() and field_name == "params":
            return False
        answer = answer or split_key(name, known) is not None or not index.isdecimal()
    return answer


def _of_fqn(key: str, rest: list[str | int], known: Container[str]) -> list[Named]:
    if len(rest) > 1:  # a recorded path
        return [Named(key, rest[0], tuple(rest[1:]))] if isinstance(rest[0], str) and rest[0] in known else []
    split = split_key(str(rest[0]), known)
    return [] if split is None else [Named(key, split[0], tuple(split[1].split(".")))]


def _of_index(key: str, rest: list[str | int]) -> list[Named]:
    if len(rest) > 1:
        index, path = rest[0], tuple(rest[1:])
    else:
        index, _, name = str(rest[0]).partition(".")
        path = tuple(name.split("."))
    if isinstance(index, str):
        if not index.isdecimal():
            return []
        index = int(index)
    return [Named(key, index, path)]
