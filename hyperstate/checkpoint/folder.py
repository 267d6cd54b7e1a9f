"""The folder of a checkpoint while it changes: where new files stand, when they become visible, what is left over.

    hyperstate.json     the manifest; what it names is the checkpoint
    model/  optim/      the files
    .data-<id>/         files of the save <id> that are not in place yet (or, behind a URL, that replaced others)

New files are written under ``.data-<id>/``. Where no checkpoint stands yet they are moved into place and the
manifest appears last. Where one does, the new manifest takes the place of the old in one step, and the files are
moved after that; until then readers find them under ``.data-<id>/``. So a crash at any moment leaves the old
checkpoint or the new one, and the next save tidies up.

Nothing is removed but what a manifest lists, what says in its header that a save wrote it, and ``.data-<id>/``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .container import LENGTH_BYTES, SAVE, Part, header_length, offsets_of, parse, stored_form
from .manifest import NAME, SECTIONS, Chunk, File, Manifest, Stored
from .manifest import parse as parse_manifest
from .storage import Reader, Store

STAGE, OLD = ".data-", ".old-"
_LEFT = re.compile(r"\.data-[0-9a-f]{8,64}|\.old-[0-9a-f]{8,64}-(model|optim)")
"""What a save may leave behind. Other hidden names are somebody else's."""


class Order(NamedTuple):
    """What the leader decides for a save."""

    id: str
    fresh: bool
    """No checkpoint stands at the path."""
    stage: str
    """Folder for the new files, with a slash at its end; empty if they are written in place."""


def look(store: Store, save_id: str) -> Order:
    """How to save at `store`. Raises `CheckpointError` if tensors stand there that are no checkpoint's of ours: who
    reads all files of a folder would mix them with the new ones."""
    fresh = store.size(NAME) is None
    names = store.names()
    if fresh:
        for section in SECTIONS:
            for name in store.names(section) if section in names else []:
                if name.endswith(".safetensors") and not _ours(store, f"{section}/{name}"):
                    raise CheckpointError(
                        f"{store.path}: {section}/{name} is not from a checkpoint of this library and would be "
                        "mixed with the new one; choose another folder, or remove it"
                    )
    in_place = fresh and not store.atomic and not set(SECTIONS) & set(names)
    return Order(save_id, fresh, "" if in_place else f"{STAGE}{save_id}/")


def _ours(store: Store, name: str) -> bool:
    try:
        with store.reader(name) as reader:
            return SAVE in read_header(reader, name)[1]
    except (CheckpointError, OSError):
        return False


def tidy(store: Store, order: Order) -> None:
    """Before a save: finish what an interrupted one began, and remove what it left."""
    current = ""
    if not order.fresh:
        try:
            manifest = read_manifest(store)
        except CheckpointError:
            return  # what stands there can't be read; it stays as it is until the new one is visible
        put_in_place(store, manifest)
        current = manifest.id
    elif order.stage:
        for section in SECTIONS:
            _clear(store, section, section)
    _remove_stages(store, {current, order.id})


def put_in_place(store: Store, manifest: Manifest, old: Collection[str] = ()) -> None:
    """Move the files of `manifest`, which is visible, from their stage to where others look for them.

    `old`: files of the checkpoint that it replaces, as far as they are known.
    """
    if store.atomic:
        _move(store, manifest)
        store.remove(f"{STAGE}{manifest.id}")
        return
    staged = {section for section in SECTIONS if store.names(f"{STAGE}{manifest.id}/{section}")}
    for section in SECTIONS:
        if section in staged or section not in _sections(manifest):
            _clear(store, section, section, old)


def _move(store: Store, manifest: Manifest) -> None:
    """Put the staged folders in the place of those that stand there, which go aside."""
    for section in SECTIONS:
        staged = f"{STAGE}{manifest.id}/{section}"
        present = bool(store.names(staged))
        if section in _sections(manifest) and not present:
            continue  # it stands in place
        if store.names(section):
            store.move(section, f"{OLD}{manifest.id}-{section}")
        if present:
            store.move(staged, section)
    store.settle()


