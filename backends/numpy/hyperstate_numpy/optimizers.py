"""The toy framework's optimizers. State, groups and laziness are PyTorch's: ``state[param][key]``, ``param_groups``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from .arrays import CPU, Tensor, zeros
from .dtypes import Array, encode
from .sharded import AnyTensor, like, plain


class Optimizer:
    """Base: groups of parameters with their fields. State of a parameter is made at its first step."""

    state_form: ClassVar[str] = ""
    """How state of sharded parameters is kept: "" as sharded tensors, "local" as plain ones of the local shape."""
    rules: ClassVar[Mapping[str, str]] = {}
    """State key -> "like_param" or "replicated"."""

    def __init__(self, params: Iterable[Any], defaults: Mapping[str, Any]) -> None:
        given = list(params)
        if not given or not isinstance(given[0], dict):
            given = [{"params": given}]
        self.param_groups: list[dict[str, Any]] = [
            {**defaults, **group, "params": list(group["params"])} for group in given
        ]
        self.state: defaultdict[Any, dict[Any, Any]] = defaultdict(dict)

    def state_keys(self) -> list[str] | None:
        """State keys of a parameter that was updated; None where anybody may put anything."""
        return list(self.rules) or None

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, plain(param), plain(param.grad), group)

    def update(self, param: AnyTensor, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """One parameter's step, on its local part."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None


def _wide(value: Tensor) -> Array:
    """Numbers to compute with: float32 at least."""
    found = value.numpy()
    return found.astype(np.float32) if found.dtype == np.float16 else found


def _put(value: Tensor, result: Array) -> None:
    value.array[...] = encode(result, value.dtype)


def _number(value: Any) -> Any:
    """A group field as a Python number, whether or not it is kept as a tensor."""
    return value.tolist() if isinstance(value, Tensor) else value


def _zeros(param: AnyTensor, dtype: str | None = None) -> Tensor:
    """Zeros of the local part's shape."""
    part = plain(param)
    return zeros(part.shape, dtype or part.dtype, part.device)


def _descend(weight: Tensor, lr: float, direction: Array) -> None:
    _put(weight, _wide(weight) - direction * np.float32(lr))


def _adam(state: dict[Any, Any], keys: tuple[str, str], gradient: Array, count: int, betas: Any) -> Array:
    """The direction of one Adam step after updating both moments in place."""
    first, second = plain(state[keys[0]]), plain(state[keys[1]])
    one, two = (np.float32(_number(beta)) for beta in betas)
    _put(first, _wide(first) * one + gradient * (1 - one))
    _put(second, _wide(second) * two + (gradient * np.conj(gradient)).real * (1 - two))
    m = _wide(first) / np.float32(1 - float(one) ** count)
    v = _wide(second).real / np.float32(1 - float(two) ** count)
    found: Array = m / (np.sqrt(v) + np.float32(1e-8))
    return found


class SGD(Optimizer):
    """Gradient descent; with `momentum` it keeps ``momentum_buffer``, without it has no state."""

    rules = {"momentum_buffer": "like_param"}  # noqa: RUF012  # as declared in the base class

    def __init__(self, params: Iterable[Any], lr: Any = 0.01, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def state_keys(self) -> list[str]:
        """See `Optimizer`."""
        return ["momentum_buffer"] if any(_number(group["momentum"]) for group in self.param_groups) else []

    def update(self, param: AnyTensor, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """See `Optimizer`."""
        direction, momentum = _wide(gradient), _number(group["momentum"])
        if momentum:
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = like(param, _zeros(param))
            buffer = plain(state["momentum_buffer"])
            _put(buffer, _wide(buffer) * np.float32(momentum) + direction)
            direction = _wide(buffer)
        _descend(weight, _number(group["lr"]), direction)


class Adam(Optimizer):
    """Adam: ``exp_avg`` and ``exp_avg_sq`` laid out as the parameter, ``step`` a 0-d float32 on the host.

    With ``capturable`` the counter lives where the parameter does.
    """

    rules = {"exp_avg": "like_param", "exp_avg_sq": "like_param", "step": "replicated"}  # noqa: RUF012  # as declared in the base class

    def __init__(
        self, params: Iterable[Any], lr: Any = 0.01, betas: tuple[float, float] = (0.9, 0.999), capturable: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "capturable": capturable})

    def update(self, param: AnyTensor, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """See `Optimizer`."""
        state = self.state[param]
        if not state:
            state["step"] = zeros((), "float32", weight.device if group["capturable"] else CPU)
            state["exp_avg"], state["exp_avg_sq"] = like(param, _zeros(param)), like(param, _zeros(param))
        state["step"].array += 1
        count = int(state["step"].array)
        direction = _adam(state, ("exp_avg", "exp_avg_sq"), _wide(gradient), count, group["betas"])
        _descend(weight, _number(group["lr"]), direction)


class LocalAdam(Optimizer):
    """Adam whose moments ``m`` and ``v`` are plain float32 tensors of the local shard's shape; ``step`` is an int.

    It has no rules: how its state is laid out is for the core to find out.
    """

    state_form = "local"

    def __init__(self, params: Iterable[Any], lr: Any = 0.01, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    def state_keys(self) -> list[str]:
        """See `Optimizer`."""
        return ["step", "m", "v"]

    def update(self, param: AnyTensor, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        """See `Optimizer`."""
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["m"], state["v"] = (_zeros(param, "float32") for _ in range(2))
        state["step"] += 1
        direction = _adam(state, ("m", "v"), _wide(gradient).astype(np.float32), state["step"], group["betas"])
        _descend(weight, _number(group["lr"]), direction)


class Custom(Optimizer):
    """Plain descent that keeps whatever state somebody puts there."""

    def __init__(self, params: Iterable[Any], lr: Any = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, param: AnyTensor, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:  # noqa: ARG002  # the base's signature
        """See `Optimizer`."""
        _descend(weight, _number(group["lr"]), _wide(gradient))
