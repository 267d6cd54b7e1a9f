"""What MindSpore's parts are called: by their place in the cell tree, and by PyTorch's names if asked. Case S45."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn
from mindspore.experimental import optim
from mindspore_optimizers import bits, net, train, weights

import hyperstate as hs
from hyperstate.errors import IncompatibleStateError, OptionError
from hyperstate.testing import Pool
from hyperstate_mindspore.names import CELLS, OPTIMIZERS, cell_name
from hyperstate_mindspore.neutral import beta_power
from hyperstate_mindspore.rules import KNOWN

BODIES = Path(__file__).with_name("bodies_mindspore_names.py")

FULL = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
NEUTRAL = hs.StateDictOptions(full_state_dict=True, cpu_offload=True, names="neutral")
SET = hs.StateDictOptions(full_state_dict=True)
SET_NEUTRAL = hs.StateDictOptions(full_state_dict=True, names="neutral")
KINDS = {
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.01, weight_decay=0.1),
    "Momentum": lambda p: nn.Momentum(p, 0.1, 0.9),
}


def _normed(seed: int) -> Any:
    np.random.seed(seed)
    ms.set_seed(seed)
    return nn.SequentialCell(nn.Dense(3, 4), nn.BatchNorm1d(4), nn.Dense(4, 2)).set_train()


class Wrapped(nn.Cell):
    """A user's cell around another."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.net = inner

    def construct(self, data: Any) -> Any:
        return self.net(data)


