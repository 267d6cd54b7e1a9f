"""The device is the parameter's own, or its mesh's: never one that follows from a rank or from what the machine has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch_devices import accelerator

import hyperstate as hs
from hyperstate.backend import load
from hyperstate.testing import Pool
from hyperstate_torch import kit as kits
from hyperstate_torch.dtensors import device_of

BODIES = Path(__file__).parent / "bodies_torch_devices.py"


def test_without_an_accelerator_all_stays_on_the_host() -> None:
    if torch.accelerator.is_available():
        pytest.skip(f"this machine has {torch.accelerator.current_accelerator()}")
    model = torch.nn.Linear(2, 2)
    hs.set_model_state_dict(model, {name: value + 1 for name, value in hs.get_model_state_dict(model).items()})
    assert {"cpu"} == {value.device.type for value in model.state_dict().values()}
    tensors: Any = load("torch").tensors
    assert not tensors.staging((2,), "float32").is_pinned()


def test_an_idle_accelerator_is_left_alone(pool2: Pool) -> None:
    assert [["cpu"], ["cpu"]] == pool2.run(BODIES, "state_stays_on_the_host_where_an_accelerator_idles")


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_mesh_or_a_name_without_number_means_the_current_device_whatever_the_rank(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    tensors: Any = load("torch").tensors
    with accelerator(kind, initialized=True, current=3):
        assert torch.device(kind, 3) == tensors.place_named(kind)
        assert torch.device(kind, 0) == tensors.place_named(f"{kind}:0")
        assert torch.device(kind, 3) == device_of(SimpleNamespace(device_type=kind))
        assert torch.device(kind, 3) == device_of(SimpleNamespace(device_type=lambda: kind))  # HyperParallel's spelling


def test_a_place_on_the_host_is_no_place() -> None:
    tensors: Any = load("torch").tensors
    with accelerator("cuda", initialized=True):
        assert tensors.place(torch.ones(2)) is None
        assert tensors.place_named("cpu") is None


def test_a_kind_of_device_that_is_not_there_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kits.DEVICE_VARIABLE, "xpu")
    assert "HYPERSTATE_TEST_DEVICE=xpu" in kits.absent()
    with accelerator("xpu", initialized=False):
        assert "" == kits.absent()
    with accelerator("cuda", initialized=False):
        assert "cuda only" in kits.absent()
    monkeypatch.setenv(kits.DEVICE_VARIABLE, "")
    assert "" == kits.absent()
    if not hasattr(torch, "npu"):
        monkeypatch.setenv(kits.DEVICE_VARIABLE, "npu")
        assert "torch-npu" in kits.absent()


def test_a_kind_of_device_that_nobody_knows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kits.DEVICE_VARIABLE, "gpu")
    with pytest.raises(RuntimeError, match="gpu"):
        kits.absent()


def test_the_default_group_is_gloo_beside_the_devices_own_or_that_alone() -> None:
    assert "gloo" == kits.group_backend("cpu", "device")
    assert "cpu:gloo,cuda:nccl" == kits.group_backend("cuda", "host+device")
    assert "nccl" == kits.group_backend("cuda", "device")
    with pytest.raises(ValueError, match="HYPERSTATE_TEST_GROUP"):
        kits.group_backend("cuda", "both")
