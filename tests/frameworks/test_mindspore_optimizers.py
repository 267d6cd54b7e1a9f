"""MindSpore's optimizers: state, counters and group fields out of one and into a fresh one, which is never stepped."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.experimental import optim
from mindspore_optimizers import EXPERIMENTAL, LEGACY, MINT, TRAINABLE, bits, net, train, weights

import hyperstate as hs
from hyperstate.errors import IncompatibleStateError, UnsupportedConfigurationError
from hyperstate.testing import Pool
from hyperstate_mindspore.rules import known, state_keys

BODIES = Path(__file__).with_name("bodies_mindspore_names.py")
FULL = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
SET = hs.StateDictOptions(full_state_dict=True)


def _move(source: tuple[Any, Any], target: tuple[Any, Any], options: Any = FULL, **more: Any) -> None:
    model, state = hs.get_state_dict(*source, options=options)
    setting = hs.StateDictOptions(full_state_dict=options.full_state_dict, names=options.names)
    hs.set_state_dict(*target, model_state_dict=model, optim_state_dict=state, options=setting, **more)


def _pair(name: str, seed: int) -> tuple[Any, Any]:
    cell = net(seed)
    return cell, TRAINABLE[name](cell.trainable_params())


# -- training goes on ------------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["own", "neutral"])
@pytest.mark.parametrize("name", TRAINABLE)
@pytest.mark.filterwarnings("ignore:PyTorch has no name for this state")
def test_training_goes_on_to_the_bit_in_a_fresh_optimizer(name: str, names: str) -> None:
    cell, optimizer = _pair(name, 0)
    train(cell, optimizer, 3)
    copy = _pair(name, 1)
    assert weights(cell) != weights(copy[0])
    _move((cell, optimizer), copy, hs.StateDictOptions(full_state_dict=True, cpu_offload=True, names=names))
    assert weights(cell) == weights(copy[0])
    assert train(cell, optimizer, 2, first=3) == train(*copy, 2, first=3)
    assert weights(cell) == weights(copy[0])


@pytest.mark.parametrize("name", TRAINABLE)
def test_what_was_loaded_is_what_is_read_again(name: str) -> None:
    source = _pair(name, 0)
    train(*source, 3)
    target = _pair(name, 1)
    _move(source, target)
    assert bits(hs.get_optim_state_dict(*source, options=FULL)) == bits(hs.get_optim_state_dict(*target, options=FULL))


@pytest.mark.parametrize("name", ["Adam", "Momentum grouped", "SGD with momentum", "experimental AdamW", "RMSProp"])
def test_training_goes_on_in_an_optimizer_that_has_trained_before(name: str) -> None:
    """Its compiled graph holds numbers of the run before."""
    source, target = _pair(name, 0), _pair(name, 1)
    train(*source, 3)
    train(*target, 2, first=7)
    _move(source, target)
    assert train(*source, 2, first=3) == train(*target, 2, first=3)
    assert weights(source[0]) == weights(target[0])


@pytest.mark.parametrize("name", MINT)
def test_optimizers_that_do_not_train_on_cpu_are_read_and_written(name: str) -> None:
    """Their state is made by hand here; on an accelerator the class makes it."""
    cell = net(0)
    optimizer = MINT[name](cell.trainable_params())
    numbers = np.random.default_rng(0)
    held = [p for p in optimizer.get_parameters() if all(p is not own for own in cell.get_parameters())]
    held += [p for group in optimizer.param_groups for p in group.get("max_exp_avg_sq", ())]
    for parameter in held:
        parameter.asnumpy()[...] = numbers.integers(1, 9, parameter.shape)
    target = net(1), None
    target = target[0], MINT[name](target[0].trainable_params())
    _move((cell, optimizer), target)
    saved = hs.get_optim_state_dict(cell, optimizer, options=FULL)
    assert bits(saved) == bits(hs.get_optim_state_dict(*target, options=FULL))
    expected = state_keys(type(optimizer), optimizer.param_groups[0])
    assert expected == list(saved["state"]["0.weight"])


# -- matching --------------------------------------------------------------------------------------


def test_state_follows_the_parameter_and_not_its_name() -> None:
    """The optimizer was built before its cell was put into another, which renames the cell's parameters."""
    inner = net(0)
    optimizer = nn.Momentum(inner.trainable_params(), 0.1, 0.9)
    outer = nn.SequentialCell(inner)
    assert "0.0.weight" == inner[0].weight.name
    train(inner, optimizer, 2)
    saved = hs.get_optim_state_dict(outer, optimizer, options=FULL)
    assert "0.0.weight" in saved["state"]
    target = nn.SequentialCell(net(1))
    second = nn.Momentum(target.trainable_params(), 0.1, 0.9)
    hs.set_state_dict(
        target,
        second,
        model_state_dict=hs.get_model_state_dict(outer, options=FULL),
        optim_state_dict=saved,
        options=SET,
    )
    assert train(inner, optimizer, 1, first=2) == train(target, second, 1, first=2)
    assert [bits(p) for p in inner.get_parameters()] == [bits(p) for p in target.get_parameters()]


