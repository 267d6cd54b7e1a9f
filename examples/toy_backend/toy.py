"""A framework in one file, for one process: tensors, a model, two optimizers. It knows nothing of hyperstate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


class Tensor:
    """Numbers in memory, of NumPy's dtypes. Compared by identity, so that it can be a key of an optimizer's state."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)
        self.trainable = False
        self.grad: np.ndarray[Any, Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def dtype(self) -> str:
        return self.array.dtype.name


def tensor(values: Any, dtype: str = "float32") -> Tensor:
    """A fresh tensor of these numbers. Raises `TypeError` for a dtype that NumPy lacks."""
    return Tensor(np.array(values, dtype))


class Model:
    """Named tensors; one tensor may have two names. Its loss pulls each parameter towards numbers of the step's own."""

    def __init__(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None) -> None:
        self.parameters, self.buffers = dict(parameters), dict(buffers or {})
        self.transient: set[str] = set()
        """Names of buffers that are no part of the state."""

    def backward(self, step: int) -> None:
        """Leave every trainable parameter's gradient."""
        numbers = np.random.default_rng(step)
        for parameter in dict.fromkeys(self.parameters.values()):
            wanted = numbers.standard_normal(parameter.shape)
            if parameter.trainable:
                parameter.grad = (parameter.array - wanted).astype(np.float32)


class Optimizer:
    """Groups of parameters with their fields, and state by parameter, made at its first step."""

    keys: tuple[str, ...] = ()
    """State keys of a parameter that was stepped."""

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        self.param_groups = [{**defaults, **group, "params": list(group["params"])} for group in groups]
        self.state: defaultdict[Tensor, dict[Any, Any]] = defaultdict(dict)

    def step(self) -> None:
        """Update every parameter that has a gradient, and forget the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.array -= _number(group["lr"]) * self.direction(parameter, group)
                    parameter.grad = None

    def direction(self, parameter: Tensor, group: Mapping[str, Any]) -> Any:  # noqa: ARG002  # others need the group
        """Where a parameter goes, against the gradient."""
        return parameter.grad


class Momentum(Optimizer):
    """Gradient descent with momentum."""

    keys = ("momentum_buffer",)

    def direction(self, parameter: Tensor, group: Mapping[str, Any]) -> Any:
        """See `Optimizer`."""
        buffer = self.state[parameter].setdefault("momentum_buffer", Tensor(np.zeros_like(parameter.array)))
        buffer.array[...] = _number(group["momentum"]) * buffer.array + parameter.grad
        return buffer.array


class Adam(Optimizer):
    """Adam, with a counter of steps for each parameter."""

    keys = ("step", "exp_avg", "exp_avg_sq")

    def direction(self, parameter: Tensor, group: Mapping[str, Any]) -> Any:
        """See `Optimizer`."""
        state = self.state[parameter]
        if not state:
            state["step"] = tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = (Tensor(np.zeros_like(parameter.array)) for _ in range(2))
        state["step"].array += 1
        count, (one, two) = float(state["step"].array), map(_number, group["betas"])
        mean, square = state["exp_avg"].array, state["exp_avg_sq"].array
        mean[...] = one * mean + (1 - one) * parameter.grad
        square[...] = two * square + (1 - two) * np.square(parameter.grad)
        return mean / (1 - one**count) / (np.sqrt(square / (1 - two**count)) + 1e-8)


def _number(value: Any) -> float:
    """A group field as a Python number, whether or not it is kept as a tensor."""
    return float(value.array) if isinstance(value, Tensor) else value
