"""Checkpoints: state in files, for any mesh, number of ranks and framework (docs/format.md).

save(path, model, optimizer, extra={"step": 100})      all ranks; each writes its own part
load(path, model, optimizer).extra                     all ranks; each reads what it needs
async_save(path, model, optimizer).wait()              held for the copy to host memory alone
verify(path)                                           one process; no framework needed
"""

from __future__ import annotations

from typing import Any

from ..flows import collector_paused
from . import background
from .background import Handle
from .converting import FILE_BYTES, Names, convert_at
from .loading import Load, Loaded, load_into
from .progress import Progress
from .saving import Wish, prepare
from .verifying import Report, verify_at


def save(
    path: Any,
    model: Any,
    optimizer: Any = None,
    *,
    options: Any = None,
    extra: Any = None,
    keep: int | None = None,
    ranks: Any = None,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> None:
    """Save a model, and perhaps its optimizer, to the folder or URL `path`. All ranks of the job must call it, or
    those of `ranks`.

    Each rank writes its own part of sharded tensors; replicas share theirs, and nothing is written twice. A
    checkpoint that stands at `path` stays whole until the new one is, and whatever happens, readers find one or the
    other. `extra` is any value of numbers, text, bytes, None, lists, tuples and dicts; it may differ between ranks.
    `keep` removes older checkpoints beside this one, whose names differ in their last number alone (``step-100``).
    Of `options` only ``ignore_frozen_params`` and ``names`` count: the others say how values are handed to a caller.
    Without `options`, names are neutral: any framework reads them.
    `timeout` is how long ranks wait for each other, in seconds; writing counts. `progress` is called with
    (bytes done, bytes to do, name of a file), this rank's own, after each tensor.

    Raises the same error on all ranks; then nothing was changed. `CheckpointError`: a file can't be written.
    Others as ``get_state_dict`` raises them.
    """
    with collector_paused():
        wish = Wish(path, extra, keep, options, ranks, timeout, progress)
        prepare(model, optimizer, wish, background.settle_last).write()


def async_save(
    path: Any,
    model: Any,
    optimizer: Any = None,
    *,
    options: Any = None,
    extra: Any = None,
    keep: int | None = None,
    ranks: Any = None,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Handle:
    """Like `save`, but return when all ranks have agreed and this rank's part has been copied to host memory.

    Training may go on at once; the rest runs on a thread and uses no process group of yours. ``wait()`` of what
    is returned ends when the checkpoint is visible, and raises what went wrong. One save goes on at a time: the
    next one waits for this one, and raises its error if nobody has waited for it. The host memory is kept for
    the next save. `progress` as in `save`, called on that thread.
    """
    wish = Wish(path, extra, keep, options, ranks, timeout, progress)
    return background.start(prepare(model, optimizer, wish, background.settle_last))


def load(
    path: Any,
    model: Any,
    optimizer: Any = None,
    *,
    options: Any = None,
    ranks: Any = None,
    timeout: float | None = None,
    device: Any = None,
    state_form: str | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Put a checkpoint back, in place: into any mesh, number of ranks and framework. All ranks of the job must call
    it, or those of `ranks`.

    Each rank reads its own part alone. Of `options` ``strict`` counts: names that the checkpoint or the target lacks
    are errors, listed together, or (not strict) returned; and ``names`` (without `options`: those of the checkpoint).
    `device` and `state_form` as in the setters; `progress` as in `save`.

    Raises the same error on all ranks; then nothing was changed. `CheckpointError`: there is no checkpoint, or it is
    damaged. Others as ``set_state_dict`` raises them.
    """
    return load_into(model, optimizer, Load(path, options, ranks, timeout, device, state_form, progress))


def verify(path: Any, *, progress: Progress | None = None) -> Report:
    """Check a checkpoint: sizes, headers, checksums, and that every element of every tensor is there exactly once.

    Reads all of it; one process does, without any framework. Raises `CheckpointError`, which lists each bad file,
    tensor and range of bytes. `progress` as in `save`.
    """
    return verify_at(path, progress)


def convert(
    source: Any,
    target: Any,
    *,
    to: str = "own",
    names: Names = None,
    section: str = "model",
    file_bytes: int = FILE_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint again in another format, in one process, a block of it in memory at a time.

    `source`: a folder of this library or of PyTorch's DCP, a safetensors file, or a folder of them (Hugging Face's, or
    sharded by DCP), a ``.ckpt`` file of MindSpore. `to`: "own"; "safetensors" (one `section` of it, in a file if
    `target` ends in ``.safetensors``, else in a folder, with an index if it is more than `file_bytes`); "ckpt" (one
    `section`, in a file); "dcp". `names` maps old FQNs to new ones. `progress` is called with (bytes
    done, bytes to do, name of a tensor).
    Raises `CheckpointError`.
    """
    convert_at(source, target, to, names, section, file_bytes, progress)


__all__ = ["Handle", "Loaded", "Report", "async_save", "convert", "load", "save", "verify"]
