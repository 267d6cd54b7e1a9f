"""`Model` for MindSpore: one cell, or the parts of a pipeline, as named values.

Names are places in the cell tree, never `Parameter.name`, which changes when a cell is put into another.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mindspore import nn
from mindspore.nn.cell import _IncompatibleKeys

from hyperstate.backend import ModelEntry
from hyperstate.errors import IncompatibleStateError, OptionError, OptionTypeError, UnsupportedConfigurationError

from . import names as tables
from . import training, tree
from .tensors import MindSporeTensors

EXTRA_STATE = "_extra_state"
"""Last part of the FQN of a cell's extra state."""
NAMES = ("own", "neutral")
_HOOKS = {
    "_lazy_state_dict_hooks": "a state_dict post-hook",
    "_lazy_load_state_dict_pre_hooks": "a load_state_dict pre-hook",
}
_OVERRIDES = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")
SHOWN = 20
"""So many names of a kind fit into a message."""


class Found(NamedTuple):
    """A value at its place."""

    part: int
    prefix: str
    cell: Any
    name: str
    value: Any
    kind: str
    frozen: bool = False
    neutral: bool = False
    """Whether `name` is PyTorch's already."""

    def __str__(self) -> str:
        called = f" ({self.value.name})" if hasattr(self.value, "name") else ""
        return f"{self.prefix}{self.name} of a {type(self.cell).__qualname__}{called} in part {self.part}"


class MindSporeModel:
    """See `hyperstate.backend.Model`. Parameters without values yet (`has_init`) get theirs through `assign`."""

    def __init__(self, model: Any, tensors: MindSporeTensors, *, device: Any = None, names: str = "own") -> None:
        if names not in NAMES:
            raise OptionError(f"names={names!r} must be one of {NAMES}")
        if device is not None:
            raise OptionError(f"device={device!r}: MindSpore's parameters get their memory where the process computes")
        self._tensors = tensors
        self._entries: dict[str, ModelEntry] = {}
        self._names: dict[int, list[str]] = {}
        self._params: dict[str, Any] = {}
        self._takers: dict[str, Any] = {}
        """FQN of extra state -> the cell that takes it back."""
        self._parts = [tree.walk(cell) for cell in _cells(model)]
        found: list[Found] = []
        for number, visits in enumerate(self._parts):
            for cell, prefix in visits:
                _refuse_own_ways(cell, prefix)
                for hook in (cell._lazy_state_dict_pre_hooks or {}).values():
                    hook(cell, prefix, False)
            found += _values(number, visits, names)
        self._add(found, self._renamed(found, names))

    def _renamed(self, found: Sequence[Found], names: str) -> Sequence[str]:
        """The FQN of each value. Warns of those that no table knows."""
        if names == "own":
            self._prefixes = {prefix: prefix for visits in self._parts for _, prefix in visits}
            return [one.prefix + one.name for one in found]
        cells = [(prefix, cell) for visits in self._parts for cell, prefix in visits]
        self._prefixes, _ = tables.model_names([(prefix, cell, "") for prefix, cell in cells], cells)
        fqns, unknown = tables.model_names(
            [(one.prefix, one.cell, one.name) for one in found if not one.neutral], cells
        )
        if unknown:
            more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
            warnings.warn(
                f"names='neutral': no table knows {', '.join(unknown[:SHOWN])}{more}; they keep their names",
                stacklevel=3,
            )
        return [fqns.get(one.prefix + one.name, self._prefixes[one.prefix] + one.name) for one in found]

    def _add(self, found: Sequence[Found], fqns: Sequence[str]) -> None:
        homes: dict[str, Found] = {}
        first: dict[int, str] = {}
        clashes: list[str] = []
        for one, fqn in zip(found, fqns, strict=True):
            other = homes.setdefault(fqn, one)
            if other is not one:
                # One object may be found twice under one name: a wrapper's segment is dropped.
                if other.value is not one.value or other.part != one.part:
                    clashes.append(f"{fqn!r}: {other} and {one}")
                continue
            tied = "" if one.kind == "extra" else first.setdefault(id(one.value), fqn)
            self._entries[fqn] = ModelEntry(one.value, one.kind, one.frozen, "" if tied == fqn else tied)
            if one.kind == "extra":
                self._takers[fqn] = one.cell
            elif hasattr(one.value, "requires_grad") and hasattr(one.value, "param_info"):
                self._names.setdefault(id(one.value), []).append(fqn)
                self._params[fqn] = one.value
        if clashes:
            raise IncompatibleStateError(
                "more than one value has one name; parts of a model need distinct FQNs:\n  "
                + "\n  ".join(clashes[:SHOWN])
            )

    # -- reading ----------------------------------------------------------------------------------

    def entries(self) -> Mapping[str, ModelEntry]:
        """The state dict by FQN, under all names of tied parameters; values are the live parameters and buffers."""
        return self._entries

    def parameters(self) -> Mapping[int, tuple[str, ...]]:
        """FQNs of each Parameter object, the canonical one first; statistics too, if an optimizer was given them."""
        return {param: tuple(fqns) for param, fqns in self._names.items()}

    def parameter(self, fqn: str) -> Any:
        """The parameter of an FQN."""
        return self._params[fqn]

    def prefixes(self, submodules: Iterable[Any]) -> set[str]:
        """FQN prefixes of the given cells ("" for a root). Raises `OptionError` for a cell from elsewhere."""
        result: set[str] = set()
        for cell in submodules:
            wanted = tree.unwrapped(cell)
            found = {self._prefixes[prefix] for visits in self._parts for each, prefix in visits if each is wanted}
            if not found:
                raise OptionError(f"submodules= holds a {type(cell).__qualname__} that is not part of the model")
            result |= found
        return result

    # -- writing ----------------------------------------------------------------------------------

    def writer(self, fqn: str) -> Any | None:
        """The live parameter or buffer of `fqn`; None where a value must go through `assign`."""
        entry = self._entries[fqn]
        return None if entry.kind == "extra" or self._tensors.is_meta(entry.value) else entry.value

    def assign(self, values: Mapping[str, Any]) -> None:
        """Take values that can't be written in place, then run load hooks and report what still has no values."""
        for fqn, value in values.items():
            if fqn in self._takers:
                self._takers[fqn].set_extra_state(value)
                continue
            old, new = self._entries[fqn].value, self._tensors.local(value)
            if self._tensors.is_meta(old):
                training.fill(old, new)
            else:
                self._tensors.copy([(self._tensors.local(old), new)])
        done: set[int] = set()
        for visits in self._parts:
            for cell, _ in reversed(visits):
                if id(cell) not in done:
                    done.add(id(cell))
                    for hook in (cell._lazy_load_state_dict_post_hooks or {}).values():
                        hook(cell, _IncompatibleKeys([], []))
        left = [fqn for fqn, one in self._entries.items() if one.kind != "extra" and self._tensors.is_meta(one.value)]
        if left:
            more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
            warnings.warn(f"still without values: {', '.join(left[:SHOWN])}{more}", stacklevel=2)


