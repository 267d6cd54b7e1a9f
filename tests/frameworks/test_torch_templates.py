"""Load templates with PyTorch's own checkpoint library: written on four ranks, read on other meshes (S37)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch_nets import Net, Tied, assert_same, frozen_copy, snapshot, train
from torch_optimizers import CONFIGS, make, model_for

import hyperstate as hs
from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_torch_templates.py")
ROUTES = [
    ("fsdp", 4, "hsdp", False, True),
    ("fsdp", 2, "fsdp", False, False),
    ("fsdp", 2, "tp", True, True),
    ("hsdp", 4, "fsdp_tp", True, False),
    ("fsdp_tp", 4, "fsdp", False, True),
    ("fsdp_tp", 2, "plain", True, True),
]


@pytest.fixture
def pools(pool2: Pool, pool4: Pool) -> dict[int, Pool]:
    return {2: pool2, 4: pool4}


@pytest.mark.parametrize(("kind", "world", "target", "flat", "by_path"), ROUTES)
def test_s37_a_fresh_optimizer_on_another_mesh_goes_on_where_the_old_one_was(
    pools: dict[int, Pool], tmp_path: Path, kind: str, world: int, target: str, flat: bool, by_path: bool
) -> None:
    folder = str(tmp_path / "checkpoint")
    pools[4].run(BODIES, "saved", kind=kind, name="groups", flat=flat, folder=folder)
    pools[world].run(BODIES, "resumed", kind=target, name="groups", flat=flat, by_path=by_path, folder=folder)


@pytest.mark.parametrize("name", ["local", "adam_amsgrad", "sgd", "asgd", "adam_tensor_lr"])
def test_s37_holds_for_any_state_an_optimizer_keeps(pools: dict[int, Pool], tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / "checkpoint")
    pools[4].run(BODIES, "saved", kind="fsdp", name=name, flat=False, folder=folder)
    pools[4].run(BODIES, "resumed", kind="hsdp", name=name, flat=False, by_path=True, folder=folder)


@pytest.mark.parametrize("body", ["factored", "whole", "sharded_safetensors", "stages"])
def test_on_four_ranks(pool4: Pool, tmp_path: Path, body: str) -> None:
    pool4.run(BODIES, body, folder=str(tmp_path / "checkpoint"))


# -- one process ---------------------------------------------------------------------------------------


def trained(seed: int = 0, lr: float = 0.01, groups: int = 2) -> tuple[Net, torch.optim.Adam]:
    model = Net(seed)
    params = list(model.parameters())
    parts = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}] if groups == 2 else params
    optimizer = torch.optim.Adam(parts, lr=lr)
    train(model, optimizer, 2, first=seed * 10)
    return model, optimizer


def saved(folder: Path, state_dict: dict[str, Any]) -> str:
    dcp.save(state_dict, checkpoint_id=folder)
    return str(folder)


@pytest.mark.parametrize("flat", [False, True])
def test_our_reader_of_a_path_finds_what_pytorchs_reader_finds(tmp_path: Path, flat: bool) -> None:
    model, optimizer = trained()
    state = hs.get_optim_state_dict(model, optimizer, options=hs.StateDictOptions(flatten_optimizer_state_dict=flat))
    folder = saved(tmp_path / "a", {**hs.get_model_state_dict(model), **state})
    target, fresh = Net(1), make("adam", Net(1))
    fresh = torch.optim.Adam([{"params": list(target.parameters())[:2]}, {"params": list(target.parameters())[2:]}])
    for build in (
        lambda reader: hs.build_model_load_template(target, reader),
        lambda reader: hs.build_optim_load_template(target, fresh, reader),
    ):
        expected = build(dcp.FileSystemReader(folder))
        assert expected
        for reader in (folder, Path(folder), Path(folder, ".metadata")):
            assert frozen_copy(expected) == frozen_copy(build(reader))


def test_building_a_template_changes_nothing_and_shares_nothing(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = saved(tmp_path / "a", {**hs.get_model_state_dict(model), **hs.get_optim_state_dict(model, optimizer)})
    before = snapshot(model, optimizer)
    weights = hs.build_model_load_template(model, folder)
    state = hs.build_optim_load_template(model, optimizer, folder)
    for value in [*weights.values(), *(value for slots in state["state"].values() for value in slots.values())]:
        assert not value.any()
        value.fill_(1)
    state["param_groups"][0]["params"].clear()
    state["param_groups"][0]["lr"] = 9.0
    assert_same(before, snapshot(model, optimizer))


def test_fields_show_the_present_values_until_the_load_replaces_them(tmp_path: Path) -> None:
    model, optimizer = trained()
    folder = saved(tmp_path / "a", hs.get_optim_state_dict(model, optimizer))
    target, fresh = trained(1, lr=0.5)
    template = hs.build_optim_load_template(target, fresh, folder)
    assert [0.5, 0.5] == [group["lr"] for group in template["param_groups"]]
    assert [["first.weight", "first.bias"], 4] == [
        template["param_groups"][0]["params"],
        len(template["param_groups"][1]["params"]),
    ]
    dcp.load(template, checkpoint_id=folder)
    assert [0.01, 0.01] == [group["lr"] for group in template["param_groups"]]


def test_a_dict_inside_a_dict_is_found_by_its_prefix(tmp_path: Path) -> None:
    model, optimizer = trained()
    both = dict(zip(("model", "optim"), hs.get_state_dict(model, optimizer), strict=True))
    folder = saved(tmp_path / "a", both)
    target, fresh = trained(1, lr=0.5)
    fresh.state.clear()
    with pytest.raises(hs.InvalidStateDictError, match=r"none of the model's 9 names.*prefix="):
        hs.build_model_load_template(target, folder)
    with pytest.raises(hs.InvalidStateDictError, match=r"no optimizer state.*prefix="):
        hs.build_optim_load_template(target, fresh, folder)
    room = {
        "model": hs.build_model_load_template(target, folder, prefix="model."),
        "optim": hs.build_optim_load_template(target, fresh, folder, prefix="optim."),
    }
    dcp.load(room, checkpoint_id=folder)
    hs.set_state_dict(target, fresh, model_state_dict=room["model"], optim_state_dict=room["optim"])
    assert_same(snapshot(model, optimizer), snapshot(target, fresh))


def test_nested_state_comes_back_nested(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    value = {"a": torch.ones(2), "list": [torch.ones(1), 3], "deep": {"b": torch.arange(3), "c": (1, None)}, "n": 4}
    optimizer.state[model.weight] = {"tree": value, "dotted.key": torch.ones(2), "plain": 1.5}
    folder = saved(tmp_path / "a", hs.get_optim_state_dict(model, optimizer))
    template = hs.build_optim_load_template(model, torch.optim.SGD(model.parameters(), lr=0.1), folder)
    dcp.load(template, checkpoint_id=folder)
    assert frozen_copy(dict(optimizer.state[model.weight])) == frozen_copy(template["state"]["weight"])


def test_extra_state_and_its_parts_are_part_of_a_models_template(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        seen: Any = ()

        def get_extra_state(self) -> Any:
            return self.seen

        def set_extra_state(self, state: Any) -> None:
            self.seen = state

    for number, seen in enumerate(((1, "two"), {"a": torch.ones(2), "n": 3})):
        model, target = Counting(2, 2), Counting(2, 2)
        model.seen = seen
        folder = saved(tmp_path / str(number), hs.get_model_state_dict(model))
        template = hs.build_model_load_template(target, folder)
        dcp.load(template, checkpoint_id=folder)
        hs.set_model_state_dict(target, template)
        assert frozen_copy(seen) == frozen_copy(target.seen)


def test_tied_parameters_are_found_under_each_name(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    weights, state = hs.get_state_dict(model, optimizer)
    state["state"]["head.weight"] = state["state"].pop("embed.weight")
    folder = saved(tmp_path / "a", {**weights, **state})
    target = Tied(1)
    assert ["embed.weight", "head.weight"] == sorted(hs.build_model_load_template(target, folder))
    template = hs.build_optim_load_template(target, torch.optim.Adam(target.parameters()), folder)
    assert ["head.weight"] == list(template["state"])
    assert (5, 3) == template["state"]["head.weight"]["exp_avg"].shape


def test_saved_dtypes_are_kept_and_shapes_of_a_model_must_fit(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    other = {"weight": torch.ones(3, 2, dtype=torch.bfloat16), "bias": torch.ones(3, dtype=torch.float64)}
    template = hs.build_model_load_template(model, saved(tmp_path / "a", other))
    assert {"weight": torch.bfloat16, "bias": torch.float64} == {fqn: value.dtype for fqn, value in template.items()}
    folder = saved(tmp_path / "b", {"weight": torch.ones(4, 2), "bias": torch.ones(1)})
    with pytest.raises(hs.IncompatibleStateError, match=r"'weight' was saved with shape \[4, 2\].*\[3, 2\].*'bias'"):
        hs.build_model_load_template(model, folder)


def test_a_meta_model_gets_a_template_on_the_host(tmp_path: Path) -> None:
    model, optimizer = trained(groups=1)
    folder = saved(tmp_path / "a", {**hs.get_model_state_dict(model), **hs.get_optim_state_dict(model, optimizer)})
    with torch.device("meta"):
        target = Net(1)
    template = hs.build_model_load_template(target, folder)
    assert {"cpu"} == {value.device.type for value in template.values()}
    state = hs.build_optim_load_template(target, torch.optim.Adam(target.parameters()), folder)
    assert {"cpu"} == {value.device.type for slots in state["state"].values() for value in slots.values()}


def test_a_compiled_model_has_the_names_of_the_model_inside(tmp_path: Path) -> None:
    model, _ = trained()
    folder = saved(tmp_path / "a", hs.get_model_state_dict(model))
    assert list(model.state_dict()) == list(hs.build_model_load_template(torch.compile(Net(1)), folder))


# -- readers of other kinds ----------------------------------------------------------------------------


def tensor(dtype: Any, *size: int) -> Any:
    """The metadata of a tensor, by structure alone."""
    return SimpleNamespace(properties=SimpleNamespace(dtype=dtype), size=size, chunks=[])


BYTES = SimpleNamespace()


class Hyper:
    """Has what HyperParallel's storage readers have."""

    def __init__(self, entries: dict[str, Any], rank: int | None = None) -> None:
        self.entries, self.rank = entries, rank

    def load_metadata(self, **kwargs: Any) -> Any:
        if kwargs.get("rank") != self.rank:
            raise FileNotFoundError(".metadata")
        return SimpleNamespace(state_dict_metadata=self.entries, planner_data=None)


