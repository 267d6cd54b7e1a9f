"""An optimizer in PyTorch's names: state, ``step`` and group fields translated both ways, by `names.OPTIMIZERS`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np

from hyperstate.schema import TensorSpec

from .fields import Pairs, number_of
from .legacy import Legacy
from .names import OptimizerNames, optimizer_names
from .parts import Fields, Part, write
from .rules import REPLICATED

CARRIED = "hyperstate_steps"
"""Attribute of an optimizer that counts no steps: for each parameter, the step that PyTorch counted."""
BLOCK = 1 << 20


class NeutralPart:
    """`Part` in neutral names. What no table knows keeps its name and is reported once."""

    def __init__(self, part: Part) -> None:
        self.part, self.optimizer, self.params, self.groups = part, part.optimizer, part.params, part.groups
        table = optimizer_names(type(part.optimizer))
        self.names = table or OptimizerNames()
        self._group_of = {position: n for n, members in enumerate(part.groups) for position in members}
        self._fields = [self._to_neutral(n, part.fields(n)) for n in range(len(part.groups))]
        self._given_shared: frozenset[Any] = frozenset()
        self._own_keys = {neutral: own for own, neutral in self.names.state.items()}
        foreign = list(part.slots) if table is None else [key for key in part.slots if key in self.names.foreign]
        if foreign:
            name = type(part.optimizer).__qualname__
            warnings.warn(f"PyTorch has no name for this state of {name}; it keeps its own: {foreign}", stacklevel=2)

    def renamed(self, rules: Mapping[Any, Any]) -> dict[Any, Any]:
        """Rules of state keys under their neutral names."""
        return {self.names.state.get(key, key): rule for key, rule in rules.items()} | {"step": REPLICATED}

    # -- reading ----------------------------------------------------------------------------------

    def state(self, position: int) -> dict[str, Any]:
        """Live state of one parameter; ``step`` is a fresh number."""
        fields = self._fields[self._group_of[position]]
        own, found = self.part.state(position), {}
        for key, live in own.items():
            name = self.names.state.get(key, key)
            needed = self.names.only_if.get(name)
            if key == self.names.begun or (needed is not None and not fields.get(needed)):
                continue
            if name == "momentum_buffer" and not self._begun(position):
                continue
            found[name] = live
        if self.names.counter or self.names.carries_step:
            found["step"] = ms.Tensor(self._step(position), ms.float32)
        return found

    def _begun(self, position: int) -> bool:
        """Whether the next step reads the momentum buffer, rather than starting a new one."""
        begun = self.names.begun
        if begun in self.part.slots:
            return not self.part.slots[begun][position].asnumpy().flat[0]
        return not begun or int(self.part.counters[begun].asnumpy().max()) > 0

    def _step(self, position: int) -> float:
        if not self.names.counter:
            return float(vars(self.optimizer).get(CARRIED, {}).get(position, 0))
        return float(self._count()) + self.names.ahead

    def _count(self) -> float:
        value: float = self.part.counters[self.names.counter].asnumpy().max()
        return value

    def fields(self, group: int) -> Fields:
        """Fields of one group, as plain numbers."""
        return dict(self._fields[group])

    def _to_neutral(self, group: int, own: Fields) -> Fields:
        if isinstance(self.part, Legacy):
            own = {"lr": self.part.rate(group), **own}
        found = {self.names.fields.get(name, name): number_of(value) for name, value in own.items()}
        for name, items in self.names.tuples.items():
            if all(item in found for item in items):
                found[name] = tuple(found.pop(item) for item in items)
        found.pop("lr_float", None)
        return found

    def shared(self) -> dict[str, Any]:
        """Live counters and tables, but for those that follow from each parameter's ``step``, a float32."""
        found = self.part.shared()
        if not self.names.counter:
            return found
        count = found[self.names.counter]
        if np.float32(self._step(0)) == self._step(0):
            del found[self.names.counter]
        for name, number in self.names.powers.items():
            power = beta_power(self._betas(self._fields)[number], int(count.asnumpy().max()))
            if name in found and _normal(found[name].asnumpy().max()) == power:
                del found[name]
        return found

    @staticmethod
    def _betas(fields: Sequence[Fields | None]) -> tuple[float, ...]:
        return next((tuple(given["betas"]) for given in fields if given and "betas" in given), (0.0, 0.0))

    # -- checking ---------------------------------------------------------------------------------

    def unfit_state(self, given: Mapping[int, Mapping[Any, Any]]) -> Iterator[tuple[int | None, str]]:
        """As `Part.unfit_state`; also steps that differ, where the optimizer counts for all parameters at once."""
        yield from self.part.unfit_state({position: self._to_own(values) for position, values in given.items()})
        if self.names.counter:
            steps = {
                position: number_of(values["step"])
                for position, values in given.items()
                if "step" in values and not isinstance(values["step"], TensorSpec)
            }
            first = next(iter(steps.values()), 0)
            for position, step in steps.items():
                if step != first:
                    name = type(self.optimizer).__qualname__
                    yield (
                        position,
                        f"'step' is {step}, another parameter's is {first}, but {name} counts for all at once",
                    )

    def _to_own(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        counts = bool(self.names.counter or self.names.carries_step)
        found = {self._own_keys.get(key, key): value for key, value in values.items() if not (counts and key == "step")}
        begun = self.names.begun
        if begun and begun in self.part.slots:
            found[begun] = 0.0 if "momentum_buffer" in values else 1.0
        return found

    def unfit_fields(self, given: Sequence[Fields | None]) -> list[str]:
        """As `Part.unfit_fields`; also weight decay that works in another way."""
        found = self.part.unfit_fields([self._own_fields(fields) for fields in given])
        for number, fields in enumerate(given):
            wanted = (fields or {}).get("decoupled_weight_decay")
            decay = number_of((fields or {}).get("weight_decay", 0))
            if wanted is not None and decay and bool(wanted) != self.names.decoupled:
                found.append(
                    f"param group {number}: weight decay is {'' if wanted else 'not '}decoupled from the gradient, "
                    f"in {type(self.optimizer).__qualname__} it is{'' if self.names.decoupled else ' not'}"
                )
        return found

    def _own_fields(self, fields: Fields | None) -> Fields | None:
        if fields is None:
            return None
        found = dict(fields)
        for name, items in self.names.tuples.items():
            values = found.get(name)
            if isinstance(values, (tuple, list)) and len(values) == len(items):
                del found[name]
                found |= dict(zip(items, values, strict=True))
        back = {neutral: own for own, neutral in self.names.fields.items()}
        found = {back.get(name, name): value for name, value in found.items()}
        if "lr" in found and any("lr_float" in spots for spots in self.part.spots):
            found["lr_float"] = number_of(found["lr"])
        return found

    def unfit_shared(self, given: Mapping[Any, Any]) -> list[str]:
        """As `Part.unfit_shared`."""
        return self.part.unfit_shared(given)

    # -- writing ----------------------------------------------------------------------------------

    def write_fields(self, given: Sequence[Fields | None], pairs: Pairs) -> None:
        """As `Part.write_fields`."""
        self._fields = [{**old, **(new or {})} for old, new in zip(self._fields, given, strict=True)]
        self.part.write_fields([self._own_fields(fields) for fields in given], pairs)

    def write_shared(self, values: Mapping[Any, Any], pairs: Pairs) -> None:
        """As `Part.write_shared`."""
        self._given_shared = frozenset(values)
        self.part.write_shared(values, pairs)

    def write_state(self, given: Mapping[int, Mapping[Any, Any]], pairs: Pairs) -> None:
        """As `Part.write_state`; ``step`` goes into the optimizer's counter and powers of betas."""
        own = {position: self._to_own(values) for position, values in given.items()}
        begun = self.names.begun
        for position, values in own.items():
            if begun in self.part.slots:
                live = self.part.slots[begun][position]
                values[begun] = ms.Tensor(np.full(live.shape, values[begun], np.float32))
        self.part.write_state(own, pairs)
        steps = {position: number_of(values["step"]) for position, values in given.items() if "step" in values}
        if self.names.carries_step:
            vars(self.optimizer).setdefault(CARRIED, {}).update(dict.fromkeys(given, 0) | steps)
        elif self.names.counter and given and (steps or len(given) == len(self.params)):
            self._write_count(int(max(steps.values(), default=0)), pairs)
        elif begun in self.part.counters and any("momentum_buffer" in values for values in given.values()):
            counter = self.part.counters[begun]
            if begun not in self._given_shared and int(counter.asnumpy().max()) == 0:
                write(counter, 1, pairs)

    def _write_count(self, step: int, pairs: Pairs) -> None:
        counters, given = self.part.counters, self._given_shared
        if self.names.counter not in given:
            write(counters[self.names.counter], step - self.names.ahead, pairs)
        for name, number in self.names.powers.items():
            if name in counters and name not in given:
                write(counters[name], float(beta_power(self._betas(self._fields)[number], step)), pairs)


def beta_power(beta: float, steps: int) -> np.float32:
    """`beta` times itself `steps` times, rounded to float32 after each, as MindSpore's Adam does it.

    What is smaller than the smallest normal number is 0, as some of MindSpore's kernels have it; training can't tell.
    """
    power, factor = np.float32(1), np.float32(beta)
    while steps > 0 and power:
        count = min(steps, BLOCK)
        factors = np.concatenate([[power], np.full(count, factor)]).astype(np.float32)
        power, steps = _normal(np.multiply.accumulate(factors)[-1]), steps - count
    return power


def _normal(value: np.float32) -> np.float32:
    return np.float32(value if value >= np.finfo(np.float32).tiny else 0)
