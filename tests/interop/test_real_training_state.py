"""A real training state of 2018 (LSTM, Linear, Adam at step 1,564,500) from PyTorch into MindSpore and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
import pytest
import torch
from twins import READ, array_of, bits, read, write

import hyperstate as hs
from hyperstate.cli.example import fetch

STEP = 1_564_500
NOISE = "similarity_bias"
"""Cross entropy does not depend on it: its gradient is rounding, out of which Adam makes steps of full size."""


class Speaker(torch.nn.Module):
    """The net that the state belongs to, as its package describes it."""

    def __init__(self) -> None:
        super().__init__()
        self.similarity_weight = torch.nn.Parameter(torch.zeros(1))
        self.similarity_bias = torch.nn.Parameter(torch.zeros(1))
        self.lstm = torch.nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = torch.nn.Linear(256, 256)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(sound)
        embedded = torch.relu(self.linear(hidden[-1]))
        embedded = embedded / embedded.norm(dim=1, keepdim=True)
        return embedded @ embedded.T * self.similarity_weight + self.similarity_bias


class SpeakerCell(ms.nn.Cell):
    """The same of MindSpore's parts."""

    def __init__(self) -> None:
        super().__init__()
        self.similarity_weight = ms.Parameter(ms.Tensor([0.0], ms.float32), name="similarity_weight")
        self.similarity_bias = ms.Parameter(ms.Tensor([0.0], ms.float32), name="similarity_bias")
        self.lstm = ms.nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = ms.nn.Dense(256, 256)

    def construct(self, sound: Any) -> Any:
        _, (hidden, _) = self.lstm(sound)
        embedded = ms.ops.relu(self.linear(hidden[-1]))
        embedded = embedded / ms.ops.sqrt(embedded.square().sum(1, keepdims=True))
        return ms.ops.matmul(embedded, embedded.T) * self.similarity_weight + self.similarity_bias


class Run(NamedTuple):
    net: Any
    optimizer: Any


@pytest.fixture(scope="module")
def held() -> Any:
    """The file; needs the package index once."""
    return torch.load(fetch(), weights_only=True, map_location="cpu")


def _torch(held: Any = None) -> Run:
    net = Speaker()
    run = Run(net, torch.optim.Adam(net.parameters(), lr=0.5, foreach=False))
    if held is not None:
        hs.set_state_dict(
            *run,
            model_state_dict=held["model_state"],
            optim_state_dict=held["optimizer_state"],
            options=hs.StateDictOptions(full_state_dict=True),
        )
    return run


def _mindspore() -> Run:
    ms.set_device("CPU")
    cell = SpeakerCell()
    return Run(cell, ms.nn.Adam(cell.trainable_params(), learning_rate=0.5))


def _sound(step: int) -> Any:
    return np.random.default_rng(step).random((6, 9, 40), np.float32)


def _train(run: Run, steps: int) -> list[float]:
    losses = []
    labels = np.arange(6) // 2
    for step in range(steps):
        if isinstance(run.net, torch.nn.Module):
            loss = torch.nn.functional.cross_entropy(run.net(torch.from_numpy(_sound(step))), torch.from_numpy(labels))
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        else:
            compute = ms.value_and_grad(
                lambda sound, labels: ms.ops.cross_entropy(run.net(sound), labels), None, run.optimizer.parameters
            )
            value, gradients = compute(ms.Tensor(_sound(step)), ms.Tensor(labels.astype(np.int32)))
            run.optimizer(gradients)
            losses.append(float(value))
    return losses


def test_it_goes_over_and_back_to_the_bit(held: Any) -> None:
    source, there, back = _torch(held), _mindspore(), _torch()
    state = read(*source)
    assert {STEP} == {int(slots["step"]) for slots in state[1]["state"].values()}
    write(*there, state)
    assert STEP == int(there.optimizer.global_step.asnumpy()[0])
    arrived = read(*there)
    assert bits(state[0]) == bits(arrived[0])
    assert bits(state[1]["state"]) == bits(arrived[1]["state"])
    write(*back, arrived)
    returned = read(*back)
    assert bits(state[0]) == bits(returned[0])
    assert bits(state[1]["state"]) == bits(returned[1]["state"])
    assert bits(held["model_state"]) == bits(dict(back.net.state_dict()))


def test_training_goes_on_alike_in_both_and_comes_back(held: Any) -> None:
    source, there = _torch(held), _mindspore()
    write(*there, read(*source))
    before = read(*source)
    np.testing.assert_allclose(_train(source, 2), _train(there, 2), rtol=1e-5)
    expected, actual = read(*source), read(*there)
    for name, value in expected[0].items():
        if name == NOISE:
            continue
        change = np.abs(array_of(value) - array_of(before[0][name])).max()
        assert change > 0
        np.testing.assert_allclose(array_of(value), array_of(actual[0][name]), rtol=1e-5, atol=1e-7, err_msg=name)
    for name, slots in expected[1]["state"].items():
        for key, value in slots.items():
            a, b = array_of(value), array_of(actual[1]["state"][name][key])
            assert name == NOISE or np.allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(a).max()), f"{name} {key}"
    back = _torch()
    write(*back, actual)
    assert bits(actual[0]) == bits(hs.get_model_state_dict(back.net, options=READ))
    assert {STEP + 2} == {int(slots["step"]) for slots in back.optimizer.state.values()}
