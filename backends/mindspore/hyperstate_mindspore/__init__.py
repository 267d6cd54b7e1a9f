"""hyperstate's backend for MindSpore (an entry point of the group ``hyperstate.backends``), and sharded tensors for it.

MindSpore ships no eager sharded tensor; scripts find one here, with what trains cells that keep shards.
"""

from __future__ import annotations

from functools import cache

from .backend import MindSporeBackend
from .job import join
from .sharded import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from .training import dtensor_of, parameter_of, reduce_gradients, shard_module, unsharded, value_and_grad

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Replicate",
    "Shard",
    "backend",
    "distribute_tensor",
    "dtensor_of",
    "init_device_mesh",
    "join",
    "parameter_of",
    "reduce_gradients",
    "shard_module",
    "unsharded",
    "value_and_grad",
]


@cache
def backend() -> MindSporeBackend:
    """The process' MindSpore backend."""
    return MindSporeBackend()
