"""Saving: agree on what there is, write each rank's own part, show the manifest.

`prepare` is a collective call on the caller's thread; `Job.write` is the rest, which may run beside the
caller's own calls: it meets the other ranks on the control channel alone, under a channel of its own.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Self

from ..agree import Call
from ..backend import Backend, Local, Tensors, choose_for_call
from ..collect import Held
from ..describe import Values
from ..errors import CheckpointError, Fault, HyperstateError, OptionError, fault_of, raise_faults
from ..flows import Faults, collector_paused, first_of, hold_for_get, lenient, meshes_in_use, open_call, turn
from ..getters import check_twins, describe_held
from ..layout import Box
from ..merge import by_key, check_alike, check_groups, merge
from ..options import StateDictOptions, read_options
from . import folder
from .aside import Aside
from .checksum import crc32
from .container import SAVE, lay_out
from .contents import Contents, Piece, contents_of, own_pieces
from .extra import take_extra
from .manifest import PIECE, SECTIONS, Chunk, File, Manifest, Stored, dump, parse
from .progress import Meter, Progress
from .storage import Store, open_store

CHANNEL = "save/"
SMALL = 1 << 20
"""Bytes: a smaller piece is summed at once; a thread would cost more."""
Source = Local | bytes


@dataclass
class Job:
    """One rank's part of a save on which all ranks have agreed."""

    call: Call
    store: Store
    order: folder.Order
    contents: Contents
    pieces: list[tuple[Piece, Source]]
    """What this rank writes, and where its bytes are."""
    keep: int | None
    naming: str
    meter: Meter

    def write(self) -> None:
        """Write, and wait until the checkpoint is visible. Raises the same error on all ranks if that fails on any."""
        faults: list[Fault] = []
        rows: Any = None
        try:
            if self.call.me == self.call.leader:
                folder.tidy(self.store, self.order)
            rows = self._write_files()
        except Exception as error:  # noqa: BLE001  # it travels to all ranks and is raised there
            faults.append(fault_of(error, self.call.me))
        shown = False
        try:
            found = self.call.gather(faults, rows)
            try:
                if found:
                    self._show(found)
                    shown = True
            except Exception as error:  # noqa: BLE001  # the same
                faults.append(fault_of(error, self.call.me))
            self.call.ready(faults)
        except BaseException:
            if self.call.me == self.call.leader and not shown:
                with suppress(HyperstateError):
                    self.store.remove(self.order.stage.rstrip("/") or f"{folder.STAGE}{self.order.id}")
            raise
        if self.call.me == self.call.leader:
            self._tidy_up()

    def _write_files(self) -> Any:
        files: list[Any] = []
        chunks: list[Any] = []
        for section in SECTIONS:
            mine = [(p, source) for p, source in self.pieces if self.contents.tensors[p.number].section == section]
            if not mine:
                continue
            name = f"{section}/shard-{self.call.me + 1:05d}-model-00001-of-00001.safetensors"
            size, rows = self._write_file(name, mine)
            chunks += [[number, len(files), *row] for number, *row in rows]
            files.append([name, size])
        return {"files": files, "chunks": chunks}

    def _write_file(self, name: str, pieces: Sequence[tuple[Piece, Source]]) -> tuple[int, list[list[Any]]]:
        """Size of the file, and per piece: tensor, box, first byte, checksums."""
        tensors = self.contents.tensors
        described = [
            (tensors[p.number].name, tensors[p.number].spec.dtype, p.box.shape, p.box.start) for p, _ in pieces
        ]
        first, starts = lay_out(described, {SAVE: self.order.id})
        ordered = sorted(pieces, key=lambda piece: starts[tensors[piece[0].number].name])
        rows, size = [], len(first)
        with _Sums() as sums:
            with self.store.writer(self.order.stage + name) as file:
                file.write(first)
                for piece, source in ordered:
                    data = host_bytes(self.call.backend.tensors, source)
                    sums.add(data)
                    file.write(data)
                    self.meter.step(len(data), name)
                    start = starts[tensors[piece.number].name]
                    rows.append([piece.number, list(piece.box.start), list(piece.box.stop), start])
                    size += len(data)
            for row, found in zip(rows, sums.found(), strict=True):
                row.append(found)
        self.store.settle((self.order.stage + name).rpartition("/")[0])
        return size, rows

    def _show(self, found: dict[int, Any]) -> None:
        """On the leader, with every rank's rows: check that all is there, and make it visible."""
        manifest = self._manifest(found)
        for file in manifest.files:
            seen = self.store.size(self.order.stage + file.name)
            if seen != file.size:
                state = "can't be seen from" if seen is None else f"has {seen} instead of {file.size} bytes for"
                raise CheckpointError(
                    f"{self.store.path}: {file.name} {state} rank {self.call.leader}; all ranks must write to one "
                    "shared file system"
                )
        data = dump(manifest)
        parse(data, "the new manifest")
        folder.show(self.store, self.order, manifest, data)

    def _manifest(self, found: dict[int, Any]) -> Manifest:
        files: list[File] = []
        chunks: dict[int, list[Chunk]] = {}
        for rank in sorted(found):
            before = len(files)
            files += [File(*file) for file in found[rank]["files"]]
            for number, file, start, stop, first, sums in found[rank]["chunks"]:
                box = Box(tuple(start), tuple(stop))
                chunks.setdefault(number, []).append(Chunk(before + file, box, first, tuple(sums)))
        tensors = tuple(
            Stored(t.section, t.name, t.spec.dtype, t.spec.shape, t.spec.layout is not None, tuple(chunks.get(i, ())))
            for i, t in enumerate(self.contents.tensors)
        )
        writer = f"hyperstate {_version()}, {self.call.backend.name}, {len(found)} rank(s)"
        c = self.contents
        return Manifest(self.order.id, writer, self.naming, tuple(files), tensors, c.entries, c.groups, c.tied, c.extra)

    def _tidy_up(self) -> None:
        """What comes after the checkpoint is visible; failing there does not make the save fail."""
        try:
            if self.keep is not None:
                folder.prune(self.store, self.keep)
        except HyperstateError as error:
            warnings.warn(f"older checkpoints could not be removed: {error}", stacklevel=3)