def linear() -> tuple[nn.Linear, torch.optim.Adam]:
    model = nn.Linear(2, 3)
    return model, torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.25)


@pytest.mark.parametrize("rank", [None, 0])
def test_hyperparallels_metadata_and_dtype_names(rank: int | None) -> None:
    entries = {
        "state.weight.exp_avg": tensor("torch.bfloat16", 3, 2),
        "state.weight.step": tensor("Float32"),
        "state.bias.exp_avg": tensor("BFloat16", 3),
        "param_groups.0.lr": BYTES,
        "param_groups.0.betas": BYTES,
        "param_groups.1.lr": tensor("Float64"),
        "state.other.exp_avg": tensor("who knows", 9),
    }
    template = hs.build_optim_load_template(*linear(), Hyper(entries, rank))
    expected = {
        "state": {
            "weight": {"exp_avg": torch.zeros(3, 2, dtype=torch.bfloat16), "step": torch.zeros(())},
            "bias": {"exp_avg": torch.zeros(3, dtype=torch.bfloat16)},
        },
        "param_groups": [
            {"params": ["weight"], "lr": 0.25, "betas": (0.9, 0.999)},
            {"params": ["bias"], "lr": torch.zeros((), dtype=torch.float64)},
        ],
    }
    assert frozen_copy(expected) == frozen_copy(template)


