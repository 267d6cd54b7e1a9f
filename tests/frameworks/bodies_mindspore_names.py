"""Rank bodies: neutral names of what several ranks hold together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from mindspore import nn
from mindspore_optimizers import batch, bits, net

import hyperstate as hs
from hyperstate.errors import IncompatibleStateError
from hyperstate_mindspore import init_device_mesh, shard_module, value_and_grad

NEUTRAL = hs.StateDictOptions(full_state_dict=True, names="neutral")


def _trained(mesh: Any, seed: int, steps: int) -> tuple[Any, list[Any], Any]:
    cell = net(seed)
    if mesh is not None:
        shard_module(cell, mesh)
    p = cell.trainable_params()
    optimizers = [nn.Adam(p[:3], 0.01, weight_decay=0.1), nn.SGD(p[3:], 0.1, momentum=0.9)]

    def step(number: int) -> None:
        compute = value_and_grad(lambda data, label: (cell(data) - label).square().mean(), cell, p)
        _, gradients = compute(*batch(number))
        for one, part in zip(optimizers, (gradients[:3], gradients[3:]), strict=True):
            one(part)

    for number in range(steps):
        step(number)
    return cell, optimizers, step


def the_neutral_form_of_a_sharded_cell_is_that_of_the_whole_one(kit: Any) -> None:
    mesh = init_device_mesh((kit.world,))
    plain, optimizers, step = _trained(None, 0, 2)
    model, state = hs.get_state_dict(plain, optimizers, options=NEUTRAL)
    cell, fresh, own_step = _trained(mesh, 1, 0)
    hs.set_state_dict(cell, fresh, model_state_dict=model, optim_state_dict=state, options=NEUTRAL)
    assert bits((model, state)) == bits(hs.get_state_dict(cell, fresh, options=NEUTRAL))
    assert {"exp_avg", "exp_avg_sq", "step"} == set(state["state"]["1.weight"])
    assert {"momentum_buffer"} == set(state["state"]["2.weight"])
    step(2)
    own_step(2)
    expected, actual = (hs.get_state_dict(*one, options=NEUTRAL) for one in ((plain, optimizers), (cell, fresh)))
    assert bits(expected) == bits(actual)


def an_optimizer_that_was_built_before_its_cell_was_sharded_is_refused(kit: Any) -> None:
    cell = net(0)
    optimizer = nn.Momentum(cell.trainable_params(), 0.1, 0.9)
    shard_module(cell, init_device_mesh((kit.world,)))
    try:
        hs.get_optim_state_dict(cell, optimizer)
    except IncompatibleStateError as error:
        assert "build the optimizer after the model was sharded" in str(error)
    else:
        raise AssertionError("nothing was raised")
