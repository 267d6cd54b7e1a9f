"""Scenarios from the field on plain models, with no process group at all. Each test names the scenario's id."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch_nets import Net, Parts, assert_same, cloned, frozen_copy, inputs, noise, push, snapshot, train

import hyperstate as hs

FLAT = hs.StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = hs.StateDictOptions()
BOTH = pytest.mark.parametrize("options", [NESTED, FLAT], ids=["nested", "flat"])


def adam(model: nn.Module, lr: float = 0.1, **fields: Any) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=lr, **fields)


def carried(model: Any, optimizer: Any, options: Any = NESTED) -> dict[str, Any]:
    return cloned(hs.get_optim_state_dict(model, optimizer, options=options))


# -- S01 to S05: no hidden step ------------------------------------------------------------------------


@BOTH
def test_s01_reading_a_fresh_optimizer_does_not_change_training(options: Any) -> None:
    read, untouched = Net(), Net()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (read, untouched)]
    hs.get_optim_state_dict(read, optimizers[0], options=options)
    assert {} == dict(optimizers[0].state)
    train(read, optimizers[0], 1)
    train(untouched, optimizers[1], 1)
    assert_same(snapshot(untouched, optimizers[1]), snapshot(read, optimizers[0]))


@BOTH
def test_s01_loading_a_dict_without_state_leaves_the_optimizer_fresh(options: Any) -> None:
    model, target = Net(), Net()
    saved = carried(model, adam(model), options)
    optimizer = adam(target, lr=0.5)
    hs.set_optim_state_dict(target, optimizer, saved, options=options)
    assert ({}, 0.1) == (dict(optimizer.state), optimizer.param_groups[0]["lr"])


class Decaying(torch.optim.Optimizer):
    """Decays weights whatever the gradient and the learning rate."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.5)
                    self.state[p]["seen"] = self.state[p].get("seen", 0) + 1


class Moody(Decaying):
    """Refuses to step outside its train mode."""

    training = False

    def step(self, closure: Any = None) -> None:
        if not self.training:
            raise RuntimeError("call optimizer.train() first")
        super().step(closure)


@pytest.mark.parametrize("kind", [Decaying, Moody])
@BOTH
def test_s02_no_step_is_taken_and_weights_do_not_move(kind: Any, options: Any) -> None:
    model = Net()
    optimizer = kind(model.parameters())
    before = snapshot(model, optimizer)
    hs.get_optim_state_dict(model, optimizer, options=options)
    assert_same(before, snapshot(model, optimizer))
    optimizer.training = True
    optimizer.step()
    target = Net(1)
    fresh = kind(target.parameters())
    weights = snapshot(target)
    hs.set_optim_state_dict(target, fresh, carried(model, optimizer, options), options=options)
    assert_same(weights, snapshot(target))
    assert [1] * 6 == [slots["seen"] for slots in fresh.state.values()]


def lbfgs_step(model: nn.Module, optimizer: torch.optim.LBFGS, seed: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs(seed, 5)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


@BOTH
def test_s02_lbfgs_that_needs_a_closure_round_trips(options: Any) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    hs.get_optim_state_dict(model, optimizer, options=options)
    assert {} == dict(optimizer.state)
    lbfgs_step(model, optimizer, 0)
    target = Net(1)
    fresh = torch.optim.LBFGS(target.parameters(), lr=0.5, max_iter=3)
    hs.set_state_dict(
        target,
        fresh,
        model_state_dict=cloned(hs.get_model_state_dict(model)),
        optim_state_dict=carried(model, optimizer, options),
        options=options,
    )
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))
    lbfgs_step(model, optimizer, 1)
    lbfgs_step(target, fresh, 1)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