def _sections(manifest: Manifest) -> set[str]:
    return {file.name.partition("/")[0] for file in manifest.files}


def _clear(store: Store, folder: str, section: str, old: Collection[str] = ()) -> None:
    """Remove from `folder`, which is or was that of a section, what saves wrote; what others put there goes (back) to
    the section."""
    present = folder != section and store.names(section)
    for name in store.names(folder):
        where = f"{folder}/{name}"
        if f"{section}/{name}" in old or _ours(store, where):
            store.remove(where)
        elif present and name not in present:
            store.move(where, f"{section}/{name}")
    if not store.names(folder):
        store.remove(folder)
    elif folder != section and not present:
        store.remove(section)  # it is empty
        store.move(folder, section)


def _remove_stages(store: Store, keep: Collection[str], old: Collection[str] = ()) -> None:
    """Remove what is left of saves but those in `keep`. `old`: names of files, under their sections, that go too."""
    for name in store.names():
        if not _LEFT.fullmatch(name) or name.removeprefix(STAGE) in keep:
            continue
        if name.startswith(OLD):
            _clear(store, name, name.rpartition("-")[2], old)
        else:
            store.remove(name)


def show(store: Store, order: Order, manifest: Manifest, data: bytes) -> None:
    """Make a written checkpoint visible. `data` is its manifest as bytes."""
    if order.fresh and store.atomic:
        _move(store, manifest)
    old = set() if order.fresh else _listed(store)
    store.publish(NAME, data)
    with suppress(CheckpointError):  # readers find the files where they are, and the next save tidies up
        if not order.fresh:
            put_in_place(store, manifest, old)
        _remove_stages(store, set() if store.atomic else {manifest.id}, old)


def _listed(store: Store) -> set[str]:
    """Names of the files of the checkpoint at `store`, whatever else is wrong with it."""
    try:
        return {str(name) for name, _ in json.loads(store.read(NAME) or b"")["files"]}
    except (CheckpointError, ValueError, TypeError, KeyError, RecursionError):
        return set()


def prune(store: Store, keep: int) -> None:
    """Keep `keep` checkpoints: this one, and those beside it with the next lower numbers. Higher ones are not older."""
    prefix, step = step_name(store.name)
    steps = {}
    for name in store.siblings():
        try:
            found = step_name(name)
        except CheckpointError:
            continue
        if found[0] == prefix and found[1] < step and store.sibling(name).size(NAME) is not None:
            steps[name] = found[1]
    newest = sorted(steps, key=lambda name: steps[name], reverse=True)
    for name in newest[keep - 1 :]:
        erase(store.sibling(name))


_STEP = re.compile(r"(.*?)(\d+)", re.DOTALL)


def step_name(name: str) -> tuple[str, int]:
    """``step-00100`` -> ("step-", 100). Raises `CheckpointError` for a name that ends in no number."""
    found = _STEP.fullmatch(name)
    if not found:
        raise CheckpointError(f"keep= needs a folder whose name ends in a number, as step-100 does, not {name!r}")
    return found[1], int(found[2])


def erase(store: Store) -> None:
    """Remove a checkpoint, its manifest first, so that nobody finds half of it. Files of others stay."""
    old = _listed(store)
    store.remove(NAME)
    store.settle()
    _remove_stages(store, (), old)
    for section in SECTIONS:
        _clear(store, section, section, old)
    if not store.names():
        store.remove("")


# -- reading -----------------------------------------------------------------------------------------


def read_manifest(store: Store) -> Manifest:
    """The manifest of the checkpoint at `store`. Raises `CheckpointError` if there is none, or a damaged one."""
    data = store.read(NAME)
    if data is None:
        raise CheckpointError(f"{store.path} holds no checkpoint: there is no {NAME}")
    return parse_manifest(data, f"{store.path}/{NAME}")


