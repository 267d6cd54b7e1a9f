"""Load templates: from a checkpoint's metadata, the dict of zero-filled tensors into which a DCP load writes.

A checkpoint library fills tensors that exist, and a fresh optimizer has none. Here they are made from what was
saved (global shape, dtype) and from where the target keeps such values (layout, device); nothing is stepped
and nothing is sent. Entries that this rank's model lacks are left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

from .backend import Backend, Place, Tensor, choose
from .collect import Held, add_optimizer, hold_model
from .describe import Values, rebuild
from .errors import HyperstateError, IncompatibleStateError, InvalidStateDictError, UnsupportedConfigurationError
from .flows import first_of
from .foreign.metadata import Saved, SavedEntries, neutral
from .foreign.readers import read
from .fqn import split_key
from .layout import whole
from .optimkeys import Named, OptimKeys, Path, read_keys
from .options import StateDictOptions, read_options
from .schema import TensorSpec, is_opaque
from .statelayout import AMBIGUOUS, LOCAL, OPAQUE, fresh_state

StateDict = dict[str, Any]
_SHOWN = 20


def build_model_load_template(model: Any, reader: Any, *, options: Any = None, prefix: str = "") -> StateDict:
    """A model's state dict to load into: every saved entry that this model has, as zeros.

    `reader` is a storage reader of PyTorch (``read_metadata()``) or of HyperParallel (``load_metadata()``), or the
    path of a checkpoint; `prefix` is what stands before the keys if the dict was saved inside another (``"model."``).
    Tensors have the saved shape and dtype on the target's mesh and device, with ``full_state_dict`` whole, with
    ``cpu_offload`` on the host. No communication.

    Raises `IncompatibleStateError` for shapes that differ from the model's, `UnsupportedConfigurationError` for an
    unknown dtype, `InvalidStateDictError` if the checkpoint has none of the model's names, `CheckpointError`
    for metadata that can't be read.
    """
    backend = choose(first_of(model))
    opts, saved = _read(backend, reader, "model", options, prefix)
    held = hold_model(backend, backend.model(model, names=opts.names), skip_frozen=opts.ignore_frozen_params)
    maker = _Maker(backend, held, opts)
    template: StateDict = {}
    for key, entry in saved.items():
        if ("model", key) in held.live:
            template[key] = maker.model_value(key, entry)
        elif (split := split_key(key, maker.objects)) is not None:  # extra state that is a dict of tensors
            path = entry.path if entry.path and entry.path[0] == split[0] else (split[0], *split[1].split("."))
            _insert(template, path, maker.extra_value(key, entry))
    if not template and held.live:
        raise InvalidStateDictError(f"the checkpoint has none of the model's {len(held.live)} names; {_keys(saved)}")
    maker.raise_faults()
    return template


def build_optim_load_template(
    model: Any, optimizer: Any, reader: Any, *, options: Any = None, prefix: str = ""
) -> StateDict:
    """An optimizer's state dict to load into, nested or flat as the checkpoint was saved; `optimizer` may be fresh.

    State tensors have the saved global shape and dtype and lie as the optimizer keeps or would keep them, plain
    where nothing tells; counters are on the host. Group fields that were stored as bytes show the optimizer's present
    values, which the load replaces. Where the checkpoint has no group fields, ``flatten_optimizer_state_dict`` chooses
    the form. Arguments as in `build_model_load_template`.

    Raises besides: `IncompatibleStateError` for groups that the optimizer lacks (a warning unless ``strict``).
    """
    backend = choose(first_of(model), first_of(optimizer))
    opts, saved = _read(backend, reader, "optim", options, prefix)
    port = backend.model(model, names=opts.names)
    held = add_optimizer(backend, Held(Values(), {}), port, backend.optimizer(optimizer, names=opts.names), None)
    keys = read_keys({key: entry.path for key, entry in saved.items()}, held.names)
    if saved and not keys.seen:
        raise InvalidStateDictError(f"the checkpoint holds no optimizer state ('state.<FQN>.<key>'); {_keys(saved)}")
    for fqn in {held.names[str(one.owner)] for one in keys.state} - held.params.keys():
        _add_parameter(backend, held, fqn, port.parameter(fqn))
    _report_groups(keys, len(held.groups), opts.strict)
    maker = _Maker(backend, held, opts)
    flat = opts.flatten_optimizer_state_dict if keys.by_fqn is None else keys.by_fqn
    template = _flat(maker, keys, saved) if flat else _nested(maker, keys, saved)
    maker.raise_faults()
    return template


def infer_state_keys(optimizer: Any) -> list[str]:
    """The state keys that an optimizer (or a sequence of them) will have after its first step with its present fields.

    For want of a checkpoint's metadata. An unknown class brings a warning and no keys.
    """
    port = choose(first_of(optimizer)).optimizer(optimizer)
    found: dict[str, None] = {}
    for kind, keys in zip(port.types(), port.state_keys(), strict=True):
        if keys is None:
            name = f"{kind.__module__}.{kind.__qualname__}"
            warnings.warn(f"the state keys of {name} are not known; they show after its first step", stacklevel=2)
        found |= dict.fromkeys(keys or ())
    return list(found)


# -- forms -----------------------------------------------------------------------------------------------


def _nested(maker: _Maker, keys: OptimKeys, saved: SavedEntries) -> StateDict:
    template: StateDict = {"state": {}, "param_groups": []}
    for one in keys.state:
        _insert(template["state"].setdefault(one.owner, {}), one.path, maker.state_value(one, saved[one.key]))
    groups: dict[int, StateDict] = {}
    for one in keys.groups:
        index = int(one.owner)
        if index < len(maker.held.groups):
            group = groups.setdefault(index, {"params": list(maker.held.groups[index][0])})
            if one.path != ("params",) or saved[one.key].leaves is not None:
                _insert(group, one.path, maker.field_value(index, one, saved[one.key]))
    template["param_groups"] = [groups.get(index, {"params": []}) for index in range(max(groups, default=-1) + 1)]
    for one in keys.shared:
        _insert(template.setdefault("global", {}), one.path, maker.shared_value(one, saved[one.key]))
    return template


def _flat(maker: _Maker, keys: OptimKeys, saved: SavedEntries) -> StateDict:
    template: StateDict = {one.key: maker.state_value(one, saved[one.key]) for one in keys.state}
    group_of = {fqn: index for index, (fqns, _) in enumerate(maker.held.groups) for fqn in fqns}
    for one in keys.groups:
        index = group_of.get(maker.held.names.get(str(one.owner), ""))
        template[one.key] = maker.field_value(index, one, saved[one.key])
    return template | {one.key: maker.shared_value(one, saved[one.key]) for one in keys.shared}


def _insert(root: StateDict, path: Path, value: Any) -> None:
    """Put `value` under nested keys. As in PyTorch's planner data, an integer further down is a place in a list."""
    here: Any = root
    for step, following in pairwise(path):
        if isinstance(here, list):
            here.extend([None] * (int(step) + 1 - len(here)))
            here[int(step)] = [] if here[int(step)] is None and isinstance(following, int) else here[int(step)] or {}
        elif step not in here:
            here[step] = [] if isinstance(following, int) else {}
        here = here[step]
    if isinstance(here, list):
        here.extend([None] * (int(path[-1]) + 1 - len(here)))
    here[path[-1]] = value


