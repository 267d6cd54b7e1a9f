"""hyperstate's backend for PyTorch (an entry point of the group ``hyperstate.backends``)."""

from __future__ import annotations

from functools import cache

from .backend import TorchBackend

__all__ = ["backend"]


@cache
def backend() -> TorchBackend:
    """The process' PyTorch backend."""
    return TorchBackend()