class Twice(nn.Cell):
    """A cell that is used in two places."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        np.random.seed(seed)
        ms.set_seed(seed)
        inner = nn.Dense(3, 3)
        self.first, self.second, self.last = inner, inner, nn.Dense(3, 2)

    def construct(self, data: Any) -> Any:
        return self.last(self.second(ms.ops.tanh(self.first(data))))


# -- S45 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [FULL, NEUTRAL], ids=["own", "neutral"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "build", [_normed, lambda seed: Wrapped(_normed(seed)), Twice], ids=["plain", "wrapped", "twice"]
)
def test_s45_resume(build: Any, kind: str, options: Any) -> None:
    source, target = build(0), build(1)
    first, second = KINDS[kind](source.trainable_params()), KINDS[kind](target.trainable_params())
    train(source, first, 3)
    model, state = hs.get_state_dict(source, first, options=options)
    setting = hs.StateDictOptions(full_state_dict=True, names=options.names)
    hs.set_state_dict(target, second, model_state_dict=model, optim_state_dict=state, options=setting)
    assert weights(source) == weights(target)
    assert train(source, first, 1, first=3) == train(target, second, 1, first=3)
    assert weights(source) == weights(target)


def test_s45_names_are_places_in_the_tree_that_the_user_passes() -> None:
    inner = _normed(0)
    optimizer = nn.Momentum(inner.trainable_params(), 0.1, 0.9)
    expected = list(hs.get_model_state_dict(inner))
    outer = Wrapped(inner)
    assert "net.0.weight" == inner[0].weight.name
    assert expected == list(hs.get_model_state_dict(inner))
    assert [f"net.{name}" for name in expected] == list(hs.get_model_state_dict(outer))
    assert {"0.weight", "0.bias", "1.gamma", "1.beta", "2.weight", "2.bias"} == set(
        hs.get_optim_state_dict(inner, optimizer)["state"]
    )


def test_s45_a_cell_in_two_places_has_both_names_and_one_state() -> None:
    cell = Twice(0)
    optimizer = nn.Momentum(cell.trainable_params(), 0.1, 0.9)
    model, state = hs.get_state_dict(cell, optimizer, options=FULL)
    assert ["first.weight", "first.bias", "second.weight", "second.bias", "last.weight", "last.bias"] == list(model)
    assert ["first.weight", "first.bias", "last.weight", "last.bias"] == list(state["state"])


def test_s45_two_parameters_with_one_name_are_told_apart_by_their_places() -> None:
    """MindSpore gives them to no optimizer together, so there is one for each."""

    def build(seed: int) -> tuple[Any, list[Any]]:
        cell = nn.Cell(auto_prefix=False)
        np.random.seed(seed)
        ms.set_seed(seed)
        cell.a, cell.b = nn.Dense(3, 4), nn.Dense(4, 2)
        cell.construct = lambda data: cell.b(cell.a(data))
        return cell, [nn.Momentum(part.trainable_params(), 0.1, 0.9) for part in (cell.a, cell.b)]

    source, target = build(0), build(1)
    assert source[0].a.weight.name == source[0].b.weight.name
    for number in range(3):
        for one in source[1]:
            train(source[0], one, 1, first=number)
    model, state = hs.get_state_dict(*source, options=FULL)
    assert ["a.weight", "a.bias", "b.weight", "b.bias"] == list(model)
    hs.set_state_dict(*target, model_state_dict=model, optim_state_dict=state, options=SET)
    for one, other in zip(source[1], target[1], strict=True):
        assert train(source[0], one, 1, first=3) == train(target[0], other, 1, first=3)


def test_s45_cells_with_the_same_names_are_refused_by_name() -> None:
    with pytest.raises(IncompatibleStateError, match=r"'0\.weight'"):
        hs.get_model_state_dict([_normed(0), _normed(1)])


@pytest.mark.parametrize("kind", KINDS)
def test_s45_bfloat16(kind: str) -> None:
    """No optimizer of MindSpore's has a kernel for it on CPU: state is made by hand, and must come over to the bit."""

    def build(seed: int) -> tuple[Any, Any]:
        cell = _normed(seed)
        for parameter in cell.get_parameters():
            parameter.set_dtype(ms.bfloat16)
        return cell, KINDS[kind](cell.trainable_params())

    source, target = build(0), build(1)
    numbers = np.random.default_rng(0)
    for parameter in source[1].get_parameters():
        if parameter.dtype == ms.bfloat16:
            parameter.set_data(ms.Tensor(numbers.standard_normal(parameter.shape), ms.bfloat16))
    for options, setting in ((FULL, SET), (NEUTRAL, SET_NEUTRAL)):
        model, state = hs.get_state_dict(*source, options=options)
        hs.set_state_dict(*target, model_state_dict=model, optim_state_dict=state, options=setting)
        assert bits((model, state)) == bits(hs.get_state_dict(*target, options=options))
        assert ms.bfloat16 == model["0.weight"].dtype
        assert {ms.bfloat16} == {
            value.dtype for slots in state["state"].values() for key, value in slots.items() if key != "step"
        }


# -- neutral names ---------------------------------------------------------------------------------