class _Sums:
    """Checksums of buffers, made on a thread beside the writing and the flushing of them."""

    def __init__(self) -> None:
        self._pool = Aside()
        self._sums: list[list[int | Future[int]]] = []
        self._pending: deque[Future[int]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.__exit__(*error)

    def add(self, data: memoryview) -> None:
        """Sum a buffer, which must stay as it is. Waits where many are still to be summed: each is kept until then."""
        self._sums.append([self._sum(data[start : start + PIECE]) for start in range(0, len(data), PIECE)])
        while len(self._pending) > 4:
            self._pending.popleft().result()

    def _sum(self, part: memoryview) -> int | Future[int]:
        if len(part) < SMALL:
            return crc32(part)
        self._pending.append(self._pool.submit(crc32, part))
        return self._pending[-1]

    def found(self) -> list[list[int]]:
        """By buffer, the checksums of its pieces."""
        return [[one if isinstance(one, int) else one.result() for one in sums] for sums in self._sums]


def host_bytes(tensors: Tensors, source: Source) -> memoryview:
    """The bytes of a tensor: its own memory if that is contiguous on the host, else a copy."""
    if isinstance(source, bytes):
        return memoryview(source)
    view = tensors.host_bytes(source)
    if view is None:
        spec = tensors.spec(source)
        assert spec is not None
        copy = tensors.empty(spec.shape, spec.dtype, None)
        tensors.copy([(copy, source)])
        view = tensors.host_bytes(copy)
    return memoryview(tensors.raw([source])[0]) if view is None else view


def _version() -> str:
    try:
        return metadata.version("hyperstate-dist")
    except metadata.PackageNotFoundError:
        return "(not installed)"


# -- agreeing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wish:
    """What the caller of `save` asks for."""

    path: Any
    extra: Any = None
    keep: int | None = None
    options: Any = None
    ranks: Any = None
    timeout: float | None = None
    progress: Progress | None = None


@collector_paused()
def prepare(model: Any, optimizer: Any, wish: Wish, first: Callable[[Backend], None]) -> Job:
    """Agree with the other ranks on what is to be saved, after `first`, which may refuse.

    Raises the same error on all of them if any refuses.
    """
    backend, refusal = choose_for_call(first_of(model), first_of(optimizer))
    faults = Faults(backend, refusal)
    faults.guard(lambda: first(backend))
    options = StateDictOptions(names="neutral") if wish.options is None else wish.options
    opts = faults.guard(lambda: read_options(options)) or lenient(options)
    held = Held(Values(), {})
    if refusal is None:
        held = faults.guard(lambda: hold_for_get(backend, model, optimizer, None, opts, "save")) or held
    store = faults.guard(lambda: open_store(wish.path))
    extra = faults.guard(lambda: take_extra(wish.extra))
    faults.guard(lambda: _check_keep(wish, store))
    meshes = meshes_in_use(backend, model, held.meshes(), faults)
    with turn(backend):
        call = open_call(backend, "save", meshes, faults, wish.ranks, wish.timeout, whole_job=True)
        parts = faults.guard(lambda: describe_held(call, held, root_only=True)) or {}
        order = None
        if call.me == call.leader and store is not None:
            order = faults.guard(lambda: folder.look(store, os.urandom(16).hex()))
        names = {alias: fqn for alias, fqn in sorted(held.names.items()) if alias != fqn}
        parts |= {"names": names, "extra": extra, "order": order, "place": _place(wish, opts)}
        classes = call.describe(faults.found, parts)
        variants = by_key(merge(classes["entries"]))
        alike = [*check_alike(variants, call.ranks), *check_groups(classes["groups"]), *_one_place(classes["place"])]
        raise_faults(alike, call.what)
        check_twins(call, held, variants)
    contents = contents_of(variants, classes["groups"], classes["names"], classes["extra"])
    raise_faults(contents.faults, call.what)
    if contents.left_out:
        text = f"fields of param groups that no file can carry were left out: {list(contents.left_out)}"
        warnings.warn(text, stacklevel=4)
    assert store is not None
    pieces = [(piece, _source(backend, held, contents, piece)) for piece in own_pieces(contents.tensors, call.me)]
    apart = Call(backend, call.ranks, call.what, call.timeout, CHANNEL)
    meter = Meter(wish.progress, sum(contents.nbytes_of(piece) for piece, _ in pieces))
    return Job(apart, store, folder.Order(*classes["order"][0][1]), contents, pieces, wish.keep, opts.names, meter)


def _check_keep(wish: Wish, store: Store | None) -> None:
    if wish.keep is None or store is None:
        return
    if type(wish.keep) is not int or wish.keep < 1:
        raise OptionError(f"keep={wish.keep!r} must be a number of checkpoints, 1 or more")
    folder.step_name(store.name)


def _place(wish: Wish, opts: StateDictOptions) -> dict[str, Any]:
    """What all ranks must ask for alike."""
    return {
        "path": str(wish.path),
        "keep": wish.keep,
        "names": opts.names,
        "ignore_frozen_params": opts.ignore_frozen_params,
    }


def _one_place(places: Any) -> list[Fault]:
    """Ranks that name different paths, numbers of checkpoints to keep, or options."""
    if len(places) == 1:
        return []
    differ = [name for name, value in places[0][1].items() if any(place[name] != value for _, place in places)]
    said = "; ".join(
        f"rank {ranks[0]}: " + ", ".join(f"{name}={place[name]!r}" for name in differ) for ranks, place in places
    )
    return [Fault(places[1][0][0], "DisagreementError", f"the ranks ask for different saves: {said}")]


def _source(backend: Backend, held: Held, contents: Contents, piece: Piece) -> Source:
    """The memory of this rank that a piece is in."""
    tensor = contents.tensors[piece.number]
    if tensor.content is not None:
        return tensor.content
    local = backend.tensors.local(held.values.tensors[tensor.key][tensor.leaf])
    if tensor.spec.layout is None:
        return local
    box = tensor.spec.layout.box(tensor.spec.shape, backend.fabric.rank())
    assert box is not None
    return local if box == piece.box else backend.tensors.view(local, piece.box.within(box))
