"""`hyperstate.compat.dcp` beside the module of PyTorch's that it stands for, on plain and on sharded models."""

from __future__ import annotations

import inspect
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as theirs
from torch import nn
from torch_nets import Net, assert_same, cloned, frozen_copy, snapshot, train, without_groups

import hyperstate.compat.dcp as ours
from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_torch_compat.py")
FUNCTIONS = [name for name in theirs.__all__ if inspect.isfunction(getattr(theirs, name))]
PRIVATE = ["_patch_model_state_dict", "_patch_optimizer_state_dict"]
OPTIONS = [
    {},
    {"full_state_dict": True},
    {"cpu_offload": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
    {"ignore_frozen_params": True},
    {"flatten_optimizer_state_dict": True, "cpu_offload": True, "ignore_frozen_params": True},
]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in found]


def test_every_public_name_is_there() -> None:
    assert sorted(theirs.__all__) == sorted(ours.__all__)


@pytest.mark.parametrize("name", [*FUNCTIONS, *PRIVATE, "StateDictOptions"])
def test_signatures_are_pytorchs(name: str) -> None:
    assert parameters(getattr(theirs, name)) == parameters(getattr(ours, name))


def trained(seed: int = 0, lr: float = 0.01) -> tuple[Net, torch.optim.Adam]:
    model = Net(seed)
    model.second.bias.requires_grad_(False)
    params = list(model.parameters())
    optimizer = torch.optim.Adam([{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}], lr=lr)
    train(model, optimizer, 2, first=seed * 10)
    return model, optimizer


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_getters_give_what_pytorchs_give(options: dict[str, bool]) -> None:
    model, optimizer = trained()
    chosen = theirs.StateDictOptions(**options)
    for name, arguments in (
        ("get_model_state_dict", (model,)),
        ("get_optimizer_state_dict", (model, optimizer)),
        ("get_state_dict", (model, [optimizer])),
    ):
        expected = getattr(theirs, name)(*arguments, options=chosen)
        assert plain(expected) == plain(getattr(ours, name)(*arguments, options=chosen))
        assert plain(expected) == plain(getattr(ours, name)(*arguments, options=ours.StateDictOptions(**options)))


def plain(value: Any) -> Any:
    """Comparable, and without the class of the outer dict: PyTorch's default form is an OrderedDict."""
    return [frozen_copy(dict(one)) for one in (value if isinstance(value, tuple) else [value])]


@pytest.mark.parametrize("options", [o for o in OPTIONS if "ignore_frozen_params" not in o], ids=str)
def test_each_reads_what_the_other_wrote(options: dict[str, bool]) -> None:
    model, optimizer = trained()
    for getter, setter in product((ours, theirs), repeat=2):
        chosen = theirs.StateDictOptions(**options)
        weights, state = getter.get_state_dict(model, optimizer, options=chosen)
        target, fresh = trained(1, lr=0.5)
        if "flatten_optimizer_state_dict" in options and setter is theirs:
            chosen = theirs.StateDictOptions()  # PyTorch fails with the flag on; it recognises the form without
        result = setter.set_state_dict(
            target, fresh, model_state_dict=cloned(weights), optim_state_dict=cloned(state), options=chosen
        )
        missing, unexpected = result
        assert ([], []) == (missing, unexpected)
        what = without_groups if setter is theirs else dict
        assert_same(what(snapshot(model, optimizer)), what(snapshot(target, fresh)))
        assert 0.01 == fresh.param_groups[0]["lr"]


def test_the_report_is_pytorchs() -> None:
    target = Net()
    weights = cloned(Net(1).state_dict())
    del weights["first.bias"]
    weights["more"] = torch.zeros(1)
    options = theirs.StateDictOptions(strict=False)
    expected = theirs.set_model_state_dict(target, dict(weights), options=options)
    found = ours.set_model_state_dict(target, weights, options=options)
    assert tuple(expected) == tuple(found)
    assert (expected.missing_keys, expected.unexpected_keys) == (found.missing_keys, found.unexpected_keys)
    model, optimizer = trained()
    assert ours.set_optimizer_state_dict(model, optimizer, ours.get_optimizer_state_dict(model, optimizer)) is None


