"""Optimizers of a user's own that keep state as PyTorch's do: any values in ``optimizer.state[parameter]``.

``mindspore.experimental.optim.Optimizer`` makes that dict and leaves it to derived classes. A class may say how it
keeps new state of sharded parameters (``state_form = "sharded"``; "local" if it says nothing), and which state its
first step makes (``state_keys = ("step", ...)``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np

from . import layouts
from .fields import Pairs, converted, copied, like
from .parts import Fields, Grouped
from .rules import IMPLEMENTATION


def keeps_by_parameter(part: Grouped) -> bool:
    """Whether an optimizer's state is in its dict: it has nothing else, and is none of MindSpore's own."""
    return part.known is None and not part.slots and isinstance(getattr(part.optimizer, "state", None), dict)


class Keyed(Grouped):
    """State of any kind by parameter; keys of the dict that are no Parameters are shared."""

    def state(self, position: int) -> dict[str, Any]:
        """Live state of one parameter."""
        param = self.params[position]
        kept = self.optimizer.state.get(param, {})
        return {key: self._shown(param, value) for key, value in kept.items()}

    @staticmethod
    def _shown(param: Any, value: Any) -> Any:
        return layouts.trimmed(param, value) if isinstance(value, ms.Tensor) else value

    def state_keys(self, _group: int) -> Sequence[str] | None:
        """What the class says of itself."""
        found: Sequence[str] | None = getattr(type(self.optimizer), "state_keys", None)
        return found

    def fresh_form(self) -> str:
        """What the class says of itself: ``state_form = "sharded"``, or "local" as for any."""
        return "" if getattr(type(self.optimizer), "state_form", "") == "sharded" else super().fresh_form()

    def fields(self, group: int) -> Fields:
        """Live fields of one group."""
        held = self.optimizer.param_groups[group]
        return {name: value for name, value in held.items() if name != "params" and name not in IMPLEMENTATION}

    def shared(self) -> dict[Any, Any]:
        """Counters that the class keeps as Parameters, and entries of its dict that belong to no parameter."""
        kept = {key: value for key, value in self.optimizer.state.items() if not isinstance(key, ms.Parameter)}
        return {**super().shared(), **kept}

    def unfit_state(self, _given: Mapping[int, Mapping[Any, Any]]) -> Iterator[tuple[int | None, str]]:
        """Nothing: the dict takes everything."""
        yield from ()

    def unfit_fields(self, _given: Sequence[Fields | None]) -> list[str]:
        """Nothing, likewise."""
        return []

    def unfit_shared(self, given: Mapping[Any, Any]) -> list[str]:
        """Nothing but what doesn't fit a Parameter that the class keeps."""
        return super().unfit_shared({key: value for key, value in given.items() if key in self.counters})

    def write_state(self, given: Mapping[int, Mapping[Any, Any]], pairs: Pairs) -> None:
        """Replace the state of parameters, by position, as a set; the dicts keep their identity."""
        for position, values in given.items():
            param = self.params[position]
            if not values:
                self.optimizer.state.pop(param, {}).clear()
                continue
            kept = self.optimizer.state.setdefault(param, {})
            merged = {key: self._merged(param, kept.get(key), value, pairs) for key, value in values.items()}
            kept.clear()
            kept.update(merged)

    @staticmethod
    def _merged(param: Any, old: Any, value: Any, pairs: Pairs) -> Any:
        """What to keep under a key: the tensor that is there, if `value` fits into it (copied later), or `value`."""
        noted = layouts.recorded(param)
        if noted is not None and isinstance(value, ms.Tensor) and not value.size and value.shape == noted.local_shape:
            return ms.Tensor(np.zeros(noted.kept_shape), dtype=value.dtype)  # as the parameter itself is kept
        if old is value or not _alike(old, value):
            return value
        pairs.append((layouts.local_of(old), layouts.local_of(value)))
        return old

    def write_fields(self, given: Sequence[Fields | None], pairs: Pairs) -> None:
        """Set fields of each group; tensors are written in place where the new value fits."""
        for group, fields in zip(self.optimizer.param_groups, given, strict=True):
            for name, value in (fields or {}).items():
                if name == "params" or name in IMPLEMENTATION:
                    continue
                old = group.get(name)
                if isinstance(old, ms.Tensor) and _size(value) == old.size:
                    pairs.append((old, like(old, value)))
                else:
                    kept = isinstance(old, (bool, int, float, tuple, list))
                    group[name] = converted(old, value) if kept else copied(value)

    def write_shared(self, values: Mapping[Any, Any], pairs: Pairs) -> None:
        """Replace what belongs to no parameter."""
        super().write_shared(values, pairs)
        state = self.optimizer.state
        for key in [key for key in state if not isinstance(key, ms.Parameter) and key not in values]:
            del state[key]
        state.update({key: value for key, value in values.items() if key not in self.counters})


def _alike(old: Any, value: Any) -> bool:
    """Whether `value` can be copied into `old`: tensors of one dtype, shape and layout."""
    if not all(isinstance(one, ms.Tensor) or layouts.is_sharded(one) for one in (old, value)):
        return False
    if layouts.is_sharded(old) != layouts.is_sharded(value) or old.dtype != value.dtype:
        return False
    if layouts.is_sharded(old) and layouts.layout_of(old) != layouts.layout_of(value):
        return False
    return layouts.shape_of(old) == layouts.shape_of(value)


def _size(value: Any) -> int:
    if isinstance(value, ms.Tensor):
        return int(value.size)
    return 1 if isinstance(value, (bool, int, float)) else -1
