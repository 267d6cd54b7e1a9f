"""Names, wrappers, hooks, dtypes and ties, with no process group at all."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch_nets import Mlp, Net, Parts, Renaming, Tied, assert_same, cloned, frozen_copy, noise, snapshot, train

import hyperstate as hs

FULL = hs.StateDictOptions(full_state_dict=True)
NAMES = ["up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight", "down.bias"]


def moved(source: Any, target: Any, **options: Any) -> Any:
    chosen = hs.StateDictOptions(**options)
    return hs.set_model_state_dict(target, cloned(hs.get_model_state_dict(source, options=chosen)), options=chosen)


# -- wrappers ------------------------------------------------------------------------------------------


def compiled(net: Mlp) -> nn.Module:
    return torch.compile(net, backend="eager")


def compiled_inside(net: Mlp) -> nn.Module:
    net.up = torch.compile(net.up, backend="eager")
    return net


def checkpointed_inside(net: Mlp) -> nn.Module:
    net.down = checkpoint_wrapper(net.down)
    return net


def wrapped_twice(net: Mlp) -> nn.Module:
    return torch.compile(checkpoint_wrapper(checkpointed_inside(net)), backend="eager")


WRAPPERS = [compiled, compiled_inside, checkpointed_inside, checkpoint_wrapper, wrapped_twice]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrappers_leave_no_trace_in_names(wrap: Any) -> None:
    model = wrap(Mlp())
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1, width=6)
    plain = Mlp(1)
    fresh = torch.optim.Adam(plain.parameters())
    weights, state = cloned(hs.get_model_state_dict(model)), cloned(hs.get_optim_state_dict(model, optimizer))
    assert (sorted(NAMES), sorted(NAMES)) == (sorted(weights), sorted(state["state"]))
    hs.set_state_dict(plain, fresh, model_state_dict=weights, optim_state_dict=state)
    again = wrap(Mlp(2))
    last = torch.optim.Adam(again.parameters())
    hs.set_state_dict(again, last, model_state_dict=weights, optim_state_dict=state)
    for one in ((model, optimizer), (plain, fresh), (again, last)):
        train(*one, 1, first=1, width=6)
    expected = list(map(frozen_copy, plain.parameters()))
    assert expected == list(map(frozen_copy, model.parameters()))
    assert expected == list(map(frozen_copy, again.parameters()))


def test_a_users_own_submodules_may_be_called_as_wrappers_call_theirs() -> None:
    class Odd(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.module = nn.Linear(2, 2)
            self._orig_mod = nn.Linear(2, 2)
            self._checkpoint_wrapped_module = nn.Sequential(OrderedDict(module=nn.Linear(2, 2)))

    model, target = Odd(0), Odd(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for name, _ in model.named_parameters()]
    assert names == list(hs.get_model_state_dict(model))
    assert names == hs.get_optim_state_dict(model, optimizer)["param_groups"][0]["params"]
    moved(model, target)
    assert_same(snapshot(model), snapshot(target))


def test_fsdp1_is_refused_with_the_name_of_its_successor() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapped)
    model = nn.Sequential(wrapped)
    for call in (
        lambda: hs.get_model_state_dict(model),
        lambda: hs.set_model_state_dict(model, {"x": torch.zeros(1)}),
        lambda: hs.get_optim_state_dict(model, torch.optim.SGD(Net().parameters())),
    ):
        with pytest.raises(hs.UnsupportedConfigurationError, match="fully_shard"):
            call()


# -- ties, frozen parameters, parametrizations, extra state, buffers -----------------------------------


def test_tied_weights_are_listed_under_both_names_and_have_state_under_the_first() -> None:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    assert ["embed.weight", "head.weight"] == list(hs.get_model_state_dict(model))
    assert ["embed.weight"] == list(hs.get_optim_state_dict(model, optimizer)["state"])


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("options", [hs.StateDictOptions(), FULL], ids=["sharded", "full"])
def test_e43_one_name_of_a_tied_set_is_enough(name: str, options: Any) -> None:
    model, target = Tied(), Tied(1)
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(target.parameters(), lr=0.5)
    train(model, optimizer, 2)
    state = cloned(hs.get_optim_state_dict(model, optimizer, options=options))
    renamed = {
        "state": {name: state["state"]["embed.weight"]},
        "param_groups": [{**state["param_groups"][0], "params": [name]}],
    }
    report = hs.set_state_dict(
        target,
        fresh,
        model_state_dict={name: model.embed.weight.detach().clone()},
        optim_state_dict=renamed,
        options=options,
    )
    assert ([], []) == (report.missing_keys, report.unexpected_keys)
    assert target.head.weight is target.embed.weight
    for one in ((model, optimizer), (target, fresh)):
        train(*one, 1, first=2)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


def test_parametrized_weights_keep_their_original_tensors() -> None:
    def build(seed: int) -> Net:
        net = Net(seed)
        nn.utils.parametrizations.weight_norm(net.first)
        nn.utils.parametrizations.spectral_norm(net.second)
        return net

    model, target = build(0), build(1)
    optimizer, fresh = torch.optim.Adam(model.parameters()), torch.optim.Adam(target.parameters())
    train(model, optimizer, 2)
    weights, state = hs.get_state_dict(model, optimizer)
    assert sorted(model.state_dict()) == sorted(weights)
    assert "first.parametrizations.weight.original0" in state["state"]
    hs.set_state_dict(target, fresh, model_state_dict=cloned(weights), optim_state_dict=cloned(state))
    for one in ((model, optimizer), (target, fresh)):
        train(*one, 1, first=2)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


class WithExtra(nn.Linear):
    note: Any = None

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


@pytest.mark.parametrize(
    "note", [None, {"a": (1, [2.5], True)}, torch.arange(3), torch.tensor(2.0), {"t": torch.ones(2)}, b"x", {1, 2}]
)
@pytest.mark.parametrize("full", [False, True])
def test_e47_extra_state_comes_back_as_it_was(note: Any, full: bool) -> None:
    model, target = nn.Sequential(WithExtra(2, 2)), nn.Sequential(WithExtra(2, 2))
    model[0].note, target[0].note = note, "old"
    moved(model, target, full_state_dict=full)
    assert frozen_copy(note) == frozen_copy(target[0].note)


def test_s24_buffers_of_all_kinds_arrive_and_those_not_persistent_are_untouched() -> None:
    def build(fill: int) -> nn.Module:
        net = nn.Linear(2, 2)
        net.register_buffer("ids", torch.full((3,), fill, dtype=torch.int64))
        net.register_buffer("flags", torch.full((2, 2), bool(fill)))
        net.register_buffer("count", torch.tensor(fill))
        net.register_buffer("on", torch.tensor(bool(fill)))
        net.register_buffer("scratch", torch.full((2,), float(fill)), persistent=False)
        return net

    model, target = build(1), build(0)
    for options in ({}, {"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}):
        target = build(0)
        moved(model, target, **options)
        expected = snapshot(model) | {"buffer scratch": frozen_copy(torch.zeros(2))}
        assert_same(expected, snapshot(target))


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float16", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "int8", "uint8",
     "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"],
)  # fmt: skip
@pytest.mark.parametrize("full", [False, True])
def test_tensors_of_every_dtype_keep_their_bits(dtype: str, full: bool) -> None:
    def build(seed: int) -> nn.Module:
        net = nn.Module()
        torch.manual_seed(seed)
        bits = torch.randint(0, 2 if dtype == "bool" else 60, (3, 5), dtype=torch.uint8)
        net.register_buffer("x", bits.to(getattr(torch, dtype)))
        net.register_buffer("single", bits[0, 0].to(getattr(torch, dtype)))
        return net

    model, target = build(0), build(1)
    memory = target.x.data_ptr()
    moved(model, target, full_state_dict=full)
    assert_same(snapshot(model), snapshot(target))
    assert memory == target.x.data_ptr()


def test_the_targets_dtype_wins_and_lost_meaning_is_an_error() -> None:
    model = nn.Linear(2, 2).bfloat16()
    hs.set_model_state_dict(model, {"weight": torch.full((2, 2), 1.5, dtype=torch.float64), "bias": torch.ones(2)})
    assert (torch.bfloat16, [1.5] * 4) == (model.weight.dtype, model.weight.flatten().tolist())
    counts = nn.Module()
    counts.register_buffer("n", torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="'n'"):
        hs.set_model_state_dict(counts, {"n": torch.tensor([1.5, 2.5])})
    assert [1, 2] == counts.n.tolist()


def test_parameters_keep_their_identity_attributes_and_hooks() -> None:
    model = Net()
    param = model.first.weight
    param.tag = "mine"
    seen: list[int] = []
    param.register_hook(lambda grad: seen.append(1))
    moved(Net(1), model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    assert (True, "mine", [1], True) == (model.first.weight is param, param.tag, seen, param.requires_grad)


def test_full_and_host_forms_are_snapshots() -> None:
    for options in (FULL, hs.StateDictOptions(cpu_offload=True)):
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, 1)
        taken = hs.get_state_dict(model, optimizer, options=options)
        before = frozen_copy(taken)
        train(model, optimizer, 1)
        assert before == frozen_copy(taken)


def test_the_sharded_form_shares_memory_without_gradient() -> None:
    model = Net()
    values = hs.get_model_state_dict(model)
    assert {False} == {value.requires_grad for value in values.values()}
    values["first.weight"].zero_()
    assert 0 == model.first.weight.abs().sum().item()
    assert list(model.state_dict()) == list(values)
    pointers = [value.data_ptr() for value in model.state_dict().values()]
    assert pointers == [value.data_ptr() for value in values.values()]


# -- S23: modules that save and load in their own way --------------------------------------------------


class Fused(nn.Module):
    """Saves its one parameter as two entries."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gate_up = nn.Parameter(torch.randn(6, 5))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "gate"], destination[prefix + "up"] = self.gate_up.detach().chunk(2)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        with torch.no_grad():
            self.gate_up.copy_(torch.cat([state[prefix + "gate"], state[prefix + "up"]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.gate_up.T


@pytest.mark.parametrize(("kind", "keys"), [(Renaming, ["weight", "bias"]), (Fused, ["gate", "up"])])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}, {"cpu_offload": True}], ids=str)
def test_s23_names_are_those_that_state_dict_gives(kind: Any, keys: list[str], inside: bool, options: Any) -> None:
    def build(seed: int) -> tuple[nn.Module, Any]:
        net = nn.Sequential(nn.Linear(5, 5), kind(seed)) if inside else kind(seed)
        return net, torch.optim.Adam(net.parameters())

    (model, optimizer), (target, fresh) = build(0), build(1)
    train(model, optimizer, 1)
    chosen = hs.StateDictOptions(**options)
    weights, state = hs.get_state_dict(model, optimizer, options=chosen)
    assert list(model.state_dict()) == list(weights)
    assert [(f"1.{key}" if inside else key) for key in keys] == list(weights)[-2:]
    assert [name for name, _ in model.named_parameters()] == state["param_groups"][0]["params"]
    hs.set_state_dict(target, fresh, model_state_dict=cloned(weights), optim_state_dict=cloned(state), options=chosen)
    for one in ((model, optimizer), (target, fresh)):
        train(*one, 1, first=1)
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


