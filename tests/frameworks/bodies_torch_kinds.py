"""Rank bodies: every way to spread a model, every form of its state, and from one way to another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch_builds import KINDS, build
from torch_nets import (
    Net,
    assert_close,
    assert_same,
    cloned,
    frozen_copy,
    full_state,
    full_values,
    snapshot,
    train,
)

import hyperstate as hs

FORMS: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "sharded": ({}, {}),
    "sharded_cpu": ({"cpu_offload": True}, {}),
    "full": ({"full_state_dict": True},) * 2,
    "broadcast": (
        {"full_state_dict": True, "cpu_offload": True},
        {"full_state_dict": True, "broadcast_from_rank0": True},
    ),
    "flat": ({"flatten_optimizer_state_dict": True},) * 2,
    "flat_broadcast": (
        {"full_state_dict": True, "cpu_offload": True, "flatten_optimizer_state_dict": True},
        {"full_state_dict": True, "broadcast_from_rank0": True, "flatten_optimizer_state_dict": True},
    ),
}
"""Options of the getter, options of the setter."""


def goes_on(kit: Any, kind: str, form: str) -> None:
    """Get, set into a fresh model and optimizer of the same kind, train on: nothing differs."""
    options = [hs.StateDictOptions(**chosen) for chosen in FORMS[form]]
    model, optimizer = build(kind, 0, kit.rank)
    go_on = KINDS[kind].train
    go_on(model, optimizer, 2, 0)
    weights, state = map(cloned, hs.get_state_dict(model, optimizer, options=options[0]))
    before = frozen_copy((weights, state))
    target, fresh = build(kind, 1, kit.rank, lr=0.5)
    objects = list(map(id, target.parameters()))
    report = hs.set_state_dict(target, fresh, model_state_dict=weights, optim_state_dict=state, options=options[1])
    assert ([], [], []) == tuple(report)
    assert before == frozen_copy((weights, state))
    assert objects == list(map(id, target.parameters()))
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))
    for one in ((model, optimizer), (target, fresh)):
        go_on(*one, 1, 2)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


def full_form_is_the_truth(kit: Any, kind: str) -> None:
    """Full values equal those that PyTorch gathers, on every rank; on the root alone with cpu_offload."""
    model, optimizer = build(kind, 0, kit.rank)
    KINDS[kind].train(model, optimizer, 2, 0)
    inner = model.module if kind == "ddp" else model
    expected, state = full_values(inner), full_state(inner, optimizer)
    weights, found = hs.get_state_dict(model, optimizer, options=hs.StateDictOptions(full_state_dict=True))
    assert sorted(expected) == sorted(weights)
    assert_close({k: expected[k] for k in weights}, weights, rtol=0, atol=0)
    assert frozen_copy(state) == frozen_copy(found["state"])
    assert not any(isinstance(v, DTensor) for v in weights.values())
    options = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    rooted, rooted_state = hs.get_state_dict(model, optimizer, options=options)
    root = (kit.rank % 2 == 0) if kind == "pp" else kit.rank == 0
    assert frozen_copy(weights if root else {}) == frozen_copy(rooted)
    assert frozen_copy(found["state"] if root else {}) == frozen_copy(rooted_state.get("state", {}))


def moves(kit: Any, source: str, target: str) -> None:
    """From one way of spreading to another through the full form, by broadcast; then training goes on alike."""
    model, optimizer = build(source, 0, kit.rank)
    KINDS[source].train(model, optimizer, 2, 0)
    options = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = hs.get_state_dict(model, optimizer, options=options)
    other, fresh = build(target, 1, kit.rank, lr=0.5)
    hs.set_state_dict(
        other,
        fresh,
        model_state_dict=weights,
        optim_state_dict=state,
        options=hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    for name, one in ((source, (model, optimizer)), (target, (other, fresh))):
        KINDS[name].train(*one, 3, 2)
    plain = [m.module if hasattr(m, "module") else m for m in (model, other)]
    assert_close(full_values(plain[0]), full_values(plain[1]), rtol=1e-5, atol=1e-6)
    assert_close(full_state(plain[0], optimizer), full_state(plain[1], fresh), rtol=1e-5, atol=1e-6)


def redistributes(kit: Any, source: str, target: str) -> None:
    """Sharded values of another layout are redistributed by the setter: no full form on the way."""
    model, optimizer = build(source, 0, kit.rank)
    KINDS[source].train(model, optimizer, 2, 0)
    other, fresh = build(target, 1, kit.rank, lr=0.5)
    weights, state = map(cloned, hs.get_state_dict(model, optimizer))
    hs.set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
    assert frozen_copy(full_values(model)) == frozen_copy(full_values(other))
    assert frozen_copy(full_state(model, optimizer)) == frozen_copy(full_state(other, fresh))


def plain_under_sharded(kit: Any) -> str:
    """Tensor parallelism leaves the norm plain; FSDP on top shards it: the sharded form can't cross over."""
    model, optimizer = build("tp", 0, kit.rank)
    other, fresh = build("fsdp_tp", 1, kit.rank)
    KINDS["fsdp_tp"].train(other, fresh, 1, 0)
    before = snapshot(other, fresh)
    weights, state = map(cloned, hs.get_state_dict(model, optimizer))
    try:
        hs.set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
    except RuntimeError as error:
        assert_same(before, snapshot(other, fresh))
        return str(error)
    return ""


