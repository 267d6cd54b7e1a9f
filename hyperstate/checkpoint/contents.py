"""What a checkpoint is to hold, and which rank writes which part of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..agree import Classes
from ..describe import show
from ..errors import Fault
from ..layout import Box, Layout, whole
from ..merge import Variant, Variants, root_of
from ..schema import LEAF, Key, TensorSpec, counter_of, is_opaque
from .boxes import share
from .manifest import Saved

Skeleton = Any


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: its name in the section, what it is, and who holds it."""

    section: str
    name: str
    spec: TensorSpec
    key: Key
    leaf: int
    """Position among the leaves of `key`'s value."""
    root: int
    """The rank that writes a plain tensor."""
    content: bytes | None = None
    """Its bytes, where they have travelled with the description."""


@dataclass(frozen=True)
class Contents:
    """Everything but the tensors' bytes; equal on all ranks."""

    tensors: tuple[Tensor, ...]
    entries: dict[Key, Saved]
    groups: tuple[tuple[tuple[str, ...], Skeleton], ...]
    tied: Mapping[str, str]
    extra: tuple[tuple[tuple[int, ...], Skeleton], ...]
    left_out: tuple[str, ...] = ()
    """Fields of param groups that no file can carry."""
    faults: tuple[Fault, ...] = ()

    def nbytes_of(self, piece: Piece) -> int:
        """Bytes of a part of a tensor."""
        return self.tensors[piece.number].spec.itemsize * piece.box.size


def contents_of(variants: Variants, groups: Classes, names: Classes, extra: Classes) -> Contents:
    """The contents of a checkpoint, from what all ranks hold."""
    tied = {alias: fqn for _, part in names for alias, fqn in part.items()}
    builder = _Builder()
    for key in sorted(variants, key=repr):
        if key[0] != "param" and not (key[0] == "model" and key[1] in tied):
            builder.add(key, variants[key])
    return Contents(
        tuple(builder.tensors),
        builder.entries,
        tuple(_merged(groups)),
        tied,
        tuple((tuple(ranks), skeleton) for ranks, skeleton in extra),
        tuple(sorted({n for _, g in groups for _, fields in g for n, value in fields["{"] if is_opaque(value)})),
        tuple(builder.faults),
    )


@dataclass
class _Builder:
    tensors: list[Tensor] = field(default_factory=list)
    entries: dict[Key, Saved] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    _taken: set[tuple[str, str]] = field(default_factory=set)

    def add(self, key: Key, same: Sequence[Variant]) -> None:
        """One value: as its root rank holds it."""
        root = root_of(same)
        if root is None:
            text = f"{show(key)}: no participating rank holds its data; pass ranks= with the ranks of its mesh"
            self.faults.append(Fault(same[0].ranks[0], "ParticipantsError", text))
            return
        entry = next(v.entry for v in same if root in v.holders())
        if entry.opaque:
            text = f"{show(key)} holds an object that no file can carry ({_objects(entry.skeleton)}); "
            text += "files hold tensors, numbers, text, bytes, None, lists, tuples and dicts"
            self.faults.append(Fault(root, "UnsupportedConfigurationError", text))
            return
        single = entry.single
        if key[0] == "model" and single is not None and not entry.leaves:
            # Others read the model's files too, so its one-element tensors stand there like all others.
            spec, content = counter_of(entry.skeleton)
            self.entries[key] = Saved(LEAF, (self._tensor(key, 0, spec, root, key[1], content),))
            return
        numbers = []
        for i, spec in enumerate(entry.leaves):
            name = key[1] if key[0] == "model" else ".".join(map(str, key))
            name = name if single is not None else f"{name}.{i}"
            numbers.append(self._tensor(key, i, spec, root, name))
        self.entries[key] = Saved(entry.skeleton, tuple(numbers))

    def _tensor(self, key: Key, leaf: int, spec: TensorSpec, root: int, name: str, content: bytes | None = None) -> int:
        section = "model" if key[0] == "model" else "optim"
        while (section, name) in self._taken or name == "__metadata__":
            name += "~"
        self._taken.add((section, name))
        self.tensors.append(Tensor(section, name, spec, key, leaf, root, content))
        return len(self.tensors) - 1


def _objects(skeleton: Any) -> str:
    """Type of the first object in `skeleton` that JSON can't carry."""
    if isinstance(skeleton, dict) and "?" in skeleton:
        return str(skeleton["?"])
    inner = skeleton if isinstance(skeleton, list) else next(iter(skeleton.values()), ())
    return next((_objects(item) for item in inner if is_opaque(item)), "an object")


def _merged(classes: Classes) -> Iterator[tuple[tuple[str, ...], Skeleton]]:
    """The groups of all ranks: each FQN once, and the groups without parameters of the first ranks that have some."""
    seen: set[str] = set()
    nameless = False
    for _, groups in classes:
        fresh = []
        for fqns, skeleton in groups:
            mine = tuple(fqn for fqn in fqns if fqn not in seen)
            if mine or (not fqns and not nameless):
                kept = [[name, value] for name, value in skeleton["{"] if not is_opaque(value)]
                fresh.append((mine, {"{": kept}))
            seen.update(mine)
        nameless = nameless or any(not fqns for fqns, _ in groups)
        yield from fresh


# -- who writes what ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that this rank writes; `number` is the tensor's position in `Contents.tensors`."""

    number: int
    box: Box
    """In full-tensor coordinates."""


def own_pieces(tensors: Sequence[Tensor], me: int) -> list[Piece]:
    """What rank `me` writes. Over all ranks, every element of every tensor is written once.

    Replicas of a layout share its tensors: each takes an equal stretch of their bytes.
    """
    totals: dict[Layout, int] = {}
    for tensor in tensors:
        if tensor.spec.layout is not None:
            totals[tensor.spec.layout] = totals.get(tensor.spec.layout, 0) + tensor.spec.nbytes
    rows = {layout: _row_of(layout, me) for layout in totals}
    positions = dict.fromkeys(totals, 0)
    found = []
    for number, tensor in enumerate(tensors):
        spec, layout = tensor.spec, tensor.spec.layout
        if layout is None or 0 in spec.shape:
            if tensor.root == me:
                found.append(Piece(number, whole(spec.shape)))
            continue
        first = positions[layout]
        positions[layout] = first + spec.nbytes
        box, row = layout.box(spec.shape, me), rows[layout]
        if box is None or row is None or not box.size:
            continue
        span = (first, first + spec.nbytes)
        part = share(box, spec.itemsize * box.size, span, totals[layout], row, len(layout.replicas))
        if part is not None:
            found.append(Piece(number, part))
    return found


def _row_of(layout: Layout, me: int) -> int | None:
    """The number of the replica group of which `me` is a member."""
    return next((i for i, row in enumerate(layout.replicas) if me in row), None)
