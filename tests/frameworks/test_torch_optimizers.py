"""Every class of `torch.optim`, old checkpoints, hooks and odd state, with no process group at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch_forms import FORMS, moved
from torch_nets import Net, assert_same, cloned, frozen_copy, push, snapshot, train
from torch_optimizers import APART, CONFIGS, make, model_for

import hyperstate as hs


def test_every_optimizer_class_is_covered() -> None:
    kinds = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
    kinds = {name for name in kinds if issubclass(getattr(torch.optim, name), torch.optim.Optimizer)}
    assert kinds - {"Optimizer"} == {kind for kind, _ in CONFIGS.values()} | APART


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("form", FORMS)
def test_training_goes_on_as_if_it_had_not_been_interrupted(name: str, form: str) -> None:
    model, target = model_for(name, 0), model_for(name, 1)
    optimizer, fresh = make(name, model), make(name, target, lr=0.7)
    push(model, optimizer, 0)
    push(model, optimizer, 1)
    moved((model, optimizer), (target, fresh), form)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))
    for one in ((model, optimizer), (target, fresh)):
        push(*one, 2)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


@pytest.mark.parametrize("name", CONFIGS)
def test_e37_a_stepped_optimizer_keeps_its_containers_and_tensors(name: str) -> None:
    model, target = model_for(name, 0), model_for(name, 1)
    optimizer, stepped = make(name, model), make(name, target)
    for seed in range(2):
        push(model, optimizer, seed)
    push(target, stepped, 5)
    objects = [stepped.state, stepped.param_groups, *stepped.param_groups, *stepped.state.values()]
    objects += [v for slots in stepped.state.values() for _, v in sorted(slots.items()) if isinstance(v, torch.Tensor)]
    moved((model, optimizer), (target, stepped))
    after = [stepped.state, stepped.param_groups, *stepped.param_groups, *stepped.state.values()]
    after += [v for slots in stepped.state.values() for _, v in sorted(slots.items()) if isinstance(v, torch.Tensor)]
    assert list(map(id, objects)) == list(map(id, after))
    assert_same(snapshot(model, optimizer), snapshot(target, stepped))


@pytest.mark.parametrize("form", FORMS)
def test_e12_no_key_of_the_old_state_is_left(form: str) -> None:
    model, target = Net(), Net(1)
    optimizer = torch.optim.Adam(model.parameters())
    stepped = torch.optim.Adam(target.parameters(), amsgrad=True)
    train(model, optimizer, 2)
    train(target, stepped, 1)
    slots = stepped.state[target.first.bias]
    moved((model, optimizer), (target, stepped), form)
    assert slots is stepped.state[target.first.bias]
    assert {"step", "exp_avg", "exp_avg_sq"} == set(slots)


@pytest.mark.parametrize("form", FORMS)
def test_sparse_adam_keeps_its_integer_counter(form: str) -> None:
    def build(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        net = nn.Embedding(6, 3, sparse=True)
        return net, torch.optim.SparseAdam(net.parameters(), lr=0.1)

    def step(net: nn.Module, optimizer: Any, seed: int) -> None:
        net(torch.tensor([seed, 2])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    (model, optimizer), (target, fresh) = build(0), build(1)
    step(model, optimizer, 0)
    moved((model, optimizer), (target, fresh), form)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))
    assert int is type(fresh.state[target.weight]["step"])
    for one in ((model, optimizer), (target, fresh)):
        step(*one, 1)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


# -- old checkpoints, fields ---------------------------------------------------------------------------

COUNTERS = [
    "adam",
    "adam_fused",
    "adadelta",
    "adafactor",
    "adagrad",
    "adamax",
    "asgd",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
]


@pytest.mark.parametrize("name", COUNTERS)
@pytest.mark.parametrize("stepped", [False, True])
def test_counters_saved_as_numbers_become_what_the_class_wants(name: str, stepped: bool) -> None:
    model, target = model_for(name, 0), model_for(name, 1)
    optimizer, fresh = make(name, model), make(name, target)
    for seed in range(2):
        push(model, optimizer, seed)
    if stepped:
        push(target, fresh, 9)
    saved = cloned(hs.get_optim_state_dict(model, optimizer))
    for slots in saved["state"].values():
        for key in {"step", "eta", "mu", "mu_product"} & set(slots):
            slots[key] = int(slots[key]) if key == "step" else float(slots[key])
    hs.set_optim_state_dict(target, fresh, saved)
    hs.set_model_state_dict(target, cloned(hs.get_model_state_dict(model)))
    assert all(isinstance(slots["step"], torch.Tensor) for slots in fresh.state.values())
    for one in ((model, optimizer), (target, fresh)):
        push(*one, 2)
    torch.testing.assert_close(dict(model.named_parameters()), dict(target.named_parameters()))


def test_fields_that_an_old_checkpoint_lacks_keep_the_targets_values() -> None:
    model, target = Net(), Net(1)
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(target.parameters(), amsgrad=True)
    train(model, optimizer, 1)
    saved = cloned(hs.get_optim_state_dict(model, optimizer))
    group = saved["param_groups"][0]
    for field in ("amsgrad", "maximize", "foreach", "capturable", "fused", "decoupled_weight_decay"):
        del group[field]
    group["initial_lr"] = 0.25
    hs.set_optim_state_dict(target, fresh, saved)
    found = fresh.param_groups[0]
    assert (True, False, 0.25) == (found["amsgrad"], found["decoupled_weight_decay"], found["initial_lr"])


def test_e15_fields_that_choose_an_implementation_stay_the_targets() -> None:
    model, target = Net(), Net(1)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    fresh = torch.optim.Adam(target.parameters(), fused=True, maximize=True)
    train(model, optimizer, 1)
    moved((model, optimizer), (target, fresh))
    found = fresh.param_groups[0]
    assert (True, None, False) == (found["fused"], found["foreach"], found["maximize"])
    optimizer.param_groups[0].update(capturable=True, differentiable=True)
    moved((model, optimizer), (target, fresh))
    assert (False, False) == (found["capturable"], found["differentiable"])


def test_e35_tensor_learning_rates_keep_type_and_identity() -> None:
    model, target = Net(), Net(1)
    lr = torch.tensor(0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    fresh = torch.optim.Adam(target.parameters(), lr=lr, foreach=False)
    plain = torch.optim.Adam(target.parameters(), lr=0.5)
    train(model, optimizer, 1)
    saved = cloned(hs.get_optim_state_dict(model, optimizer))
    hs.set_optim_state_dict(target, fresh, saved)
    assert fresh.param_groups[0]["lr"] is lr and lr.item() == pytest.approx(0.1)
    hs.set_optim_state_dict(target, plain, saved)
    assert float is type(plain.param_groups[0]["lr"])
    plain.param_groups[0]["lr"] = 0.25
    hs.set_optim_state_dict(target, fresh, cloned(hs.get_optim_state_dict(target, plain)))
    assert fresh.param_groups[0]["lr"] is lr and lr.item() == 0.25
    assert saved["param_groups"][0]["lr"] is not lr


def test_named_parameters_keep_the_targets_names() -> None:
    model, target = Net(), Net(1)
    optimizer = torch.optim.Adam([(f"old.{name}", p) for name, p in model.named_parameters()])
    fresh = torch.optim.Adam([(f"new.{name}", p) for name, p in target.named_parameters()])
    train(model, optimizer, 1)
    moved((model, optimizer), (target, fresh))
    assert [f"new.{name}" for name, _ in target.named_parameters()] == fresh.param_groups[0]["param_names"]


@pytest.mark.parametrize("name", ["adam_tensor_lr", "adam_amsgrad"])
def test_a_learning_rate_scheduler_goes_on(name: str) -> None:
    model, target = model_for(name, 0), model_for(name, 1)
    optimizer, fresh = make(name, model), make(name, target)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, fresh)]
    push(model, optimizer, 0)
    schedules[0].step()
    moved((model, optimizer), (target, fresh))
    schedules[1].load_state_dict(copy.deepcopy(schedules[0].state_dict()))
    for one, schedule in zip(((model, optimizer), (target, fresh)), schedules, strict=True):
        push(*one, 1)
        schedule.step()
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


# -- hooks, overrides, wrappers ------------------------------------------------------------------------


def test_e56_state_dict_hooks_run_once_per_call() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda one: calls.append("pre save"))
    optimizer.register_state_dict_post_hook(lambda one, state: calls.append("post save"))
    optimizer.register_load_state_dict_pre_hook(lambda one, state: calls.append("pre load"))
    optimizer.register_load_state_dict_post_hook(lambda one: calls.append("post load"))
    saved = cloned(hs.get_optim_state_dict(model, optimizer))
    assert ["pre save", "post save"] == calls
    calls.clear()
    hs.set_optim_state_dict(model, optimizer, saved)
    assert [1, 1] == [calls.count("pre load"), calls.count("post load")]


def test_a_hook_may_change_what_is_saved_and_what_is_loaded() -> None:
    model, target = Net(), Net(1)
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(target.parameters())
    train(model, optimizer, 1)

    def halve(one: Any, state: Any) -> Any:
        return {**state, "param_groups": [{**g, "lr": g["lr"] / 2} for g in state["param_groups"]]}

    optimizer.register_state_dict_post_hook(halve)
    fresh.register_load_state_dict_pre_hook(halve)
    moved((model, optimizer), (target, fresh))
    assert (0.001, 0.00025) == (optimizer.param_groups[0]["lr"], fresh.param_groups[0]["lr"])
    assert frozen_copy(optimizer.state[model.first.bias]) == frozen_copy(fresh.state[target.first.bias])


def test_an_optimizer_that_saves_and_loads_in_its_own_way_does_so() -> None:
    class Packed(torch.optim.Adam):
        """Keeps its moments halved in what it saves, and counts its loads."""

        loads = 0

        def state_dict(self) -> Any:
            saved = super().state_dict()
            state = {n: {**s, "exp_avg": s["exp_avg"] / 2} for n, s in saved["state"].items()}
            return {**saved, "state": state}

        def load_state_dict(self, saved: Any) -> None:
            self.loads += 1
            state = {n: {**s, "exp_avg": s["exp_avg"] * 2} for n, s in saved["state"].items()}
            super().load_state_dict({**saved, "state": state})

    model, target = Net(), Net(1)
    optimizer, fresh = Packed(model.parameters()), Packed(target.parameters(), lr=0.5)
    train(model, optimizer, 1)
    containers = [id(fresh.state), id(fresh.param_groups), id(fresh.param_groups[0])]
    saved = hs.get_optim_state_dict(model, optimizer)["state"]["first.bias"]["exp_avg"]
    assert torch.equal(optimizer.state[model.first.bias]["exp_avg"] / 2, saved)
    moved((model, optimizer), (target, fresh))
    assert 1 == fresh.loads
    assert containers == [id(fresh.state), id(fresh.param_groups), id(fresh.param_groups[0])]
    for one in ((model, optimizer), (target, fresh)):
        train(*one, 1, first=1)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


def test_state_of_frozen_parameters_stays_when_models_leave_them_out() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    model.first.weight.requires_grad_(False)
    weights, state = hs.get_state_dict(model, optimizer, options=hs.StateDictOptions(ignore_frozen_params=True))
    assert "first.weight" not in weights and "first.weight" in state["state"]


def test_group_fields_may_be_any_object() -> None:
    model, target = Net(), Net(1)
    optimizer, fresh = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(target.parameters(), lr=0.1)
    optimizer.param_groups[0].update(kind=torch.bfloat16, names={"a", "b"}, at=torch.arange(3))
    for form in FORMS:
        moved((model, optimizer), (target, fresh), form)
        found = fresh.param_groups[0]
        assert (torch.bfloat16, {"a", "b"}, [0, 1, 2]) == (found["kind"], found["names"], found["at"].tolist())


def test_an_optimizer_inside_a_wrapper_is_found() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

    model, target = Net(), Net(1)
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(target.parameters())
    train(model, optimizer, 1)
    moved((model, Wrapper(optimizer)), (target, Wrapper(fresh)))
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


def test_a_chained_optimizer_is_refused_everywhere() -> None:
    class ChainedOptimizer:
        def __init__(self, parts: list[Any]) -> None:
            self.chained_optimizers = parts
            self.param_groups = [group for part in parts for group in part.param_groups]
            self.state: dict[Any, Any] = {}

    model = Net()
    chained = ChainedOptimizer([torch.optim.SGD(model.parameters())])
    for call in (
        lambda: hs.get_optim_state_dict(model, chained),
        lambda: hs.set_optim_state_dict(model, chained, {"state": {}, "param_groups": []}),
    ):
        with pytest.raises(hs.UnsupportedConfigurationError, match=r"state_dict\(\)"):
            call()


def test_values_of_every_kind_keep_their_type() -> None:
    odd = {
        "tuple": (1, 2.5, "x"), "list": [None, True, 1], "dict": {1: {"a": (torch.ones(2),)}, "b": {}}, "empty": [],
        "true": True, "one": 1, "none": None, "text": "t", "zero_d": torch.tensor(3), "single": torch.tensor([3.0]),
        "nan": float("nan"), 7: "integer key",
    }  # fmt: skip
    for form in FORMS:
        model, target = Net(), Net(1)
        optimizer, fresh = torch.optim.SGD(model.parameters()), torch.optim.SGD(target.parameters())
        # An integer key has no flat form: the flat key would be a string.
        kept = {key: value for key, value in odd.items() if isinstance(key, str) or "flat" not in form}
        optimizer.state[model.first.weight] = copy.deepcopy(kept)
        moved((model, optimizer), (target, fresh), form)
        found = fresh.state[target.first.weight]
        assert str(float("nan")) == str(found.pop("nan"))
        assert frozen_copy({k: v for k, v in kept.items() if k != "nan"}) == frozen_copy(found)
