"""The folder of a checkpoint while it changes: where new files stand, when they become visible, what is left over.

    hyperstate.json     the manifest; what it names is the checkpoint
    model/  optim/      the files
    .data-<id>/         files of the save <id> that are not in place yet (or, behind a URL, that replaced others)

New files are written under ``.data-<id>/``. Where no checkpoint stands yet they are moved into place and the
manifest appears last. Where one does, the new manifest takes the place of the old in one step, and the files are
moved after that; until then readers find them under ``.data-<id>/``. So a crash at any moment leaves the old
checkpoint or the new one, and the next save tidies up.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .container import LENGTH_BYTES, SAVE, Part, header_length, parse
from .manifest import NAME, SECTIONS, File, Manifest
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
    """How to save at `store`. Raises `CheckpointError` if files stand there that are nobody's checkpoint of ours."""
    fresh = store.size(NAME) is None
    names = store.names()
    if fresh:
        for section in SECTIONS:
            for name in store.names(section) if section in names else []:
                if not _ours(store, f"{section}/{name}"):
                    raise CheckpointError(
                        f"{store.path}: {section}/{name} is not from a checkpoint of this library and would be "
                        "replaced; choose another folder, or remove it"
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
            store.remove(section)
    _remove_stages(store, {current, order.id})


def put_in_place(store: Store, manifest: Manifest) -> None:
    """Move the files of `manifest`, which is visible or about to be, from their stage to where others look for them."""
    stage = f"{STAGE}{manifest.id}"
    wanted = {file.name.partition("/")[0] for file in manifest.files}
    for section in SECTIONS:
        staged = bool(store.names(f"{stage}/{section}"))
        if section in wanted and not staged:
            continue  # it stands in place
        if store.atomic:
            if store.names(section):
                store.move(section, f"{OLD}{manifest.id}-{section}")
            if staged:
                store.move(f"{stage}/{section}", section)
        else:
            store.remove(section)
    if store.atomic:
        store.settle()
        store.remove(stage)


def _remove_stages(store: Store, keep: Collection[str]) -> None:
    for name in store.names():
        if _LEFT.fullmatch(name) and name.removeprefix(STAGE) not in keep:
            store.remove(name)


def show(store: Store, order: Order, manifest: Manifest, data: bytes) -> None:
    """Make a written checkpoint visible. `data` is its manifest as bytes."""
    if order.fresh and order.stage:
        for section in sorted({file.name.partition("/")[0] for file in manifest.files}):
            store.move(order.stage + section, section)
        store.settle()
    store.publish(NAME, data)
    with suppress(CheckpointError):  # readers find the files where they are, and the next save tidies up
        if not order.fresh:
            put_in_place(store, manifest)
        _remove_stages(store, set() if order.fresh or store.atomic else {manifest.id})


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
    store.remove(NAME)
    store.settle()
    for name in store.names():
        if name in SECTIONS or _LEFT.fullmatch(name):
            store.remove(name)
    if not store.names():
        store.remove("")


# -- reading -----------------------------------------------------------------------------------------


def read_manifest(store: Store) -> Manifest:
    """The manifest of the checkpoint at `store`. Raises `CheckpointError` if there is none, or a damaged one."""
    data = store.read(NAME)
    if data is None:
        raise CheckpointError(f"{store.path} holds no checkpoint: there is no {NAME}")
    return parse_manifest(data, f"{store.path}/{NAME}")


def read_header(reader: Reader, where: str) -> tuple[dict[str, Part], dict[str, str]]:
    """The tensors of an open safetensors file, and its metadata. Reads no more than the file has."""
    first = bytearray(min(LENGTH_BYTES, reader.size))
    reader.read_into(memoryview(first), 0)
    header = bytearray(header_length(bytes(first), reader.size, where))
    reader.read_into(memoryview(header), LENGTH_BYTES)
    return parse(bytes(header), reader.size, where)


@contextmanager
def open_file(store: Store, manifest: Manifest, file: File) -> Iterator[tuple[Reader, dict[str, Part]]]:
    """A file of a checkpoint and the tensors in its header. Raises `CheckpointError` if it is not this save's."""
    with ExitStack() as stack:
        reader = _open(store, manifest, file, stack)
        where = f"{store.path}/{file.name}"
        if reader.size != file.size:
            raise CheckpointError(f"{where} has {reader.size} bytes, the manifest says {file.size}")
        parts, metadata = read_header(reader, where)
        if metadata.get(SAVE) != manifest.id:
            raise CheckpointError(
                f"{where} is of another save ({metadata.get(SAVE)}) than the manifest ({manifest.id})"
            )
        yield reader, parts


def _open(store: Store, manifest: Manifest, file: File, stack: ExitStack) -> Any:
    for name in [f"{STAGE}{manifest.id}/{file.name}", file.name] * 2:  # it may be moved while we look
        try:
            return stack.enter_context(store.reader(name))
        except (FileNotFoundError, NotADirectoryError):
            continue
    raise CheckpointError(f"{store.path}/{file.name} is missing")
