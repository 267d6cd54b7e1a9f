"""The MindSpore backend: its parts, put together."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore.communication import GlobalComm
from mindspore.mint import distributed as dist

from hyperstate.errors import OptionTypeError
from hyperstate.structure import is_sharded

from . import layouts
from .control import MindSporeControl
from .fabric import MindSporeFabric
from .host import settle
from .model import MindSporeModel
from .optimizer import MindSporeOptimizer, is_optimizer
from .tensors import MindSporeTensors


class MindSporeBackend:
    """MindSpore on CPU and Ascend."""

    name = "mindspore"

    def __init__(self) -> None:
        self.control = MindSporeControl()
        self.fabric = MindSporeFabric(self.control)
        self.tensors = MindSporeTensors(self.fabric)

    def owns(self, value: Any) -> bool:
        """Whether `value` is a model, an optimizer or a tensor of MindSpore, or a list of such."""
        if isinstance(value, (ms.nn.Cell, ms.Tensor)) or is_optimizer(value):
            return True
        if isinstance(value, (list, tuple)):
            return any(map(self.owns, value))
        return is_sharded(value) and isinstance(layouts.local_of(value), ms.Tensor)

    def model(self, model: Any, device: Any = None, names: str = "own") -> MindSporeModel:
        """Describe a cell or a sequence of cells. What the script's own operations still have to raise comes first."""
        settle()
        return MindSporeModel(model, self.tensors, device=device, names=names)

    def optimizer(self, optimizer: Any, names: str = "own") -> MindSporeOptimizer:
        """Describe an optimizer or a sequence of them."""
        return MindSporeOptimizer(optimizer, self.tensors, names=names)

    def ranks_of(self, value: Any) -> tuple[int, ...]:
        """Global ranks of a sequence of numbers, a mesh of any kind, or a process group (its name)."""
        if isinstance(value, str) and GlobalComm.INITED:
            return tuple(int(rank) for rank in dist.get_process_group_ranks(value))
        if hasattr(value, "mesh_dim_names"):
            return tuple(layouts.mesh_of(value).ranks)
        try:
            return tuple(int(rank) for rank in value)
        except (TypeError, ValueError) as error:
            raise OptionTypeError(
                f"ranks= must be a sequence of ranks, a device mesh or a process group, not {value!r}"
            ) from error
