"""Rank bodies: cells of all shapes, sharded, go into new ones; buffers and extra state arrive."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore_cells import OPTIMIZERS, Kinds, Outer, Twice, bits, parameter, seeded, sequence, tensor

import hyperstate as hs
from hyperstate_mindspore import init_device_mesh, shard_module, unsharded, value_and_grad

CELLS = {"wrapped": lambda: Outer(sequence()), "used twice": Twice, "both": lambda: Outer(Outer(Twice()))}


def forms(form: str, names: str) -> tuple[Any, Any]:
    """Options of the getter and of the setter."""
    plain, full = {"names": names}, {"full_state_dict": True, "names": names}
    return {
        "sharded": (hs.StateDictOptions(**plain), hs.StateDictOptions(**plain)),
        "full": (hs.StateDictOptions(**full), hs.StateDictOptions(**full)),
        "root": (hs.StateDictOptions(cpu_offload=True, **full), hs.StateDictOptions(broadcast_from_rank0=True, **full)),
    }[form]


def steps(cell: Any, optimizer: Any, numbers: Any) -> list[float]:
    cell.set_train()
    compute = value_and_grad(lambda batch: cell(batch).square().mean(), cell, optimizer.parameters)
    losses = []
    for number in numbers:
        batch = np.random.default_rng(number).standard_normal((5, 3)).astype(np.float32)
        loss, gradients = compute(ms.Tensor(batch))
        optimizer(gradients)
        losses.append(float(loss))
    return losses


def s45_variants_on_ranks(kit: Any, cell: str, form: str, names: str) -> list[str]:
    mesh = init_device_mesh((kit.world,))
    source, target = (shard_module(seeded(CELLS[cell](), seed), mesh) for seed in (0, 1))
    made, fresh = (OPTIMIZERS["AdamWeightDecay"](one.trainable_params()) for one in (source, target))
    steps(source, made, range(3))
    get, put = forms(form, names)
    model, state = hs.get_state_dict(source, made, options=get)
    hs.set_state_dict(target, fresh, model_state_dict=model, optim_state_dict=state, options=put)
    assert steps(source, made, [3, 4]) == steps(target, fresh, [3, 4])
    with unsharded(source), unsharded(target):
        assert [bits(one) for one in source.get_parameters()] == [bits(one) for one in target.get_parameters()]
    return list(model)


def buffers_and_extra_state_arrive(kit: Any, form: str) -> None:
    """The root's, under broadcast and where ranks differ; what does not persist stays."""
    mesh = init_device_mesh((kit.world,))
    source, target = shard_module(Kinds(1.0), mesh), shard_module(Kinds(2.0), mesh)
    source.norm.moving_mean.asnumpy()[...] = 10.0 * (kit.rank if form == "full" else 0) + np.arange(3)
    get, put = forms(form, "own")
    hs.set_model_state_dict(target, hs.get_model_state_dict(source, options=get), options=put)
    assert 1.0 == target.steps
    assert [1.0, 2.0, 3.0] == target.kept.asnumpy().tolist()
    assert [2.0, 3.0, 4.0] == target.scratch.asnumpy().tolist()
    assert [0.0, 1.0, 2.0] == target.norm.moving_mean.asnumpy().tolist()
    with unsharded(source), unsharded(target):
        assert bits(source.linear.weight) == bits(target.linear.weight)
        assert bits(source.frozen) == bits(target.frozen)


def stages_keep_their_own(kit: Any) -> list[str]:
    """Two pipeline stages of two ranks each: every name comes out on the root of its stage."""
    mesh = init_device_mesh((2, 2), ("pp", "dp"))
    stage = kit.rank // 2
    cell = nn.Cell()
    cell.insert_child_to_cell(f"stage{stage}", nn.Dense(4, 4))
    getattr(cell, f"stage{stage}").weight.set_data(tensor(4, 4, start=100.0 * stage))
    shard_module(cell, mesh["dp"])
    found = hs.get_model_state_dict(cell, options=forms("root", "own")[0])
    if kit.rank % 2 == 0:
        assert bits(tensor(4, 4, start=100.0 * stage)) == bits(found[f"stage{stage}.weight"])
    return list(found)


def a_clash_on_one_rank_is_refused_on_all(kit: Any) -> str:
    mesh = init_device_mesh((kit.world,))
    first, second = nn.Cell(), nn.Cell()
    first.w = parameter(4, name="w")
    second.insert_param_to_cell("w" if kit.rank == 1 else "v", parameter(4, name="second"))
    shard_module(first, mesh), shard_module(second, mesh)
    try:
        hs.get_model_state_dict([first, second], options=forms("full", "own")[0])
    except hs.HyperstateError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("not refused")
