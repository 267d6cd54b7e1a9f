"""State between PyTorch and MindSpore through the neutral form: there, back, and on with training."""

from __future__ import annotations

import warnings
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import mint
from twins import OPTIMIZERS, READ, TWINS, WRITE, assert_close, bits, carried, optimizer, read, write

import hyperstate as hs
from hyperstate.errors import IncompatibleStateError

OTHER = {"torch": "mindspore", "mindspore": "torch"}
ALL = [(net, "Adam") for net in TWINS] + [(net, "AdamW") for net in TWINS] + [(net, "SGD") for net in TWINS]
ALL += [("Linear", name) for name in OPTIMIZERS if name not in ("Adam", "AdamW", "SGD")]


@pytest.fixture(autouse=True)
def _on_cpu() -> None:
    ms.set_device("CPU")


@pytest.mark.parametrize("source", ["torch", "mindspore"])
@pytest.mark.parametrize(("name", "kind"), ALL)
def test_there_and_back_is_the_identity_and_the_next_step_agrees(name: str, kind: str, source: str) -> None:
    """Case S46, for every kind of layer and optimizer that both frameworks have."""
    twin, other = TWINS[name], OTHER[source]
    net = twin.build(source, 0)
    trained = optimizer(source, kind, net)
    twin.train(net, trained, 2)
    state = read(net, trained)

    there = twin.build(other, 1)
    fresh = optimizer(other, kind, there)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(there, fresh, state)
    arrived = read(there, fresh)
    assert bits(state[0]) == bits(arrived[0])
    assert bits(state[1]["state"]) == bits(arrived[1]["state"])

    back = twin.build(source, 2)
    again = optimizer(source, kind, back)
    write(back, again, arrived)
    returned = read(back, again)
    assert bits(state[0]) == bits(returned[0])
    assert bits(state[1]["state"]) == bits(returned[1]["state"])
    assert bits(state[1].get("global", {})) == bits(
        {key: returned[1]["global"][key] for key in state[1].get("global", {})}
    )
    fields, found = _by_name(state[1]), _by_name(returned[1])
    assert bits(fields) == bits({name: {key: found[name].get(key) for key in fields[name]} for name in fields})

    assert twin.train(net, trained, 1, first=2) == twin.train(back, again, 1, first=2)
    assert bits(hs.get_model_state_dict(net)) == bits(hs.get_model_state_dict(back))
    twin.train(there, fresh, 1, first=2)
    assert_close(net, there, twin.noise, 2e-6 if kind.startswith("SGD") else 1e-5)


def _by_name(state: Any) -> dict[str, Any]:
    """Group fields by FQN: groups may be split in another way."""
    return {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in state["param_groups"]
        for name in group["params"]
    }


def test_the_names_of_case_s46_are_all_known() -> None:
    net, cell = TWINS["mixed"].build("torch", 0), TWINS["mixed"].build("mindspore", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = (hs.get_model_state_dict(one, options=READ) for one in (net, cell))
    assert list(first) == sorted(second, key=list(first).index)
    assert [bits(value)[:2] for value in first.values()] == [bits(second[name])[:2] for name in first]


def test_running_statistics_and_their_count_come_back() -> None:
    """MindSpore's cells do not count batches: what PyTorch counted waits beside the cell."""
    twin = TWINS["BatchNorm"]
    net = twin.build("torch", 0)
    twin.train(net, optimizer("torch", "SGD", net), 3)
    cell = twin.build("mindspore", 1)
    state = carried(hs.get_model_state_dict(net, options=READ), "mindspore")
    assert 3 == int(state["1.num_batches_tracked"])
    hs.set_model_state_dict(cell, state, options=WRITE)
    assert bits(state) == bits(hs.get_model_state_dict(cell, options=READ))
    np.testing.assert_array_equal(net[1].running_var.numpy(), cell[1].moving_variance.asnumpy())


@pytest.mark.filterwarnings("ignore:optimizer state was cleared")
def test_group_fields_go_over() -> None:
    net, cell = TWINS["Linear"].build("torch", 0), TWINS["Linear"].build("mindspore", 0)
    given = [
        {"params": list(net[0].parameters()), "lr": 0.5, "weight_decay": 0.125},
        {"params": list(net[2].parameters()), "lr": 0.25},
    ]
    adam = torch.optim.Adam(given, betas=(0.5, 0.75), eps=0.0625)
    p = cell.trainable_params()
    twin = ms.nn.Adam([{"params": p[:2], "lr": 0.1, "weight_decay": 0.1}, {"params": p[2:], "lr": 0.1}])
    state = hs.get_optim_state_dict(net, adam, options=READ)
    hs.set_optim_state_dict(cell, twin, carried(state, "mindspore"), options=WRITE)
    assert [0.5, 0.5, 0.25, 0.25] == [float(rate) for rate in twin.learning_rate]
    assert [0.125, 0.125, 0.0, 0.0] == [float(decay) for decay in twin.weight_decay]
    assert (0.5, 0.75, 0.0625) == (float(twin.beta1), float(twin.beta2), float(twin.eps))


@pytest.mark.parametrize("steps", [1, 2, 1000, 50_000, 1_564_500])
def test_powers_of_betas_follow_from_the_step(steps: int) -> None:
    net, cell = TWINS["Linear"].build("torch", 0), TWINS["Linear"].build("mindspore", 0)
    adam, twin = optimizer("torch", "Adam", net), ms.nn.Adam(cell.trainable_params())
    TWINS["Linear"].train(net, adam, 1)
    for slots in adam.state.values():
        slots["step"].fill_(steps)
    write(cell, twin, read(net, adam))
    assert steps == int(twin.global_step.asnumpy()[0])
    assert float(twin.beta1_power) == pytest.approx(0.8**steps, rel=1e-4, abs=1e-37)
    assert float(twin.beta2_power) == pytest.approx(0.95**steps, rel=1e-4, abs=1e-37)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"maximize": True}, "can't do that"),
        ({"amsgrad": True}, "build it with True"),
        ({"decoupled_weight_decay": True}, "decoupled"),
    ],
)
def test_what_the_other_class_can_not_do_is_refused(change: dict[str, Any], text: str) -> None:
    net, cell = TWINS["Linear"].build("torch", 0), TWINS["Linear"].build("mindspore", 0)
    adam, twin = optimizer("torch", "Adam", net), ms.nn.Adam(cell.trainable_params())
    TWINS["Linear"].train(net, adam, 1)
    state = carried(hs.get_optim_state_dict(net, adam, options=READ), "mindspore")
    state["param_groups"][0] |= change
    before = bits(hs.get_optim_state_dict(cell, twin, options=READ))
    with pytest.raises(IncompatibleStateError, match=text):
        hs.set_optim_state_dict(cell, twin, state, options=WRITE)
    assert before == bits(hs.get_optim_state_dict(cell, twin, options=READ))


