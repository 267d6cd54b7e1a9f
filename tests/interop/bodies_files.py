"""Rank bodies of test_interop_files.py: the same for every framework."""

from __future__ import annotations

from typing import Any

import hyperstate as hs
from hyperstate.testing.cases.tools import FULL, build, build_stepped, shown
from hyperstate.testing.kit import Kit


def everything(kit: Kit, model: Any, optimizer: Any) -> Any:
    """Full values and state by name, as bytes."""
    values, state = hs.get_state_dict(model, optimizer, options=FULL)
    found = {fqn: list(kit.content(value)) for fqn, value in values.items()}
    for fqn, slots in state["state"].items():
        found |= {f"{fqn} {key}": _plain(kit, value) for key, value in slots.items()}
    return found


def _plain(kit: Kit, value: Any) -> Any:
    """A counter is a tensor to one framework's optimizer and a number to another's."""
    if kit.is_tensor(value):
        return list(kit.content(value))
    return repr(shown(kit, value))


def save(kit: Kit, folder: str, topology: str) -> Any:
    """Train two steps and save."""
    model, optimizer = build_stepped(kit, topology)
    hs.save(folder, model, optimizer, extra={"by": kit.name})
    return everything(kit, model, optimizer)


def carry(kit: Kit, source: str, target: str, topology: str) -> Any:
    """Load into a fresh pair and save that."""
    model = build(kit, topology, start=900.0)
    optimizer = kit.optimizer(model, lr=7.0)
    loaded = hs.load(source, model, optimizer)
    assert ([], [], []) == tuple(loaded.keys)
    hs.save(target, model, optimizer, extra=loaded.extra)
    return everything(kit, model, optimizer)
