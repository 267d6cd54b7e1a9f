"""`Optimizer` for MindSpore: one optimizer or several, read and written without a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mindspore as ms
from mindspore import nn

from hyperstate.backend import ParamGroup, ParamId
from hyperstate.errors import IncompatibleStateError, OptionError, UnsupportedConfigurationError

from .fields import Pairs
from .keyed import Keyed, keeps_by_parameter
from .legacy import Legacy
from .neutral import NeutralPart
from .parts import Grouped, Part
from .rules import layouts

WRAPPERS = {"LARS": "opt", "OptTFTWrapper": "opt"}
"""Optimizers around another one that keep nothing that training needs, and the attribute with the other one."""


class Tensors(Protocol):
    """What of `hyperstate.backend.Tensors` is used here."""

    def copy(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """See `hyperstate.backend.Tensors`."""

    def place(self, value: Any) -> Any:
        """See `hyperstate.backend.Tensors`."""

    def local(self, value: Any) -> Any:
        """See `hyperstate.backend.Tensors`."""


class Slot(NamedTuple):
    """Where a parameter stands: number of the optimizer, position in its list of parameters."""

    optimizer: int
    position: int
    param: Any

    def __str__(self) -> str:
        return f"optimizer {self.optimizer}, position {self.position}"


def is_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer of MindSpore's."""
    return isinstance(value, nn.Cell) and isinstance(getattr(value, "parameters", None), (tuple, list))


def _inner(optimizer: Any) -> Any:
    """The optimizer inside wrappers. Raises for what is no optimizer and for a ChainedOptimizer."""
    if any(kind.__name__ == "ChainedOptimizer" for kind in type(optimizer).__mro__):
        raise UnsupportedConfigurationError(
            "a ChainedOptimizer is not supported, since it keeps its parts' state in a form of its own; use its own "
            "state_dict() and load_state_dict()"
        )
    name = WRAPPERS.get(type(optimizer).__name__)
    if name is not None and is_optimizer(getattr(optimizer, name, None)):
        return _inner(getattr(optimizer, name))
    if not is_optimizer(optimizer):
        raise UnsupportedConfigurationError(
            f"{type(optimizer).__qualname__} is no optimizer of mindspore.nn, mindspore.mint.optim or "
            "mindspore.experimental.optim"
        )
    return optimizer


def _part_of(optimizer: Any) -> Part:
    """The optimizer, by what it keeps its groups in."""
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        return Legacy(optimizer)
    part = Grouped(optimizer)
    return Keyed(optimizer) if keeps_by_parameter(part) else part


