"""One MindSpore optimizer taken apart: state of each parameter, counters, param groups. Nothing is stepped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import mindspore as ms
import numpy as np

from hyperstate.errors import IncompatibleStateError
from hyperstate.schema import TensorSpec, keeps_meaning

from . import layouts
from .fields import InDict, InTensor, Pairs, Spot, copied, refused
from .host import neutral_dtype
from .rules import COUNTERS, IMPLEMENTATION, known, state_keys

Fields = dict[str, Any]


class Part:
    """What both kinds of optimizer have in common. Positions count `params`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.params: tuple[Any, ...] = tuple(optimizer.parameters)
        self.known = known(type(optimizer))
        self.groups: list[tuple[int, ...]] = []
        """Positions of each group's parameters."""
        self.spots: list[dict[str, Spot]] = []
        """Where each group keeps its fields."""
        self._find_groups()
        rates = {id(rate) for rate in self._rates()}
        own = {id(param) for param in self.params} | rates
        own |= {id(spot.tensor) for spots in self.spots for spot in spots.values() if isinstance(spot, InTensor)}
        self.slots: dict[str, dict[int, Any]] = self._find_slots(own)
        """State key -> position -> the live Parameter."""
        self._check_lengths()
        self._check_shapes()
        own |= {id(value) for slots in self.slots.values() for value in slots.values()}
        self.counters = dict(self._find_shared(own, rates))
        """What belongs to no parameter, by its place in the optimizer."""

    # -- finding ----------------------------------------------------------------------------------

    def _find_groups(self) -> None:
        raise NotImplementedError

    def _rates(self) -> list[Any]:
        """All Parameters that hold learning rates or tables of them."""
        raise NotImplementedError

    def _find_slots(self, own: set[Any]) -> dict[str, dict[int, Any]]:
        """Attributes that hold one Parameter for each parameter, in their order."""
        found: dict[str, dict[int, Any]] = {}
        for name, value in vars(self.optimizer).items():
            if not isinstance(value, (tuple, list)) or len(value) != len(self.params):
                continue
            ids = {id(item) for item in value}
            if all(isinstance(item, ms.Parameter) for item in value) and len(ids) == len(value) and not ids & own:
                found[name] = dict(enumerate(value))
        return found

    def _check_lengths(self) -> None:
        """Refuse an optimizer whose state was made before the last of its parameters was added."""
        for key in self.known.like + self.known.whole if self.known is not None else ():
            held = vars(self.optimizer).get(key)
            if isinstance(held, (tuple, list)) and len(held) != len(self.params):
                raise IncompatibleStateError(
                    f"{type(self.optimizer).__qualname__} has {len(self.params)} parameters and {key!r} for "
                    f"{len(held)}; build it with all its param groups"
                )

    def _check_shapes(self) -> None:
        """Refuse an optimizer that was built on whole parameters of which a rank keeps its part now."""
        name = type(self.optimizer).__qualname__
        for key in self.known.like if self.known is not None else ():
            for position, live in self.slots.get(key, {}).items():
                found, wanted = tuple(live.shape), tuple(self.params[position].shape)
                if found != wanted:
                    raise IncompatibleStateError(
                        f"{name} keeps {key!r} of shape {found} for a parameter of shape {wanted}; build the optimizer "
                        "after the model was sharded"
                    )

    def _find_shared(self, own: set[Any], rates: set[int]) -> Iterator[tuple[str, Any]]:
        stand_ins = {id(value[0]): name for name, value in vars(self.optimizer).items() if _repeats(value)}
        for path, param in self.optimizer.parameters_and_names():
            if id(param) in stand_ins:
                yield stand_ins[id(param)], param  # AdaFactor without first moment; its name depends on the process
            elif id(param) in rates and param.ndim:
                yield param.name, param  # a table of learning rates; its path depends on the order of parameters
            elif id(param) not in own:
                yield path, param

    # -- reading ----------------------------------------------------------------------------------

    def state(self, position: int) -> dict[str, Any]:
        """Live state of one parameter; where its shard has no elements, state has none either."""
        param = self.params[position]
        mine = {key: slots[position] for key, slots in self.slots.items() if position in slots}
        return {key: layouts.trimmed(param, live) for key, live in mine.items()}

    def fields(self, group: int) -> Fields:
        """Live fields of one group."""
        return {name: spot.get() for name, spot in self.spots[group].items()}

    def shared(self) -> dict[str, Any]:
        """Live counters and tables."""
        return dict(self.counters)

    def state_keys(self, group: int) -> Sequence[str] | None:
        """The state keys that the class makes for parameters of a group; None for an unknown class."""
        return state_keys(type(self.optimizer), self.fields(group))

    def fresh_form(self) -> str:
        """How new state of a sharded parameter is kept: as a plain tensor like the shard, on which optimizers run."""
        return "local"

    def fresh(self) -> bool:
        """Whether no step has been taken; False if nothing counts them."""
        counts = [int(value.asnumpy().max()) for key, value in self.counters.items() if key in COUNTERS]
        return bool(counts) and max(counts) <= 0

    def fill(self, key: str) -> float | None:
        """The initial value of a state key; None if nobody can tell."""
        if self.known is None or key not in self.known.keys:
            return None
        value = self.known.fills.get(key, 0.0)
        if isinstance(value, str):
            given: dict[str, Any] = {
                **getattr(self.optimizer, "defaults", {}),
                **getattr(self.optimizer, "init_args", {}),
            }
            value = given.get(value, "")
        return None if isinstance(value, str) else value

    # -- checking ---------------------------------------------------------------------------------

    def unfit_state(self, given: Mapping[int, Mapping[Any, Any]]) -> Iterator[tuple[int | None, str]]:
        """What of the new state of parameters, by position, can't be kept. Tensors may be given as their specs."""
        name = type(self.optimizer).__qualname__
        fresh = self.fresh()
        for position, values in given.items():
            mine = self.state(position)
            for key, value in values.items():
                if key not in mine:
                    yield position, f"{name} has no place for state key {key!r}; it keeps {list(mine)}"
                elif not isinstance(value, (TensorSpec, ms.Tensor, bool, int, float)):
                    yield position, f"state key {key!r} of {name} must be a tensor"
            for key in mine:
                if key not in values and not fresh and self.fill(key) is None:
                    yield position, f"state key {key!r} is missing, and only a new {name} has its initial value"

    def unfit_fields(self, given: Sequence[Fields | None]) -> list[str]:
        """What of the groups' new fields can't be kept."""
        return refused(self.spots, given)

    def unfit_shared(self, given: Mapping[Any, Any]) -> list[str]:
        """What of the new counters and tables can't be kept. Tensors may be given as their specs."""
        found = []
        for key, value in given.items():
            live = self.counters.get(key)
            shape = tuple(value.shape) if isinstance(value, (TensorSpec, ms.Tensor)) else ()
            if live is None:
                found.append(f"shared state {key!r} has no place; there is {list(self.counters)}")
            elif prod(shape) != live.size:
                found.append(f"shared state {key!r} of shape {shape} was passed for shape {tuple(live.shape)}")
            elif isinstance(value, TensorSpec) and not keeps_meaning(value.dtype, neutral_dtype(live.dtype)):
                found.append(
                    f"shared state {key!r}: {value.dtype} can't become {live.dtype} without losing its meaning"
                )
        return found

    # -- writing ----------------------------------------------------------------------------------

    def write_state(self, given: Mapping[int, Mapping[Any, Any]], pairs: Pairs) -> None:
        """Replace the state of parameters, by position, as a set: what is not given gets its initial value."""
        for position, values in given.items():
            for key, live in self.state(position).items():
                fill = self.fill(key)
                if key in values:
                    write(live, values[key], pairs)
                elif fill is not None:
                    pairs.append((live, ms.Tensor(np.full(live.shape, fill, np.float32))))

    def write_fields(self, given: Sequence[Fields | None], pairs: Pairs) -> None:
        """Set fields of each group; None leaves a group alone."""
        changed, done = False, set[Any]()
        for number, fields in enumerate(given):
            for name, value in (fields or {}).items():
                spot = self.spots[number].get(name)
                if name in IMPLEMENTATION:
                    continue
                if spot is None:
                    self._keep_extra(number, name, value)
                elif not spot.refuses(value) and spot.id not in done:
                    done.add(spot.id)
                    changed = spot.put(value, pairs) or changed
        if changed:
            recompile(self.optimizer)

    def _keep_extra(self, group: int, name: str, value: Any) -> None:
        raise NotImplementedError

    def write_shared(self, values: Mapping[Any, Any], pairs: Pairs) -> None:
        """Set counters and tables."""
        for key, value in values.items():
            if key in self.counters:
                write(self.counters[key], value, pairs)


