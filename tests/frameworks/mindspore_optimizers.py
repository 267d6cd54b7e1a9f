"""Small cells, data and every optimizer class of MindSpore that trains on CPU; shared by several test files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import mint, nn
from mindspore.experimental import optim

Make = Callable[[Any], Any]


def net(seed: int) -> Any:
    """A cell with parameters that weight decay treats in two ways."""
    np.random.seed(seed)  # MindSpore's initializers draw from it
    ms.set_seed(seed)
    return nn.SequentialCell(nn.Dense(3, 4), nn.LayerNorm((4,)), nn.Dense(4, 2))


def batch(number: int) -> tuple[Any, Any]:
    """Data of one step."""
    numbers = np.random.default_rng(number)
    return ms.Tensor(numbers.standard_normal((5, 3), np.float32)), ms.Tensor(
        numbers.standard_normal((5, 2), np.float32)
    )


def train(cell: Any, optimizer: Any, steps: int, first: int = 0) -> list[float]:
    """The losses of some steps."""
    losses = []
    compute = ms.value_and_grad(lambda data, label: (cell(data) - label).square().mean(), None, optimizer.parameters)
    for number in range(first, first + steps):
        loss, gradients = compute(*batch(number))
        optimizer(gradients)
        losses.append(float(loss))
    return losses


def bits(value: Any) -> Any:
    """What must be equal to the bit: shape and bytes of tensors; anything else as it is."""
    if isinstance(value, ms.Tensor):
        return tuple(value.shape), str(value.dtype), value.get_bytes().hex() if value.size else ""
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def weights(cell: Any) -> dict[str, Any]:
    """All parameters of a cell, to the bit."""
    return {name: bits(parameter) for name, parameter in cell.parameters_dict().items()}


def _with(kind: Any, **arguments: Any) -> Make:
    return lambda parameters: kind(parameters, **arguments)


def _grouped(kind: Any, order: bool = False, **arguments: Any) -> Make:
    """Two groups with a learning rate and a weight decay of their own; perhaps in another order."""

    def make(parameters: Any) -> Any:
        groups = [
            {"params": list(parameters[:3]), "lr": 0.02, "weight_decay": 0.1},
            {"params": list(parameters[3:]), "weight_decay": 0.05},
        ]
        if order:
            groups.append({"order_params": list(reversed(parameters))})
        return kind(groups, **arguments)

    return make


class Warmup(nn.learning_rate_schedule.LearningRateSchedule):
    """A learning rate that the step number alone decides."""

    def construct(self, global_step: Any) -> Any:
        return 0.01 * (global_step + 1)


LEGACY: dict[str, Make] = {
    "Adagrad": _with(nn.Adagrad, learning_rate=0.1),
    "Adadelta": _with(nn.Adadelta),
    "AdaFactor": _with(nn.AdaFactor, learning_rate=None),
    "AdaFactor without first moment": _with(
        nn.AdaFactor, learning_rate=0.1, relative_step=False, beta1=0.0, weight_decay=0.1
    ),
    "Adam": _with(nn.Adam, learning_rate=0.01, weight_decay=0.1),
    "Adam amsgrad": _with(nn.Adam, use_amsgrad=True),
    "Adam lazy": _with(nn.Adam, use_lazy=True),
    "Adam offload": _with(nn.Adam, use_offload=True),
    "Adam with a loss scale": _with(nn.Adam, weight_decay=0.1, loss_scale=8.0),
    "Adam with a table": _with(nn.Adam, learning_rate=[0.1, 0.05, 0.02, 0.01, 0.005, 0.002]),
    "Adam with a schedule": _with(nn.Adam, learning_rate=Warmup()),
    "Adam grouped": _grouped(nn.Adam, learning_rate=0.01),
    "Adam grouped with tables": lambda p: nn.Adam(
        [{"params": list(p[:2]), "lr": [0.1, 0.2, 0.3, 0.4, 0.5]}, {"params": list(p[2:]), "lr": 0.1}], 0.5
    ),
    "AdamOffload": _with(nn.AdamOffload),
    "AdamWeightDecay": _with(nn.AdamWeightDecay, weight_decay=0.1),
    "AdamWeightDecay grouped": _grouped(nn.AdamWeightDecay, order=True),
    "AdaMax": _with(nn.AdaMax),
    "ASGD": _with(nn.ASGD),
    "FTRL": _with(nn.FTRL, l1=0.1),
    "LazyAdam": _with(nn.LazyAdam),
    "Momentum": _with(nn.Momentum, learning_rate=0.1, momentum=0.9),
    "Momentum grouped": _grouped(nn.Momentum, order=True, learning_rate=0.1, momentum=0.9),
    "ProximalAdagrad": _with(nn.ProximalAdagrad),
    "RMSProp": _with(nn.RMSProp, momentum=0.5),
    "RMSProp centered": _with(nn.RMSProp, centered=True),
    "Rprop": _with(nn.Rprop),
    "SGD": _with(nn.SGD),
    "SGD with momentum": _with(nn.SGD, momentum=0.9, weight_decay=0.1),
    "SGD with dampening": _with(nn.SGD, momentum=0.9, dampening=0.5),
    "SGD nesterov": _with(nn.SGD, momentum=0.9, nesterov=True),
}
"""Optimizers of ``mindspore.nn``; Lamb and LARS have no kernel on CPU."""

EXPERIMENTAL: dict[str, Make] = {
    **{
        f"experimental {name}": _with(getattr(optim, name), lr=0.01)
        for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
    "experimental SGD": _with(optim.SGD, lr=0.1),
    "experimental SGD with momentum": _with(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "experimental AdamW amsgrad": _with(optim.AdamW, amsgrad=True),
    "experimental AdamW grouped": _grouped(optim.AdamW, lr=0.01),
    "experimental RMSprop centered": _with(optim.RMSprop, lr=0.1, centered=True, momentum=0.5),
}

MINT: dict[str, Make] = {
    "mint Adam": _with(mint.optim.Adam),
    "mint Adam amsgrad": _with(mint.optim.Adam, amsgrad=True),
    "mint AdamW": _with(mint.optim.AdamW),
    "mint SGD": _with(mint.optim.SGD, lr=0.1, momentum=0.9),
}
"""On CPU these do not train: their updates in place do nothing there, AdamW has no kernel."""

TRAINABLE = LEGACY | EXPERIMENTAL
