"""Cells as named values: names are places in the tree; what is a parameter, a buffer, frozen, tied, refused."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore_cells import (
    OPTIMIZERS,
    Kinds,
    Outer,
    SameNames,
    Twice,
    bits,
    half,
    parameter,
    seeded,
    sequence,
    steps,
    tensor,
)

import hyperstate as hs
from hyperstate.backend import load
from hyperstate.errors import (
    IncompatibleStateError,
    OptionError,
    OptionTypeError,
    UnsupportedConfigurationError,
)

FULL = hs.StateDictOptions(full_state_dict=True)
NEUTRAL = hs.StateDictOptions(full_state_dict=True, names="neutral")


def entries(cell: Any, names: str = "own") -> Any:
    return load("mindspore").model(cell, names=names).entries()


def names(cell: Any) -> list[str]:
    return list(entries(cell))


# -- S45: resume ---------------------------------------------------------------------------------------


CELLS = {"plain": sequence, "wrapped": lambda: Outer(sequence()), "used twice": Twice}


@pytest.mark.parametrize("options", [FULL, NEUTRAL, hs.StateDictOptions(), hs.StateDictOptions(cpu_offload=True)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("cell", CELLS)
def test_s45_training_goes_on_to_the_bit(cell: str, optimizer: str, options: Any) -> None:
    source, target = seeded(CELLS[cell](), 0), seeded(CELLS[cell](), 1)
    made, fresh = (OPTIMIZERS[optimizer](one.trainable_params()) for one in (source, target))
    steps(source, made, range(3))
    model, state = hs.get_state_dict(source, made, options=options)
    setting = hs.StateDictOptions(full_state_dict=options.full_state_dict, names=options.names)
    hs.set_state_dict(target, fresh, model_state_dict=model, optim_state_dict=state, options=setting)
    assert steps(source, made, [3, 4]) == steps(target, fresh, [3, 4])
    expected, actual = ([bits(one) for one in each.get_parameters()] for each in (source, target))
    assert expected == actual


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_s45_two_parameters_with_one_name_are_told_apart_by_their_places(optimizer: str) -> None:
    """MindSpore makes no optimizer of two such parameters; they can get their common name afterwards."""
    cells = [seeded(SameNames(), seed) for seed in (0, 1)]
    made = []
    for cell in cells:
        cell.two.weight.name, cell.two.bias.name = "weight of two", "bias of two"
        made.append(OPTIMIZERS[optimizer](cell.trainable_params()))
        cell.two.weight.name, cell.two.bias.name = cell.one.weight.name, cell.one.bias.name
    steps(cells[0], made[0], range(3))
    model, state = hs.get_state_dict(cells[0], made[0], options=FULL)
    assert ["one.weight", "one.bias", "two.weight", "two.bias"] == list(model) == list(state["state"])
    hs.set_state_dict(cells[1], made[1], model_state_dict=model, optim_state_dict=state, options=FULL)
    assert steps(cells[0], made[0], [3, 4]) == steps(cells[1], made[1], [3, 4])


def test_s45_bfloat16_state_arrives_to_the_bit() -> None:
    source, target = seeded(half(), 0), seeded(half(), 1)
    made, fresh = (nn.AdamWeightDecay(one.trainable_params(), 0.05) for one in (source, target))
    for moment in made.moments1:
        moment.set_data(ms.Tensor(np.random.default_rng(7).standard_normal(tuple(moment.shape))).astype(moment.dtype))
    model, state = hs.get_state_dict(source, made, options=FULL)
    assert {"BFloat16"} == {str(value.dtype) for value in model.values()}
    hs.set_state_dict(target, fresh, model_state_dict=model, optim_state_dict=state, options=FULL)
    assert list(map(bits, source.get_parameters())) == list(map(bits, target.get_parameters()))
    assert list(map(bits, made.moments1)) == list(map(bits, fresh.moments1))


def test_s45_a_load_into_an_optimizer_that_stepped_keeps_training() -> None:
    """MindSpore's compiled optimizers remember where their parameters are: loading must not move them."""
    source, target = seeded(sequence(), 0), seeded(sequence(), 1)
    made, other = (nn.AdamWeightDecay(one.trainable_params(), 0.05) for one in (source, target))
    steps(source, made, range(3)), steps(target, other, range(5))
    before = [one.data_ptr() for one in (*target.get_parameters(), *other.moments1)]
    model, state = hs.get_state_dict(source, made, options=FULL)
    hs.set_state_dict(target, other, model_state_dict=model, optim_state_dict=state, options=FULL)
    assert before == [one.data_ptr() for one in (*target.get_parameters(), *other.moments1)]
    assert steps(source, made, [3, 4]) == steps(target, other, [3, 4])


