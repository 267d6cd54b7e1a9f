"""Live values as entries: what this rank holds or passes, ready to be compared with other ranks."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from .backend import Tensor, Tensors
from .errors import UnsupportedConfigurationError
from .schema import (
    LEAF,
    PLAIN,
    Entry,
    Key,
    TensorSpec,
    counter_entry,
    counter_of,
    put_together,
    take_apart,
    tensor_entry,
    tiny,
    tiny_skeleton,
)

Read = Callable[[Key, TensorSpec], TensorSpec]
"""Completes the spec of a tensor leaf of the value under a key (`statelayout.read_state`)."""


@dataclass
class Values:
    """Values of one rank, taken apart: entries to compare, tensors to move."""

    entries: dict[Key, Entry] = field(default_factory=dict)
    tensors: dict[Key, list[Tensor]] = field(default_factory=dict)
    """The tensor leaves of each entry, in the order of its specs."""
    counters: dict[Key, list[Tensor]] = field(default_factory=dict)
    """The tensors that travel in each skeleton, in its order."""
    objects: dict[Key, Any] = field(default_factory=dict)
    """Values that hold an object which only this rank has (`Entry.opaque`), as they are."""


def describe(
    tensors: Tensors,
    values: Mapping[Key, Any],
    read: Read | None = None,
    *,
    carry_objects: bool = False,
    inline: bool = False,
    contents: bool = True,
) -> Values:
    """Take `values` apart.

    Plain tensors of one element go into the skeleton with their bytes. Objects that JSON can't carry
    are named by their type, or with `carry_objects` pickled (for extra state, inside a job only).
    With `inline` every plain tensor goes into the skeleton (fields of param groups).
    Without `contents` counters tell dtype and shape alone: for targets, whose values are replaced.
    Errors name the key.
    """
    result = Values()
    taker = _Taker(tensors, read, carry_objects, inline)
    for key, value in values.items():
        leaves = taker.start(key)
        try:
            skeleton = taker.leaf(value) if type(value) not in PLAIN else take_apart(value, taker.leaf)
        except UnsupportedConfigurationError as error:
            raise UnsupportedConfigurationError(f"{show(key)}: {error}") from error
        specs = taker.specs
        result.entries[key] = tensor_entry(specs[0]) if skeleton is LEAF else Entry(skeleton, tuple(specs))
        result.tensors[key] = leaves
    pending, result.counters = taker.pending, taker.counters
    read_now = tensors.raw([tensors.local(one.tensor) for one in pending]) if contents else [b""] * len(pending)
    for one, content in zip(pending, read_now, strict=True):
        if result.entries[one.key].skeleton is one.skeleton:
            result.entries[one.key] = counter_entry(one.spec, content)
        else:
            one.skeleton.update(tiny_skeleton(one.spec, content))
    result.objects = {key: values[key] for key, one in result.entries.items() if one.opaque}
    return result


class _Pending(NamedTuple):
    """A counter whose content is read later, with all others."""

    key: Key
    skeleton: dict[str, Any]
    spec: TensorSpec
    tensor: Tensor


class _Taker:
    """Takes the leaves of one value after another."""

    def __init__(self, tensors: Tensors, read: Read | None, carry: bool, inline: bool) -> None:
        self.tensors, self.read, self.carry, self.inline = tensors, read, carry, inline
        self.pending: list[_Pending] = []
        self.counters: dict[Key, list[Tensor]] = {}

    def start(self, key: Key) -> list[Tensor]:
        """Begin with the value under `key`; its tensor leaves will be in the list returned, their specs in `specs`."""
        self.key = key
        self.leaves: list[Tensor] = []
        self.specs: list[TensorSpec] = []
        return self.leaves

    def leaf(self, item: Any) -> Any:
        """The skeleton of what is no plain Python value."""
        spec = self.tensors.spec(item)
        if spec is None:
            return _object(item, self.carry)
        if self.read is not None:
            spec = self.read(self.key, spec)
        if spec.layout is None and not spec.form and (self.inline or tiny(spec)) and not self.tensors.is_meta(item):
            one = _Pending(self.key, {}, spec, item)
            self.pending.append(one)
            self.counters.setdefault(self.key, []).append(item)
            return one.skeleton
        self.leaves.append(item)
        self.specs.append(spec)
        return LEAF if len(self.leaves) == 1 else {"t": len(self.leaves) - 1}


def _object(item: Any, carry: bool) -> Any:
    if not carry:
        return {"?": f"{type(item).__module__}.{type(item).__qualname__}"}
    try:
        return {"P": base64.b85encode(pickle.dumps(item)).decode()}
    except Exception as error:
        raise UnsupportedConfigurationError(f"an object of type {type(item).__qualname__}: {error}") from error


def rebuild(skeleton: Any, leaf: Callable[[int], Any], counter: Callable[[TensorSpec, bytes], Any]) -> Any:
    """The value of `skeleton` from its tensor leaves (by index) and its counters."""

    def make(item: Any) -> Any:
        if "t" in item:
            return leaf(item["t"])
        if "T" in item:
            return counter(*counter_of(item))
        if "P" in item:
            return pickle.loads(base64.b85decode(item["P"]))  # noqa: S301  # from a rank of this job, never from a file
        raise UnsupportedConfigurationError(f"a value of type {item.get('?')} can't be carried to another rank")

    return put_together(skeleton, make)


def content_digest(tensors: Tensors, value: Tensor) -> str:
    """A digest of a plain tensor's bytes."""
    return blake2b(tensors.raw([tensors.local(value)])[0], digest_size=8).hexdigest()


def show(key: Key) -> str:
    """A key as users know it."""
    section, *rest = key
    names = {"model": "model", "state": "optimizer state of", "param": "parameter", "global": "optimizer's shared"}
    return f"{names.get(section, section)} " + " ".join(repr(part) for part in rest)
