"""Rank bodies: checkpoints written by `torch.distributed.checkpoint`, read into load templates on another mesh."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch_nets import Mlp, fsdp, full_values, local, mesh_of, push, tensor_parallel
from torch_optimizers import Factored, Local, make

import hyperstate as hs

SIZES = (5, 7, 3)
"""On four ranks and on two, every weight is split unevenly."""
FLAT = hs.StateDictOptions(flatten_optimizer_state_dict=True)


def spread(kind: str, seed: int) -> Any:
    """The same net, spread over all ranks in one of several ways."""
    model = Mlp(seed, SIZES)
    world = dist.get_world_size()
    if kind == "fsdp":
        return fsdp(model, mesh_of((world,), ("dp",)))
    if kind == "hsdp":
        return fsdp(model, mesh_of((2, world // 2), ("rep", "dp")))
    if kind == "tp":
        return tensor_parallel(model, mesh_of((world,), ("tp",)))
    if kind == "fsdp_tp":
        mesh = mesh_of((2, world // 2), ("dp", "tp"))
        return fsdp(tensor_parallel(model, mesh["tp"]), mesh["dp"])
    return model


def optimizer_of(name: str, model: Any, lr: float) -> torch.optim.Optimizer:
    if name == "local":
        hs.register_state_layout(Local, {"m": "like_param"})
        return Local(model.parameters(), lr=lr)
    if name == "factored":
        return Factored(model.parameters(), lr=lr)
    if name == "groups":
        first, *rest = model.parameters()
        return torch.optim.AdamW([{"params": rest, "initial_lr": 0.7}, {"params": [first], "weight_decay": 0.2}], lr=lr)
    return make(name, model, lr)


def saved(kit: Any, kind: str, name: str, flat: bool, folder: str) -> None:
    """Two steps, a checkpoint, and the weights after a third step, in full."""
    model = spread(kind, 0)
    optimizer = optimizer_of(name, model, 0.01)
    for step in range(2):
        push(model, optimizer, step)
    weights = hs.get_model_state_dict(model)
    state = hs.get_optim_state_dict(model, optimizer, options=FLAT if flat else None)
    more = {"unrelated": torch.ones(3), "note": "x", "state.gone.weight.exp_avg": torch.ones(2)}
    dcp.save({**weights, **state, **more}, checkpoint_id=folder)
    push(model, optimizer, 2)
    expected = full_values(model)
    if dist.get_rank() == 0:
        torch.save(expected, Path(folder, "expected.pt"))
    dist.barrier()


def resumed(kit: Any, kind: str, name: str, flat: bool, by_path: bool, folder: str) -> None:
    """Into a fresh optimizer on another mesh; the next step is that of the run that was not interrupted."""
    model = spread(kind, 1)
    optimizer = optimizer_of(name, model, 0.5)
    reader: Any = folder if by_path else dcp.FileSystemReader(folder)
    weights = hs.build_model_load_template(model, reader)
    state = hs.build_optim_load_template(model, optimizer, reader)
    check_form(model, optimizer, state, flat)
    assert not optimizer.state
    both = {**weights, **state}
    dcp.load(both, checkpoint_id=folder)
    report = hs.set_state_dict(
        model,
        optimizer,
        model_state_dict={fqn: both[fqn] for fqn in weights},
        optim_state_dict={key: both[key] for key in state},
        state_form="local" if name == "local" else None,
    )
    assert ([], [], []) == tuple(report)
    assert all(group["lr"] == 0.01 for group in optimizer.param_groups)
    push(model, optimizer, 2)
    expected = torch.load(Path(folder, "expected.pt"))
    actual = full_values(model)
    assert expected.keys() == actual.keys()
    assert [] == [fqn for fqn, value in expected.items() if not torch.equal(value, actual[fqn])]


def check_form(model: Any, optimizer: Any, state: dict[str, Any], flat: bool) -> None:
    """Every saved entry of this model is there, as zeros, laid out as the parameter."""
    if flat:
        assert "param_groups" not in state
        nested = hs.unflatten_optim_state_dict(state, model, optimizer)
    else:
        assert ["param_groups", "state"] == sorted(state)
        nested = state
    stateless = isinstance(optimizer, torch.optim.SGD)
    assert (set() if stateless else set(dict(model.named_parameters()))) == set(nested["state"])
    for fqn, param in model.named_parameters():
        for key, value in nested["state"].get(fqn, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            assert not local(value).any(), (fqn, key)
            if value.shape == param.shape:
                assert type(param.data) is type(value), (fqn, key)
                assert not isinstance(param, DTensor) or param.placements == value.placements
            elif value.ndim == 0:
                assert torch.device("cpu") == value.device
    for group, live in zip(nested["param_groups"], optimizer.param_groups, strict=True):
        assert isinstance(live["lr"], torch.Tensor) or live["lr"] == group["lr"]


def factored(kit: Any, folder: str) -> None:
    """Moments of another shape than the parameter's, sharded with its rows: into a new optimizer on the same mesh."""
    saved(kit, "fsdp", "factored", False, folder)
    resumed(kit, "fsdp", "factored", False, True, folder)


