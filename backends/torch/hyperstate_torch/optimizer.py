"""`Optimizer` for PyTorch: one optimizer or several, read and written without a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from hyperstate.backend import ParamGroup, ParamId
from hyperstate.errors import IncompatibleStateError, UnsupportedConfigurationError
from hyperstate.structure import is_sharded

from . import savedform
from .rules import counters_on_device, first_state, known_layouts, state_keys
from .tensors import Place, TorchTensors

KEPT_FIELDS = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})
"""Fields that are the target's: which parameters, and how they are updated rather than to what."""

State = dict[Any, Any]


class Slot(NamedTuple):
    """Where a parameter stands: number of the optimizer, of its group, position in the group."""

    optimizer: int
    group: int
    position: int
    param: torch.Tensor


def _refuse(optimizer: Any) -> None:
    if any(kind.__name__ == "ChainedOptimizer" for kind in type(optimizer).__mro__):
        raise UnsupportedConfigurationError(
            "a ChainedOptimizer is not supported, since it keeps its parts' state in a form of its own; use its own "
            "state_dict() and load_state_dict()"
        )


def is_optimizer(value: Any) -> bool:
    """Whether `value` looks like an optimizer."""
    return isinstance(value, torch.optim.Optimizer) or (hasattr(value, "param_groups") and hasattr(value, "state"))