def test_a_reader_that_finds_nothing_says_so_itself() -> None:
    with pytest.raises(FileNotFoundError, match="metadata"):
        hs.build_optim_load_template(*linear(), Hyper({}, 7))


@pytest.mark.parametrize("prefix", ["param_group", "param_groups"])
def test_flat_group_fields_under_both_prefixes(prefix: str) -> None:
    entries = {"state.weight.step": tensor("torch.float32"), f"{prefix}.bias.lr": BYTES, f"{prefix}.gone.lr": BYTES}
    template = hs.build_optim_load_template(*linear(), Hyper(entries))
    assert {"state.weight.step": torch.tensor(0.0), f"{prefix}.bias.lr": 0.25} == template


@pytest.mark.parametrize("flat", [False, True])
def test_without_fields_the_option_chooses_the_form(flat: bool) -> None:
    options = hs.StateDictOptions(flatten_optimizer_state_dict=flat)
    template = hs.build_optim_load_template(*linear(), Hyper({"state.weight.step": tensor("Float32")}), options=options)
    step = torch.tensor(0.0)
    nested = {"state": {"weight": {"step": step}}, "param_groups": []}
    assert ({"state.weight.step": step} if flat else nested) == template


@pytest.mark.parametrize("dtype", ["torch.nn", "float", "Tensor", "torch.float33", "", None])
def test_an_unknown_dtype_is_an_error_that_names_the_entry(dtype: Any) -> None:
    entries = {"state.weight.exp_avg": tensor(dtype, 3, 2), "state.bias.exp_avg": tensor("torch.float32", 3)}
    with pytest.raises(hs.UnsupportedConfigurationError, match=r"'state.weight.exp_avg': unknown dtype"):
        hs.build_optim_load_template(*linear(), Hyper(entries))


