"""`Model` for PyTorch: one module, or the parts of a pipeline, as named values."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hyperstate.backend import ModelEntry
from hyperstate.errors import IncompatibleStateError, OptionError
from hyperstate.structure import is_sharded

from . import names
from .tensors import TorchTensors

_OWN = ("torch.nn.", "torch.distributed.", "torch._dynamo.")
"""Where PyTorch's own hooks and overrides live: values stay as they are (BatchNorm, FSDP2, checkpoint wrappers)."""
_FSDP = "torch.distributed.fsdp."
_OVERRIDES = ("_load_from_state_dict", "_save_to_state_dict", "state_dict")

_swap: Any = torch.utils.swap_tensors  # has no annotations

Home = tuple[torch.nn.Module, str]
"""A module and the name of one of its own parameters or buffers."""


@dataclass(frozen=True)
class Region:
    """A module that saves and loads in its own way, with everything below it."""

    module: torch.nn.Module
    prefix: str
    key_prefix: str
    root: bool


@dataclass
class Part:
    """One of the modules given."""

    root: torch.nn.Module
    visits: list[names.Visit]
    keys: dict[str, str] = field(default_factory=dict)
    """FQN -> key in the root's state dict."""
    versions: Mapping[str, Any] = field(default_factory=dict)
    """The state dict's ``_metadata``."""
    regions: dict[str, Region] = field(default_factory=dict)
    """By FQN prefix; none lies inside another."""
    extras: dict[str, torch.nn.Module] = field(default_factory=dict)
    """FQN of extra state -> the module that takes it."""

    def region(self, fqn: str) -> Region | None:
        """The region around a name or prefix."""
        if not self.regions:
            return None
        end = -1
        while (found := self.regions.get(fqn[: end + 1])) is None:
            end = fqn.find(".", end + 1)
            if end < 0:
                return None
        return found


