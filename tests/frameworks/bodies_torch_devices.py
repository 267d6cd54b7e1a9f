"""Rank bodies of test_torch_devices.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch_devices import accelerator

import hyperstate as hs

FROM_ROOT = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
ON_ROOT = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)


def state_stays_on_the_host_where_an_accelerator_idles(kit: Any) -> list[str]:
    mesh = kit.mesh((kit.world,), ("dp",))
    source, target = kit.shard(kit.model(1), mesh), kit.shard(kit.model(2), mesh)
    optimizer, fresh = kit.optimizer(source), kit.optimizer(target)
    kit.train(source, optimizer, 1)
    with accelerator("cuda", initialized=False) as module:
        weights, state = hs.get_state_dict(source, optimizer, options=ON_ROOT)
        hs.set_state_dict(target, fresh, model_state_dict=weights, optim_state_dict=state, options=FROM_ROOT)
        assert mock.call.current_device() not in module.mock_calls
        assert mock.call.set_device(mock.ANY) not in module.mock_calls
    values = [*target.state_dict().values(), *(v for one in fresh.state.values() for v in one.values())]
    for name, value in source.state_dict().items():
        assert kit.content(value) == kit.content(target.state_dict()[name]), name
    return sorted({str(value.device) for value in values if isinstance(value, torch.Tensor)})