def test_a_group_that_the_target_lacks_is_unexpected() -> None:
    entries = {"state.weight.step": tensor("Float32"), "param_groups.0.lr": BYTES, "param_groups.2.lr": BYTES}
    with pytest.raises(hs.IncompatibleStateError, match=r"unexpected: .* 2 param groups.*param_groups\.2\.lr"):
        hs.build_optim_load_template(*linear(), Hyper(entries))
    with pytest.warns(UserWarning, match=r"param_groups\.2\.lr; left out"):
        template = hs.build_optim_load_template(*linear(), Hyper(entries), options=hs.StateDictOptions(strict=False))
    assert [{"params": ["weight"], "lr": 0.25}] == template["param_groups"]


def test_a_list_of_parameters_named_by_numbers_is_no_list_of_groups(tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
    for number, flat in enumerate((True, False)):
        optimizer = torch.optim.Adam([{"params": [model[0]], "lr": 0.1}, {"params": [model[1]], "lr": 0.2}])
        for param in model:
            param.grad = torch.ones_like(param)
        optimizer.step()
        options = hs.StateDictOptions(flatten_optimizer_state_dict=flat)
        folder = saved(tmp_path / str(number), hs.get_optim_state_dict(model, optimizer, options=options))
        fresh = torch.optim.Adam([{"params": [param]} for param in model], lr=0.5)
        template = hs.build_optim_load_template(model, fresh, folder)
        assert flat == ("param_groups" not in template)
        dcp.load(template, checkpoint_id=folder)
        hs.set_optim_state_dict(model, fresh, template)
        assert [0.1, 0.2] == [group["lr"] for group in fresh.param_groups]


def refused(error: type[Exception], reader: Any, options: Any = None) -> None:
    model, _ = linear()
    with pytest.raises(error):
        hs.build_model_load_template(model, reader, options=options)


def test_what_is_no_reader_or_no_metadata_is_refused() -> None:
    refused(hs.OptionTypeError, object())
    refused(hs.OptionTypeError, None)
    refused(hs.OptionTypeError, Hyper({}), {"strict": True})
    refused(hs.CheckpointError, Hyper({3: BYTES}))
    refused(hs.CheckpointError, Hyper({"weight": tensor("Float32", -1)}))
    refused(hs.CheckpointError, SimpleNamespace(read_metadata=lambda: 3))
    with pytest.raises(hs.InvalidStateDictError):
        hs.build_optim_load_template(*linear(), Hyper({"weight": BYTES}))


def test_a_chained_optimizer_is_refused() -> None:
    model, optimizer = linear()
    chained = type("ChainedOptimizer", (), {"param_groups": optimizer.param_groups, "state": {}})()
    with pytest.raises(hs.UnsupportedConfigurationError, match=r"own state_dict\(\)"):
        hs.build_optim_load_template(model, chained, Hyper({}))
    with pytest.raises(hs.UnsupportedConfigurationError, match=r"own state_dict\(\)"):
        hs.infer_state_keys(chained)


def test_hugging_face_folders(tmp_path: Path) -> None:
    model = Net()
    weights = {fqn: value.contiguous() for fqn, value in model.state_dict().items()}
    dcp.save(weights, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "one")))
    split = {fqn: 1 + number % 2 for number, fqn in enumerate(weights)}
    dcp.save(weights, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "two"), split))
    save_file(weights, tmp_path / "model.safetensors")
    assert (tmp_path / "two" / "model.safetensors.index.json").is_file()
    for place in (tmp_path / "one", tmp_path / "two", tmp_path / "model.safetensors", tmp_path):
        template = hs.build_model_load_template(Net(1), place)
        expected = {fqn: (value.shape, value.dtype) for fqn, value in weights.items()}
        assert expected == {fqn: (value.shape, value.dtype) for fqn, value in template.items()}