class TorchModel:
    """See `hyperstate.backend.Model`. Call `assign` once per load, after all writing, even with no values."""

    def __init__(self, model: torch.nn.Module | Sequence[torch.nn.Module], tensors: TorchTensors) -> None:
        self._tensors = tensors
        self._entries: dict[str, ModelEntry] = {}
        self._homes: dict[int, list[Home]] = {}
        self._names: dict[int, list[str]] = {}
        self._params: dict[str, torch.nn.Parameter] = {}
        self._first: dict[int, str] = {}
        """Of each parameter and buffer object, the first name in the state dict."""
        modules = [model] if isinstance(model, torch.nn.Module) else model
        self._parts = [Part(module, names.walk(module)) for module in modules]
        for part in self._parts:
            self._read(part)

    # -- reading ----------------------------------------------------------------------------------

    def _read(self, part: Part) -> None:
        # First the state dict: its pre-hooks may change what the modules hold (FSDP2 reshards).
        saved = _state_dict(part.root)
        part.versions = getattr(saved, "_metadata", {})
        frozen = self._walk(part)
        prefixes = {visit.key_prefix: visit.prefix for visit in part.visits}
        clashes = []
        for key, value in saved.items():
            fqn = names.clean(key, prefixes)
            if fqn in self._entries:
                clashes.append(fqn)
                continue
            part.keys[fqn] = key
            self._entries[fqn] = self._entry(fqn, value, frozen)
        if clashes:
            raise IncompatibleStateError(
                f"more than one of the modules given has the names {', '.join(map(repr, sorted(clashes)[:20]))}; parts "
                "of a model need distinct FQNs"
            )

    def _walk(self, part: Part) -> dict[int, bool]:
        """Learn the tree; returns for each parameter (True where frozen) and buffer object what it is."""
        inner = names.unwrapped(part.root)
        found: dict[int, bool] = {}
        for module, prefix, key_prefix in part.visits:
            for name, param in module._parameters.items():
                if param is not None:
                    found[id(param)] = not param.requires_grad
                    self._homes.setdefault(id(param), []).append((module, name))
                    self._names.setdefault(id(param), []).append(prefix + name)
                    if self._params.setdefault(prefix + name, param) is not param:
                        raise IncompatibleStateError(
                            f"two parameters are called {prefix + name!r}; parts of a model need distinct FQNs"
                        )
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._homes.setdefault(id(buffer), []).append((module, name))
            if _takes_extra_state(module):
                part.extras[prefix + names.EXTRA_STATE] = module
            if part.region(prefix) is None and _own_way(module, inner):
                part.regions[prefix] = Region(module, prefix, key_prefix, module is inner)
        return found

    def _entry(self, fqn: str, value: Any, frozen: Mapping[int, bool]) -> ModelEntry:
        if id(value) not in self._homes:
            made = "buffer" if isinstance(value, torch.Tensor) and not fqn.endswith(names.EXTRA_STATE) else "extra"
            return ModelEntry(value, made)
        first = self._first.setdefault(id(value), fqn)
        kind = "param" if id(value) in self._names else "buffer"
        return ModelEntry(value, kind, frozen.get(id(value), False), "" if first == fqn else first)

    def entries(self) -> Mapping[str, ModelEntry]:
        """The state dict by FQN, under all names of tied parameters; values are the live parameters and buffers."""
        return self._entries

    def parameters(self) -> Mapping[int, tuple[str, ...]]:
        """FQNs of each parameter object as `named_parameters` has them, which state-dict hooks do not rename."""
        return {param: tuple(fqns) for param, fqns in self._names.items()}

    def parameter(self, fqn: str) -> Any:
        """The parameter of an FQN."""
        return self._params[fqn]

    def prefixes(self, submodules: Iterable[torch.nn.Module]) -> set[str]:
        """FQN prefixes of the given submodules ("" for a root). Raises `OptionError` for a module from elsewhere."""
        result: set[str] = set()
        for module in submodules:
            wanted = names.unwrapped(module)
            found = {visit.prefix for part in self._parts for visit in part.visits if visit.module is wanted}
            if not found:
                raise OptionError(f"submodules= holds a {type(module).__qualname__} that is not part of the model")
            result |= found
        return result

    # -- writing ----------------------------------------------------------------------------------

    def writer(self, fqn: str) -> Any | None:
        """The live parameter or buffer of `fqn`; None where a value must go through `assign`."""
        entry = self._entries[fqn]
        if id(entry.value) not in self._homes or self._region(fqn) is not None or self._tensors.is_meta(entry.value):
            return None
        return entry.value

    def _region(self, fqn: str) -> Region | None:
        for part in self._parts:
            if fqn in part.keys:
                return part.region(fqn)
        return None

    def assign(self, values: Mapping[str, Any]) -> None:
        """Take values that can't be written in place, then run load hooks and report what is still on the meta device.

        Meta parameters and buffers take over the tensors given; the others are copied from.
        """
        inside: dict[tuple[int, str], dict[str, Any]] = {}
        filled: dict[int, tuple[Any, Any]] = {}
        for number, part in enumerate(self._parts):
            for fqn in [fqn for fqn in values if fqn in part.keys]:
                region, old = part.region(fqn), self._entries[fqn].value
                if region is not None:
                    inside.setdefault((number, region.prefix), {})[fqn] = values[fqn]
                elif id(old) in self._homes:
                    filled[id(old)] = (old, values[fqn])
                elif fqn in part.extras:
                    part.extras[fqn].set_extra_state(values[fqn])
                else:
                    raise IncompatibleStateError(f"the model gives {fqn!r} but has no way to take it back")
        new: set[int] = set()
        for old, value in filled.values():
            self._fill(old, value, new)
        loaded: set[int] = set()
        for (number, prefix), contents in inside.items():
            region = self._parts[number].regions[prefix]
            self._load(self._parts[number], region, contents, new)
            loaded |= {id(module) for module in region.module.modules()}
        self._run_load_hooks(loaded, new)
        self._report_meta()

    def _fill(self, old: Any, value: Any, new: set[int]) -> None:
        if not self._tensors.is_meta(old):
            self._tensors.copy([(self._tensors.local(old), self._tensors.local(value))])
            return
        homes = self._homes[id(old)]
        new |= {id(module) for module, _ in homes}
        fresh = _like(old, value)
        try:
            _swap(old, fresh)
        except RuntimeError as error:  # somebody holds a weak reference, or autograd a node
            for module, name in homes:
                (module._parameters if name in module._parameters else module._buffers)[name] = fresh
            self._renew(old, fresh)
            warnings.warn(
                f"{self._first.get(id(old), 'a parameter')!r} was replaced by a new object, since the framework can't "
                f"keep it ({error}); build the optimizer after loading",
                stacklevel=2,
            )

    def _renew(self, old: Any, fresh: Any) -> None:
        """Put a new parameter object in the place of `old` in what was learnt."""
        tables: list[dict[int, Any]] = [self._homes, self._names, self._first]
        for table in tables:
            if id(old) in table:
                table[id(fresh)] = table.pop(id(old))
        self._params |= {fqn: fresh for fqn, param in self._params.items() if param is old}
        self._entries |= {
            fqn: replace(entry, value=fresh) for fqn, entry in self._entries.items() if entry.value is old
        }

    def _load(self, part: Part, region: Region, values: Mapping[str, Any], new: set[int]) -> None:
        """Load `values` with the module's own machinery, under the keys that it saved them by."""
        self._make_room(region, values, new)
        start = len(region.key_prefix)
        inside: OrderedDict[str, Any] = OrderedDict((part.keys[fqn][start:], value) for fqn, value in values.items())
        versions = {
            path[start:]: dict(version)
            for path, version in part.versions.items()
            if f"{path}.".startswith(region.key_prefix) or not start
        }
        inside._metadata = versions  # type: ignore[attr-defined]  # as nn.Module.state_dict() hangs it on
        load = (
            _method(region.module, "load_state_dict")
            if region.root
            # nn.Module never calls a nested module's load_state_dict, so overriding it means nothing there.
            else functools.partial(torch.nn.Module.load_state_dict, region.module)
        )
        load(inside, **({"strict": False} if _accepts(load, "strict") else {}))

    def _make_room(self, region: Region, values: Mapping[str, Any], new: set[int]) -> None:
        """Give the meta tensors of a region storage, where its values live, so that they can be copied into."""
        places = [self._tensors.place(value) for value in values.values() if isinstance(value, torch.Tensor)]
        if not places:
            return
        for module in region.module.modules():
            for member in (*module._parameters.values(), *module._buffers.values()):
                if member is not None and id(member) in self._homes and self._tensors.is_meta(member):
                    spec = self._tensors.spec(member)
                    assert spec is not None
                    shape = tuple(self._tensors.local(member).shape)
                    room = self._tensors.empty(shape, spec.dtype, places[0])
                    self._fill(member, self._tensors.wrap(room, spec, member), new)

    def _run_load_hooks(self, loaded: set[int], new: set[int]) -> None:
        """Run each module's load_state_dict post-hooks, children first, but for those that ran in `_load`.

        FSDP2's note new storage and are run only where there is some.
        """
        for part in self._parts:
            for module, _, _ in reversed(part.visits):
                if id(module) in loaded:
                    continue
                loaded.add(id(module))
                for hook in list(module._load_state_dict_post_hooks.values()):
                    if id(module) in new or not _origin(hook).startswith(_FSDP):
                        hook(module, torch.nn.modules.module._IncompatibleKeys([], []))

    def _report_meta(self) -> None:
        left = [
            f"{prefix}{name}"
            for part in self._parts
            for module, prefix, _ in part.visits
            for name, member in (*module._parameters.items(), *module._buffers.items())
            if member is not None and self._tensors.is_meta(member)
        ]
        if left:
            more = f" and {len(left) - 20} more" if len(left) > 20 else ""
            warnings.warn(f"still on the meta device: {', '.join(left[:20])}{more}", stacklevel=2)


