"""The same small nets and optimizers in PyTorch and in MindSpore, and state carried from one to the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import torch
from mindspore.experimental import optim

import hyperstate as hs

READ = hs.StateDictOptions(full_state_dict=True, cpu_offload=True, names="neutral")
WRITE = hs.StateDictOptions(full_state_dict=True, names="neutral")


# -- values ----------------------------------------------------------------------------------------


def array_of(value: Any) -> Any:
    """The content of a tensor; bfloat16, which NumPy lacks, as integers."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.view(torch.int16).numpy().copy() if value.dtype == torch.bfloat16 else value.numpy().copy()
    return (value.view(ms.int16) if value.dtype == ms.bfloat16 else value).asnumpy().copy()


def carried(value: Any, to: str) -> Any:
    """A neutral dict of one framework with the other's tensors: an equal value of the same type in every place."""
    if isinstance(value, (torch.Tensor, ms.Tensor)):
        array, half = array_of(value), str(value.dtype).lower().endswith("bfloat16")
        if to == "torch":
            made = torch.from_numpy(array)
            return made.view(torch.bfloat16) if half else made
        return ms.Tensor(array).view(ms.bfloat16) if half else ms.Tensor(array)
    if isinstance(value, dict):
        return {key: carried(item, to) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(carried(item, to) for item in value)
    return value


def bits(value: Any) -> Any:
    """What must be equal to the bit: dtype, shape and bytes of tensors; anything else as it is."""
    if isinstance(value, (torch.Tensor, ms.Tensor)):
        kind = str(value.dtype).lower().removeprefix("torch.")
        return kind, tuple(value.shape), array_of(value).tobytes().hex()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


# -- nets ------------------------------------------------------------------------------------------


class Twin:
    """A net of both frameworks with a loss that depends on a batch of NumPy arrays."""

    def __init__(
        self,
        torch_net: Callable[[], Any],
        mindspore_net: Callable[[], Any],
        shape: tuple[int, ...],
        indices: int = 0,
        hidden: tuple[str, ...] = (),
    ) -> None:
        self.torch_net, self.mindspore_net, self.shape, self.indices = torch_net, mindspore_net, shape, indices
        self.noise = hidden
        """Parameters whose gradient is 0 but for rounding: Adam makes steps of full size out of that."""

    def build(self, framework: str, seed: int) -> Any:
        """A net with values that only the seed decides, the same ones for both frameworks in no way."""
        torch.manual_seed(seed)
        np.random.seed(seed)  # MindSpore's initializers draw from it
        ms.set_seed(seed)
        return self.torch_net() if framework == "torch" else self.mindspore_net().set_train()

    def batch(self, number: int) -> tuple[Any, Any]:
        numbers = np.random.default_rng(number)
        if self.indices:
            data = numbers.integers(0, self.indices, self.shape)
        else:
            data = numbers.standard_normal(self.shape, np.float32)
        return data, numbers.standard_normal(self.shape[0], np.float32)

    def train(self, net: Any, optimizer: Any, steps: int, first: int = 0) -> list[float]:
        """The losses of some steps."""
        return [self._step(net, optimizer, *self.batch(number)) for number in range(first, first + steps)]

    def _step(self, net: Any, optimizer: Any, data: Any, label: Any) -> float:
        if isinstance(net, torch.nn.Module):
            result = net(torch.from_numpy(data))
            loss = (result.reshape(len(label), -1).mean(1) - torch.from_numpy(label)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        def forward(data: Any, label: Any) -> Any:
            return (net(data).reshape(len(label), -1).mean(1) - label).square().mean()

        loss, gradients = ms.value_and_grad(forward, None, optimizer.parameters)(ms.Tensor(data), ms.Tensor(label))
        optimizer(gradients)
        return float(loss)


class TorchAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(data, data, data)[0]).tanh()


class MindSporeAttention(ms.nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.attention = ms.nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = ms.nn.Dense(8, 3)

    def construct(self, data: Any) -> Any:
        return ms.ops.tanh(self.head(self.attention(data, data, data)[0]))


class TorchMixed(torch.nn.Module):
    """Case S46: Linear, BatchNorm, LayerNorm, Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 6)
        self.first = torch.nn.Linear(6, 5, bias=False)
        self.across = torch.nn.BatchNorm1d(5)
        self.along = torch.nn.LayerNorm(5)
        self.last = torch.nn.Linear(5, 2)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.last(self.along(self.across(self.first(self.words(data).mean(1))).tanh()))


class MindSporeMixed(ms.nn.Cell):
    """Case S46: the same."""

    def __init__(self) -> None:
        super().__init__()
        self.words = ms.nn.Embedding(11, 6)
        self.first = ms.nn.Dense(6, 5, has_bias=False)
        self.across = ms.nn.BatchNorm1d(5)
        self.along = ms.nn.LayerNorm((5,), epsilon=1e-5)
        self.last = ms.nn.Dense(5, 2)

    def construct(self, data: Any) -> Any:
        return self.last(self.along(ms.ops.tanh(self.across(self.first(self.words(data).mean(1))))))


def _both(torch_parts: Callable[[Any], list[Any]], mindspore_parts: Callable[[Any], list[Any]]) -> tuple[Any, Any]:
    return (
        lambda: torch.nn.Sequential(*torch_parts(torch.nn)),
        lambda: ms.nn.SequentialCell(*mindspore_parts(ms.nn)),
    )


TWINS: dict[str, Twin] = {
    "Linear": Twin(
        *_both(
            lambda nn: [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)],
            lambda nn: [nn.Dense(3, 4), nn.Tanh(), nn.Dense(4, 2)],
        ),
        (5, 3),
    ),
    "Conv": Twin(
        *_both(
            lambda nn: [nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3)],
            lambda nn: [
                nn.Conv2d(2, 4, 3, pad_mode="pad", padding=1, has_bias=True),
                nn.Tanh(),
                nn.Conv2d(4, 3, 3, pad_mode="valid", has_bias=True),
            ],
        ),
        (5, 2, 6, 6),
    ),
    "BatchNorm": Twin(
        *_both(
            lambda nn: [nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 3, 3)],
            lambda nn: [
                nn.Conv2d(2, 4, 3, pad_mode="valid"),
                nn.BatchNorm2d(4),
                nn.Tanh(),
                nn.Conv2d(4, 3, 3, pad_mode="valid", has_bias=True),
            ],
        ),
        (5, 2, 6, 6),
    ),
    "LayerNorm": Twin(
        *_both(
            lambda nn: [nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)],
            lambda nn: [nn.Dense(3, 4), nn.LayerNorm((4,), epsilon=1e-5), nn.Dense(4, 2)],
        ),
        (5, 3),
    ),
    "GroupNorm": Twin(
        *_both(
            lambda nn: [nn.Conv2d(2, 4, 3, bias=False), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 3)],
            lambda nn: [
                nn.Conv2d(2, 4, 3, pad_mode="valid"),
                nn.GroupNorm(2, 4),
                nn.Tanh(),
                nn.Conv2d(4, 3, 3, pad_mode="valid", has_bias=True),
            ],
        ),
        (5, 2, 6, 6),
    ),
    "Embedding": Twin(
        *_both(
            lambda nn: [nn.Embedding(7, 4), nn.Linear(4, 2)],
            lambda nn: [nn.Embedding(7, 4), nn.Dense(4, 2)],
        ),
        (5, 3),
        indices=7,
    ),
    "attention": Twin(TorchAttention, MindSporeAttention, (5, 4, 8), hidden=("attention.in_proj_bias",)),
    "mixed": Twin(TorchMixed, MindSporeMixed, (6, 4), indices=11),
}

Make = Callable[[Any], Any]
OPTIMIZERS: dict[str, tuple[Make, Make]] = {
    "Adam": (
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
        lambda p: ms.nn.Adam(p, learning_rate=0.02),
    ),
    "Adam (experimental)": (
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
        lambda p: optim.Adam(p, lr=0.02),
    ),
    "Adam amsgrad": (
        lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
        lambda p: ms.nn.Adam(p, learning_rate=0.02, use_amsgrad=True),
    ),
    "AdamW": (
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
        lambda p: optim.AdamW(p, lr=0.02),
    ),
    "AdamW amsgrad": (
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: optim.AdamW(p, lr=0.02, amsgrad=True),
    ),
    "SGD": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: ms.nn.SGD(p, learning_rate=0.02, momentum=0.5),
    ),
    "SGD (experimental)": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: optim.SGD(p, lr=0.02, momentum=0.5),
    ),
    "SGD (Momentum)": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: ms.nn.Momentum(p, 0.02, 0.5),  # with Nesterov's momentum its kernel on CPU leaves that out
    ),
    "SGD nesterov": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: ms.nn.SGD(p, learning_rate=0.02, momentum=0.5, nesterov=True),
    ),
    "SGD without momentum": (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: ms.nn.SGD(p, learning_rate=0.02),
    ),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1), lambda p: optim.Adagrad(p, lr=0.02)),
    "Adadelta": (lambda p: torch.optim.Adadelta(p, lr=0.02), lambda p: optim.Adadelta(p, lr=0.1)),
    "Adamax": (lambda p: torch.optim.Adamax(p, lr=0.01), lambda p: optim.Adamax(p, lr=0.02)),
    "ASGD": (lambda p: torch.optim.ASGD(p, lr=0.1), lambda p: optim.ASGD(p, lr=0.02)),
    "NAdam": (lambda p: torch.optim.NAdam(p, lr=0.01), lambda p: optim.NAdam(p, lr=0.02)),
    "RAdam": (lambda p: torch.optim.RAdam(p, lr=0.01), lambda p: optim.RAdam(p, lr=0.02)),
    "RMSprop": (
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
        lambda p: optim.RMSprop(p, lr=0.02, momentum=0.1, centered=True),
    ),
    "Rprop": (lambda p: torch.optim.Rprop(p, lr=0.01), lambda p: optim.Rprop(p, lr=0.02)),
}
"""Of both frameworks; the second with other settings, which a load replaces."""


def optimizer(framework: str, name: str, net: Any) -> Any:
    """A fresh optimizer of all parameters of `net` that need a gradient."""
    if framework == "torch":
        return OPTIMIZERS[name][0](list(net.parameters()))
    return OPTIMIZERS[name][1](net.trainable_params())


# -- state -----------------------------------------------------------------------------------------


def read(net: Any, trained: Any) -> tuple[Any, Any]:
    """Both neutral dicts."""
    found: tuple[Any, Any] = hs.get_state_dict(net, trained, options=READ)
    return found


def write(net: Any, fresh: Any, state: tuple[Any, Any]) -> None:
    """Load both neutral dicts, whichever framework's tensors they hold."""
    model, optim_state = (carried(one, "torch" if isinstance(net, torch.nn.Module) else "mindspore") for one in state)
    hs.set_state_dict(net, fresh, model_state_dict=model, optim_state_dict=optim_state, options=WRITE)


def assert_close(expected: Any, actual: Any, noise: tuple[str, ...] = (), atol: float = 2e-6) -> None:
    """Weights and statistics of two nets agree to rounding, which is larger where small gradients are scaled up."""
    first, second = (hs.get_model_state_dict(one, options=READ) for one in (expected, actual))
    assert set(first) == set(second)
    for name in first:
        if name not in noise and name.rsplit(".")[-1] != "num_batches_tracked":
            np.testing.assert_allclose(
                array_of(first[name]), array_of(second[name]), rtol=2e-5, atol=atol, err_msg=name
            )