def test_flat_dicts_have_pytorchs_prefix() -> None:
    model, optimizer = trained()
    options = ours.StateDictOptions(flatten_optimizer_state_dict=True)
    flat = ours.get_optimizer_state_dict(model, optimizer, options=options)
    assert {"state", "param_groups"} == {key.split(".")[0] for key in flat}
    assert 0.01 == flat["param_groups.first.weight.lr"]


# -- deprecated, but working ---------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [True, False])
def test_submodules_warn_and_work_as_there(keep: bool) -> None:
    model, optimizer = trained()
    options = theirs.StateDictOptions(keep_submodule_prefixes=keep)
    found = []
    for module in (theirs, ours):
        with pytest.warns(FutureWarning, match="submodules"):
            weights = module.get_model_state_dict(model, submodules={model.first}, options=options)
        with pytest.warns(FutureWarning, match="submodules"):
            state = module.get_optimizer_state_dict(model, optimizer, submodules={model.first}, options=options)
        with pytest.warns(FutureWarning, match="submodules"):
            both = module.get_state_dict(model, optimizer, submodules={model.first}, options=options)
        found.append([plain(weights), plain(state), plain(both)])
    assert found[0] == found[1]


def test_no_submodules_are_all_of_them_and_warn_of_nothing() -> None:
    model, _ = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for submodules in (None, set()):
            assert 9 == len(ours.get_model_state_dict(model, submodules=submodules))


def test_state_dicts_by_module_warn_and_work_as_there() -> None:
    source = Net(3)
    parts = {"first": source.first, "norm": source.norm, "second": source.second}
    found = []
    for module in (theirs, ours):
        target = Net(1)
        given = {getattr(target, name): cloned(part.state_dict()) for name, part in parts.items()}
        with pytest.warns(FutureWarning, match="deprecated"):
            module.set_model_state_dict(target, given)
        found.append(snapshot(target))
    assert_same(snapshot(source), found[0])
    assert_same(found[0], found[1])


# -- patched methods -----------------------------------------------------------------------------------


@pytest.mark.parametrize("patching", [theirs, ours])
def test_patched_methods_do_not_recurse(patching: Any) -> None:
    model, optimizer = trained()
    expected = snapshot(model, optimizer)
    weights, state = map(cloned, ours.get_state_dict(model, optimizer))
    patching._patch_model_state_dict(model, options=patching.StateDictOptions(full_state_dict=True))
    patching._patch_optimizer_state_dict(model, optimizers=optimizer)
    assert plain(weights) == plain(model.state_dict())
    assert plain(state) == plain(optimizer.state_dict())
    assert plain(weights) == plain(ours.get_model_state_dict(model))
    assert plain((weights, state)) == plain(ours.get_state_dict(model, optimizer))
    train(model, optimizer, 1)
    ours.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert_same(expected, snapshot(model, optimizer))
    train(model, optimizer, 1)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert_same(expected, snapshot(model, optimizer))


def test_a_module_that_calls_compat_in_its_own_state_dict_is_left_alone() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {"net." + name: value for name, value in ours.get_model_state_dict(self.net).items()}

    assert ["net.weight", "net.bias"] == list(ours.get_model_state_dict(Wrapped()))


# -- sharded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sharded_getters_give_what_pytorchs_give(pool2: Pool, options: dict[str, bool]) -> None:
    pool2.run(BODIES, "getters", options=options)


@pytest.mark.parametrize("form", ["sharded", "full", "broadcast", "flat"])
def test_sharded_dicts_cross_over(pool2: Pool, form: str) -> None:
    pool2.run(BODIES, "crossing", form=form)


def test_a_checkpoint_of_pytorchs_library_goes_in_and_out(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(BODIES, "through_files", folder=str(tmp_path))


def test_a_dotted_state_key_is_refused_on_all_ranks(pool2: Pool) -> None:
    pool2.run(BODIES, "dotted")


@pytest.mark.parametrize("kind", ["Adam", "NAdam", "RMSprop", "SGD", "SGD without momentum"])
def test_a_fresh_optimizer_is_loaded_as_in_the_tutorial(pool2: Pool, tmp_path: Path, kind: str) -> None:
    pool2.run(BODIES, "a_fresh_optimizer_is_loaded_as_in_the_tutorial", folder=str(tmp_path / "c"), kind=kind)


def test_an_optimizer_of_an_unknown_class_says_how_to_load_it(pool2: Pool) -> None:
    pool2.run(BODIES, "an_unknown_class_says_how_to_load_it")
