"""What every process of a job runs that msrun starts: ``script_mindspore_msrun.py FOLDER WHAT``. Results are files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.experimental.optim import Adam

import hyperstate as hs
from hyperstate_mindspore import init_device_mesh, join, shard_module, value_and_grad

FULL = hs.StateDictOptions(full_state_dict=True)
BROADCAST = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
QUIET = 0
"""Exit status that msrun takes for success. At any other it ends the other ranks itself."""


def net(seed):
    made = nn.SequentialCell(nn.Dense(6, 5), nn.Tanh(), nn.Dense(5, 3))
    numbers = np.random.default_rng(seed)
    for param in made.get_parameters():
        param.set_data(ms.Tensor(numbers.uniform(-1, 1, param.shape).astype(np.float32)))
    return made


def trained(model, optimizer, steps):
    compute = value_and_grad(lambda batch: model(batch).square().mean(), model, optimizer.parameters)
    for step in range(steps):
        batch = np.random.default_rng(1000 + step).standard_normal((8, 6)).astype(np.float32)
        optimizer(compute(ms.Tensor(batch))[1])
    return model, optimizer


def stepped(seed, mesh=None):
    model = net(seed)
    if mesh is not None:
        shard_module(model, mesh)
    return trained(model, Adam(model.trainable_params(), lr=0.01), 2)


def shown(value):
    if isinstance(value, dict):
        return {str(key): shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    return value.asnumpy().tolist() if isinstance(value, ms.Tensor) else value


def round_trip(mesh):
    """Full state of a sharded training, the same of a plain one, and the former after a load into fresh objects."""
    full = hs.get_state_dict(*stepped(0, mesh), options=FULL)
    alone = hs.get_state_dict(*stepped(0), options=FULL)
    model = shard_module(net(1), mesh)
    optimizer = Adam(model.trainable_params(), lr=0.5)
    given = full if get_rank() == 0 else ({}, {})
    hs.set_state_dict(model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=BROADCAST)
    again = hs.get_state_dict(model, optimizer, options=FULL)
    return {"full": shown(full), "alone": shown(alone), "again": shown(again)}


def death(mesh):
    """The text of the error on the ranks that are left when the last one ends in the middle of a call."""
    model, optimizer = stepped(0, mesh)
    if get_rank() == get_group_size() - 1:
        fabric = hs.backend.load("mindspore").fabric
        fabric.exchange = lambda sends, recvs: os._exit(QUIET)
    try:
        hs.get_state_dict(model, optimizer, options=FULL, timeout=2.0)
    except hs.TransferError as error:
        return {"error": str(error)}
    return {}


def main(folder, what):
    ms.set_device("CPU")
    if what == "joined":
        join()
    else:
        init()
    mesh = init_device_mesh((get_group_size(),), ("dp",))
    result = death(mesh) if what == "death" else round_trip(mesh)
    (Path(folder) / f"{get_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
