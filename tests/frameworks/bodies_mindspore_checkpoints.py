"""Rank bodies: checkpoints of MindSpore's ranks; sizes are uneven, few ranks take part, a rank fails or stops."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hyperstate as hs
from hyperstate.checkpoint import storage
from hyperstate.testing.cases.tools import FULL, SHAPES, build, build_stepped, grid, live, shown, tensor
from hyperstate.testing.kit import Kit

PATIENCE_S = 3.0
"""How long ranks wait for one that has stopped."""


def everything(kit: Kit, model: Any, optimizer: Any) -> str:
    return repr(shown(kit, list(hs.get_state_dict(model, optimizer, options=FULL))))


def refused(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    try:
        call(*arguments, **named)
    except hs.HyperstateError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def uneven(kit: Kit, folder: str) -> Any:
    """Three ranks, sizes that three does not divide; into plain models and back."""
    first = build_stepped(kit, "fsdp")
    hs.save(f"{folder}/1", *first, extra=kit.rank)
    plain = build(kit, "plain", start=900.0)
    whole = plain, kit.optimizer(plain, lr=7.0)
    assert kit.rank == hs.load(f"{folder}/1", *whole).extra
    hs.save(f"{folder}/2", *whole)
    again = build(kit, "fsdp", start=500.0)
    second = again, kit.optimizer(again, lr=5.0)
    hs.load(f"{folder}/2", *second)
    assert live(kit, *first) == live(kit, *second)
    for pair in (first, second):
        kit.fake_step(*pair, seed=7)
    assert live(kit, *first) == live(kit, *second)
    return everything(kit, *second)


def sub_mesh(kit: Kit, folder: str) -> Any:
    """Ranks 2 and 3 of four save and load what lies on their mesh; the others make no call."""
    inner = kit.mesh((2, 2), ("outer", "inner"))["inner"]
    if kit.rank < 2:
        return None

    def pair(start: float, lr: float) -> tuple[Any, Any]:
        model = kit.with_parameters(
            {fqn: tensor(kit, grid(shape, start), (inner, ("S0",))) for fqn, shape in SHAPES.items()}
        )
        return model, kit.optimizer(model, lr=lr)

    first, second = pair(0.0, 0.5), pair(900.0, 7.0)
    kit.fake_step(*first)
    for how in (inner, [2, 3]):
        hs.save(folder, *first, ranks=how, timeout=20.0)
        hs.load(folder, *second, ranks=how, timeout=20.0)
        assert live(kit, *first) == live(kit, *second)
        kit.fake_step(*first)
    return sorted(each.name for each in Path(folder, "model").iterdir())


def stopped(kit: Kit, folder: str, call: str) -> str:
    """Rank 2 is stopped (SIGSTOP) in the middle of a call, and goes on when the others have had their error."""
    first = build_stepped(kit, "fsdp")
    hs.save(f"{folder}/c", *first, extra="old")
    other = build(kit, "fsdp", start=900.0)
    second = other, kit.optimizer(other, lr=7.0)
    before = live(kit, *second)
    note = Path(folder, "stopped")
    name = "writer" if call == "save" else "reader"
    real = getattr(storage.Local, name)

    def stopping(self: Any, file: str) -> Any:
        if not note.exists():
            note.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(self, file)

    if kit.rank == 2:
        setattr(storage.Local, name, stopping)
    try:
        if call == "save":
            text = refused(hs.save, f"{folder}/c", *first, extra="new", timeout=PATIENCE_S)
        else:
            text = refused(hs.load, f"{folder}/c", *second, timeout=PATIENCE_S)
    finally:
        setattr(storage.Local, name, real)
        if kit.rank == 0:
            os.kill(int(note.read_text()), signal.SIGCONT)
    assert "rank 2" in text, text
    assert before == live(kit, *second)
    time.sleep(0.5)
    loaded = hs.load(f"{folder}/c", *second)
    assert "old" == loaded.extra
    assert live(kit, *first) == live(kit, *second)
    kit.fake_step(*first)
    hs.save(f"{folder}/c", *first, extra="next")
    assert "next" == hs.load(f"{folder}/c", *second).extra
    assert live(kit, *first) == live(kit, *second)
    return text.partition(":")[0]


def failing(kit: Kit, folder: str) -> str:
    """The disk of rank 1 is full in the middle of a save."""
    first = build_stepped(kit, "fsdp")
    hs.save(f"{folder}/c", *first, extra="old")
    real = storage.Local.writer

    def full(self: Any, file: str) -> Any:
        raise OSError(28, "No space left on device")

    storage.Local.writer = full if kit.rank == 1 else real  # type: ignore[method-assign]
    try:
        text = refused(hs.save, f"{folder}/c", *first, extra="new")
    finally:
        storage.Local.writer = real  # type: ignore[method-assign]
    assert "old" == hs.load(f"{folder}/c", *first).extra
    return text
