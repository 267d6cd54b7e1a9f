"""Rank bodies: optimizer state of every class and of odd kinds on sharded parameters."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch_nets import (
    Net,
    Parts,
    assert_close,
    assert_same,
    cloned,
    frozen_copy,
    fsdp,
    full_state,
    full_values,
    mesh_of,
    noise,
    push,
    snapshot,
    train,
)
from torch_optimizers import ODD, make, model_for

import hyperstate as hs

ROOT = {"full_state_dict": True, "cpu_offload": True}
BROADCAST = {"full_state_dict": True, "broadcast_from_rank0": True}
FORMS: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "sharded": ({}, {}),
    "full": ({"full_state_dict": True},) * 2,
    "broadcast": (ROOT, BROADCAST),
    "flat": ({**ROOT, "flatten_optimizer_state_dict": True}, BROADCAST),
}


def sharded(model: nn.Module, kit: Any) -> nn.Module:
    """The model with every parameter split along its first dimension over all ranks."""
    mesh = mesh_of((kit.world,), ("dp",))
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None:
                cut = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
                module._parameters[name] = nn.Parameter(cut)
    return model


def carry(source: tuple[Any, Any], target: tuple[Any, Any], form: str, **keywords: Any) -> None:
    get, put = (hs.StateDictOptions(**chosen) for chosen in FORMS[form])
    weights, state = map(cloned, hs.get_state_dict(*source, options=get))
    hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=put, **keywords)


# -- every class of torch.optim ------------------------------------------------------------------------


def every_class(kit: Any, name: str) -> str:
    """All forms into a fresh and into a stepped optimizer; "cannot step" where PyTorch's class can't here."""
    try:
        probe = sharded(model_for(name, 0), kit)
        push(probe, make(name, probe), 0)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
        return f"cannot step: {type(error).__name__}"
    for form in FORMS:
        for stepped in (False, True):
            model, target = (sharded(model_for(name, seed), kit) for seed in (0, 1))
            optimizer, fresh = make(name, model), make(name, target, lr=0.7)
            push(model, optimizer, 0)
            push(model, optimizer, 1)
            if stepped:
                push(target, fresh, 9)
            carry((model, optimizer), (target, fresh), form)
            assert_same(snapshot(model, optimizer), snapshot(target, fresh))
            for one in ((model, optimizer), (target, fresh)):
                push(*one, 2)
            assert_same(snapshot(model, optimizer), snapshot(target, fresh))
    return "exact"


def s16_adagrad_built_before_sharding(kit: Any) -> str:
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters())
    fsdp(model, mesh_of((kit.world,), ("dp",)))
    try:
        hs.get_optim_state_dict(model, optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


# -- S12: factored moments -----------------------------------------------------------------------------


def odd_model(kind: str, seed: int, kit: Any | None) -> tuple[nn.Module, Any]:
    shapes = {"w": (6, 4), "b": (5,)}
    model: nn.Module = Parts({name: noise(name, shape, seed) for name, shape in shapes.items()})
    if kit is not None:
        model = sharded(model, kit)
    return model, ODD[kind](model.parameters())


def s12_factored(kit: Any, stepped: bool, form: str) -> None:
    plain, model, target = odd_model("factored", 0, None), odd_model("factored", 0, kit), odd_model("factored", 1, kit)
    for one in (plain, model):
        push(*one, 0)
        push(*one, 1)
    if stepped:
        push(*target, 7)
    full = hs.get_optim_state_dict(*model, options=hs.StateDictOptions(full_state_dict=True))
    assert {"row": (6,), "col": (4,)} == {key: tuple(v.shape) for key, v in full["state"]["w"].items()}
    assert_close(full_state(*plain), full["state"])
    carry(model, target, form)
    assert_same(snapshot(*model), snapshot(*target))
    for one in (plain, model, target):
        push(*one, 2)
    assert_same(snapshot(*model), snapshot(*target))
    assert_close(full_values(plain[0]), full_values(model[0]))


def s12_square_matrices(kit: Any) -> str:
    """Rows and columns have one length: shapes alone can't tell, so a fresh optimizer asks for the hook."""

    class Square(ODD["factored"]):  # type: ignore[misc,name-defined]  # a class of its own: rules are kept by class
        pass

    def build(seed: int) -> tuple[nn.Module, Any]:
        model = sharded(Parts({"w": noise("w", (4, 4), seed)}), kit)
        return model, Square(model.parameters())

    model, target = build(0), build(1)
    push(*model, 0)
    before = snapshot(*target)
    try:
        carry(model, target, "broadcast")
    except hs.AmbiguousLayoutError as error:
        text = str(error)
    assert_same(before, snapshot(*target))
    from hyperstate.layout import Layout

    rows = lambda param, shape: Layout(param.layout.mesh, (param.layout.splits[0],))  # noqa: E731  (a rule in one line)
    cols = lambda param, shape: Layout(param.layout.mesh, ((),))  # noqa: E731
    hs.register_state_layout(Square, {"row": rows, "col": cols})
    carry(model, target, "broadcast")
    for one in (model, target):
        push(*one, 1)
    assert_same(snapshot(*model), snapshot(*target))
    return text