@BOTH
def test_s03_pending_gradients_are_kept_and_all_state_arrives(options: Any) -> None:
    source = Net()
    trained = adam(source)
    train(source, trained, 2)
    model = Net(1)
    optimizer = adam(model, lr=0.5)
    model(inputs(7, 5)).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert {} == dict(hs.get_optim_state_dict(model, optimizer)["state"])
    hs.set_optim_state_dict(model, optimizer, carried(source, trained, options), options=options)
    hs.set_model_state_dict(model, cloned(hs.get_model_state_dict(source)))
    assert_same(snapshot(source, trained), snapshot(model, optimizer))
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))


@BOTH
def test_s04_state_of_a_parameter_frozen_after_training_is_kept(options: Any) -> None:
    model, target = Net(), Net(1)
    optimizer, fresh = adam(model), adam(target, lr=0.5)
    train(model, optimizer, 2)
    for one in (model, target):
        one.first.weight.requires_grad_(False)
    saved = carried(model, optimizer, options)
    hs.set_state_dict(
        target, fresh, model_state_dict=cloned(hs.get_model_state_dict(model)), optim_state_dict=saved, options=options
    )
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))
    for one in (model, target):
        one.first.weight.requires_grad_(True)
    train(model, optimizer, 1, first=2)
    train(target, fresh, 1, first=2)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


@BOTH
@pytest.mark.parametrize("strict", [True, False])
def test_s05_a_parameter_without_gradient_stays_without_state(options: Any, strict: bool) -> None:
    class WithUnused(Net):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            self.unused = nn.Linear(2, 2)

    model, target = WithUnused(0), WithUnused(1)
    optimizer, fresh = adam(model), adam(target)
    train(model, optimizer, 2)
    saved = carried(model, optimizer, options)
    chosen = hs.StateDictOptions(strict=strict, flatten_optimizer_state_dict=options.flatten_optimizer_state_dict)
    assert ([], [], []) == tuple(hs.set_optim_state_dict(target, fresh, saved, options=chosen))
    assert target.unused.weight not in fresh.state and target.unused.bias not in fresh.state
    hs.set_model_state_dict(target, cloned(hs.get_model_state_dict(model)))
    train(model, optimizer, 1, first=2)
    train(target, fresh, 1, first=2)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


# -- S06, S07: strictness, no state --------------------------------------------------------------------


def without(saved: dict[str, Any], fqn: str) -> dict[str, Any]:
    """The dict as if its source had never heard of `fqn`."""
    if "state" not in saved:
        return {key: value for key, value in saved.items() if not key.split(".", 1)[1].startswith(fqn + ".")}
    groups = [{**g, "params": [name for name in g["params"] if name != fqn]} for g in saved["param_groups"]]
    return {"state": {k: v for k, v in saved["state"].items() if k != fqn}, "param_groups": groups}


@BOTH
def test_s06_strict_names_the_parameter_that_the_checkpoint_does_not_know(options: Any) -> None:
    model, target = Net(), Net(1)
    optimizer, fresh = adam(model), adam(target, lr=0.5)
    train(model, optimizer, 2)
    train(target, fresh, 1)
    before = snapshot(target, fresh)
    with pytest.raises(RuntimeError, match="'first.weight'"):
        hs.set_optim_state_dict(target, fresh, without(carried(model, optimizer, options), "first.weight"))
    assert_same(before, snapshot(target, fresh))


@BOTH
def test_s06_lenient_restores_the_others_and_keeps_this_one(options: Any) -> None:
    model, target = Net(), Net(1)
    optimizer, fresh = adam(model), adam(target, lr=0.5)
    train(model, optimizer, 2)
    train(target, fresh, 1)
    kept = frozen_copy(fresh.state[target.first.weight])
    report = hs.set_optim_state_dict(
        target,
        fresh,
        without(carried(model, optimizer, options), "first.weight"),
        options=hs.StateDictOptions(strict=False),
    )
    assert (["first.weight"], []) == (report.missing_keys, report.unexpected_keys)
    assert kept == frozen_copy(fresh.state[target.first.weight])
    assert frozen_copy(optimizer.state[model.first.bias]) == frozen_copy(fresh.state[target.first.bias])