# -- names ---------------------------------------------------------------------------------------------


def test_names_do_not_change_when_a_cell_is_put_into_another() -> None:
    cell = sequence()
    before = names(cell)
    outer = Outer(cell)
    assert "net.0.weight" == cell[0].weight.name
    assert before == names(cell)
    assert [f"net.{name}" for name in before] == names(outer)


def test_names_are_those_of_the_cells_own_state_dict() -> None:
    for cell in (sequence(), Outer(sequence()), Twice(), SameNames(), nn.LSTM(3, 4), nn.CellList([nn.Dense(2, 3)])):
        assert list(cell.state_dict()) == names(cell)


def test_wrappers_of_mindspore_add_nothing_to_names() -> None:
    cell = sequence()
    expected = names(cell)
    with_loss = nn.WithLossCell(cell, nn.MSELoss())
    stepping = nn.TrainOneStepCell(with_loss, nn.Momentum(cell.trainable_params(), 0.1, 0.9))
    assert expected == names(with_loss)
    assert expected == names(stepping)  # neither its optimizer's state nor its list of weights
    assert expected == names(nn.WithEvalCell(cell, nn.MSELoss()))
    assert expected == names(ms.amp.auto_mixed_precision(cell, "O2"))


def test_a_cell_used_twice_has_both_names_the_first_counting() -> None:
    found = entries(Twice())
    assert {"second.weight": "first.weight", "second.bias": "first.bias"} == {
        fqn: one.tied for fqn, one in found.items() if one.tied
    }
    target = seeded(Twice(), 1)
    result = hs.set_model_state_dict(
        target, {fqn: tensor(*one.value.shape) for fqn, one in found.items() if not one.tied}, options=FULL
    )
    assert ([], []) == (result.missing_keys, result.unexpected_keys)
    assert tensor(3, 3).asnumpy().tolist() == target.second.weight.asnumpy().tolist()


def test_a_tied_parameter_may_be_passed_under_any_name() -> None:
    cell = nn.Cell()
    cell.encode, cell.decode = nn.Dense(2, 2, has_bias=False), nn.Dense(2, 2, has_bias=False)
    cell.decode.weight = cell.encode.weight
    assert ["encode.weight", "decode.weight"] == names(cell)
    hs.set_model_state_dict(cell, {"decode.weight": tensor(2, 2, start=5)}, options=FULL)
    assert [[5.0, 6.0], [7.0, 8.0]] == cell.encode.weight.asnumpy().tolist()
    assert cell.decode.weight is cell.encode.weight