def s12_save(kit: Any, file: str) -> None:
    model = odd_model("factored", 0, kit)
    push(*model, 0)
    weights, state = hs.get_state_dict(*model, options=hs.StateDictOptions(**ROOT))
    if kit.rank == 0:
        torch.save((weights, state), file)


def s12_load(kit: Any, file: str) -> None:
    """What was saved on another number of ranks equals a one-process run."""
    weights, state = torch.load(file, weights_only=True) if kit.rank == 0 else ({}, {})
    plain, target = odd_model("factored", 0, None), odd_model("factored", 1, kit)
    push(*plain, 0)
    hs.set_state_dict(
        *target, model_state_dict=weights, optim_state_dict=state, options=hs.StateDictOptions(**BROADCAST)
    )
    assert_close(full_state(*plain), full_state(*target))
    for one in (plain, target):
        push(*one, 1)
    assert_close(full_values(plain[0]), full_values(target[0]))


# -- S13, S14: plain and quantised local state ---------------------------------------------------------


def s13_local(kit: Any, form: str, stepped: bool) -> None:
    plain, model, target = odd_model("local", 0, None), odd_model("local", 0, kit), odd_model("local", 1, kit)
    for one in (plain, model):
        push(*one, 0)
    if stepped:
        push(*target, 7)
    full = hs.get_optim_state_dict(*model, options=hs.StateDictOptions(full_state_dict=True))
    assert frozen_copy(full_state(*plain)) == frozen_copy(full["state"])
    shown = hs.get_optim_state_dict(*model)["state"]["w"]["m"]
    assert isinstance(shown, DTensor) and (6, 4) == tuple(shown.shape)
    carry(model, target, form, **({} if stepped else {"state_form": "local"}))
    kinds = {type(slots["m"]) for slots in target[1].state.values()}
    assert {torch.Tensor} == kinds
    assert_same(snapshot(*model), snapshot(*target))
    for one in (model, target):
        push(*one, 1)
    assert_same(snapshot(*model), snapshot(*target))


def s14_blocks(kit: Any, registered: bool) -> list[str]:
    """Sharded round trip: bit-equal. Full form: an error that names parameter, key and hook; nothing changes."""
    if registered:
        hs.register_state_layout(ODD["blocks"], {"codes": "opaque_local", "absmax": "opaque_local"})
    model, target = odd_model("blocks", 0, kit), odd_model("blocks", 1, kit)
    push(*model, 0)
    # Codes of a vector have the shard's own shape: without a rule, a fresh optimizer must be told its form.
    carry(model, target, "sharded", **({} if registered else {"state_form": "local"}))
    assert_same(snapshot(*model), snapshot(*target))
    assert torch.uint8 == target[1].state[target[0].w]["codes"].dtype
    before = snapshot(*model)
    errors = []
    for chosen in ({"full_state_dict": True}, ROOT):
        try:
            hs.get_optim_state_dict(*model, options=hs.StateDictOptions(**chosen))
        except RuntimeError as error:
            errors.append(f"{type(error).__name__}: {error}")
    assert_same(before, snapshot(*model))
    return errors


# -- S15, S06, S40 -------------------------------------------------------------------------------------


def s15_precision(kit: Any, form: str) -> None:
    def build(seed: int) -> tuple[nn.Module, Any]:
        model = sharded(Parts({"w": noise("w", (5, 3), seed).bfloat16()}), kit)
        return model, torch.optim.Adam(model.parameters())

    model, target = build(0), build(1)
    push(*model, 0)
    slots = model[1].state[model[0].w]
    slots["exp_avg"] = slots["exp_avg"].float() + 2**-20
    slots["seen"] = slots["exp_avg"] > 0
    carry(model, target, form)
    assert_same(snapshot(*model), snapshot(*target))
    assert torch.float32 == target[1].state[target[0].w]["exp_avg"].dtype