@BOTH
def test_s06_a_parameter_named_in_a_group_had_no_state_and_is_cleared(options: Any) -> None:
    model, target = Net(), Net(1)
    optimizer, fresh = adam(model), adam(target)
    train(model, optimizer, 1)
    train(target, fresh, 1)
    del optimizer.state[model.first.weight]
    with pytest.warns(UserWarning, match="first.weight"):
        report = hs.set_optim_state_dict(target, fresh, carried(model, optimizer, options))
    assert ["first.weight"] == report.cleared
    assert target.first.weight not in fresh.state


@BOTH
def test_s07_an_optimizer_without_state_stays_without(options: Any) -> None:
    model, target = Net(), Net(1)
    optimizer, fresh = (torch.optim.SGD(m.parameters(), lr=lr) for m, lr in ((model, 0.1), (target, 0.7)))
    train(model, optimizer, 1)
    hs.set_optim_state_dict(target, fresh, carried(model, optimizer, options), options=options)
    assert ({}, 0.1) == (dict(fresh.state), fresh.param_groups[0]["lr"])
    for one in (optimizer, fresh):
        one.param_groups[0]["momentum"] = 0.9
    hs.set_model_state_dict(target, cloned(hs.get_model_state_dict(model)))
    train(model, optimizer, 2, first=1)
    train(target, fresh, 2, first=1)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


# -- S15, S20, S35, S40, S41 ---------------------------------------------------------------------------