def _inner(optimizer: Any) -> Any:
    """The optimizer inside wrappers that lend their inner one's groups (accelerate's AcceleratedOptimizer)."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        if not is_optimizer(inner) or inner.param_groups is not optimizer.param_groups:
            break
        optimizer = inner
    return optimizer


class TorchOptimizer:
    """See `hyperstate.backend.Optimizer`."""

    def __init__(self, optimizer: Any, tensors: TorchTensors) -> None:
        _refuse(optimizer)
        given = [optimizer] if is_optimizer(optimizer) else list(optimizer)
        for one in given:
            _refuse(one)
        self._tensors = tensors
        self._optimizers = [_inner(one) for one in given]
        self._slots: dict[ParamId, Slot] = {}
        for slot in self._walk():
            other = self._slots.setdefault(id(slot.param), slot)
            if other is not slot:
                raise IncompatibleStateError(
                    f"{_place(slot)} holds the same parameter as {_place(other)}; each parameter may belong to one "
                    "optimizer and one group only"
                )
        self._saved = [savedform.saved(one) if savedform.saves_its_own_way(one) else None for one in self._optimizers]
        self._first: dict[ParamId, Mapping[Any, Any]] = {}

    def show_first_state(self) -> Sequence[type]:
        """Where an optimizer has no state at all, let `state` show what its first step would begin with.

        Nothing is stepped and nothing kept. Returns the classes of which that is not known.
        """
        unknown: dict[type, None] = {}
        for slot in self._slots.values():
            optimizer = self._optimizers[slot.optimizer]
            if optimizer.state or self._saved[slot.optimizer] is not None:
                continue
            found = first_state(optimizer, optimizer.param_groups[slot.group], slot.param)
            if found is None:
                unknown[type(optimizer)] = None
            elif found:
                self._first[id(slot.param)] = found
        return list(unknown)

    def _walk(self) -> Iterator[Slot]:
        for i, optimizer in enumerate(self._optimizers):
            for j, group in enumerate(optimizer.param_groups):
                for k, param in enumerate(group["params"]):
                    yield Slot(i, j, k, param)

    # -- reading ----------------------------------------------------------------------------------

    def types(self) -> Sequence[type]:
        """Classes of the optimizers."""
        return [type(one) for one in self._optimizers]

    def groups(self) -> Sequence[ParamGroup]:
        """The groups of all optimizers in order, as their state-dict hooks show them."""
        found = []
        for optimizer, saved in zip(self._optimizers, self._saved, strict=True):
            shown = optimizer.param_groups if saved is None else saved["param_groups"]
            for group, fields in zip(optimizer.param_groups, shown, strict=True):
                kept = {key: value for key, value in fields.items() if key not in ("params", "param_names")}
                found.append(ParamGroup([id(param) for param in group["params"]], kept))
        return found

    def state(self) -> Mapping[ParamId, Mapping[Any, Any]]:
        """Live state of each parameter that has some; what its state-dict hooks make of it, where there are any."""
        found = dict(self._first)
        for i, optimizer in enumerate(self._optimizers):
            for key, value in self._keyed(i):
                if id(key) in self._slots and self._slots[id(key)].optimizer == i:
                    if value:
                        found[id(key)] = value
                elif isinstance(key, torch.Tensor):
                    raise IncompatibleStateError(
                        f"{type(optimizer).__qualname__} keeps state of a parameter of shape {tuple(key.shape)} "
                        "that is in none of its groups; build the optimizer after the model was sharded"
                    )
        return found

    def shared(self) -> Mapping[Any, Any]:
        """Entries of `optimizer.state` that belong to no parameter."""
        found: dict[Any, Any] = {}
        for i in range(len(self._optimizers)):
            for key, value in self._keyed(i):
                if not isinstance(key, torch.Tensor):
                    if key in found:
                        raise UnsupportedConfigurationError(
                            f"two of the optimizers keep shared state under {key!r}; load them one at a time"
                        )
                    found[key] = value
        return found

    def _keyed(self, i: int) -> Iterator[tuple[Any, Any]]:
        """State of an optimizer by parameter object, or by whatever other key it has."""
        saved, optimizer = self._saved[i], self._optimizers[i]
        if saved is None:
            yield from optimizer.state.items()
            return
        params = savedform.numbered(optimizer, saved["param_groups"])
        for key, value in saved["state"].items():
            yield params.get(key, key) if isinstance(key, int) else key, value

    def param(self, param: ParamId) -> torch.Tensor:
        """The parameter object."""
        return self._slots[param].param

    def rules(self) -> Mapping[Any, Any]:
        """What is known of the state of these classes and their bases."""
        known = known_layouts()
        found: dict[Any, Any] = {}
        for kind in self.types():
            for cls in reversed(kind.__mro__):
                found |= known.get(cls, {})
        return found

    def state_keys(self) -> Sequence[Sequence[str] | None]:
        """See `rules.state_keys`."""
        return list(map(state_keys, self._optimizers))

    def fresh_form(self, param: ParamId) -> str:
        """See `TorchTensors.fresh_form`."""
        return self._tensors.fresh_form(self.param(param))

    def counter_place(self, param: ParamId) -> Place:
        """The parameter's device where counters are kept there, else the host."""
        slot = self._slots[param]
        optimizer = self._optimizers[slot.optimizer]
        group = optimizer.param_groups[slot.group]
        if group.get("capturable") or group.get("fused") or counters_on_device(type(optimizer)):
            return self._tensors.place(slot.param)
        return None

    # -- writing ----------------------------------------------------------------------------------

    def commit(
        self,
        state: Mapping[ParamId, Mapping[Any, Any]],
        cleared: Iterable[ParamId],
        fields: Sequence[Mapping[str, Any] | None],
        shared: Mapping[Any, Any] | None,
    ) -> None:
        """See `hyperstate.backend.Optimizer`. `fields` has one item per group of `groups()`, None leaves a group alone.

        Tensors that fit are copied into those that are there; others are taken over as they are. An
        optimizer whose class overrides `load_state_dict` loads with that; else its load_state_dict
        hooks run around the writing.
        """
        gone = set(cleared)
        start = 0
        for i, optimizer in enumerate(self._optimizers):
            count = len(optimizer.param_groups)
            mine = {param: values for param, values in state.items() if self._slots[param].optimizer == i}
            clear = {param for param in gone if self._slots[param].optimizer == i}
            self._commit_one(i, mine, clear, fields[start : start + count], self._shared_of(i, shared))
            start += count

    def _shared_of(self, i: int, shared: Mapping[Any, Any] | None) -> Mapping[Any, Any] | None:
        """The part of `shared` that goes to optimizer `i`: what it has already, and the first also what nobody has."""
        if shared is None or len(self._optimizers) == 1:
            return shared
        owners = {key: n for n, one in enumerate(self._optimizers) for key in one.state if key in shared}
        return {key: value for key, value in shared.items() if owners.get(key, 0) == i}

    def _commit_one(
        self,
        i: int,
        state: Mapping[ParamId, Mapping[Any, Any]],
        cleared: set[ParamId],
        fields: Sequence[Mapping[str, Any] | None],
        shared: Mapping[Any, Any] | None,
    ) -> None:
        optimizer = self._optimizers[i]
        if savedform.overrides(optimizer, "load_state_dict"):
            self._load(optimizer, self._whole(i, state, cleared, fields, shared))
            return
        hooks = list(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {}).values())
        if hooks:
            packed = self._whole(i, state, cleared, fields, shared)
            for hook in hooks:
                packed = hook(optimizer, packed) or packed
            params = savedform.numbered(optimizer, packed["param_groups"])
            found = {id(params[key]): value for key, value in packed["state"].items() if key in params}
            state = {param: value for param, value in found.items() if param not in cleared}
            fields = [
                group if given is not None else None
                for group, given in zip(packed["param_groups"], fields, strict=True)
            ]
            shared = None if shared is None else {k: v for k, v in packed["state"].items() if k not in params}
        self._write(optimizer, state, cleared, shared)
        for group, given in zip(optimizer.param_groups, fields, strict=True):
            self._write_fields(group, given or {})
        for hook in list(getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {}).values()):
            hook(optimizer)

    def _write(
        self,
        optimizer: Any,
        state: Mapping[ParamId, Mapping[Any, Any]],
        cleared: set[ParamId],
        shared: Mapping[Any, Any] | None,
    ) -> None:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for param, values in state.items():
            slots = optimizer.state.setdefault(self.param(param), {})
            self._replace(slots, values, pairs)
        for param in cleared:
            optimizer.state.pop(self.param(param), {}).clear()
        if shared is not None:
            for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor) and key not in shared]:
                del optimizer.state[key]
            for key, value in shared.items():
                optimizer.state[key] = self._merged(optimizer.state.get(key), value, pairs)
        self._tensors.copy(pairs)
        given = {type(value) for values in state.values() for value in values.values()}
        numbers = (_is_number(value) for param in state for value in optimizer.state[self.param(param)].values())
        if not given.isdisjoint((int, float)) and isinstance(optimizer, torch.optim.Optimizer) and any(numbers):
            # Checkpoints older than torch 1.12 keep counters as numbers; the class knows which it wants as tensors.
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    def _replace(self, slots: MutableMapping[Any, Any], values: Mapping[Any, Any], pairs: list[Any]) -> None:
        """Make `slots` hold `values` and nothing else."""
        merged = {key: self._merged(slots.get(key), value, pairs) for key, value in values.items()}
        slots.clear()
        slots.update(merged)

    def _merged(self, old: Any, value: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """What to keep under a key: the tensor that is there, if `value` fits into it (copied later), or `value`."""
        if old is value or not isinstance(old, torch.Tensor):
            return value
        if _is_number(value) and old.numel() == 1 and not is_sharded(old):
            pairs.append((old, torch.full_like(old, value)))
            return old
        if not isinstance(value, torch.Tensor):
            return value
        spec = self._tensors.spec(value)
        if spec is None or not self._tensors.same_storage_form(old, spec, self._tensors.place(value)):
            return value
        pairs.append((self._tensors.local(old), self._tensors.local(value)))
        return old

    def _write_fields(self, group: MutableMapping[str, Any], fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            if name not in KEPT_FIELDS:
                group[name] = self._field(group.get(name), value)

    @torch.no_grad()
    def _field(self, old: Any, value: Any) -> Any:
        """`value` in the form in which a group keeps a field; never the caller's own object."""
        if isinstance(old, torch.Tensor):
            if isinstance(value, torch.Tensor) and value.shape != old.shape and value.numel() != old.numel():
                return value.detach().to(old.device, old.dtype, copy=True)
            if isinstance(value, (torch.Tensor, bool, int, float, complex)):
                new = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                old.copy_(new.reshape(old.shape) if new.numel() == old.numel() else new)
                return old
        elif isinstance(value, torch.Tensor) and isinstance(old, (int, float)) and value.numel() == 1:
            return float(value.item()) if isinstance(old, float) else value.item()
        elif type(value) in (tuple, list) and isinstance(old, (tuple, list)) and len(value) == len(old):
            return type(value)(self._field(was, item) for was, item in zip(old, value, strict=True))
        return _copied(value)

    def _whole(
        self,
        i: int,
        state: Mapping[ParamId, Mapping[Any, Any]],
        cleared: set[ParamId],
        fields: Sequence[Mapping[str, Any] | None],
        shared: Mapping[Any, Any] | None,
    ) -> State:
        """What `optimizer.load_state_dict` would be given: what is kept, with the new values over it."""
        optimizer = self._optimizers[i]
        numbers: dict[ParamId, int] = {}
        groups = []
        for group, given in zip(optimizer.param_groups, fields, strict=True):
            members = [numbers.setdefault(id(param), len(numbers)) for param in group["params"]]
            new = {name: value for name, value in (given or {}).items() if name not in KEPT_FIELDS}
            groups.append({**group, **new, "params": members})
        packed: State = {}
        for key, value in self._keyed(i):
            if isinstance(key, torch.Tensor):
                if id(key) in numbers and id(key) not in cleared:
                    packed[numbers[id(key)]] = value
            elif shared is None:
                packed[key] = value
        packed |= {numbers[param]: dict(values) for param, values in state.items()}
        packed |= shared or {}
        return {"state": packed, "param_groups": groups}

    @staticmethod
    def _load(optimizer: Any, packed: State) -> None:
        """Load with the optimizer's own method, then put its containers back, which the base class replaces."""
        state, groups = optimizer.state, list(optimizer.param_groups)
        outer = optimizer.param_groups
        type(optimizer).load_state_dict(optimizer, packed)
        for group, new in zip(groups, optimizer.param_groups, strict=True):
            if group is not new:
                kept = dict(new)
                group.clear()
                group.update(kept)
        if optimizer.param_groups is not outer:
            outer[:] = groups
            optimizer.param_groups = outer
        if optimizer.state is not state:
            items = dict(optimizer.state)
            old = dict(state)
            state.clear()
            for key, value in items.items():
                slots = old.get(key)
                if isinstance(slots, dict) and isinstance(value, dict) and slots is not value:
                    slots.clear()
                    slots.update(value)
                    value = slots
                state[key] = value
            optimizer.state = state


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _place(slot: Slot) -> str:
    return f"optimizer {slot.optimizer}, group {slot.group}, position {slot.position}"


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value