def s06_missing(kit: Any, form: str, strict: bool) -> str:
    get, put = FORMS[form]
    model, target = (fsdp(Net(seed), mesh_of((kit.world,), ("dp",))) for seed in (0, 1))
    optimizer, fresh = (torch.optim.Adam(m.parameters(), lr=lr) for m, lr in ((model, 0.1), (target, 0.5)))
    train(model, optimizer, 2)
    train(target, fresh, 1)
    state = cloned(hs.get_optim_state_dict(model, optimizer, options=hs.StateDictOptions(**get)))
    if form == "flat":
        state = {key: value for key, value in state.items() if ".first.weight." not in key}
    elif state:
        state["state"].pop("first.weight")
        state["param_groups"][0]["params"].remove("first.weight")
    before = snapshot(target, fresh)
    options = hs.StateDictOptions(**put, strict=strict)
    try:
        report = hs.set_optim_state_dict(target, fresh, state, options=options)
    except RuntimeError as error:
        assert_same(before, snapshot(target, fresh))
        return str(error)
    assert ["first.weight"] == report.missing_keys
    after, wanted = snapshot(target, fresh), snapshot(model, optimizer)
    assert before["state first.weight"] == after["state first.weight"]
    assert wanted["state first.bias"] == after["state first.bias"]
    return ""


def s40_plain_checkpoint(kit: Any) -> None:
    """Integer keys of a one-process optimizer into a sharded run, and the full dict back into a plain one."""
    alone, model, last = Net(0), fsdp(Net(1), mesh_of((kit.world,), ("dp",))), Net(2)
    optimizers = [torch.optim.Adam(m.parameters(), lr=lr) for m, lr in ((alone, 0.1), (model, 0.5), (last, 0.7))]
    train(alone, optimizers[0], 2)
    full = hs.StateDictOptions(full_state_dict=True)
    hs.set_optim_state_dict(model, optimizers[1], cloned(optimizers[0].state_dict()), options=full)
    hs.set_model_state_dict(model, cloned(alone.state_dict()), options=full)
    assert frozen_copy(full_state(alone, optimizers[0])) == frozen_copy(full_state(model, optimizers[1]))
    weights, state = hs.get_state_dict(model, optimizers[1], options=full)
    hs.set_state_dict(last, optimizers[2], model_state_dict=weights, optim_state_dict=state)
    assert_same(snapshot(alone, optimizers[0]), snapshot(last, optimizers[2]))


# -- S29, S44: memory and messages ---------------------------------------------------------------------


def _peak_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")


def s29_memory(kit: Any, broadcast: bool) -> float:
    """Growth of this rank's peak memory during one load, in parameters' sizes (48 MiB)."""
    os.environ["HYPERSTATE_BUCKET_MIB"] = "24"
    mesh = mesh_of((kit.world,), ("dp",))
    rows = 48 * 2**20 // (1024 * 4)
    names = [f"p{i}" for i in range(12)]
    model = Parts({n: distribute_tensor(torch.zeros(rows, 1024), mesh, [Shard(0)], src_data_rank=None) for n in names})
    given = {n: torch.full((rows, 1024), float(i)) for i, n in enumerate(names)}
    chosen = BROADCAST if broadcast else {"full_state_dict": True}
    passed = given if kit.rank == 0 or not broadcast else {}
    hs.set_model_state_dict(model, passed, options=hs.StateDictOptions(**chosen))  # loads code and opens connections
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_mib()
    hs.set_model_state_dict(model, passed, options=hs.StateDictOptions(**chosen))
    grown = (_peak_mib() - before) / 48
    assert [float(i) for i in range(12)] == [p.to_local().mean().item() for p in model.parameters()]
    del os.environ["HYPERSTATE_BUCKET_MIB"]
    return grown


def s44_messages(kit: Any, tensors: int) -> dict[str, dict[str, int]]:
    """Traffic of this rank for many small parameters with Adam."""
    mesh = mesh_of((kit.world,), ("dp",))
    zero = torch.zeros(8, 4)
    model = Parts({f"p{i}": distribute_tensor(zero, mesh, [Shard(0)], src_data_rank=None) for i in range(tensors)})
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    kit.traffic(reset=True)
    state = hs.get_optim_state_dict(model, optimizer, options=hs.StateDictOptions(**ROOT))
    got = dict(kit.traffic(reset=True))
    hs.set_optim_state_dict(model, optimizer, state, options=hs.StateDictOptions(**BROADCAST))
    return {"get": got, "set": dict(kit.traffic(reset=True))}