def test_order_of_parameters_does_not_matter() -> None:
    source, target = net(0), net(1)
    first = nn.Adam(source.trainable_params(), 0.01)
    train(source, first, 2)
    second = nn.Adam(list(reversed(target.trainable_params())), 0.01)
    _move((source, first), (target, second))
    assert train(source, first, 1, first=2) == train(target, second, 1, first=2)
    assert weights(source) == weights(target)


def test_several_optimizers_of_one_cell() -> None:
    def build(seed: int) -> tuple[Any, list[Any]]:
        cell = net(seed)
        p = cell.trainable_params()
        return cell, [nn.Adam(p[:2], 0.01), nn.Momentum(p[2:], 0.1, 0.9)]

    def step(cell: Any, optimizers: list[Any], number: int) -> None:
        for one in optimizers:
            train(cell, one, 1, first=number)

    source, target = build(0), build(1)
    step(*source, 0)
    step(*source, 1)
    _move(source, target)
    step(*source, 2)
    step(*target, 2)
    assert weights(source[0]) == weights(target[0])
    shared = hs.get_optim_state_dict(*source, options=FULL)["global"]
    assert {"0.global_step", "0.beta1_power", "0.beta2_power", "1.global_step"} == set(shared)


def test_an_optimizer_around_another_shows_the_inner_one() -> None:
    cell = net(0)
    inner = nn.Momentum(cell.trainable_params(), 0.1, 0.9)
    train(cell, inner, 2)
    expected = bits(hs.get_optim_state_dict(cell, inner, options=FULL)["state"])
    assert expected == bits(hs.get_optim_state_dict(cell, nn.LARS(inner), options=FULL)["state"])


def test_an_optimizer_without_a_kernel_on_cpu_is_read_and_written() -> None:
    source, target = net(0), net(1)
    first, second = nn.Lamb(source.trainable_params(), 0.1), nn.Lamb(target.trainable_params(), 0.5)
    for number, slot in enumerate([*first.moments1, *first.moments2, first.global_step], start=1):
        slot.asnumpy()[...] = number
    _move((source, first), (target, second))
    found = [hs.get_optim_state_dict(*pair, options=FULL) for pair in ((source, first), (target, second))]
    assert bits(found[0]) == bits(found[1])


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    cell = net(0)
    p = cell.trainable_params()
    with pytest.raises(IncompatibleStateError, match="optimizer 1, position 0 holds the same parameter as optimizer 0"):
        hs.get_optim_state_dict(cell, [nn.Adam(p[:2]), nn.Adam(p[1:])])


def test_a_chained_optimizer_is_refused() -> None:
    class ChainedOptimizer(nn.Adam):
        pass

    cell = net(0)
    optimizer = ChainedOptimizer(cell.trainable_params())
    for call in (
        lambda: hs.get_optim_state_dict(cell, optimizer),
        lambda: hs.set_optim_state_dict(cell, optimizer, {"state": {}, "param_groups": []}),
    ):
        with pytest.raises(UnsupportedConfigurationError, match="its own state_dict"):
            call()


# -- what a setter does to state -------------------------------------------------------------------


def test_nothing_is_aliased() -> None:
    source, target = _pair("Adam", 0), _pair("Adam", 1)
    train(*source, 2)
    saved = hs.get_optim_state_dict(*source, options=FULL)
    expected = bits(saved)
    hs.set_optim_state_dict(*target, saved, options=SET)
    train(*target, 2)
    train(*source, 2)
    assert expected == bits(saved)


def test_tables_of_another_length_are_refused() -> None:
    source, target = net(0), net(1)
    first = nn.Adam(source.trainable_params(), [0.5, 0.25, 0.125])
    second = nn.Adam(target.trainable_params(), [0.5, 0.25])
    with pytest.raises(IncompatibleStateError, match=r"'learning_rate' of shape \(3,\) was passed for shape \(2,\)"):
        _move((source, first), (target, second))


def test_another_class_state_is_refused_and_nothing_changed() -> None:
    source, target = _pair("Adam", 0), _pair("SGD with momentum", 1)
    train(*source, 1)
    train(*target, 1)
    before = bits(hs.get_optim_state_dict(*target, options=FULL))
    with pytest.raises(IncompatibleStateError, match=r"'0.weight': SGD has no place for state key 'moment1'"):
        hs.set_optim_state_dict(*target, hs.get_optim_state_dict(*source, options=FULL), options=SET)
    assert before == bits(hs.get_optim_state_dict(*target, options=FULL))


