"""What `hyperstate doctor` tells of MindSpore on this machine."""

from __future__ import annotations

from typing import Any

import mindspore as ms


def facts() -> dict[str, Any]:
    """Devices, and the collectives that go with them."""
    devices, collectives = [], []
    for kind, collective in (("CPU", "mccl"), ("Ascend", "hccl")):
        if ms.hal.is_available(kind):
            count = ms.hal.device_count(kind)
            devices += ["cpu"] if kind == "CPU" else [f"{kind.lower()}:{number}" for number in range(count)]
            collectives.append(collective)
    return {"devices": devices, "collectives": collectives}