def test_members_of_a_parameter_tuple_have_one_name() -> None:
    class Tuples(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Dense(2, 2)
            self.own = ms.ParameterTuple([parameter(2, name="a"), parameter(3, name="b")])
            self.listed = ms.ParameterTuple(self.linear.trainable_params())

    assert ["a", "b", "linear.weight", "linear.bias"] == names(Tuples())


def test_parameters_named_by_hand_are_named_by_their_place() -> None:
    cell = nn.Cell()
    cell.w = parameter(2, name="my_weight")
    cell.linear = nn.Dense(2, 2, has_bias=False)
    cell.linear.weight.name = "renamed"
    assert ["w", "linear.weight"] == names(cell)


def test_parts_with_one_name_are_refused_and_both_are_named() -> None:
    first, second = nn.Dense(2, 2), nn.SequentialCell(OrderedWeight())
    with pytest.raises(IncompatibleStateError, match=r"'weight': weight of a Dense .*part 0 and weight of a .*part 1"):
        names([first, second[0]])
    assert ["weight", "bias", "0.weight"] == names([first, second])


class OrderedWeight(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(2)


def test_a_place_that_a_wrapper_hides_may_not_be_taken_twice() -> None:
    class Step(nn.TrainOneStepCell):
        def __init__(self, network: Any, optimizer: Any) -> None:
            super().__init__(network, optimizer)
            self.weight = parameter(2, name="scale")

    inner = nn.Dense(2, 2)
    with pytest.raises(IncompatibleStateError, match=r"weight of a .*Step \(scale\) in part 0 and weight of a Dense"):
        names(Step(inner, nn.Momentum(inner.trainable_params(), 0.1, 0.9)))


def test_parts_of_a_pipeline_are_one_model() -> None:
    stages = [nn.SequentialCell(nn.Dense(2, 3)), Outer(nn.Dense(3, 2))]
    found = hs.get_model_state_dict(stages)
    assert ["0.weight", "0.bias", "net.weight", "net.bias"] == list(found)


# -- kinds ---------------------------------------------------------------------------------------------


def test_parameters_buffers_statistics_and_extra_state_are_told_apart() -> None:
    found = {fqn: (one.kind, one.frozen) for fqn, one in entries(Kinds()).items()}
    assert {
        "frozen": ("param", True),
        "kept": ("buffer", False),
        "_extra_state": ("extra", False),
        "linear.weight": ("param", False),
        "linear.bias": ("param", False),
        "norm.moving_mean": ("buffer", False),
        "norm.moving_variance": ("buffer", False),
        "norm.gamma": ("param", False),
        "norm.beta": ("param", False),
    } == found


def test_frozen_parameters_can_be_left_out_and_statistics_stay() -> None:
    found = hs.get_model_state_dict(Kinds(), options=hs.StateDictOptions(ignore_frozen_params=True))
    assert "frozen" not in found
    assert {"norm.moving_mean", "norm.moving_variance", "kept"} <= found.keys()


def test_buffers_and_extra_state_arrive_and_what_does_not_persist_stays() -> None:
    source, target = Kinds(1.0), Kinds(2.0)
    source.norm.moving_mean.set_data(tensor(3, start=9))
    hs.set_model_state_dict(target, hs.get_model_state_dict(source, options=FULL), options=FULL)
    assert 1.0 == target.steps
    assert [1.0, 2.0, 3.0] == target.kept.asnumpy().tolist()
    assert [9.0, 10.0, 11.0] == target.norm.moving_mean.asnumpy().tolist()
    assert [2.0, 3.0, 4.0] == target.scratch.asnumpy().tolist()


def test_submodules_are_found_by_identity_inside_wrappers_too() -> None:
    cell = Outer(sequence())
    inner = cell.net[0]
    wanted = nn.WithLossCell(inner, nn.MSELoss())
    assert ["net.0.weight", "net.0.bias"] == list(hs.get_model_state_dict(cell, submodules=[wanted]))
    short = hs.StateDictOptions(keep_submodule_prefixes=False)
    assert ["weight", "bias"] == list(hs.get_model_state_dict(cell, submodules=[inner], options=short))
    with pytest.raises(OptionError, match="Dense that is not part of the model"):
        hs.get_model_state_dict(cell, submodules=[nn.Dense(2, 2)])


# -- values --------------------------------------------------------------------------------------------


def test_a_lazily_initialised_cell_gets_its_values_and_keeps_its_parameters() -> None:
    with nn.utils.no_init_parameters():
        cell = sequence()
    weight, before = cell[0].weight, list(cell.get_parameters())
    assert weight.has_init
    source = seeded(sequence(), 3)
    hs.set_model_state_dict(cell, hs.get_model_state_dict(source), options=FULL)
    assert not any(one.has_init for one in cell.get_parameters())
    assert all(a is b for a, b in zip(before, cell.get_parameters(), strict=True))
    assert [bits(one) for one in source.get_parameters()] == [bits(one) for one in cell.get_parameters()]


def test_what_stays_without_values_is_reported() -> None:
    with nn.utils.no_init_parameters():
        cell = nn.Dense(2, 2)
    with pytest.warns(UserWarning, match="still without values: bias"):
        hs.set_model_state_dict(
            cell, {"weight": tensor(2, 2)}, options=hs.StateDictOptions(full_state_dict=True, strict=False)
        )


def test_what_was_not_loaded_yet_has_nothing_to_give() -> None:
    with nn.utils.no_init_parameters():
        cell = nn.Dense(2, 2)
    with pytest.raises(UnsupportedConfigurationError, match="weight"):
        hs.get_model_state_dict(cell, options=FULL)


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "bool"]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
def test_values_of_all_dtypes_arrive_to_the_bit(dtype: str, shape: tuple[int, ...]) -> None:
    kind = getattr(ms, "bool_" if dtype == "bool" else dtype)
    numbers = ms.Tensor(np.random.default_rng(0).integers(0, 2, shape)).astype(kind)
    source, target = nn.Cell(), nn.Cell()
    for cell, value in ((source, numbers), (target, ms.Tensor(np.zeros(shape)).astype(kind))):
        cell.register_buffer("value", value)
    for options in (FULL, hs.StateDictOptions(), hs.StateDictOptions(cpu_offload=True)):
        state = hs.get_model_state_dict(source, options=options)
        assert bits(numbers) == bits(state["value"])
        hs.set_model_state_dict(target, state, options=hs.StateDictOptions(full_state_dict=options.full_state_dict))
        assert bits(numbers) == bits(target.value)


def test_snapshots_do_not_follow_training_and_live_forms_do() -> None:
    cell = nn.Dense(2, 2)
    live, snapshot = hs.get_model_state_dict(cell), hs.get_model_state_dict(cell, options=FULL)
    before = snapshot["weight"].asnumpy().tolist()
    cell.weight.asnumpy()[...] += 1
    assert before == snapshot["weight"].asnumpy().tolist()
    assert cell.weight.asnumpy().tolist() == live["weight"].asnumpy().tolist()


def test_a_shape_that_broadcasting_would_hide_is_refused() -> None:
    cell = nn.Dense(2, 2)
    before = bits(cell.weight)
    with pytest.raises(hs.HyperstateError, match="weight"):
        hs.set_model_state_dict(cell, {"weight": tensor(2), "bias": tensor(2)}, options=FULL)
    assert before == bits(cell.weight)


# -- hooks and other ways ------------------------------------------------------------------------------


def test_hooks_around_state_dicts_run_and_those_that_change_them_are_refused() -> None:
    cell, seen = nn.SequentialCell(nn.Dense(2, 2)), []
    cell[0].register_state_dict_pre_hook(lambda inner, prefix, keep: seen.append(prefix))
    cell.register_load_state_dict_post_hook(lambda inner, keys: seen.append(type(keys).__name__))
    state = hs.get_model_state_dict(cell)
    assert ["0."] == seen
    hs.set_model_state_dict(cell, state)
    assert "_IncompatibleKeys" == seen[-1]
    cell[0].register_state_dict_post_hook(lambda *arguments: None)
    with pytest.raises(UnsupportedConfigurationError, match="cell '0', a Dense, has a state_dict post-hook"):
        hs.get_model_state_dict(cell)


def test_cells_that_save_in_their_own_way_are_refused() -> None:
    class Renaming(nn.Dense):
        def state_dict(self, *arguments: Any, **named: Any) -> Any:
            return {}

    with pytest.raises(UnsupportedConfigurationError, match=r"cell '\(root\)', a .*Renaming, has its own state_dict"):
        hs.get_model_state_dict(Renaming(2, 2))


def test_what_is_no_cell_is_refused() -> None:
    cell = nn.Dense(2, 2)
    with pytest.raises(OptionTypeError, match="is a str, not an nn.Cell"):
        names([cell, "cell"])
    with pytest.raises(OptionTypeError, match="is an optimizer"):
        names([nn.Momentum(cell.trainable_params(), 0.1, 0.9)])


# -- neutral names -------------------------------------------------------------------------------------


def test_neutral_names_are_pytorchs() -> None:
    cell = nn.SequentialCell(nn.Dense(2, 3), nn.BatchNorm1d(3), nn.LayerNorm((3,)), nn.Embedding(4, 3))
    assert [
        *("0.weight", "0.bias", "1.running_mean", "1.running_var", "1.weight", "1.bias", "1.num_batches_tracked"),
        *("2.weight", "2.bias", "3.weight"),
    ] == list(entries(cell, "neutral"))


def test_a_place_of_mindspores_own_inside_a_cell_is_hidden_from_neutral_names() -> None:
    cell = nn.SequentialCell(nn.BatchNorm3d(3))
    found = list(entries(cell, "neutral"))
    assert "0.bn2d.gamma" in names(cell)
    assert ["0.running_mean", "0.running_var", "0.weight", "0.bias", "0.num_batches_tracked"] == found
    assert {"0."} == set(load("mindspore").model(cell, names="neutral").prefixes([cell[0].bn2d]))


def test_what_no_table_knows_keeps_its_name_and_is_reported() -> None:
    class Later(nn.Cell):
        """As a later MindSpore may bring it."""

        def __init__(self) -> None:
            super().__init__()
            self.kernel = parameter(2, name="kernel")

    Later.__module__ = "mindspore.nn.layer.later"
    with pytest.warns(UserWarning, match=r"no table knows 0\.kernel; they keep their names"):
        assert ["0.kernel", "1.weight", "1.bias"] == list(
            entries(nn.SequentialCell(Later(), nn.LayerNorm((3,))), "neutral")
        )


def test_an_unknown_choice_of_names_is_refused() -> None:
    with pytest.raises(OptionError, match="names='torch' must be one of"):
        load("mindspore").model(nn.Dense(2, 2), names="torch")
