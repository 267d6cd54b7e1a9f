"""Optimizers of ``mindspore.nn`` taken apart."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import nn

from .fields import InAttribute, InFlags, InTensor, Pairs, Spot, copied, number_of, same
from .parts import Fields, Part, recompile
from .rules import IMPLEMENTATION

EXTRA = "hyperstate_fields"
"""Attribute of an optimizer without group dicts: for each parameter, the fields that it has no place for."""
FIRST_FLAGS = "hyperstate_decay_flags"
"""Attribute of an optimizer whose decay flags were set: those it was built with, which make its groups."""
NOT_FIELDS = IMPLEMENTATION | {"self", "params", "learning_rate", "weight_decay", "loss_scale", "kwargs", "args"}


class Legacy(Part):
    """``mindspore.nn`` optimizers: no group objects, but a learning rate and a weight decay for each parameter.

    Parameters that share these form a group. Without groups of its own, an optimizer leaves parameters called
    gamma or beta undecayed (`decay_flags`); those form a second group, whose weight decay is 0.
    """

    def _find_groups(self) -> None:
        found: dict[Any, list[int]] = {}
        for position in range(len(self.params)):
            found.setdefault(self._settings(position), []).append(position)
        common = self._common()
        for positions in found.values():
            members = tuple(positions)
            spots: dict[str, Spot] = {}
            rate = constant_rate(self._rate(members[0]))
            if rate is not None:
                spots["lr"] = InTensor(rate)
            decay = self._decay(members)
            if decay is not None:
                spots["weight_decay"] = decay
            if self.optimizer.is_group:
                spots["grad_centralization"] = InFlags(
                    self.optimizer, "group_grad_centralization", "grad_centralization_flags", members
                )
            self.groups.append(members)
            self.spots.append(spots | common)

    def _settings(self, position: int) -> tuple[Any, ...]:
        optimizer = self.optimizer
        rate = id(self._rate(position))
        if not self._decays():
            return (rate,)
        if not optimizer.is_group:
            return rate, bool(vars(optimizer).get(FIRST_FLAGS, optimizer.decay_flags)[position])
        decay = optimizer.group_weight_decay[position]
        centralized = bool(optimizer.group_grad_centralization[position])
        return rate, id(decay) if isinstance(decay, nn.Cell) else float(decay), centralized

    def _decays(self) -> bool:
        """Whether weight decay is the base class'. AdaFactor has one of its own for all parameters."""
        return not hasattr(self.optimizer, "weight_decay_flag")

    def _decay(self, members: tuple[int, ...]) -> Spot | None:
        optimizer = self.optimizer
        if not self._decays():
            return InTensor(optimizer.weight_decay, shown=False)
        held = optimizer.weight_decay[members[0]] if optimizer.is_group else optimizer.weight_decay
        return None if isinstance(held, nn.Cell) else InDecay(optimizer, members)

    def rate(self, group: int) -> Any:
        """The learning rate of a group's next step, by whatever decides it."""
        rates = self.optimizer.get_lr()
        return rates[self.groups[group][0]] if self.optimizer.is_group_lr else rates

    def _rate(self, position: int) -> Any:
        rates = self.optimizer.learning_rate
        return rates[position] if self.optimizer.is_group_lr else rates

    def _rates(self) -> list[Any]:
        found: dict[int, Any] = {}
        for position in range(len(self.params)):
            rate = self._rate(position)
            inner = rate.get_parameters() if isinstance(rate, nn.Cell) else [rate]
            found |= {id(param): param for param in inner if isinstance(param, ms.Parameter)}
        return list(found.values())

    def _common(self) -> dict[str, Spot]:
        """Constructor arguments that the optimizer keeps for all its parameters."""
        optimizer = self.optimizer
        given = getattr(optimizer, "init_args", None)
        names = given if given is not None else inspect.signature(type(optimizer).__init__).parameters
        found: dict[str, Spot] = {}
        for name in [*names, *(self.known.fields if self.known else ())]:
            value = None if name in NOT_FIELDS else getattr(optimizer, name, None)
            if isinstance(value, ms.Tensor):
                found[name] = InTensor(value, shown=isinstance(value, ms.Parameter))
            elif _are_numbers(value):
                fixed = isinstance(value, bool) or (self.known is not None and name in self.known.fixed)
                found[name] = InAttribute(optimizer, name, fixed)
        return found

    # -- weight decay -----------------------------------------------------------------------------

    def fields(self, group: int) -> Fields:
        """The fields that the optimizer knows, and those kept for it."""
        extra = vars(self.optimizer).get(EXTRA, {}).get(self.groups[group][0], {})
        return {**extra, **super().fields(group)}

    def unfit_fields(self, given: Sequence[Fields | None]) -> list[str]:
        """As for any; and there is one weight decay for all parameters that have one, unless there are groups."""
        found = super().unfit_fields(given)
        wanted = [number_of(fields["weight_decay"]) for fields in given if fields and "weight_decay" in fields]
        if not self._decays() and any(bool(value) != self.optimizer.weight_decay_flag for value in wanted):
            found.append("weight_decay can't become zero, or other than zero, after this optimizer was built")
        if self._decays() and not self.optimizer.is_group:
            nonzero = [value for value in wanted if value]
            if any(not same(nonzero[0], value) for value in nonzero):
                found.append(
                    f"weight_decay is {wanted}, but this optimizer was built without groups and keeps one; build it "
                    "with groups"
                )
        return found

    def write_fields(self, given: Sequence[Fields | None], pairs: Pairs) -> None:
        """As for any; and the one weight decay of an optimizer without groups, with the flags of who has it."""
        if not self.optimizer.is_group and self._decays() and self._write_decay(given, pairs):
            recompile(self.optimizer)
        super().write_fields(given, pairs)

    def _write_decay(self, given: Sequence[Fields | None], pairs: Pairs) -> bool:
        optimizer = self.optimizer
        if isinstance(optimizer.weight_decay, nn.Cell):
            return False
        wanted = [
            float(
                number_of(
                    fields["weight_decay"] if fields and "weight_decay" in fields else spots["weight_decay"].get()
                )
            )
            for spots, fields in zip(self.spots, given, strict=True)
        ]
        decay = next((value for value in wanted if value), 0.0)
        flags = list(optimizer.decay_flags)
        if decay:
            for members, value in zip(self.groups, wanted, strict=True):
                for position in members:
                    flags[position] = value > 0
        pairs.append((optimizer.weight_decay, ms.Tensor(decay * optimizer.loss_scale, ms.float32)))
        return set_decay_flags(optimizer, flags, bool(decay))

    def _keep_extra(self, group: int, name: str, value: Any) -> None:
        if name == "lr":
            return  # a table or a schedule decides
        kept = vars(self.optimizer).setdefault(EXTRA, {})
        for position in self.groups[group]:
            kept.setdefault(position, {})[name] = copied(value)


