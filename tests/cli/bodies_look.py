"""Rank bodies: checkpoints to look at."""

from __future__ import annotations

from collections.abc import Sequence

import hyperstate as hs
from hyperstate.testing import Kit


def save(kit: Kit, folder: str, shape: Sequence[int], names: Sequence[str], seed: int = 0, **change: float) -> None:
    """A small trained net and its Adam, perhaps with changed values: ``first`` element of a bias, ``lr``."""
    plain = kit.model(seed)
    live = kit.shard(plain, kit.mesh(shape, names))
    optimizer = kit.optimizer(live, lr=change.get("lr", 0.01))
    kit.fake_step(live, optimizer)
    if "first" in change:
        full = hs.get_model_state_dict(live, options=hs.StateDictOptions(full_state_dict=True))
        values = [1.0 * n for n in range(7)]
        values[2] = change["first"]
        full["layers.0.bias"] = kit.tensor(values)
        hs.set_model_state_dict(live, full, options=hs.StateDictOptions(full_state_dict=True))
    hs.save(folder, live, optimizer, extra={"step": 3})