class Mixed(torch.optim.Optimizer):
    """float32 moments, int and bool state, whatever the parameter's dtype."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            slots = self.state[p]
            if not slots:
                slots |= {"m": torch.zeros(p.shape), "n": torch.zeros(p.shape, dtype=torch.int16)}
                slots["mask"] = torch.zeros(p.shape, dtype=torch.bool)
            slots["m"].mul_(0.9).add_(p.grad.float())
            slots["n"] += 1
            slots["mask"] |= p.grad > 0
            p.sub_((self.param_groups[0]["lr"] * slots["m"]).to(p.dtype))


@BOTH
def test_s15_state_keeps_its_own_precision(options: Any) -> None:
    def build(seed: int) -> tuple[Parts, Mixed]:
        model = Parts({"a.w": noise("a", (4, 3), seed).bfloat16(), "b": noise("b", (5,), seed).bfloat16()})
        return model, Mixed(model.parameters())

    (model, optimizer), (target, fresh) = build(0), build(1)
    push(model, optimizer, 0)
    hs.set_state_dict(
        target,
        fresh,
        model_state_dict=cloned(hs.get_model_state_dict(model)),
        optim_state_dict=carried(model, optimizer, options),
        options=options,
    )
    dtypes = {key: value.dtype for key, value in fresh.state[target.b].items()}
    assert {"m": torch.float32, "n": torch.int16, "mask": torch.bool} == dtypes
    for one in ((model, optimizer), (target, fresh)):
        push(*one, 1)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


@BOTH
def test_s20_the_callers_dicts_are_neither_changed_nor_aliased(options: Any) -> None:
    model = Net()
    optimizer = adam(model)
    train(model, optimizer, 1)
    weights, state = cloned(hs.get_model_state_dict(model)), carried(model, optimizer, options)
    before = frozen_copy(weights), frozen_copy(state), list(map(id, weights.values()))
    for seed in (1, 2):
        target = Net(seed)
        fresh = adam(target)
        compiled = torch.compile(target, backend="eager")
        hs.set_state_dict(compiled, fresh, model_state_dict=weights, optim_state_dict=state, options=options)
        assert_same(snapshot(model, optimizer), snapshot(target, fresh))
        train(target, fresh, 1)
        assert before == (frozen_copy(weights), frozen_copy(state), list(map(id, weights.values())))


def adapter_net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.ModuleDict({"embed": nn.Embedding(6, 4), "adapter": nn.Linear(4, 4), "head": nn.Linear(4, 6, bias=False)})
    net["head"].weight = net["embed"].weight
    net["embed"].weight.requires_grad_(False)
    return net


@pytest.mark.parametrize("full", [False, True])
def test_s35_frozen_tied_weights_are_left_out_under_both_names(full: bool) -> None:
    model, target = adapter_net(0), adapter_net(1)
    base = frozen_copy(target["embed"].weight)
    saved = hs.get_model_state_dict(model, options=hs.StateDictOptions(ignore_frozen_params=True, full_state_dict=full))
    assert ["adapter.weight", "adapter.bias"] == list(saved)
    report = hs.set_model_state_dict(
        target, cloned(saved), options=hs.StateDictOptions(strict=False, full_state_dict=full)
    )
    assert {"embed.weight", "head.weight"} >= set(report.missing_keys) > set()
    assert base == frozen_copy(target["embed"].weight)
    assert frozen_copy(model["adapter"].weight) == frozen_copy(target["adapter"].weight)
    assert target["head"].weight is target["embed"].weight


def test_s40_integer_keys_are_matched_by_the_order_of_groups() -> None:
    model, target = Net(), Net(1)
    optimizer, fresh = adam(model), adam(target, lr=0.5)
    train(model, optimizer, 2)
    hs.set_optim_state_dict(target, fresh, optimizer.state_dict())
    hs.set_model_state_dict(target, model.state_dict())
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


def test_s40_integer_keys_that_do_not_fit_ask_for_names() -> None:
    model, target = Net(), Net(1, sizes=(5, 6, 3))
    optimizer, fresh = adam(model), adam(target)
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="get_optim_state_dict"):
        hs.set_optim_state_dict(target, fresh, optimizer.state_dict())
    halves = torch.optim.Adam([{"params": [p]} for p in target.parameters()])
    with pytest.raises(RuntimeError, match="get_optim_state_dict"):
        hs.set_optim_state_dict(target, halves, optimizer.state_dict())


@BOTH
def test_s41_state_follows_names_not_positions(options: Any) -> None:
    def build(seed: int, backwards: bool) -> tuple[Parts, torch.optim.Adam]:
        model = Parts({name: noise(name, (3, 3), seed) for name in ("a", "b", "c", "d")})
        params = list(model.parameters())
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.2, "initial_lr": 0.3}]
        if backwards:
            groups = [{"params": params[:1:-1]}, {"params": params[1::-1]}]
        return model, torch.optim.Adam(groups, lr=0.9)

    (model, optimizer), (target, fresh) = build(0, False), build(1, True)
    push(model, optimizer, 0)
    hs.set_state_dict(
        target,
        fresh,
        model_state_dict=cloned(hs.get_model_state_dict(model)),
        optim_state_dict=carried(model, optimizer, options),
        options=options,
    )
    assert [0.2, 0.1] == [group["lr"] for group in fresh.param_groups]
    assert [0.3, None] == [group.get("initial_lr") for group in fresh.param_groups]
    for one in ((model, optimizer), (target, fresh)):
        push(*one, 1)
    for name in ("a", "b", "c", "d"):
        assert frozen_copy(getattr(model, name)) == frozen_copy(getattr(target, name))
        assert frozen_copy(optimizer.state[getattr(model, name)]) == frozen_copy(fresh.state[getattr(target, name)])


def test_s43_without_an_accelerator_everything_is_on_the_host_and_nothing_warns() -> None:
    model, target = Net(), Net(1)
    optimizer, fresh = adam(model), adam(target)
    train(model, optimizer, 1)
    options = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weights, state = hs.get_state_dict(model, optimizer, options=options)
        hs.set_state_dict(target, fresh, model_state_dict=weights, optim_state_dict=state, options=options)
    assert {"cpu"} == {value.device.type for value in weights.values()}
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))