class InDecay:
    """Weight decay of some parameters of a legacy optimizer, which keeps it times its loss scale."""

    def __init__(self, optimizer: Any, members: tuple[int, ...]) -> None:
        self._optimizer, self._members = optimizer, members

    @property
    def id(self) -> Any:
        return id(self._optimizer), "weight_decay", self._members

    def get(self) -> float:
        optimizer, first = self._optimizer, self._members[0]
        if optimizer.is_group:
            return float(optimizer.group_weight_decay[first]) / float(optimizer.loss_scale)
        if not optimizer.decay_flags[first]:
            return 0.0
        return float(number_of(optimizer.weight_decay)) / float(optimizer.loss_scale)

    def refuses(self, value: Any) -> str:
        number = number_of(value)
        return "" if isinstance(number, (int, float)) and number >= 0 else f"can't be {value!r:.60}"

    def put(self, value: Any, pairs: Pairs) -> bool:
        """For an optimizer with groups; otherwise the optimizer's one value is set for all (`Legacy.write_fields`)."""
        number, optimizer = float(number_of(value)), self._optimizer
        if not optimizer.is_group or number == self.get():
            return False
        flags, scaled = list(optimizer.decay_flags), number * optimizer.loss_scale
        for position in self._members:
            flags[position] = number > 0
            optimizer.group_weight_decay[position] = scaled
            pairs.append((optimizer.weight_decay[position], ms.Tensor(scaled, ms.float32)))
        return set_decay_flags(optimizer, flags, any(flags))


def set_decay_flags(optimizer: Any, flags: Sequence[bool], used: bool) -> bool:
    """Say which parameters decay and whether any does; whether that is new."""
    old = optimizer.decay_flags, optimizer.exec_weight_decay
    vars(optimizer).setdefault(FIRST_FLAGS, optimizer.decay_flags)
    optimizer.decay_flags, optimizer.exec_weight_decay = tuple(flags), used
    return bool(old != (optimizer.decay_flags, optimizer.exec_weight_decay))


def _are_numbers(value: Any) -> bool:
    items = value if isinstance(value, tuple) and value else (value,)
    return all(isinstance(item, (bool, int, float)) for item in items)


def constant_rate(rate: Any) -> Any:
    """The Parameter of a learning rate that is one number; None for a table or a schedule."""
    inner = getattr(rate, "learning_rate", None) if isinstance(rate, nn.Cell) else rate
    return inner if isinstance(inner, ms.Parameter) and inner.ndim == 0 else None
