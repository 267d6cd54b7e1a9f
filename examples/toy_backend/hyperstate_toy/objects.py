"""`Model` and `Optimizer` of hyperstate.backend for toy: live objects as named values, read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import toy

from hyperstate.backend import ModelEntry, ParamGroup, ParamId
from hyperstate.errors import IncompatibleStateError, OptionError

from .tensors import ToyTensors

KEPT = ("params", "foreach", "fused", "capturable", "differentiable")
"""Fields that are the target's own: which parameters, and how they are updated rather than to what."""


class ToyModel:
    """Models as one dict of names."""

    def __init__(self, models: Sequence[toy.Model]) -> None:
        self._entries: dict[str, ModelEntry] = {}
        self._names: dict[ParamId, tuple[str, ...]] = {}
        for model in models:
            for name, value in model.parameters.items():
                self._names[id(value)] = names = (*self._names.get(id(value), ()), name)
                tied = names[0] if len(names) > 1 else ""
                self._add(name, ModelEntry(value, "param", frozen=not value.trainable, tied=tied))
            for name, value in model.buffers.items():
                if name not in model.transient:
                    self._add(name, ModelEntry(value, "buffer"))

    def _add(self, name: str, entry: ModelEntry) -> None:
        if name in self._entries:
            raise IncompatibleStateError(f"two values are called {name!r}; parts of a model need distinct names")
        self._entries[name] = entry

    def entries(self) -> Mapping[str, ModelEntry]:
        """The state dict; values are live."""
        return self._entries

    def parameters(self) -> Mapping[ParamId, tuple[str, ...]]:
        """Names of each parameter object, the canonical one first."""
        return self._names

    def parameter(self, fqn: str) -> toy.Tensor:
        """The parameter of a name."""
        value: toy.Tensor = self._entries[fqn].value
        return value

    def prefixes(self, submodules: Any) -> Sequence[str]:
        """A toy model has no modules inside."""
        raise OptionError(f"submodules= holds {submodules!r}; toy models have no modules inside")

    def writer(self, fqn: str) -> toy.Tensor:
        """All values of toy are written in place."""
        return self.parameter(fqn)

    def assign(self, values: Mapping[str, Any]) -> None:
        """Called once per load; no value needs it here."""
        assert not values


class ToyOptimizer:
    """Optimizers, never stepped."""

    def __init__(self, optimizers: Sequence[toy.Optimizer], tensors: ToyTensors) -> None:
        self._given, self._tensors = optimizers, tensors
        self._live = [group for one in optimizers for group in one.param_groups]
        self._owner: dict[ParamId, tuple[toy.Optimizer, toy.Tensor]] = {}
        for one in optimizers:
            for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
                if self._owner.setdefault(id(parameter), (one, parameter))[0] is not one:
                    raise IncompatibleStateError("two optimizers hold one parameter; each belongs to one alone")

    def types(self) -> Sequence[type]:
        """For the registry of state layouts."""
        return [type(one) for one in self._given]

    def groups(self) -> Sequence[ParamGroup]:
        """Identities of the parameters, and all other fields."""
        return [
            ParamGroup([id(p) for p in group["params"]], {k: v for k, v in group.items() if k != "params"})
            for group in self._live
        ]

    def state(self) -> Mapping[ParamId, Mapping[Any, Any]]:
        """Live state of each parameter that has some."""
        return {id(p): slots for one in self._given for p, slots in one.state.items() if slots}

    def shared(self) -> Mapping[Any, Any]:
        """State that belongs to no parameter."""
        return {}

    def rules(self) -> Mapping[Any, Any]:
        """How known state lies beside its parameter."""
        known = {"momentum_buffer": "like_param", "exp_avg": "like_param", "exp_avg_sq": "like_param"}
        return {**known, "step": "replicated"}

    def state_keys(self) -> Sequence[Sequence[str] | None]:
        """The keys that a class makes; None for a class of somebody else's."""
        return [one.keys if type(one).__module__ == "toy" else None for one in self._given]

    def fresh_form(self, param: ParamId) -> str:  # noqa: ARG002  # nothing is sharded
        """How a fresh optimizer keeps sharded state."""
        return ""

    def counter_place(self, param: ParamId) -> None:
        """Where a fresh counter lives: on the host."""

    def commit(
        self,
        state: Mapping[ParamId, Mapping[Any, Any]],
        cleared: Iterable[ParamId],
        fields: Sequence[Mapping[str, Any] | None],
        shared: Mapping[Any, Any] | None,  # noqa: ARG002  # there is none
    ) -> None:
        """Everything was checked, on all ranks: now write. Containers and tensors that fit stay the same objects."""
        for param, values in state.items():
            optimizer, parameter = self._owner[param]
            slots = optimizer.state[parameter]
            kept = {key: self._into(slots.get(key), value) for key, value in values.items()}
            slots.clear()
            slots.update(kept)
        for param in cleared:
            optimizer, parameter = self._owner[param]
            optimizer.state.pop(parameter, {}).clear()
        for group, given in zip(self._live, fields, strict=True):
            for name, value in (given or {}).items():
                if name not in KEPT:
                    group[name] = self._field(group.get(name), value)

    def _into(self, old: Any, value: Any) -> Any:
        """`value`, copied into the tensor that is there if it fits."""
        if old is value or not isinstance(old, toy.Tensor) or self._tensors.spec(old) != self._tensors.spec(value):
            return value
        self._tensors.copy([(old, value)])
        return old

    def _field(self, old: Any, value: Any) -> Any:
        """A field in the form in which the group keeps it: a tensor, or a number. Never the caller's own object."""
        if isinstance(old, toy.Tensor) and isinstance(value, (toy.Tensor, int, float)):
            new = value if isinstance(value, toy.Tensor) else toy.tensor(value, old.dtype)
            old.array[...] = new.array.reshape(old.shape)
            return old
        if isinstance(value, toy.Tensor):
            number = value.array.item() if value.array.size == 1 and isinstance(old, (int, float)) else None
            return toy.Tensor(value.array.copy()) if number is None else type(old)(number)
        return value