def test_several_modules_are_one_model_and_clashing_names_are_an_error() -> None:
    first, second = Parts({"a": noise("a", (2,), 0)}), Parts({"b": noise("b", (3,), 0)})
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    weights, state = hs.get_state_dict([first, second], optimizer)
    assert (["a", "b"], ["a", "b"]) == (list(weights), state["param_groups"][0]["params"])
    with pytest.raises(hs.IncompatibleStateError, match="'a'"):
        hs.get_model_state_dict([first, Parts({"a": noise("a", (2,), 0)})])


def test_submodules_select_by_prefix() -> None:
    model = Net()
    chosen = hs.get_model_state_dict(model, submodules={model.first})
    assert ["first.weight", "first.bias"] == list(chosen)
    bare = hs.get_model_state_dict(
        model, submodules={model.first}, options=hs.StateDictOptions(keep_submodule_prefixes=False)
    )
    assert ["weight", "bias"] == list(bare)


def test_lazy_sparse_and_quantised_tensors_are_refused_by_name() -> None:
    sparse = nn.Module()
    sparse.register_buffer("s", torch.eye(3).to_sparse())
    for model, name in ((sparse, "'s'"), (nn.Sequential(nn.LazyLinear(2)), "'0.weight'")):
        with pytest.raises(hs.UnsupportedConfigurationError, match=name):
            hs.get_model_state_dict(model)