def s42_other_topologies(kit: Any) -> None:
    """Sharded over 4 -> hybrid 2 x 2 -> one process -> sharded, with three further steps beside one process each."""
    alone = Net(0)
    alone_optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
    carried: Any = None
    first = 0
    root = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    broadcast = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for stage in ("fsdp", "hsdp", "plain", "fsdp"):
        model = KINDS[stage].model(first, kit.rank)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        if carried is None:
            weights, state = hs.get_state_dict(alone, alone_optimizer, options=root)
            carried = (weights, state)
        hs.set_state_dict(model, optimizer, model_state_dict=carried[0], optim_state_dict=carried[1], options=broadcast)
        train(model, optimizer, 3, first)
        train(alone, alone_optimizer, 3, first)
        first += 3
        carried = hs.get_state_dict(model, optimizer, options=root)
        assert_close(full_values(alone), full_values(model), rtol=1e-4, atol=1e-5)
        assert_close(full_state(alone, alone_optimizer), full_state(model, optimizer), rtol=1e-4, atol=1e-5)


def s28_replica_zero_passes_its_shards(kit: Any) -> None:
    """Hybrid sharding: ranks of the first replica pass their own sharded values, the others pass nothing."""
    model, optimizer = build("hsdp", 0, kit.rank)
    KINDS["hsdp"].train(model, optimizer, 2, 0)
    weights, state = map(cloned, hs.get_state_dict(model, optimizer))
    target, fresh = build("hsdp", 1, kit.rank, lr=0.5)
    passing = kit.rank < 2
    hs.set_state_dict(
        target,
        fresh,
        model_state_dict=weights if passing else {},
        optim_state_dict=state if passing else {},
        options=hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


def s34_stages(kit: Any) -> dict[str, Any]:
    """Each stage's root keeps its stage; each stage then loads on its own, from its own first rank."""
    model, optimizer = build("pp", 0, kit.rank)
    KINDS["pp"].train(model, optimizer, 2, 0)
    root = {"full_state_dict": True, "cpu_offload": True}
    weights, state = hs.get_state_dict(model, optimizer, options=hs.StateDictOptions(**root))
    flat = hs.get_optim_state_dict(
        model, optimizer, options=hs.StateDictOptions(**root, flatten_optimizer_state_dict=True)
    )
    target, fresh = build("pp", 1, kit.rank, lr=0.5)
    first = kit.rank // 2 * 2
    hs.set_state_dict(
        target,
        fresh,
        model_state_dict=weights if kit.rank == first else {},
        optim_state_dict=state if kit.rank == first else None,
        options=hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        ranks=[first, first + 1],
    )
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))
    for one in ((model, optimizer), (target, fresh)):
        KINDS["pp"].train(*one, 1, 2)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))
    return {
        "model": sorted(weights),
        "state": sorted(state.get("state", {})),
        "flat": sorted(flat),
        "groups": [group["params"] for group in state.get("param_groups", [])],
    }


def e9_groups_are_equal_on_all_ranks(kit: Any, empty: str, flat: bool) -> None:
    """S27: only the root holds dicts; the others pass {} or None. State and group fields arrive everywhere."""
    model, optimizer = build("fsdp", 0, kit.rank)
    KINDS["fsdp"].train(model, optimizer, 1, 0)
    optimizer.param_groups[0].update(lr=0.125, betas=(0.5, 0.75), note={"a": (1, None)})
    chosen = {"full_state_dict": True, "flatten_optimizer_state_dict": flat}
    weights, state = hs.get_state_dict(model, optimizer, options=hs.StateDictOptions(**chosen, cpu_offload=True))
    if kit.rank:
        assert (0, 0) == (len(weights), len(state))
        weights, state = ({}, {}) if empty == "{}" else (None, None)  # type: ignore[assignment]  # both are allowed
    target, fresh = build("fsdp", 1, kit.rank, lr=float(kit.rank + 1))
    hs.set_state_dict(
        target,
        fresh,
        model_state_dict=weights,
        optim_state_dict=state,
        options=hs.StateDictOptions(**chosen, broadcast_from_rank0=True),
    )
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


def posted(kit: Any) -> int:
    """How many ranks there are, said by the job itself."""
    return dist.get_world_size()