def _report_groups(keys: OptimKeys, count: int, strict: bool) -> None:
    if keys.by_fqn:
        return
    lacking = [one.key for one in keys.groups if int(one.owner) >= count]
    if not lacking:
        return
    text = f"unexpected: the optimizer has {count} param groups, and the checkpoint has {_listed(lacking)}"
    if strict:
        raise IncompatibleStateError(f"{text}; with strict=False they are left out")
    warnings.warn(f"{text}; left out", stacklevel=3)


# -- values ----------------------------------------------------------------------------------------------


class _Maker:
    """Makes the values of one template. What does not fit is noted, to be raised all together."""

    def __init__(self, backend: Backend, held: Held, opts: StateDictOptions) -> None:
        self.backend, self.held, self.opts = backend, held, opts
        self.faults: list[tuple[type[HyperstateError], str]] = []
        self.objects = {key[1] for key, entry in held.values.entries.items() if key[0] == "model" and not entry.single}
        """FQNs of a model's extra state."""
        self._present: dict[int, StateDict] = {}

    def raise_faults(self) -> None:
        if self.faults:
            raise self.faults[0][0](f"the checkpoint does not fit: {_listed([text for _, text in self.faults])}")

    def model_value(self, fqn: str, saved: Saved) -> Any:
        want, live = self.held.values.entries["model", fqn].single, self.held.live["model", fqn]
        if saved.leaves is not None:
            return self._told(fqn, saved)
        if saved.dtype is None:
            return None if want is not None else _leaf(deepcopy(live))
        if want is None:
            return self._plain(fqn, saved)
        if saved.shape != want.shape:
            text = f"{fqn!r} was saved with shape {list(saved.shape)} and has {list(want.shape)} here"
            self.faults.append((IncompatibleStateError, text))
            return None
        return self._tensor(fqn, saved, want, live)

    def extra_value(self, key: str, saved: Saved) -> Any:
        """A part of a model's extra state."""
        return None if saved.dtype is None else self._plain(key, saved)

    def state_value(self, one: Named, saved: Saved) -> Any:
        fqn = self.held.names[str(one.owner)]
        where = ("state", fqn, one.path[0]) if len(one.path) == 1 else None
        kept, live = self.held.values.entries.get(where or ()), self.held.live.get(where or ())
        if saved.leaves is not None:
            return self._told(one.key, saved)
        if saved.dtype is None:
            return _leaf(deepcopy(live))
        spec, like = None if kept is None else kept.single, live
        if spec is None or spec.shape != saved.shape or spec.form in (OPAQUE, AMBIGUOUS):
            spec = fresh_state("float32", saved.shape, self.held.params[fqn], self.held.rules.get(one.path[0]))
            like = None
        if prod(saved.shape) == 1 and not (spec.layout is not None and spec.layout.used):
            return self._plain(one.key, saved)  # a counter: getters give it plain, too
        if like is None or spec.form == LOCAL:
            like = self.held.parameters[fqn]
        return self._tensor(one.key, saved, spec, like)

    def field_value(self, index: int | None, one: Named, saved: Saved) -> Any:
        if saved.leaves is not None:
            return self._told(one.key, saved)
        if saved.dtype is not None:
            return self._plain(one.key, saved)
        if index is None or len(one.path) != 1:
            return None
        return _leaf(self.present(index).get(str(one.path[0])))

    def shared_value(self, one: Named, saved: Saved) -> Any:
        if saved.leaves is not None:
            return self._told(one.key, saved)
        if saved.dtype is not None:
            return self._plain(one.key, saved)
        return _leaf(deepcopy(self.held.live.get(("global", one.path[0])))) if len(one.path) == 1 else None

    def present(self, index: int) -> StateDict:
        """A group's fields as they are, copied, tensors to the host."""
        if index not in self._present:
            skeleton = self.held.fields.entries["group", index].skeleton
            self._present[index] = (
                deepcopy(self.held.groups[index][1])
                if is_opaque(skeleton)
                else rebuild(
                    skeleton, lambda _: None, lambda spec, data: self.backend.tensors.from_raw(data, spec, None)
                )
            )
        return self._present[index]

    def _told(self, key: str, saved: Saved) -> Any:
        """A value that the metadata tell; tensors inside it are zeros."""
        leaves, from_raw = saved.leaves or (), self.backend.tensors.from_raw
        return rebuild(
            saved.skeleton, lambda i: self._plain(key, leaves[i]), lambda spec, data: from_raw(data, spec, None)
        )

    def _plain(self, key: str, saved: Saved) -> Any:
        """A whole tensor on the host."""
        return self._tensor(key, saved, TensorSpec("float32", saved.shape), None)

    def _tensor(self, key: str, saved: Saved, spec: TensorSpec, like: Tensor | None) -> Any:
        """Zeros of the saved shape and dtype, laid out as `spec` on the device and mesh of `like` (None: the host)."""
        tensors = self.backend.tensors
        try:
            dtype = neutral(saved.dtype)
            layout = None if self.opts.full_state_dict else spec.layout
            box = whole(saved.shape) if layout is None else layout.box(saved.shape, self.backend.fabric.rank())
            shape = (0,) if box is None else box.shape  # as PyTorch's sharded tensors have outside their mesh
            local = tensors.zeros(shape, dtype, self._place(like))
            return local if layout is None else tensors.wrap(local, replace(spec, dtype=dtype, form=""), like)
        except UnsupportedConfigurationError as error:
            self.faults.append((UnsupportedConfigurationError, f"{key!r}: {error}"))
            return None

    def _place(self, like: Tensor | None) -> Place:
        tensors = self.backend.tensors
        if like is None or self.opts.cpu_offload:
            return None
        spec = tensors.spec(like)
        if tensors.is_meta(like) and (spec is None or spec.layout is None):
            return None  # where a plain meta tensor is to live, the setter's device= will tell
        return tensors.place(like)


