"""`Optimizer` of the reference backend: one optimizer or several, read and written without a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hyperstate.backend import ParamGroup, ParamId
from hyperstate.errors import IncompatibleStateError, UnsupportedConfigurationError

from . import optimizers
from .arrays import Tensor, tensor
from .tensors import NumpyTensors, Place, is_sharded

KEPT_FIELDS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Fields that are the target's: which parameters, and how they are updated rather than to what."""


class Slot(NamedTuple):
    """Where a parameter stands: number of the optimizer, of its group, position in the group."""

    optimizer: int
    group: int
    position: int
    param: Any

    def __str__(self) -> str:
        return f"optimizer {self.optimizer}, group {self.group}, position {self.position}"


class NumpyOptimizer:
    """See `hyperstate.backend.Optimizer`."""

    def __init__(self, given: Sequence[optimizers.Optimizer], tensors: NumpyTensors) -> None:
        self._given, self._tensors = given, tensors
        self._slots: dict[ParamId, Slot] = {}
        for i, one in enumerate(given):
            if any(kind.__name__ == "ChainedOptimizer" for kind in type(one).__mro__):
                raise UnsupportedConfigurationError("a ChainedOptimizer is not supported; use its own state_dict()")
            for j, group in enumerate(one.param_groups):
                for k, param in enumerate(group["params"]):
                    slot = Slot(i, j, k, param)
                    other = self._slots.setdefault(id(param), slot)
                    if other is not slot:
                        raise IncompatibleStateError(
                            f"{slot} holds the same parameter as {other}; each belongs to one group only"
                        )

    # -- reading ----------------------------------------------------------------------------------

    def types(self) -> Sequence[type]:
        """Classes of the optimizers."""
        return [type(one) for one in self._given]

    def groups(self) -> Sequence[ParamGroup]:
        """The groups of all optimizers in order."""
        return [
            ParamGroup(
                [id(param) for param in group["params"]],
                {name: value for name, value in group.items() if name not in ("params", "param_names")},
            )
            for one in self._given
            for group in one.param_groups
        ]

    def state(self) -> Mapping[ParamId, Mapping[Any, Any]]:
        """Live state of each parameter that has some."""
        found: dict[ParamId, Mapping[Any, Any]] = {}
        for one in self._given:
            for key, value in one.state.items():
                if id(key) in self._slots:
                    if value:
                        found[id(key)] = value
                elif _is_parameter(key):
                    raise IncompatibleStateError(
                        f"{type(one).__qualname__} keeps state of a parameter of shape {tuple(key.shape)} that is in "
                        "none of its groups; build the optimizer after the model was sharded"
                    )
        return found

    def shared(self) -> Mapping[Any, Any]:
        """Entries of `optimizer.state` that belong to no parameter."""
        found: dict[Any, Any] = {}
        for one in self._given:
            for key, value in one.state.items():
                if not _is_parameter(key):
                    if key in found:
                        raise UnsupportedConfigurationError(
                            f"two optimizers keep shared state {key!r}; load them singly"
                        )
                    found[key] = value
        return found

    def rules(self) -> Mapping[Any, Any]:
        """What is known of the state of these classes."""
        return {key: rule for one in self._given for key, rule in getattr(type(one), "rules", {}).items()}

    def state_keys(self) -> Sequence[Sequence[str] | None]:
        """What each optimizer's class says of itself."""
        return [one.state_keys() if isinstance(one, optimizers.Optimizer) else None for one in self._given]

    def fresh_form(self, param: ParamId) -> str:
        """How the optimizer's class keeps sharded state, or else what goes with the parameter's kind."""
        slot = self._slots[param]
        return getattr(type(self._given[slot.optimizer]), "state_form", "") or self._tensors.fresh_form(slot.param)

    def counter_place(self, param: ParamId) -> Place:
        """The host; the parameter's device for ``capturable`` groups."""
        slot = self._slots[param]
        group = self._given[slot.optimizer].param_groups[slot.group]
        return self._tensors.place(slot.param) if group.get("capturable") else None

    # -- writing ----------------------------------------------------------------------------------

    def commit(
        self,
        state: Mapping[ParamId, Mapping[Any, Any]],
        cleared: Iterable[ParamId],
        fields: Sequence[Mapping[str, Any] | None],
        shared: Mapping[Any, Any] | None,
    ) -> None:
        """See `hyperstate.backend.Optimizer`. Tensors that fit are copied into those that are there."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for pid, values in state.items():
            slot = self._slots[pid]
            kept = self._given[slot.optimizer].state.setdefault(slot.param, {})
            merged = {key: self._merged(kept.get(key), value, pairs) for key, value in values.items()}
            kept.clear()
            kept.update(merged)
        for pid in cleared:
            slot = self._slots[pid]
            self._given[slot.optimizer].state.pop(slot.param, {}).clear()
        if shared is not None:
            self._replace_shared(shared, pairs)
        self._tensors.copy(pairs)
        live = [group for one in self._given for group in one.param_groups]
        for group, given in zip(live, fields, strict=True):
            self._write_fields(group, given or {})

    def _replace_shared(self, shared: Mapping[Any, Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Each optimizer takes what it has already; the first also what nobody has."""
        owners = {key: one for one in reversed(self._given) for key in one.state if not _is_parameter(key)}
        for key, one in owners.items():
            if key not in shared:
                del one.state[key]
        for key, value in shared.items():
            container: MutableMapping[Any, Any] = owners.get(key, self._given[0]).state
            container[key] = self._merged(container.get(key), value, pairs)

    def _merged(self, old: Any, value: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """What to keep under a key: the tensor that is there, if `value` fits into it (copied later), or `value`."""
        spec = self._tensors.spec(value)
        if old is value or spec is None or not self._tensors.same_storage_form(old, spec, self._tensors.place(value)):
            return value
        pairs.append((self._tensors.local(old), self._tensors.local(value)))
        return old

    def _write_fields(self, group: MutableMapping[str, Any], fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            if name not in KEPT_FIELDS:
                group[name] = self._field(group.get(name), value)

    def _field(self, old: Any, value: Any) -> Any:
        """`value` in the form in which the group keeps a field; never the caller's own object."""
        if isinstance(old, Tensor) and isinstance(value, (Tensor, bool, int, float, complex)):
            new = value if isinstance(value, Tensor) else tensor(value, old.dtype)
            if new.array.size != old.array.size:
                return new.clone(old.device)
            self._tensors.copy([(old, Tensor(new.array.reshape(old.shape), new.dtype))])
            return old
        if isinstance(value, Tensor) and isinstance(old, (int, float)) and value.array.size == 1:
            number = value.numpy().item()
            return float(number) if isinstance(old, float) else number
        return _copied(value)


def is_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer of tensors of this framework."""
    if isinstance(value, optimizers.Optimizer):
        return True
    groups = getattr(value, "param_groups", None)
    return isinstance(groups, list) and any(_is_parameter(param) for group in groups for param in group["params"])


def _is_parameter(value: Any) -> bool:
    return isinstance(value, Tensor) or is_sharded(value)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value