def test_cells_have_the_names_of_pytorch() -> None:
    cell = nn.SequentialCell(
        nn.Embedding(5, 4),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.LayerNorm((4,)),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4),
        nn.PReLU(4),
        nn.LSTM(4, 3),
        nn.MultiheadAttention(4, 2),
        mint.nn.BatchNorm1d(4),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = set(hs.get_model_state_dict(cell, options=NEUTRAL))
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    expected = {
        0: {"weight"},
        1: {"weight"},
        2: {"weight", "bias"} | statistics,
        3: {"weight", "bias"} | statistics,
        4: {"weight", "bias"},
        5: {"weight", "bias"},
        6: {"weight", "bias", "running_mean", "running_var"},
        7: {"weight"},
        8: {"weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"},
        9: {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"},
        10: {"weight", "bias"} | statistics,
    }
    assert {f"{number}.{name}" for number, all_names in expected.items() for name in all_names} == names


def test_a_table_goes_by_the_type_of_the_cell_and_not_by_names() -> None:
    class Mine(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = ms.Parameter(ms.Tensor([1.0]), name="gamma")
            self.norm = type("Derived", (nn.LayerNorm,), {})((4,))

    assert ["gamma", "norm.weight", "norm.bias"] == list(hs.get_model_state_dict(Mine(), options=NEUTRAL))


def test_what_no_table_knows_keeps_its_name_and_is_reported() -> None:
    """Thor's dense layer has no counterpart in PyTorch."""
    odd = nn.layer.thor_layer.DenseThor(3, 4)
    with pytest.warns(UserWarning, match="no table knows weight, bias"):
        model = hs.get_model_state_dict(odd, options=NEUTRAL)
    assert list(hs.get_model_state_dict(odd)) == list(model)
    cell = net(0)
    optimizer = nn.FTRL(cell.trainable_params())
    with pytest.warns(UserWarning, match=r"PyTorch has no name for this state of FTRL.*'moments', 'linear'"):
        state = hs.get_optim_state_dict(cell, optimizer, options=NEUTRAL)
    assert {"moments", "linear"} == set(state["state"]["0.weight"])
    assert {"global_step"} == set(state["global"])


def test_tables_read_both_ways() -> None:
    for table in CELLS.values():
        assert len(table) == len(set(table.values()))
    for key, entry in OPTIMIZERS.items():
        keys = KNOWN[key].keys
        neutral = [entry.state.get(name, name) for name in keys]
        assert len(keys) == len(set(neutral)), key
        assert set(entry.state) <= set(keys), key
        assert len(entry.fields) == len(set(entry.fields.values())), key
    assert "weight" == cell_name(nn.LayerNorm((3,)), "gamma")
    assert cell_name(nn.layer.thor_layer.DenseThor(3, 4), "weight") is None


def test_steps_are_derived_for_each_parameter_and_counters_follow_from_them() -> None:
    cell = net(0)
    optimizer = nn.Adam(cell.trainable_params(), beta1=0.5, beta2=0.75)
    train(cell, optimizer, 3)
    state = hs.get_optim_state_dict(cell, optimizer, options=NEUTRAL)
    assert {3.0} == {float(slots["step"]) for slots in state["state"].values()}
    assert {()} == {tuple(slots["step"].shape) for slots in state["state"].values()}
    assert "global" not in state
    assert (0.5, 0.75) == state["param_groups"][0]["betas"]
    fresh = net(1)
    target = nn.Adam(fresh.trainable_params())
    hs.set_optim_state_dict(fresh, target, state, options=SET_NEUTRAL)
    assert (0.125, 0.421875) == (float(target.beta1_power), float(target.beta2_power))
    assert bits([optimizer.global_step, optimizer.beta1, optimizer.beta2]) == bits(
        [target.global_step, target.beta1, target.beta2]
    )


def test_steps_that_float32_can_not_count_are_not_rounded() -> None:
    cell, fresh = net(0), net(1)
    optimizer, target = optim.AdamW(cell.trainable_params()), optim.AdamW(fresh.trainable_params())
    optimizer.state_step.set_data(ms.Tensor(2**24 + 1, ms.int32))
    state = hs.get_optim_state_dict(cell, optimizer, options=NEUTRAL)
    hs.set_optim_state_dict(fresh, target, state, options=SET_NEUTRAL)
    assert 2**24 + 1 == int(target.state_step)


def test_powers_of_betas_that_do_not_follow_from_the_step_are_not_lost() -> None:
    cell = net(0)
    optimizer = nn.Adam(cell.trainable_params())
    train(cell, optimizer, 2)
    optimizer.beta1_power.set_data(ms.Tensor(0.3, ms.float32))
    state = hs.get_optim_state_dict(cell, optimizer, options=NEUTRAL)
    assert ["beta1_power"] == list(state["global"])
    target = nn.Adam(cell.trainable_params())
    hs.set_optim_state_dict(cell, target, state, options=SET_NEUTRAL)
    assert bits([optimizer.beta1_power, optimizer.beta2_power]) == bits([target.beta1_power, target.beta2_power])


def test_powers_too_small_to_matter_are_no_state_of_their_own() -> None:
    """Some of MindSpore's kernels make 0 of them and some don't."""
    cell = net(0)
    optimizer = nn.Adam(cell.trainable_params())
    train(cell, optimizer, 1)
    optimizer.global_step.set_data(ms.Tensor([1_564_500], ms.int32))
    for power in (0.0, 1e-40):
        optimizer.beta1_power.set_data(ms.Tensor(power, ms.float32))
        optimizer.beta2_power.set_data(ms.Tensor(power, ms.float32))
        assert "global" not in hs.get_optim_state_dict(cell, optimizer, options=NEUTRAL)


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.999])
def test_powers_are_those_that_the_optimizer_itself_computes(beta: float) -> None:
    parameter = ms.Parameter(ms.Tensor([0.0], ms.float32), name="w")
    optimizer = nn.Adam([parameter], beta1=beta, beta2=beta)
    gradient = (ms.Tensor([1.0], ms.float32),)
    for step in range(1, 121):
        optimizer(gradient)
        assert bits(ms.Tensor(beta_power(beta, step))) == bits(optimizer.beta1_power)