def _cells(model: Any) -> list[Any]:
    cells = [model] if isinstance(model, nn.Cell) else list(model)
    for cell in cells:
        if not isinstance(cell, nn.Cell):
            raise OptionTypeError(f"a part of the model is a {type(cell).__qualname__}, not an nn.Cell")
        if tree.is_optimizer(cell):
            raise OptionTypeError(f"a part of the model is an optimizer ({type(cell).__qualname__})")
    return cells


def _refuse_own_ways(cell: Any, prefix: str) -> None:
    """A cell that changes its values or names when it saves or loads can't be read value by value."""
    ways = [what for attribute, what in _HOOKS.items() if getattr(cell, attribute, None)]
    ways += [
        f"its own {name}"
        for name in _OVERRIDES
        if getattr(type(cell), name) is not getattr(nn.Cell, name) or name in vars(cell)
    ]
    if ways:
        raise UnsupportedConfigurationError(
            f"cell {prefix[:-1] or '(root)'!r}, a {type(cell).__qualname__}, has {' and '.join(ways)}, which may "
            "change values or names; remove it, or keep what it adds in get_extra_state() and set_extra_state()"
        )


def _values(part: int, visits: Sequence[tree.Visit], names: str) -> Iterable[Found]:
    """Everything of one part that the state dict has, in the order of `Cell.state_dict`."""
    places: dict[int, list[tree.Member]] = {}
    for member in tree.members(visits):
        places.setdefault(member.visit, []).append(member)
    for number, (cell, prefix) in enumerate(visits):
        for member in places.get(number, ()):
            if member.statistic:
                yield Found(part, prefix, cell, member.name, member.parameter, "buffer")
            else:
                frozen = not member.parameter.requires_grad
                yield Found(part, prefix, cell, member.name, member.parameter, "param", frozen)
        for name, buffer in cell._buffers.items():
            if buffer is not None and name not in (cell._lazy_non_persistent_buffers_set or ()):
                yield Found(part, prefix, cell, name, buffer, "buffer")
        if names == "neutral":
            for name, value in tables.carried(cell).items():
                yield Found(part, prefix, cell, name, value, "buffer", neutral=True)
        if type(cell).get_extra_state is not nn.Cell.get_extra_state:
            yield Found(part, prefix, cell, EXTRA_STATE, cell.get_extra_state(), "extra")
