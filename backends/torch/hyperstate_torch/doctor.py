"""What `hyperstate doctor` tells of PyTorch on this machine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def facts() -> dict[str, Any]:
    """Devices, and the collectives that this build of PyTorch has."""
    devices = ["cpu"]
    if torch.accelerator.is_available():
        here = torch.accelerator.current_accelerator()
        kind = "" if here is None else here.type
        name_of = getattr(torch.get_device_module(kind), "get_device_name", str)
        devices += [f"{kind}:{number} ({name_of(number)})" for number in range(torch.accelerator.device_count())]
    if not dist.is_available():
        return {"devices": devices, "collectives": []}
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    found = [name for name, there in known.items() if there()]
    # Backends of other makers (hccl) register themselves.
    found += [name for name in dist.Backend.backend_list if name not in (*known, "undefined", "ucc", "xccl", "fake")]
    return {"devices": devices, "collectives": found}