def test_momentum_buffers_are_there_once_they_hold_something() -> None:
    for kind in (lambda p: nn.SGD(p, 0.1, 0.9), lambda p: optim.SGD(p, lr=0.1, momentum=0.9)):
        cell = net(0)
        optimizer = kind(cell.trainable_params())
        assert not hs.get_optim_state_dict(cell, optimizer, options=NEUTRAL)["state"]
        train(cell, optimizer, 1)
        state = hs.get_optim_state_dict(cell, optimizer, options=NEUTRAL)["state"]
        assert {("momentum_buffer",)} == {tuple(slots) for slots in state.values()}


def test_a_table_of_learning_rates_shows_the_one_that_comes_next() -> None:
    cell = net(0)
    optimizer = nn.Adam(cell.trainable_params(), [0.5, 0.25, 0.125])
    train(cell, optimizer, 1)
    state = hs.get_optim_state_dict(cell, optimizer, options=NEUTRAL)
    assert [0.25, 0.25] == [group["lr"] for group in state["param_groups"]]
    np.testing.assert_array_equal([0.5, 0.25, 0.125], state["global"]["learning_rate"].asnumpy())
    fresh = net(1)
    target = nn.Adam(fresh.trainable_params(), [1.0, 1.0, 1.0])
    hs.set_optim_state_dict(fresh, target, state, options=SET_NEUTRAL)
    assert bits(state) == bits(hs.get_optim_state_dict(fresh, target, options=NEUTRAL))


def test_the_neutral_form_of_a_sharded_cell_is_that_of_the_whole_one(mindspore2: Pool) -> None:
    mindspore2.run(BODIES, "the_neutral_form_of_a_sharded_cell_is_that_of_the_whole_one")


def test_state_that_a_users_class_keeps_by_parameter_has_the_names_that_the_class_gave() -> None:
    class Mine(optim.Optimizer):
        def construct(self, gradients: Any) -> None:
            for param, gradient in zip(self.parameters, gradients, strict=True):
                self.state[param] = {"exp_avg": ms.Tensor(gradient.asnumpy()), "note": ("a", 1)}

    source, target = net(0), net(1)
    first, second = (Mine(cell.trainable_params(), {"lr": 0.5}) for cell in (source, target))
    train(source, first, 1)
    state = hs.get_optim_state_dict(source, first, options=NEUTRAL)
    assert ("a", 1) == state["state"]["1.weight"]["note"]
    hs.set_optim_state_dict(target, second, state, options=SET_NEUTRAL)
    assert bits(state) == bits(hs.get_optim_state_dict(target, second, options=NEUTRAL))


def test_an_unknown_word_for_names_is_refused() -> None:
    with pytest.raises(OptionError, match="names"):
        hs.StateDictOptions(names="pytorch")
