"""The PyTorch backend: its parts, put together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hyperstate.checkpoint.converting import FileFormat
from hyperstate.errors import OptionTypeError
from hyperstate.structure import is_sharded

from .fabric import TorchControl, TorchFabric
from .model import TorchModel
from .optimizer import TorchOptimizer, is_optimizer
from .tensors import TorchTensors


class TorchBackend:
    """PyTorch on CPU, CUDA and Ascend NPU."""

    name = "torch"

    def __init__(self) -> None:
        self.fabric = TorchFabric()
        self.control = TorchControl(self.fabric)
        self.tensors = TorchTensors(self.fabric)

    @property
    def file_formats(self) -> dict[str, FileFormat]:
        """PyTorch's own formats of checkpoints, by name (`hyperstate.checkpoint.converting`)."""
        from .dcp_files import Files  # imports torch.distributed.checkpoint, which most scripts never use

        return {"dcp": Files()}

    def owns(self, value: Any) -> bool:
        """Whether `value` is a model, an optimizer or a tensor of PyTorch, or a list of such."""
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)):
            return True
        if isinstance(value, (list, tuple)):
            return any(map(self.owns, value))
        if is_sharded(value):
            return isinstance(getattr(value, "_local_tensor", None), torch.Tensor)
        return is_optimizer(value) and any(
            isinstance(param, torch.Tensor) for group in value.param_groups for param in group["params"]
        )

    def model(self, model: Any, device: Any = None, names: str = "own") -> TorchModel:  # noqa: ARG002  # both kinds of names are the same here
        """Describe a module or a sequence of modules; runs state-dict hooks. `device` is for plain meta parameters."""
        if not isinstance(model, torch.nn.Module):
            model = list(model)
            for part in model:
                if not isinstance(part, torch.nn.Module):
                    raise OptionTypeError(f"a part of the model is a {type(part).__qualname__}, not an nn.Module")
        self.tensors.meta_place = None if device is None else (self.tensors.place_named(device),)
        return TorchModel(model, self.tensors)

    def optimizer(self, optimizer: Any, names: str = "own") -> TorchOptimizer:  # noqa: ARG002  # the same
        """Describe an optimizer or a sequence of them; runs state-dict hooks."""
        return TorchOptimizer(optimizer, self.tensors)

    def ranks_of(self, value: Any) -> tuple[int, ...]:
        """Global ranks of a sequence of numbers, a mesh of any kind, or a process group."""
        if dist.is_available() and isinstance(value, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(value))
        if hasattr(value, "mesh_dim_names"):
            return tuple(self.tensors.mesh(value).ranks)
        try:
            return tuple(int(rank) for rank in value)
        except (TypeError, ValueError) as error:
            raise OptionTypeError(
                f"ranks= must be a sequence of ranks, a device mesh or a process group, not {value!r}"
            ) from error
