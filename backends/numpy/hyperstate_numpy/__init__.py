"""hyperstate's reference backend, in NumPy alone (an entry point of the group ``hyperstate.backends``).

Two halves. A toy framework, in which ranks are threads: `dtypes`, `arrays`, `sharded`, `job`, `modules`,
`optimizers`, and `standin` (a sharded tensor of somebody else's make). And the adapter to it, which an
author of a new backend may read as a model: `backend`, `tensors`, `fabric`, `model`, `optimizer`, with
`kit` for the conformance suite and `demo` for the command.
"""

from __future__ import annotations

from functools import cache

from .backend import NumpyBackend

__all__ = ["backend"]


@cache
def backend() -> NumpyBackend:
    """The process' NumPy backend."""
    return NumpyBackend()
