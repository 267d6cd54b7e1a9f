"""Rank bodies for the tests of PyTorch's demo."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import hyperstate
from hyperstate_torch import demo
from hyperstate_torch.demo_inputs import open_input


class SpeakerEncoder(nn.Module):
    """The net whose training state the example is, as its package describes it."""

    def __init__(self) -> None:
        super().__init__()
        self.similarity_weight = nn.Parameter(torch.zeros(1))
        self.similarity_bias = nn.Parameter(torch.zeros(1))
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        """Similarities between the utterances of `sound`, of shape (utterances, frames, 40)."""
        _, (hidden, _) = self.lstm(sound)
        embedded = torch.relu(self.linear(hidden[-1]))
        embedded = embedded / embedded.norm(dim=1, keepdim=True)
        return embedded @ embedded.T * self.similarity_weight + self.similarity_bias


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        sound = torch.rand(6, 9, 40, generator=generator)
        loss = nn.functional.cross_entropy(model(sound), torch.arange(6) // 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def the_example_trains_on_as_in_one_process(kit: Any, file: str) -> dict[str, Any]:
    """The file into a sharded net by hyperstate, and into one process by PyTorch's loaders; two steps of both."""
    held = torch.load(file, weights_only=True, map_location="cpu")
    torch.manual_seed(7 + kit.rank)  # what is not loaded will differ
    model = SpeakerEncoder()
    fully_shard(
        model, mesh=kit.mesh((kit.world,), ("shard",)), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, foreach=False)
    root = kit.rank == 0
    hyperstate.set_state_dict(
        model,
        optimizer,
        model_state_dict=held["model_state"] if root else {},
        optim_state_dict=held["optimizer_state"] if root else {},
        options=hyperstate.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    alone = SpeakerEncoder()
    alone.load_state_dict(held["model_state"])
    theirs = torch.optim.Adam(alone.parameters(), lr=0.5, foreach=False)
    theirs.load_state_dict(copy.deepcopy(held["optimizer_state"]))
    before = _differences(model, optimizer, alone, theirs)
    _train(model, optimizer, 2)
    _train(alone, theirs, 2)
    moved = float((alone.linear.weight.detach() - held["model_state"]["linear.weight"]).abs().max())
    steps = {float(slots["step"]) for slots in optimizer.state.values()}
    after = _differences(model, optimizer, alone, theirs)
    return {
        "before": before,
        "after": after,
        "moved": moved > 0,
        "steps": sorted(steps),
        "lr": optimizer.param_groups[0]["lr"],
    }


def _differences(model: Any, optimizer: Any, alone: Any, theirs: Any) -> list[str]:
    """Names of parameters and state whose bits differ."""
    found = []
    for (name, mine), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        pairs = [("", mine, other)]
        pairs += [(key, value, theirs.state[other][key]) for key, value in optimizer.state[mine].items()]
        for key, value, expected in pairs:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if not torch.equal(full.detach(), expected.detach()):
                found.append(f"{name} {key}".strip())
    return found


def the_comparison_finds(kit: Any, fault: str) -> list[dict[str, Any]]:
    """What the demo's comparison says of two equal runs of which the second gets one small fault on the last rank."""
    given = open_input(None, None, values=True)
    first, second = (demo._sharded(given, kit.mesh((kit.world,), ("shard",)), seed=0) for _ in range(2))
    first.train(0, 1)
    second.train(0, 1)
    parameter = second.model.get_parameter("head.weight")
    state, group = second.optimizer.state[parameter], second.optimizer.param_groups[0]
    last = kit.rank == kit.world - 1
    with torch.no_grad():
        if fault == "one bit of a weight" and last:
            parameter._local_tensor[-1, -1] = torch.nextafter(parameter._local_tensor[-1, -1], torch.tensor(9.0))
        elif fault == "minus zero in a moment" and last:
            for run, zero in ((first, 0.0), (second, -0.0)):
                run.optimizer.state[run.model.get_parameter("head.weight")]["exp_avg"]._local_tensor[0, 0] = zero
        elif fault == "a counter":
            state["step"] += 1
        elif fault == "a missing moment":
            del state["exp_avg_sq"]
        elif fault == "a learning rate":
            group["lr"] *= 2
        elif fault == "a dtype":
            state["step"] = state["step"].double()
    report = demo.Report()
    demo._compare(report, fault, first, second)
    return report.checks
