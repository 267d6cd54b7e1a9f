"""Rank bodies of test_torch_checkpoints.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict as torch_dicts

import hyperstate as hs
from hyperstate.testing.kit import Kit


def started(kit: Kit, mesh: Any, seed: int) -> tuple[Any, Any]:
    model = kit.model(seed, (9, 13, 5))
    model = model if mesh is None else kit.shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer


def save(kit: Kit, folder: str, shape: list[int]) -> None:
    """Train two steps and save."""
    mesh = kit.mesh(shape, ("outer", "inner")[-len(shape) :]) if shape else None
    model, optimizer = started(kit, mesh, 0)
    kit.train(model, optimizer, 2)
    hs.save(folder, model, optimizer, extra={"step": 2})


def resume(kit: Kit, folder: str, shape: list[int]) -> dict[str, Any]:
    """Load into a fresh pair, and train two more steps; all values as bytes."""
    mesh = kit.mesh(shape, ("outer", "inner")[-len(shape) :]) if shape else None
    model, optimizer = started(kit, mesh, 1)
    step = hs.load(folder, model, optimizer).extra["step"]
    loaded = full(kit, model, optimizer)
    kit.train(model, optimizer, 2, step)
    return {"loaded": loaded, "trained": full(kit, model, optimizer)}


def full(kit: Kit, model: Any, optimizer: Any) -> dict[str, Any]:
    options = hs.StateDictOptions(full_state_dict=True)
    values, state = hs.get_state_dict(model, optimizer, options=options)
    found = {fqn: list(kit.content(value)) for fqn, value in values.items()}
    for fqn, slots in state["state"].items():
        found |= {f"{fqn} {key}": list(kit.content(value)) for key, value in slots.items()}
    return found


def dcp_reads(kit: Kit, folder: str, shape: list[int]) -> dict[str, Any]:
    """PyTorch's reader loads our model folder into a model of its own sharding."""
    mesh = kit.mesh(shape, ("outer", "inner")[-len(shape) :])
    model, _ = started(kit, mesh, 1)
    state = torch_state_dict(model)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(Path(folder) / "model")))
    model.load_state_dict(state)
    options = hs.StateDictOptions(full_state_dict=True)
    return {fqn: list(kit.content(value)) for fqn, value in hs.get_model_state_dict(model, options=options).items()}


def dcp_reads_moments(kit: Kit, folder: str, shape: list[int]) -> bool:
    """The optimizer's folder too: tensors under PyTorch's flat names."""
    mesh = kit.mesh(shape, ("outer", "inner")[-len(shape) :])
    model, optimizer = started(kit, mesh, 0)
    kit.train(model, optimizer, 2)
    state = hs.get_optim_state_dict(model, optimizer, options=hs.StateDictOptions(flatten_optimizer_state_dict=True))
    wanted = {key: torch.zeros_like(value) for key, value in state.items() if key.endswith((".exp_avg", ".exp_avg_sq"))}
    dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(Path(folder) / "optim")))
    return all(torch.equal(value.to_local(), state[key].to_local()) for key, value in wanted.items())


def saves_while_groups_are_busy(kit: Kit, folder: str) -> list[Any]:
    """A save beside the training, while every rank makes collective calls of its own in every group."""
    mesh = kit.mesh((2, kit.world // 2), ("outer", "inner"))
    model, optimizer = started(kit, mesh, 0)
    kit.train(model, optimizer, 1)
    before = full(kit, model, optimizer)
    for number in range(3):
        handle = hs.async_save(f"{folder}/step-{number}", model, optimizer, keep=1)
        kit.train(model, optimizer, 2, 1)
        for _ in range(3):
            hs.get_state_dict(model, optimizer, options=hs.StateDictOptions(full_state_dict=True))
        handle.wait()
        other = started(kit, mesh, 1)
        hs.load(f"{folder}/step-{number}", *other)
        assert before == full(kit, *other)
        before = full(kit, model, optimizer)
    return sorted(each.name for each in Path(folder).iterdir())


def saves_with_dcp(kit: Kit, folder: str) -> dict[str, Any]:
    """PyTorch's own functions alone write the checkpoint; what it holds."""
    model, optimizer = started(kit, kit.mesh((4,), ("inner",)), 0)
    kit.train(model, optimizer, 2)
    values, state = torch_dicts(model, optimizer)
    dcp.save({"model": values, "optimizer": state, "step": 2}, checkpoint_id=folder)
    return full(kit, model, optimizer)


def saves_for_ever(kit: Kit, folder: str) -> None:
    """Save again and again over one checkpoint, each time with another number in all values."""
    mesh = kit.mesh((kit.world,), ("inner",))
    model = kit.shard(kit.model(0, (65, 257, 63)), mesh)
    number = 0
    while True:
        number += 1
        with torch.no_grad():
            for value in [*model.parameters(), *model.buffers()]:
                value.fill_(number)
        hs.save(folder, model, extra=number, timeout=3.0)
        Path(f"{folder}.{kit.rank}").write_text(str(number))
