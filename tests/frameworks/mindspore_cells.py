"""Cells of the shapes that names go wrong with, and their training; shared by several test files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.experimental import optim


def tensor(*shape: int, start: float = 0.0) -> Any:
    return ms.Tensor(start + np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape))


def parameter(*shape: int, name: str | None = None, start: float = 0.0, **more: Any) -> Any:
    return ms.Parameter(tensor(*shape, start=start), name=name, **more)


def seeded(cell: Any, seed: int) -> Any:
    """`cell` with values that depend on the seed and the places alone."""
    numbers = np.random.default_rng(seed)
    for one in cell.trainable_params():
        values = numbers.standard_normal(tuple(one.shape)).astype(np.float32)
        one.set_data(ms.Tensor(values).astype(one.dtype))
    return cell


def bits(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    return str(value.dtype), tuple(value.shape), value.asnumpy().tobytes()


class Twice(nn.Cell):
    """One cell under two attributes; MindSpore calls its parameters after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.second = self.first
        self.last = nn.Dense(3, 2)

    def construct(self, batch: Any) -> Any:
        return self.last(self.second(self.norm(self.first(batch))))


class Outer(nn.Cell):
    """A cell around another, which renames the live parameters inside."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def construct(self, batch: Any) -> Any:
        return self.net(batch)


class SameNames(nn.Cell):
    """Parameters of one name, MindSpore's, at different places."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.one, self.two = nn.Dense(3, 4), nn.Dense(4, 2)

    def construct(self, batch: Any) -> Any:
        return self.two(ms.ops.tanh(self.one(batch)))


def sequence() -> Any:
    return nn.SequentialCell(nn.Dense(3, 4), nn.BatchNorm1d(4), nn.Dense(4, 2))


def half() -> Any:
    cell = nn.SequentialCell(nn.Dense(3, 4), nn.Dense(4, 2))
    for one in cell.get_parameters():
        one.set_dtype(ms.bfloat16)
    return cell


OPTIMIZERS = {
    "AdamWeightDecay": lambda params: nn.AdamWeightDecay(params, 0.05),
    "Momentum": lambda params: nn.Momentum(params, 0.05, 0.9),
    "experimental Adam": lambda params: optim.Adam(params, lr=0.05),
}


def steps(cell: Any, optimizer: Any, numbers: Iterable[int]) -> list[float]:
    """Losses of some steps on data that depend on the step number alone."""
    cell.set_train()
    compute = ms.value_and_grad(lambda batch: cell(batch).square().mean(), None, optimizer.parameters)
    losses = []
    for number in numbers:
        batch = np.random.default_rng(number).standard_normal((5, 3)).astype(np.float32)
        loss, gradients = compute(ms.Tensor(batch))
        optimizer(gradients)
        losses.append(float(loss))
    return losses


class Kinds(nn.Cell):
    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.linear, self.norm = nn.Dense(2, 3), nn.BatchNorm1d(3)
        self.frozen = parameter(2, name="frozen", start=fill, requires_grad=False)
        self.register_buffer("kept", tensor(3, start=fill))
        self.register_buffer("scratch", tensor(3, start=fill), persistent=False)
        self.steps = fill

    def get_extra_state(self) -> Any:
        return {"steps": self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]