def whole(kit: Any, folder: str) -> None:
    """With full_state_dict every rank gets whole tensors, which the setter cuts."""
    saved(kit, "fsdp", "adam", False, folder)
    model = spread("fsdp", 1)
    optimizer = optimizer_of("adam", model, 0.5)
    options = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = hs.build_model_load_template(model, folder, options=options)
    state = hs.build_optim_load_template(model, optimizer, folder, options=options)
    tensors = [*weights.values(), *(value for slots in state["state"].values() for value in slots.values())]
    assert not any(isinstance(value, DTensor) for value in tensors)
    both = {**weights, **state}
    dcp.load(both, checkpoint_id=folder)
    hs.set_state_dict(
        model,
        optimizer,
        model_state_dict={fqn: both[fqn] for fqn in weights},
        optim_state_dict={key: both[key] for key in state},
        options=hs.StateDictOptions(full_state_dict=True),
    )
    push(model, optimizer, 2)
    expected = torch.load(Path(folder, "expected.pt"))
    assert all(torch.equal(value, expected[fqn]) for fqn, value in full_values(model).items())


def sharded_safetensors(kit: Any, folder: str) -> None:
    """Shards in safetensors files, as PyTorch's Hugging Face writer makes them, into another mesh."""
    model = spread("fsdp", 0)
    expected = full_values(model)
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
    dcp.save(hs.get_model_state_dict(model), storage_writer=writer)
    target = spread("hsdp", 1)
    template = hs.build_model_load_template(target, folder)
    assert {fqn: value.shape for fqn, value in expected.items()} == {k: v.shape for k, v in template.items()}
    dcp.load(template, storage_reader=dcp.HuggingFaceStorageReader(folder))
    hs.set_model_state_dict(target, template)
    assert all(torch.equal(value, expected[fqn]) for fqn, value in full_values(target).items())


def stages(kit: Any, folder: str) -> None:
    """Two pipeline stages in one flat checkpoint: each finds its own entries, and no field under an index."""
    from torch_builds import build

    model, optimizer = build("pp", 0, dist.get_rank())
    push(model, optimizer, 0)
    dcp.save(hs.get_optim_state_dict(model, optimizer, options=FLAT), checkpoint_id=folder)
    fresh_model, fresh = build("pp", 1, dist.get_rank(), lr=0.5)
    template = hs.build_optim_load_template(fresh_model, fresh, folder)
    own = f"layers.{dist.get_rank() // 2}."
    assert all(key.split(".", 1)[1].startswith(own) for key in template)
    dcp.load(template, checkpoint_id=folder)
    hs.set_optim_state_dict(fresh_model, fresh, template)
    assert {0.01} == {group["lr"] for group in fresh.param_groups}
    for param, other in zip(model.parameters(), fresh_model.parameters(), strict=True):
        assert all(
            torch.equal(local(value), local(fresh.state[other][key])) for key, value in optimizer.state[param].items()
        )