def test_checkpoints_of_this_library_tell_more_than_others(tmp_path: Path) -> None:
    """Tensors are zeros as in any template; values that stand in the manifest are there already."""
    model, optimizer = trained()
    optimizer.state[model.second.bias]["notes"] = {"a": (1, None), 3: [torch.ones(2)]}
    optimizer.param_groups[0]["extra"] = [1, 2]
    hs.save(tmp_path / "own", model, optimizer)
    target, fresh = trained(1, lr=0.5)
    fresh.state.clear()
    for place in (tmp_path / "own", str(tmp_path / "own")):
        weights = hs.build_model_load_template(target, place)
        assert {fqn: value.shape for fqn, value in model.state_dict().items()} == {
            k: v.shape for k, v in weights.items()
        }
        state = hs.build_optim_load_template(target, fresh, place)
        assert not state["state"]["first.weight"]["exp_avg"].any()
        assert 2 == state["state"]["first.weight"]["step"]
        assert frozen_copy({"a": (1, None), 3: [torch.zeros(2)]}) == frozen_copy(state["state"]["second.bias"]["notes"])
        saved = hs.get_optim_state_dict(model, optimizer)
        assert frozen_copy(saved["param_groups"]) == frozen_copy(state["param_groups"])
        assert {fqn: set(slots) for fqn, slots in saved["state"].items()} == {
            fqn: set(slots) for fqn, slots in state["state"].items()
        }


# -- state keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_inferred_state_keys_are_those_of_the_first_step(name: str) -> None:
    model = model_for(name, 0)
    optimizer = make(name, model)
    keys = hs.infer_state_keys(optimizer)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert {key for slots in optimizer.state.values() for key in slots} == set(keys)
    assert len(keys) == len(set(keys))


def test_state_keys_of_an_unknown_class_are_none_and_a_warning() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    class Changed(torch.optim.Adam):
        def step(self, closure: Any = None) -> None: ...

    class Named(torch.optim.Adam):
        """Adam, under another name."""

    model = nn.Linear(2, 2)
    for kind in (Own, Changed):
        with pytest.warns(UserWarning, match=rf"{kind.__name__} are not known"):
            assert [] == hs.infer_state_keys(kind(model.parameters()))
    assert ["step", "exp_avg", "exp_avg_sq"] == hs.infer_state_keys(Named(model.parameters()))


def test_state_keys_of_several_optimizers_and_groups_are_joined() -> None:
    model = Net()
    one, *rest = model.parameters()
    sgd = torch.optim.SGD([{"params": [one]}, {"params": rest[:1], "momentum": 0.9}], lr=0.1)
    adam = torch.optim.Adam([{"params": rest[1:2]}, {"params": rest[2:], "amsgrad": True}])
    assert ["momentum_buffer", "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"] == hs.infer_state_keys([sgd, adam])