def test_what_has_no_place_is_left_out_with_a_warning_when_not_strict() -> None:
    source, target = _pair("Adam amsgrad", 0), _pair("Adam", 1)
    train(*source, 2)
    saved = hs.get_optim_state_dict(*source, options=FULL)
    lenient = hs.StateDictOptions(full_state_dict=True, strict=False)
    with pytest.warns(UserWarning, match="no place for state key 'vhat'"):
        hs.set_optim_state_dict(*target, saved, options=lenient)
    found = hs.get_optim_state_dict(*target, options=FULL)
    for fqn, slots in found["state"].items():
        assert {key: bits(saved["state"][fqn][key]) for key in ("moment1", "moment2")} == bits(slots)


@pytest.mark.parametrize("name", ["Adam", "SGD with momentum", "RMSProp", "Adagrad", "FTRL", "experimental NAdam"])
def test_state_that_a_checkpoint_lacks_is_as_it_was_in_the_beginning(name: str) -> None:
    trained, fresh = _pair(name, 0), _pair(name, 0)
    expected = hs.get_optim_state_dict(*fresh, options=FULL)
    train(*trained, 2)
    saved = hs.get_optim_state_dict(*trained, options=FULL)
    del saved["state"]["0.weight"]
    with pytest.warns(UserWarning, match="cleared because the source has none"):
        found = hs.set_optim_state_dict(*trained, saved, options=SET)
    assert ["0.weight"] == found.cleared
    state = hs.get_optim_state_dict(*trained, options=FULL)["state"]
    assert bits(expected["state"]["0.weight"]) == bits(state["0.weight"])
    assert bits(saved["state"]["2.weight"]) == bits(state["2.weight"])


def test_state_of_a_users_own_class_is_found_by_its_form() -> None:
    class Mine(nn.Optimizer):
        def __init__(self, params: Any, learning_rate: float = 0.1, friction: float = 0.5) -> None:
            super().__init__(learning_rate, params)
            self.friction = friction
            self.speed = self.parameters.clone(prefix="speed", init="zeros")

        def construct(self, gradients: Any) -> None:
            for param, speed, gradient in zip(self.parameters, self.speed, gradients, strict=True):
                ms.ops.assign(speed, speed * self.friction + gradient)
                ms.ops.assign(param, param - self.learning_rate * speed)

    source, target = net(0), net(1)
    first, second = Mine(source.trainable_params(), friction=0.75), Mine(target.trainable_params())
    train(source, first, 2)
    _move((source, first), (target, second))
    assert 0.75 == second.friction
    assert train(source, first, 2) == train(target, second, 2)
    assert weights(source) == weights(target)


@pytest.mark.parametrize("dtype", [ms.bfloat16, ms.float16])
def test_state_keeps_its_precision(dtype: Any) -> None:
    def build() -> Any:
        cell = net(0)
        for parameter in cell.get_parameters():
            parameter.set_dtype(dtype)
        return cell, nn.Momentum(cell.trainable_params(), 0.1, 0.9)

    source, target = build(), build()
    for slot in source[1].moments:
        slot.set_data(ms.Tensor(np.random.default_rng(0).standard_normal(slot.shape), dtype=slot.dtype))
    _move(source, target)
    saved = hs.get_optim_state_dict(*target, options=FULL)["state"]
    assert bits(list(source[1].moments)) == bits([slots["moments"] for slots in saved.values()])
    assert dtype == saved["0.weight"]["moments"].dtype


def test_parameters_that_were_added_after_the_state_was_made_are_refused() -> None:
    """MindSpore's classes make no state for them."""
    cell = net(0)
    p = cell.trainable_params()
    optimizer = optim.AdamW(p[:2])
    optimizer.add_param_group({"params": p[2:]})
    with pytest.raises(IncompatibleStateError, match="has 6 parameters and 'exp_avg' for 2"):
        hs.get_optim_state_dict(cell, optimizer)


def test_an_optimizer_that_was_built_before_its_cell_was_sharded_is_refused(mindspore2: Pool) -> None:
    mindspore2.run(BODIES, "an_optimizer_that_was_built_before_its_cell_was_sharded_is_refused")


@pytest.mark.parametrize("name", [*LEGACY, *EXPERIMENTAL])
def test_state_keys_are_known_without_looking(name: str) -> None:
    cell, optimizer = _pair(name, 0)
    slots = hs.get_optim_state_dict(cell, optimizer)["state"]["0.weight"]
    assert sorted(slots) == sorted(hs.infer_state_keys(optimizer))


def test_the_table_of_known_classes_says_what_they_keep() -> None:
    for make in (LEGACY | EXPERIMENTAL | MINT).values():
        cell = net(0)
        optimizer = make(cell.trainable_params())
        entry = known(type(optimizer))
        assert entry is not None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            slots = hs.get_optim_state_dict(cell, optimizer, options=FULL)["state"]["0.weight"]
        assert set(slots) <= set(entry.keys)
        for key in slots:
            whole = (4, 3) if key in entry.like else ()
            assert key in entry.other or whole == tuple(slots[key].shape)
