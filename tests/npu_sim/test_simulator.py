"""The simulated NPU is strict enough to prove something, and hyperstate keeps to the parameters' own devices on it.

Runs in the tox environment ``npu-sim`` only; there a simulator that is not in use fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

if "NPU_SIM_FOLDER" not in os.environ:
    pytest.skip("no simulated NPU; see tests/npu_sim/README.md", allow_module_level=True)

import torch

from hyperstate.testing import Pool

BODIES = Path(__file__).parent / "bodies_npu.py"
RANKS = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    with Pool("torch", RANKS) as pool:
        yield pool


@pytest.fixture(scope="module")
def ranks_of_devices() -> Iterator[Pool]:
    """Ranks whose default group is HCCL alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERSTATE_TEST_GROUP", "device")
        with Pool("torch", RANKS) as pool:
            pool.run(BODIES, "complex_numbers_are_refused")  # starts the processes with this environment
            yield pool


def test_the_adapter_is_the_installed_one_and_sees_the_simulated_devices() -> None:
    import torch_npu

    assert metadata.version("torch-npu") == torch_npu.__version__.split("+")[0]
    assert "npu" == torch.accelerator.current_accelerator().type
    assert RANKS == torch.npu.device_count()


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError):
        torch.npu.set_device(RANKS)
    assert 0 == torch.npu.current_device()


def test_a_copy_to_pinned_memory_is_late_until_the_stream_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = torch.full((100,), 7.0, device="npu"), torch.zeros(100, pin_memory=True)
    torch.npu.synchronize()
    monkeypatch.setenv("NPU_SIM_COPY_DELAY_US", "500000")
    here.copy_(there, non_blocking=True)
    assert 0.0 == here[0]
    torch.npu.synchronize()
    assert 7.0 == here[0]


def test_the_adapters_copies_are_there_when_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    from hyperstate.backend import load

    tensors: Any = load("torch").tensors
    there, here = torch.full((100,), 7.0, device="npu"), torch.zeros(100, pin_memory=True)
    torch.npu.synchronize()
    monkeypatch.setenv("NPU_SIM_COPY_DELAY_US", "200000")
    tensors.copy([(here, there)])
    assert [7.0] * 100 == here.tolist()
    here.fill_(3.0)
    tensors.copy([(there, here)])
    here.fill_(5.0)
    assert [3.0] * 100 == there.tolist()


def test_training_gives_the_bits_of_the_host() -> None:
    found = []
    for device in ("npu", "cpu"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3)).to(device)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        for step in range(3):
            batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
            model(batch.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([value.detach().cpu().tolist() for value in model.state_dict().values()])
    assert found[1] == found[0]


def test_what_the_simulator_lacks_ends_the_process_with_its_name() -> None:
    text = "import ctypes; ctypes.CDLL('libascendcl.so').aclopCompileAndExecute()"
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert -signal.SIGABRT == run.returncode
    assert "aclopCompileAndExecute" in run.stderr


def test_hccl_refuses_host_tensors(ranks: Pool) -> None:
    (answer,) = set(ranks.run(BODIES, "host_tensors_are_refused"))
    assert "No backend type associated with device type cpu" in answer


def test_hccl_refuses_complex_numbers(ranks: Pool) -> None:
    assert "accepted" not in ranks.run(BODIES, "complex_numbers_are_refused")


def test_hccls_gather_is_an_all_gather(ranks: Pool) -> None:
    caught = ranks.run(BODIES, "a_gather_brings_all_to_all")
    assert any("Implemented with allgather" in text for text in caught[0])


def test_values_arrive_on_the_parameters_own_device_with_gloo_beside_hccl(ranks: Pool) -> None:
    found = ranks.run(BODIES, "values_arrive_where_the_parameters_are")
    assert [["npu:1"], ["npu:2"], ["npu:3"], ["npu:0"]] == found


def test_values_arrive_on_the_parameters_own_device_with_hccl_alone(ranks_of_devices: Pool) -> None:
    found = ranks_of_devices.run(BODIES, "values_arrive_where_the_parameters_are")
    assert [["npu:1"], ["npu:2"], ["npu:3"], ["npu:0"]] == found


def test_host_state_travels_by_way_of_the_device_with_hccl_alone(ranks_of_devices: Pool) -> None:
    assert ["{'cpu'}"] * RANKS == ranks_of_devices.run(BODIES, "a_group_of_devices_alone_moves_host_state")
