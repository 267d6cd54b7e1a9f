"""A stand-in for an accelerator that PyTorch reports and this machine lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def accelerator(kind: str, *, initialized: bool, current: int = 3) -> Iterator[mock.Mock]:
    """PyTorch finds an accelerator of this kind, whose current device is `current`. Gives its device module."""
    module = mock.Mock()
    module.is_initialized.return_value = initialized
    module.current_device.return_value = current
    with (
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device(kind)),
        mock.patch.object(torch, "get_device_module", return_value=module),
    ):
        yield module
