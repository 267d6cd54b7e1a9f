"""`Model` of the reference backend: one module, or the parts of a pipeline, as named values."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hyperstate.backend import ModelEntry
from hyperstate.errors import IncompatibleStateError, OptionError

from .modules import Module
from .sharded import plain
from .tensors import NumpyTensors

EXTRA_STATE = "_extra_state"
"""Last part of the FQN of a module's extra state."""


class NumpyModel:
    """See `hyperstate.backend.Model`."""

    def __init__(self, parts: Sequence[Module], tensors: NumpyTensors, device: str | None) -> None:
        self._tensors, self._parts = tensors, parts
        self._entries: dict[str, ModelEntry] = {}
        self._names: dict[int, list[str]] = {}
        self._params: dict[str, Any] = {}
        self._takers: dict[str, Module] = {}
        """FQN of extra state -> the module that takes it back."""
        for part in parts:
            for _, module in part.named_modules():
                for hook in module.state_dict_pre_hooks:
                    hook(module)
        first: dict[int, str] = {}
        for part in parts:
            for _, value in (*part.named_parameters(), *part.named_buffers()):
                plain(value).home = device
            for prefix, module in part.named_modules():
                self._read(prefix, module, first)

    def _read(self, prefix: str, module: Module, first: dict[int, str]) -> None:
        for name, param in module.parameters_.items():
            fqn = prefix + name
            self._names.setdefault(id(param), []).append(fqn)
            tied = first.setdefault(id(param), fqn)
            self._add(fqn, ModelEntry(param, "param", not param.requires_grad, "" if tied == fqn else tied))
            self._params[fqn] = param
        for name, buffer in module.buffers_.items():
            if name not in module.transient:
                fqn = prefix + name
                tied = first.setdefault(id(buffer), fqn)
                self._add(fqn, ModelEntry(buffer, "buffer", tied="" if tied == fqn else tied))
        if module.has_extra_state:
            self._takers[prefix + EXTRA_STATE] = module
            self._add(prefix + EXTRA_STATE, ModelEntry(module.get_extra_state(), "extra"))

    def _add(self, fqn: str, entry: ModelEntry) -> None:
        if fqn in self._entries:
            raise IncompatibleStateError(f"two values are called {fqn!r}; parts of a model need distinct FQNs")
        self._entries[fqn] = entry

    def entries(self) -> Mapping[str, ModelEntry]:
        """The state dict by FQN; values are the live parameters and buffers."""
        return self._entries

    def parameters(self) -> Mapping[int, tuple[str, ...]]:
        """FQNs of each parameter object, the canonical one first."""
        return {param: tuple(fqns) for param, fqns in self._names.items()}

    def parameter(self, fqn: str) -> Any:
        """The parameter of an FQN."""
        return self._params[fqn]

    def prefixes(self, submodules: Iterable[Module]) -> list[str]:
        """FQN prefixes of the given submodules ("" for a root). Raises `OptionError` for a module from elsewhere."""
        result: list[str] = []
        for wanted in submodules:
            found = [prefix for part in self._parts for prefix, module in part.named_modules() if module is wanted]
            if not found:
                raise OptionError(f"submodules= holds a {type(wanted).__qualname__} that is not part of the model")
            result += found
        return result

    def writer(self, fqn: str) -> Any | None:
        """The live parameter or buffer of `fqn`; None where a value must go through `assign`."""
        entry = self._entries[fqn]
        if entry.kind == "extra":
            return None
        return None if self._tensors.is_meta(entry.value) else entry.value

    def assign(self, values: Mapping[str, Any]) -> None:
        """Give meta tensors the memory of the values, and modules their extra state; report what stays meta."""
        for fqn, value in values.items():
            if fqn in self._takers:
                self._takers[fqn].set_extra_state(value)
                continue
            old, new = plain(self._entries[fqn].value), self._tensors.local(value)
            if self._tensors.is_meta(old):
                old.become(new)
            else:
                self._tensors.copy([(old, new)])
        left = [
            fqn
            for part in self._parts
            for fqn, value in (*part.named_parameters(), *part.named_buffers())
            if self._tensors.is_meta(value)
        ]
        if left:
            more = f" and {len(left) - 20} more" if len(left) > 20 else ""
            warnings.warn(f"still on the meta device: {', '.join(left[:20])}{more}", stacklevel=2)
