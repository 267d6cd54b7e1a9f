"""Rank bodies: what the calls that `hyperstate plan` plans for really send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hyperstate as hs
from hyperstate.simulate.placement import layout_of, parse_mesh
from hyperstate.testing import Kit


def traffic(kit: Kit, schema: dict[str, Any], source: str, target: str) -> dict[str, dict[str, int]]:
    """Counts of this rank, by operation."""
    first, second = _built(kit, schema, source), _built(kit, schema, target)
    full, root = hs.StateDictOptions(full_state_dict=True), hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    broadcast = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    found: dict[str, dict[str, int]] = {}

    def count(operation: str, call: Callable[[], Any]) -> Any:
        kit.traffic(reset=True)
        result = call()
        found[operation] = kit.traffic()
        return result

    def put(dicts: Any, options: Any) -> None:
        hs.set_state_dict(*second, model_state_dict=dicts[0], optim_state_dict=dicts[1], options=options)

    on_root = count("get, full on the root", lambda: hs.get_state_dict(*first, options=root))
    everywhere = count("get, full everywhere", lambda: hs.get_state_dict(*first, options=full))
    count("set, broadcast from the root", lambda: put(on_root, broadcast))
    count("set, full everywhere", lambda: put(everywhere, full))
    sharded = hs.get_state_dict(*first)
    count("redistribute", lambda: put(sharded, hs.StateDictOptions()))
    return found


def _built(kit: Kit, schema: dict[str, Any], text: str) -> tuple[Any, Any]:
    """A model of these tensors on the mesh, and an Adam that has stepped."""
    mesh = parse_mesh(text)
    live = kit.mesh(mesh.shape, mesh.names or ())
    values, buffers = {}, {}
    for fqn, entry in schema.items():
        shape = tuple(entry["shape"])
        plain = kit.tensor(_filled(shape), entry["dtype"])
        if not entry.get("sharded", True):
            buffers[fqn] = plain
            continue
        splits = layout_of(mesh, fqn, shape).splits
        placements = ["R"] * len(mesh.shape)
        for dim, split in enumerate(splits):
            for number in split:
                placements[number] = f"S{dim}"
        values[fqn] = kit.sharded_tensor(plain, live, placements)
    model = kit.with_parameters(values)
    for name, value in buffers.items():
        kit.add_buffer(model, name, value)
    optimizer = kit.optimizer(model, "adam")
    kit.fake_step(model, optimizer)
    return model, optimizer


def _filled(shape: tuple[int, ...]) -> Any:
    return [_filled(shape[1:]) for _ in range(shape[0])] if shape else 1.5