@torch.inference_mode(False)  # a parameter made in inference mode could never be trained
def _like(old: Any, value: Any) -> Any:
    """`value` as an object of the class, the gradient flag and the attributes of `old`."""
    if isinstance(old, torch.nn.Parameter):
        fresh: Any = torch.nn.Parameter(value.detach(), requires_grad=old.requires_grad)
        if type(fresh) is not type(old) and not is_sharded(old):
            fresh = torch.Tensor._make_subclass(type(old), value.detach(), old.requires_grad)
    else:
        fresh = value.detach()
    fresh.__dict__.update(old.__dict__)  # swapping exchanges attributes as well
    return fresh


def _takes_extra_state(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _own_way(module: torch.nn.Module, root: torch.nn.Module) -> bool:
    """Whether `module` may change values or names when it saves or loads."""
    overrides = (*_OVERRIDES, "load_state_dict") if module is root else _OVERRIDES
    for name in overrides:
        definer = next(kind for kind in type(module).__mro__ if name in kind.__dict__)
        if not _is_own(definer.__module__):
            return True
        if name in module.__dict__ and not _patched(module.__dict__[name]):
            return True
    hooks = [*module._state_dict_hooks.values(), *module._load_state_dict_pre_hooks.values()]
    return not all(_is_own(_origin(hook)) for hook in hooks)


def _is_own(module: str) -> bool:
    return module.startswith(_OWN)


def _origin(hook: Any) -> str:
    """The Python module in which a hook was written."""
    hook = getattr(hook, "hook", hook)  # torch.nn.modules.module._WrappedHook
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", ""))


def _patched(method: Any) -> bool:
    """Whether ``_patch_model_state_dict``, PyTorch's or hyperstate's, put a method on the object: it leads here."""
    return _origin(method) in ("torch.distributed.checkpoint.state_dict", "hyperstate.compat.dcp")


def _method(module: torch.nn.Module, name: str) -> Any:
    method = getattr(module, name)
    return functools.partial(getattr(type(module), name), module) if _patched(method) else method


def _accepts(function: Any, argument: str) -> bool:
    parameters = inspect.signature(function).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _state_dict(module: torch.nn.Module) -> Mapping[str, Any]:
    """The module's state dict, with the parameter objects themselves where the module can give them."""
    method = _method(module, "state_dict")
    saved: Mapping[str, Any] = method(keep_vars=True) if _accepts(method, "keep_vars") else method()
    return saved
