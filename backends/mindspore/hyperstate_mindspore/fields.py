"""Where MindSpore's optimizers keep the fields of param groups: in Parameters, tensors, attributes and dicts."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mindspore as ms
import numpy as np

from .rules import IMPLEMENTATION

Pairs = list[tuple[Any, Any]]
"""(to, from) of equal shape, copied when everything has been decided."""

MEANINGFUL: dict[str, Any] = {
    "maximize": False,
    "amsgrad": False,
    "nesterov": False,
    "centered": False,
    "dampening": 0,
}
"""Fields that an optimizer lacks where it only does what this value says."""


class Spot(Protocol):
    """The one place where a field is kept; several groups may share it."""

    @property
    def id(self) -> Hashable:
        """Equal for the same place."""

    def get(self) -> Any:
        """The live value."""

    def refuses(self, value: Any, /) -> str:
        """Why `value` can't be kept here, or ""."""

    def put(self, value: Any, pairs: Pairs, /) -> bool:
        """Keep `value`; whether a graph compiled before must be compiled again."""


def number_of(value: Any) -> Any:
    """A tensor of one or a few elements as Python numbers; anything else as it is.

    A float32 becomes the shortest number that rounds to it, so that 0.1 comes back as 0.1.
    """
    if not isinstance(value, ms.Tensor):
        return value
    array = value.asnumpy()
    items = [float(str(item)) if array.dtype == np.float32 else item.item() for item in array.ravel()]
    return items[0] if array.size == 1 else tuple(items)


def like(tensor: Any, value: Any) -> Any:
    """`value` (a tensor or numbers) as a fresh tensor of the shape of `tensor`."""
    if isinstance(value, ms.Tensor):
        return value.reshape(tensor.shape)
    return ms.Tensor(np.asarray(value, dtype=np.float64).reshape(tensor.shape), dtype=tensor.dtype)


def _size(value: Any) -> int:
    """How many numbers `value` has; -1 if it is none."""
    if isinstance(value, ms.Tensor):
        return int(value.size)
    items = value if isinstance(value, (tuple, list)) else (value,)
    return len(items) if all(isinstance(item, (int, float)) for item in items) else -1


def same(a: Any, b: Any) -> bool:
    """Whether two field values are equal, as far as float32 tells them apart."""
    a, b = number_of(a), number_of(b)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return bool(np.float32(a) == np.float32(b)) or a == b
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@dataclass(frozen=True)
class InTensor:
    """A Parameter (shown as it is) or a tensor (shown as numbers), written in place: its graph sees the new value."""

    tensor: Any
    shown: bool = True

    @property
    def id(self) -> Hashable:
        return id(self.tensor)

    def get(self) -> Any:
        return self.tensor if self.shown else number_of(self.tensor)

    def refuses(self, value: Any) -> str:
        return "" if _size(value) == self.tensor.size else f"needs {self.tensor.size} number(s), not {value!r:.60}"

    def put(self, value: Any, pairs: Pairs) -> bool:
        if value is not self.tensor:
            pairs.append((self.tensor, like(self.tensor, value)))
        return False


@dataclass(frozen=True)
class InAttribute:
    """An attribute. Numbers are written; what takes effect in the constructor only (`fixed`) must be equal."""

    owner: Any
    name: str
    fixed: bool = False

    @property
    def id(self) -> Hashable:
        return id(self.owner), self.name

    def get(self) -> Any:
        return getattr(self.owner, self.name)

    def refuses(self, value: Any) -> str:
        old = self.get()
        if self.fixed:
            return "" if same(old, value) else f"is {old!r} since the optimizer was built; build it with {value!r:.60}"
        return "" if _size(value) == _size(old) else f"can't be {value!r:.60}"

    def put(self, value: Any, _pairs: Pairs) -> bool:
        old = self.get()
        if self.fixed or same(old, value):
            return False
        setattr(self.owner, self.name, converted(old, value))
        return True


@dataclass(frozen=True)
class InDict:
    """An entry of a param group's dict."""

    group: MutableMapping[str, Any]
    name: str

    @property
    def id(self) -> Hashable:
        return id(self.group), self.name

    def get(self) -> Any:
        return self.group[self.name]

    def refuses(self, _value: Any) -> str:
        return ""

    def put(self, value: Any, _pairs: Pairs) -> bool:
        self.group[self.name] = converted(self.group.get(self.name), value)
        return False


@dataclass(frozen=True)
class InFlags:
    """A flag for each parameter, of which a group's are equal: in a list and in the tuple that graphs read."""

    owner: Any
    listed: str
    used: str
    members: tuple[int, ...]

    @property
    def id(self) -> Hashable:
        return id(self.owner), self.listed, self.members

    def get(self) -> Any:
        return bool(getattr(self.owner, self.listed)[self.members[0]])

    def refuses(self, value: Any) -> str:
        return "" if isinstance(value, bool) else f"can't be {value!r:.60}"

    def put(self, value: Any, _pairs: Pairs) -> bool:
        if value == self.get():
            return False
        flags = getattr(self.owner, self.listed)
        for position in self.members:
            flags[position] = value
        setattr(self.owner, self.used, tuple(flags))
        return True


def converted(old: Any, value: Any) -> Any:
    """`value` in the form in which `old` is kept; never the caller's own object."""
    if isinstance(old, (bool, int, float)) or old is None:
        value = number_of(value) if isinstance(value, ms.Tensor) and value.size == 1 else value
    if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(old, (tuple, list)) and isinstance(value, (tuple, list)):
        known = [*old, *[None] * (len(value) - len(old))]
        return type(old)(converted(was, item) for was, item in zip(known, value, strict=False))
    return copied(value)


def copied(value: Any) -> Any:
    """A copy that shares no tensor and no container with `value`."""
    if isinstance(value, ms.Tensor):
        return ms.Tensor(value.asnumpy().copy(), dtype=value.dtype)
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value


def refused(spots: Sequence[dict[str, Spot]], given: Sequence[dict[str, Any] | None]) -> list[str]:
    """What of the fields given for each group can't be kept, `spots` being where each group keeps its fields."""
    found: list[str] = []
    taken: dict[Hashable, Any] = {}
    for number, (group, fields) in enumerate(zip(spots, given, strict=True)):
        for name, value in (fields or {}).items():
            if name in IMPLEMENTATION:
                continue
            spot = group.get(name)
            if spot is None:
                if name in MEANINGFUL and not same(MEANINGFUL[name], value):
                    found.append(f"field {name!r} of param group {number} is {value!r}: this optimizer can't do that")
                continue
            if reason := spot.refuses(value):
                found.append(f"field {name!r} of param group {number} {reason}")
            elif not same(taken.setdefault(spot.id, value), value):
                found.append(
                    f"field {name!r} of param group {number} is {number_of(value)!r} and in another group "
                    f"{number_of(taken[spot.id])!r}, but this optimizer keeps one for both"
                )
    return found