def test_parameters_that_took_unequal_numbers_of_steps_are_refused() -> None:
    """MindSpore's optimizers count for all parameters at once."""
    net, cell = TWINS["Linear"].build("torch", 0), TWINS["Linear"].build("mindspore", 0)
    adam, twin = optimizer("torch", "Adam", net), ms.nn.Adam(cell.trainable_params())
    TWINS["Linear"].train(net, adam, 2)
    adam.state[net[2].bias]["step"].fill_(1)
    state = carried(hs.get_optim_state_dict(net, adam, options=READ), "mindspore")
    with pytest.raises(IncompatibleStateError, match="counts for all at once"):
        hs.set_optim_state_dict(cell, twin, state, options=WRITE)


def test_parameters_that_were_never_trained_have_fresh_state() -> None:
    net, cell = TWINS["Linear"].build("torch", 0), TWINS["Linear"].build("mindspore", 0)
    adam, twin = optimizer("torch", "Adam", net), ms.nn.Adam(cell.trainable_params())
    net[2].weight.requires_grad_(False)
    TWINS["Linear"].train(net, adam, 2)
    state = carried(hs.get_optim_state_dict(net, adam, options=READ), "mindspore")
    assert "2.weight" not in state["state"]
    with pytest.warns(UserWarning, match="cleared"):
        hs.set_optim_state_dict(cell, twin, state, options=WRITE)
    assert not twin.moment1[2].asnumpy().any()
    assert twin.moment1[1].asnumpy().any()
    assert 2 == int(twin.global_step.asnumpy()[0])


@pytest.mark.parametrize(
    ("kind", "make", "counter", "count"),
    [
        ("Adam amsgrad", lambda p: mint.optim.Adam(p, amsgrad=True), "state_step", 2),
        ("AdamW", mint.optim.AdamW, "state_step", 1),
        ("SGD", lambda p: mint.optim.SGD(p, lr=0.5, momentum=0.5), "step_t", 1),
    ],
)
def test_mint_takes_and_gives_back_what_pytorch_trained(kind: str, make: Any, counter: str, count: int) -> None:
    """These do not train on CPU. AdamW counts from -1; SGD must know that the buffer is in use."""
    twin = TWINS["Linear"]
    net, cell = twin.build("torch", 0), twin.build("mindspore", 0)
    trained, fresh = optimizer("torch", kind, net), make(cell.trainable_params())
    twin.train(net, trained, 2)
    state = read(net, trained)
    write(cell, fresh, state)
    assert count == int(getattr(fresh, counter))
    arrived = read(cell, fresh)
    assert bits(state[1]["state"]) == bits(arrived[1]["state"])
    group = arrived[1]["param_groups"][0]
    assert {"lr", "weight_decay"} < {
        key for key, value in state[1]["param_groups"][0].items() if group.get(key) == value
    }
    if kind == "SGD":
        assert 0.1 == fresh.param_groups[0]["lr_float"]


def test_bfloat16_goes_over_to_the_bit() -> None:
    net, cell = TWINS["Linear"].build("torch", 0).bfloat16(), TWINS["Linear"].build("mindspore", 1)
    for parameter in cell.get_parameters():
        parameter.set_dtype(ms.bfloat16)
    state = hs.get_model_state_dict(net, options=READ)
    hs.set_model_state_dict(cell, carried(state, "mindspore"), options=WRITE)
    assert bits(state) == bits(hs.get_model_state_dict(cell, options=READ))
