"""The reference backend: its parts, put together."""

from __future__ import annotations

from typing import Any

import numpy as np

from hyperstate.errors import OptionError, OptionTypeError

from .arrays import META, Tensor, check_device
from .fabric import NumpyControl, NumpyFabric
from .model import NumpyModel
from .modules import Module
from .optimizer import NumpyOptimizer, is_optimizer
from .tensors import NumpyTensors, is_sharded, mesh_of


class NumpyBackend:
    """NumPy arrays on the host and on a simulated device; ranks are threads (`job.run_ranks`)."""

    name = "numpy"

    def __init__(self) -> None:
        self.fabric = NumpyFabric()
        self.control = NumpyControl()
        self.tensors = NumpyTensors(self.fabric)

    def owns(self, value: Any) -> bool:
        """Whether `value` is a model, an optimizer or a tensor of the toy framework, or a list of such."""
        if isinstance(value, (list, tuple)):
            return any(map(self.owns, value))
        return isinstance(value, (Module, Tensor, np.ndarray)) or is_sharded(value) or is_optimizer(value)

    def model(self, model: Any, device: Any = None, names: str = "own") -> NumpyModel:  # noqa: ARG002  # both kinds of names are the same here
        """Describe a module or a sequence of modules; runs state-dict pre-hooks. `device` is for meta parameters."""
        parts = [model] if isinstance(model, Module) else list(model)
        for part in parts:
            if not isinstance(part, Module):
                raise OptionTypeError(f"a part of the model is a {type(part).__qualname__}, not a Module")
        if device is not None:
            if check_device(device) == META:
                raise OptionError("device='meta' has no storage to load into; name 'cpu' or 'sim'")
        return NumpyModel(parts, self.tensors, device)

    def optimizer(self, optimizer: Any, names: str = "own") -> NumpyOptimizer:  # noqa: ARG002  # the same
        """Describe an optimizer or a sequence of them."""
        given = [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer)
        return NumpyOptimizer(given, self.tensors)

    def ranks_of(self, value: Any) -> tuple[int, ...]:
        """Global ranks of a sequence of numbers or a mesh of any kind."""
        if hasattr(value, "mesh_dim_names"):
            return mesh_of(value).ranks
        try:
            return tuple(int(rank) for rank in value)
        except (TypeError, ValueError) as error:
            raise OptionTypeError(f"ranks= must be a sequence of ranks or a device mesh, not {value!r}") from error