class MindSporeOptimizer:
    """See `hyperstate.backend.Optimizer`. `names="neutral"` shows everything in the names that PyTorch has for it."""

    def __init__(self, optimizer: Any, tensors: Tensors, names: str = "own") -> None:
        if names not in ("own", "neutral"):
            raise OptionError(f"names={names!r} must be 'own' or 'neutral'")
        given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._tensors = tensors
        parts = [_part_of(_inner(one)) for one in given]
        self._parts: list[Part | NeutralPart] = [NeutralPart(part) if names == "neutral" else part for part in parts]
        self._slots: dict[ParamId, Slot] = {}
        for i, part in enumerate(parts):
            for position, param in enumerate(part.params):
                slot = Slot(i, position, param)
                other = self._slots.setdefault(id(param), slot)
                if other is not slot:
                    raise IncompatibleStateError(
                        f"{slot} holds the same parameter as {other}; each parameter may belong to one optimizer only"
                    )

    # -- reading ----------------------------------------------------------------------------------

    def types(self) -> Sequence[type]:
        """Classes of the optimizers."""
        return [type(part.optimizer) for part in self._parts]

    def groups(self) -> Sequence[ParamGroup]:
        """The groups of all optimizers in order."""
        return [
            ParamGroup([id(part.params[position]) for position in members], part.fields(number))
            for part in self._parts
            for number, members in enumerate(part.groups)
        ]

    def state(self) -> Mapping[ParamId, Mapping[Any, Any]]:
        """Live state of each parameter: MindSpore's optimizers have all of it from the start."""
        found = {pid: self._parts[slot.optimizer].state(slot.position) for pid, slot in self._slots.items()}
        return {pid: values for pid, values in found.items() if values}

    def shared(self) -> Mapping[Any, Any]:
        """Counters and learning-rate tables; of several optimizers, with the optimizer's number before the name."""
        return {self._name(i, key): value for i, part in enumerate(self._parts) for key, value in part.shared().items()}

    def _name(self, i: int, key: str) -> str:
        return key if len(self._parts) == 1 else f"{i}.{key}"

    def _shared_of(self, i: int, shared: Mapping[Any, Any]) -> dict[Any, Any]:
        """The part of `shared` that goes to optimizer `i`, by its own names; the first also gets what nobody has."""
        if len(self._parts) == 1:
            return dict(shared)
        prefix = f"{i}."
        mine = {key[len(prefix) :]: value for key, value in shared.items() if str(key).startswith(prefix)}
        numbers = tuple(f"{n}." for n in range(len(self._parts)))
        return mine if i else mine | {k: v for k, v in shared.items() if not str(k).startswith(numbers)}

    def state_keys(self) -> Sequence[Sequence[str] | None]:
        """For each optimizer, the state keys that its class makes with its fields; None for an unknown class."""
        found: list[Sequence[str] | None] = []
        for part in self._parts:
            inner = part.part if isinstance(part, NeutralPart) else part
            keys = [inner.state_keys(n) for n in range(len(part.groups))]
            known = [key for group in keys for key in group or ()]
            renamed = part.renamed(dict.fromkeys(known)) if isinstance(part, NeutralPart) else known
            found.append(None if None in keys else list(dict.fromkeys(renamed)))
        return found

    def rules(self) -> Mapping[Any, Any]:
        """What is known of the state of these classes and their bases."""
        found: dict[Any, Any] = {}
        for part in self._parts:
            known = layouts(type(part.optimizer))
            found |= part.renamed(known) if isinstance(part, NeutralPart) else known
        return found

    def fresh_form(self, param: ParamId) -> str:
        """How the optimizer keeps new state of a sharded parameter."""
        part = self._parts[self._slots[param].optimizer]
        return (part.part if isinstance(part, NeutralPart) else part).fresh_form()

    def counter_place(self, param: ParamId) -> Any:
        """The parameter's device: there MindSpore keeps all that its optimizers need."""
        return self._tensors.place(self._slots[param].param)

    # -- writing ----------------------------------------------------------------------------------

    def unfit(
        self,
        state: Mapping[ParamId, Mapping[Any, Any]],
        cleared: Iterable[ParamId],
        fields: Sequence[Mapping[str, Any] | None],
        shared: Mapping[Any, Any],
    ) -> Iterator[tuple[ParamId | None, str]]:
        """What of the arguments of `commit` these optimizers can't keep, since their state has a fixed form.

        In `state` and `shared`, tensors that have not arrived yet are given as their `TensorSpec`.
        """
        for i, (part, own_fields) in enumerate(zip(self._parts, self._split(fields), strict=True)):
            mine = {self._slots[p].position: values for p, values in state.items() if self._slots[p].optimizer == i}
            mine |= {self._slots[pid].position: {} for pid in cleared if self._slots[pid].optimizer == i}
            for position, text in part.unfit_state(mine):
                yield None if position is None else id(part.params[position]), text
            for text in [*part.unfit_fields(own_fields), *part.unfit_shared(self._shared_of(i, shared))]:
                yield None, text

    def commit(
        self,
        state: Mapping[ParamId, Mapping[Any, Any]],
        cleared: Iterable[ParamId],
        fields: Sequence[Mapping[str, Any] | None],
        shared: Mapping[Any, Any] | None,
    ) -> None:
        """See `hyperstate.backend.Optimizer`. Every tensor is written in place; what `unfit` lists is left out."""
        gone = set(cleared)
        pairs: Pairs = []
        for i, (part, own_fields) in enumerate(zip(self._parts, self._split(fields), strict=True)):
            mine = {self._slots[p].position: values for p, values in state.items() if self._slots[p].optimizer == i}
            mine |= {self._slots[pid].position: {} for pid in gone if self._slots[pid].optimizer == i}
            part.write_fields(own_fields, pairs)
            part.write_shared(self._shared_of(i, shared or {}), pairs)
            part.write_state(mine, pairs)
        local = self._tensors.local
        self._tensors.copy([(local(to), local(new) if isinstance(new, ms.Tensor) else new) for to, new in pairs])

    def _split(self, fields: Sequence[Mapping[str, Any] | None]) -> list[list[dict[str, Any] | None]]:
        """Fields per optimizer."""
        found, start = [], 0
        for part in self._parts:
            end = start + len(part.groups)
            found.append([None if given is None else dict(given) for given in fields[start:end]])
            start = end
        return found