def _add_parameter(backend: Backend, held: Held, fqn: str, param: Tensor) -> None:
    """A parameter of the model that is another optimizer's: its state is shown too, for the setter to judge."""
    spec = backend.tensors.spec(param)
    assert spec is not None
    held.params[fqn], held.parameters[fqn] = spec, param


def _leaf(value: Any) -> Any:
    """`value` where a checkpoint library takes it for one entry; None for a dict or a list that it would look into."""
    if isinstance(value, Mapping) or (isinstance(value, list) and any(not _is_scalar(item) for item in value)):
        return None
    return value


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def _read(
    backend: Backend, reader: Any, section: str, options: Any, prefix: str
) -> tuple[StateDictOptions, SavedEntries]:
    """Options, and the checkpoint's entries below `prefix`. Without options, names are those of the checkpoint."""
    opts = read_options(options)
    found = read(reader, backend.fabric.rank(), section)
    if options is None and found.names is not None:
        opts = replace(opts, names=found.names)
    return opts, _below(found.entries, prefix)


def _below(entries: SavedEntries, prefix: str) -> SavedEntries:
    """The entries whose keys start with `prefix`, without it."""
    if not prefix:
        return entries
    steps = prefix.count(".")
    return {
        key.removeprefix(prefix): replace(entry, path=None if entry.path is None else entry.path[steps:] or None)
        for key, entry in entries.items()
        if key.startswith(prefix)
    }


def _keys(saved: SavedEntries) -> str:
    shown = _listed(list(saved)[:_SHOWN])
    return f"its keys are: {shown}. If the dict was saved inside another, pass prefix= ('optim.')"


def _listed(texts: Iterable[str]) -> str:
    found = list(texts)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
