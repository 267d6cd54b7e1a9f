"""Rank bodies: HyperParallel's sharded tensors, of which a stand-in has the attributes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import mindspore as ms
import mindspore_hyperparallel as hp
import numpy as np
import pytest
from bodies_mindspore_sharded import FORMS, counting
from mindspore import nn

import hyperstate as hs
from hyperstate_mindspore import Shard, dtensor_of, init_device_mesh, shard_module


def hyperparallel_tensors_are_known_by_structure(kit: Any, form: str) -> None:
    mesh = hp.DeviceMesh("npu", np.arange(kit.world), ("dp",))
    full = counting(8, 6).astype(np.float32)
    cells = []
    for factor in (1, 0):
        part = hp.DTensor(ms.Tensor(np.split(factor * full, kit.world)[kit.rank]), mesh, (hp.Shard(0),))
        cell = nn.Cell()
        cell.insert_param_to_cell("w", ms.Parameter(part, name="w"))
        cells.append(cell)
    source, target = cells
    assert isinstance(source.w, hp.DTensor) and isinstance(source.w, ms.Parameter)
    get, put = FORMS[form]
    state = hs.get_model_state_dict(source, options=get)
    if form == "sharded":
        assert isinstance(state["w"], hp.DTensor) and mesh is state["w"].device_mesh
    elif state:
        assert full.tolist() == state["w"].asnumpy().tolist()
    hs.set_model_state_dict(target, state, options=put)
    assert np.split(full, kit.world)[kit.rank].tolist() == target.w.to_local().asnumpy().tolist()


def hyperparallel_addends_are_refused(kit: Any) -> None:
    mesh = hp.DeviceMesh("npu", np.arange(kit.world), ("dp",))
    cell = nn.Cell()
    cell.insert_param_to_cell("w", ms.Parameter(hp.DTensor(ms.Tensor([1.0, 2.0]), mesh, (hp.Partial(),)), name="w"))
    with pytest.raises(hs.UnsupportedConfigurationError, match="redistribute"):
        hs.get_model_state_dict(cell)


def from_hyperparallel_to_our_own(kit: Any) -> None:
    mesh = hp.DeviceMesh("npu", np.arange(kit.world), ("dp",))
    full = counting(8, 6).astype(np.float32)
    part = hp.DTensor(ms.Tensor(np.split(full, kit.world)[kit.rank]), mesh, (hp.Shard(0),))
    target = nn.Cell()
    target.insert_param_to_cell("w", ms.Parameter(ms.Tensor(0 * full), name="w"))
    shard_module(target, init_device_mesh((kit.world,)), {"w": [Shard(1)]})
    hs.set_model_state_dict(target, {"w": part})
    assert full.tolist() == dtensor_of(target.w).full_tensor().asnumpy().tolist()