def write(live: Any, value: Any, pairs: Pairs) -> None:
    """Note that `live` gets `value`, a tensor of as many elements or a number; anything else is left out."""
    if value is live:
        return
    if isinstance(value, ms.Tensor):
        if value.size == live.size:
            pairs.append((live, value if value.shape == live.shape else value.reshape(live.shape)))
    elif isinstance(value, (bool, int, float)) and live.size == 1:
        pairs.append((live, ms.Tensor(np.full(live.shape, value), dtype=live.dtype)))


def recompile(optimizer: Any) -> None:
    """Make a compiled graph of the optimizer, which holds its numbers as constants, be compiled again.

    Graphs are kept by the creation time of their cell (``mindspore/graph/api.py``, `_JitExecutor.compile`).
    """
    object.__setattr__(optimizer, "_create_time", optimizer.create_time + 1)


class Grouped(Part):
    """``mindspore.experimental.optim`` and ``mindspore.mint.optim``: param groups in dicts, as PyTorch has them."""

    def _find_groups(self) -> None:
        start = 0
        for group in self.optimizer.param_groups:
            end = start + len(group["params"])
            self.groups.append(tuple(range(start, end)))
            spots: dict[str, Spot] = {}
            for name, value in group.items():
                if name == "params" or name in IMPLEMENTATION or _is_state(value):
                    continue
                spots[name] = InTensor(value) if isinstance(value, ms.Tensor) else InDict(group, name)
            self.spots.append(spots)
            start = end

    def _rates(self) -> list[Any]:
        return [rate for rate in self.optimizer.lrs if isinstance(rate, ms.Parameter)]

    def _find_slots(self, own: set[Any]) -> dict[str, dict[int, Any]]:
        found = super()._find_slots(own)
        for members, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            for name, value in group.items():
                if name != "params" and _is_state(value) and len(value) == len(members):
                    found.setdefault(name, {}).update(zip(members, value, strict=True))
        return found

    def unfit_fields(self, given: Sequence[Fields | None]) -> list[str]:
        """As for any; and a group without room for ``amsgrad`` can't start to need it."""
        found = super().unfit_fields(given)
        for number, fields in enumerate(given):
            wanted = self.known.only_if.items() if self.known is not None and fields else ()
            for key, name in wanted:
                if (
                    (fields or {}).get(name)
                    and self.groups[number]
                    and self.groups[number][0] not in self.slots.get(key, {})
                ):
                    found.append(f"field {name!r} of param group {number} is true: build the optimizer with it")
        return found

    def _keep_extra(self, group: int, name: str, value: Any) -> None:
        self.optimizer.param_groups[group][name] = copied(value)


def _repeats(value: Any) -> bool:
    """Whether `value` has one Parameter in the place of each."""
    return _is_state(value) and len(value) > 1 and len({id(item) for item in value}) == 1


def _is_state(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(item, ms.Parameter) for item in value)