TRIES = 5
"""How often a reader begins anew because somebody saves to the path meanwhile."""


def id_at(store: Store) -> str:
    """The id of the checkpoint at `store`; empty if none can be read."""
    try:
        return read_manifest(store).id
    except CheckpointError:
        return ""


def read_header(reader: Reader, where: str) -> tuple[dict[str, Part], dict[str, str]]:
    """The tensors of an open safetensors file, and its metadata. Reads no more than the file has."""
    first = bytearray(min(LENGTH_BYTES, reader.size))
    reader.read_into(memoryview(first), 0)
    header = bytearray(header_length(bytes(first), reader.size, where))
    reader.read_into(memoryview(header), LENGTH_BYTES)
    return parse(bytes(header), reader.size, where)


class Opened(NamedTuple):
    """An open file of a checkpoint."""

    reader: Reader
    parts: dict[str, Part]
    """The tensors in its header."""
    offsets: dict[str, tuple[int, ...]]
    """Where in its tensor each of them starts."""

    def fault(self, tensor: Stored, chunk: Chunk) -> str:
        """How the header contradicts the manifest, which has this chunk in the file; empty if it does not."""
        part = self.parts.get(tensor.name)
        kind, shape = stored_form(tensor.dtype, chunk.box.shape)
        start = (*chunk.box.start, *[0] * (len(shape) - len(chunk.box.start)))
        wanted = kind, shape, chunk.start, start
        if part is None:
            found = "nothing"
        elif wanted == (*stored_form(part.dtype, part.shape), part.start, self.offsets.get(part.name)):
            return ""
        else:
            found = f"{part.dtype}{list(part.shape)} from {list(self.offsets.get(part.name, ()))} at byte {part.start}"
        return (
            f"its header has {found} where the manifest has {tensor.name!r}: {tensor.dtype}{list(chunk.box.shape)} "
            f"from {list(chunk.box.start)} at byte {chunk.start}"
        )


@contextmanager
def open_file(store: Store, manifest: Manifest, file: File) -> Iterator[Opened]:
    """A file of a checkpoint. Raises `CheckpointError` if it is not this save's."""
    with ExitStack() as stack:
        reader = _open(store, manifest, file, stack)
        where = f"{store.path}/{file.name}"
        if reader.size != file.size:
            text = f"{where} has {reader.size} bytes, the manifest says {file.size}"
            raise CheckpointError(text + _cut_off(manifest, file, reader.size))
        parts, metadata = read_header(reader, where)
        if metadata.get(SAVE) != manifest.id:
            raise CheckpointError(
                f"{where} is of another save ({metadata.get(SAVE)}) than the manifest ({manifest.id})"
            )
        yield Opened(reader, parts, offsets_of(metadata, where))


def _cut_off(manifest: Manifest, file: File, size: int) -> str:
    """What a file of only `size` bytes lacks, in words."""
    number = manifest.files.index(file)
    lost = sorted(
        (chunk.start, chunk.start + tensor.itemsize * chunk.box.size, tensor.name)
        for tensor in manifest.tensors
        for chunk in tensor.chunks
        if chunk.file == number and chunk.start + tensor.itemsize * chunk.box.size > size
    )
    if not lost:
        return ""
    start, stop, name = lost[0]
    more = f", and {len(lost) - 1} tensors after it" if len(lost) > 1 else ""
    return f"; bytes {max(start, size)} to {stop} of {name!r} are lost{more}"


def _open(store: Store, manifest: Manifest, file: File, stack: ExitStack) -> Any:
    for name in [f"{STAGE}{manifest.id}/{file.name}", file.name] * 2:  # it may be moved while we look
        try:
            return stack.enter_context(store.reader(name))
        except (FileNotFoundError, NotADirectoryError):
            continue
    raise CheckpointError(f"{store.path}/{file.name} is missing")
