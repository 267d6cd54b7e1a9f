"""Rank bodies of test_simulator.py: what the genuine torch-npu does with its groups, and what hyperstate does then."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

import hyperstate as hs

FROM_ROOT = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
ON_ROOT = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)


def group_of_devices(kit: Any) -> Any:
    """A group that moves the device's memory only, as `init_process_group("hccl")` makes it."""
    return dist.new_group(list(range(kit.world)), backend="hccl")


def host_tensors_are_refused(kit: Any) -> str:
    try:
        dist.broadcast(torch.ones(2), 0, group=group_of_devices(kit))
    except RuntimeError as error:
        return str(error).splitlines()[0].split("[")[0]
    return "accepted"


def complex_numbers_are_refused(kit: Any) -> str:
    value = torch.ones(2, dtype=torch.complex64, device=kit.device)
    try:
        # Not dist.broadcast, which sees the numbers as pairs of real ones.
        group_of_devices(kit)._get_backend(kit.device).broadcast([value], dist.BroadcastOptions())
    except (RuntimeError, TypeError) as error:
        return type(error).__name__
    return "accepted"


def a_gather_brings_all_to_all(kit: Any) -> list[str]:
    """The warnings of a gather to rank 0, as that rank sees them."""
    value = torch.full((128,), float(kit.rank), device=kit.device)  # what is no multiple of 512 bytes, HCCL's users pad
    found = [torch.empty_like(value) for _ in range(kit.world)] if kit.rank == 0 else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.gather(value, found, 0, group=group_of_devices(kit))
    for rank, part in enumerate(found or []):
        assert [float(rank)] * 128 == part.tolist()
    return [str(one.message) for one in caught]


def values_arrive_where_the_parameters_are(kit: Any) -> list[str]:
    """Each rank keeps its model on a device that is neither its current one nor its rank's."""
    count = torch.accelerator.device_count()
    away = torch.device("npu", (kit.device.index + 1) % count)
    assert kit.device.index == torch.accelerator.current_device_index()
    source, target = kit.model(1), kit.model(2).to(away)
    optimizer, fresh = kit.optimizer(source), kit.optimizer(target)
    kit.train(source, optimizer, 1)
    weights, state = hs.get_state_dict(source, optimizer, options=ON_ROOT)
    assert all(value.device.type == "cpu" for value in weights.values())
    hs.set_state_dict(target, fresh, model_state_dict=weights, optim_state_dict=state, options=FROM_ROOT)
    found = [*target.parameters(), *target.buffers()]
    found += [value for one in fresh.state.values() for key, value in one.items() if key != "step"]
    for name, value in source.state_dict().items():
        assert torch.equal(value.cpu(), target.state_dict()[name].cpu()), name
    assert kit.device.index == torch.accelerator.current_device_index()
    return sorted({str(value.device) for value in found})


def a_group_of_devices_alone_moves_host_state(kit: Any) -> str:
    """The model is on the host, the default group reaches devices only: bytes travel by way of the device."""
    assert ["npu"] == [device.type for device in dist.group.WORLD._device_types]
    source, target = kit.model(1).cpu(), kit.model(2).cpu()
    weights = hs.get_model_state_dict(source, options=ON_ROOT)
    hs.set_model_state_dict(target, weights, options=FROM_ROOT)
    for name, value in source.state_dict().items():
        assert torch.equal(value, target.state_dict()[name]), name
    return str({value.device.type for value in target.state_dict().values()})
