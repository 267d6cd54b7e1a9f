"""Load templates (S37): what a fresh optimizer offers a checkpoint library to write into, from metadata alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from hyperstate import (
    IncompatibleStateError,
    InvalidStateDictError,
    OptionTypeError,
    StateDictOptions,
    UnsupportedConfigurationError,
    build_model_load_template,
    build_optim_load_template,
    flatten_optim_state_dict,
    get_model_state_dict,
    get_optim_state_dict,
    infer_state_keys,
    set_optim_state_dict,
)
from hyperstate.testing.cases.tools import (
    SHAPES,
    build,
    build_stepped,
    case,
    live,
    refused,
    shown,
    silent,
    state_of,
    warned,
)
from hyperstate.testing.kit import Kit

TOPOLOGIES = ("plain", "fsdp", "hsdp", "grid", "columns", "mix")


def tensor(dtype: str, *size: int) -> Any:
    """The metadata of a tensor."""
    return SimpleNamespace(properties=SimpleNamespace(dtype=dtype), size=size, chunks=[])


STORED_AS_BYTES = SimpleNamespace()


class Reader:
    """What PyTorch's storage readers can do, by structure alone."""

    def __init__(self, entries: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        self._found = SimpleNamespace(state_dict_metadata=entries, planner_data=paths)

    def read_metadata(self) -> Any:
        return self._found


class RankReader(Reader):
    """What HyperParallel's can do; there is a file for this rank alone."""

    read_metadata = None  # type: ignore[assignment]  # it has no such method

    def __init__(self, entries: Mapping[str, Any], rank: int) -> None:
        super().__init__(entries)
        self._rank = rank

    def load_metadata(self, rank: int | None = None) -> Any:
        if rank != self._rank:
            raise FileNotFoundError(".metadata")
        return self._found


def stored(kit: Kit, value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Metadata of a nested dict by path, as a checkpoint library flattens it."""
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in value):
        items = list(enumerate(value))
    elif kit.is_tensor(value):
        return {path: tensor(kit.content(value).dtype, *value.shape)}
    else:
        return {path: STORED_AS_BYTES}
    return {found: entry for step, item in items for found, entry in stored(kit, item, (*path, step)).items()}


def reader_of(kit: Kit, value: Mapping[str, Any], recorded: bool = True) -> Reader:
    """A reader of a checkpoint of `value`; perhaps its writer recorded the paths."""
    entries = stored(kit, value)
    keys = {path: ".".join(map(str, path)) for path in entries}
    paths = {key: path for path, key in keys.items()} if recorded else None
    return Reader({keys[path]: entry for path, entry in entries.items()}, paths)


def fresh(kit: Kit, topology: str, kind: str = "adam", lr: float = 0.5) -> tuple[Any, Any]:
    """A model and an optimizer that never stepped."""
    model = build(kit, topology, start=7.0)
    return model, kit.optimizer(model, kind, lr=lr)


def kinds(kit: Kit, value: Any) -> Any:
    """A tree with (kind, dtype, local shape, global shape) for each tensor; other values as they are shown."""
    if isinstance(value, Mapping):
        return {key: kinds(kit, item) for key, item in value.items()}
    if not kit.is_tensor(value):
        return shown(kit, value)
    content = kit.content(value)
    return ("sharded" if kit.is_sharded(value) else "plain", content.dtype, content.shape, tuple(value.shape))


def all_zero(kit: Kit, value: Any) -> bool:
    """Whether every tensor in a tree is zero on this rank."""
    if isinstance(value, Mapping):
        return all(all_zero(kit, item) for item in value.values())
    return not kit.is_tensor(value) or not int(kit.content(value).data or "0", 16)


@case(1, topology=("plain",))
@case(4, topology=TOPOLOGIES)
def a_fresh_optimizer_offers_every_saved_entry(kit: Kit, topology: str) -> None:
    model, optimizer = build_stepped(kit, topology)
    saved = get_optim_state_dict(model, optimizer)
    target, new = fresh(kit, topology)
    before = live(kit, target, new)
    for recorded in (True, False):
        template = build_optim_load_template(target, new, reader_of(kit, saved, recorded))
        assert kinds(kit, saved["state"]) == kinds(kit, template["state"])
        assert all_zero(kit, template["state"])
        assert [0.5] == [group["lr"] for group in template["param_groups"]]
        assert [set(group) for group in saved["param_groups"]] == [set(group) for group in template["param_groups"]]
    assert before == live(kit, target, new)


@case(1, topology=("plain",))
@case(4, topology=TOPOLOGIES)
def a_model_offers_every_saved_entry(kit: Kit, topology: str) -> None:
    saved = get_model_state_dict(build(kit, topology))
    template = build_model_load_template(build(kit, topology, start=7.0), reader_of(kit, saved))
    assert kinds(kit, saved) == kinds(kit, template)
    assert all_zero(kit, template)


@case(4, source=("plain", "fsdp"), target=("hsdp", "grid"), kind=("adam", "local"))
def the_layout_is_the_targets_and_the_setter_takes_it(kit: Kit, source: str, target: str, kind: str) -> None:
    """Written on one mesh, to be read on another; set, the state is what the target itself would keep."""
    options = StateDictOptions(full_state_dict=True)
    saved = get_optim_state_dict(*build_stepped(kit, source, kind), options=options)
    stepped_model, stepped = build_stepped(kit, target, kind)
    wanted = {fqn: kinds(kit, state_of(kit, stepped_model, stepped, fqn)) for fqn in SHAPES}
    model, new = fresh(kit, target, kind)
    template = build_optim_load_template(model, new, reader_of(kit, saved))
    assert set(SHAPES) == set(template["state"])
    for slots in template["state"].values():
        slots.update(dict.fromkeys([key for key, value in slots.items() if not kit.is_tensor(value)], 2))
    set_optim_state_dict(model, new, template, state_form="local" if kind == "local" else None)
    assert wanted == {fqn: kinds(kit, state_of(kit, model, new, fqn)) for fqn in SHAPES}


@case(2, topology=("plain", "fsdp"))
def flat_checkpoints_give_flat_templates(kit: Kit, topology: str) -> None:
    saved = flatten_optim_state_dict(get_optim_state_dict(*build_stepped(kit, topology)))
    model, new = fresh(kit, topology)
    entries = {key: value for (key,), value in stored(kit, saved).items()}
    template = build_optim_load_template(model, new, Reader(entries))
    assert set(saved) == set(template)
    assert 0.5 == template["param_group.odd.bias.lr"]
    assert kinds(kit, saved["state.odd.weight.exp_avg"]) == kinds(kit, template["state.odd.weight.exp_avg"])


@case(2, full=(False, True))
def options_choose_whole_tensors_on_the_host(kit: Kit, full: bool) -> None:
    saved = get_optim_state_dict(*build_stepped(kit, "fsdp"))
    options = StateDictOptions(full_state_dict=full, cpu_offload=True)
    template = build_optim_load_template(*fresh(kit, "fsdp"), reader_of(kit, saved), options=options)
    moment = template["state"]["dense.weight"]["exp_avg"]
    assert full != kit.is_sharded(moment)
    assert SHAPES["dense.weight"] == tuple(moment.shape)
    assert kit.on_host(moment)


@case(2)
def saved_shapes_and_dtypes_count_not_the_parameters(kit: Kit) -> None:
    entries = {
        "state.dense.weight.m": tensor("Float64", 8, 6),
        "state.dense.weight.code": tensor("torch.uint8", 3, 17),
        "state.dense.weight.step": tensor("torch.int64"),
        "state.dense.bias.count": tensor("Float32", 1),
        "param_groups.0.lr": tensor("Float32"),
    }
    template = build_optim_load_template(*fresh(kit, "fsdp", "custom"), Reader(entries))
    assert {
        "dense.weight": {
            "m": ("sharded", "float64", (4, 6), (8, 6)),
            "code": ("plain", "uint8", (3, 17), (3, 17)),
            "step": ("plain", "int64", (), ()),
        },
        "dense.bias": {"count": ("plain", "float32", (1,), (1,))},
    } == kinds(kit, template["state"])
    assert ("plain", "float32", (), ()) == kinds(kit, template["param_groups"][0]["lr"])


@case(2)
def what_this_rank_lacks_is_left_out(kit: Kit) -> None:
    entries = {
        "state.dense.weight.m": tensor("Float32", 8, 6),
        "state.layers.9.weight.m": tensor("nobody knows", 8, 6),
        "param_group.dense.weight.lr": STORED_AS_BYTES,
        "param_group.layers.9.weight.lr": STORED_AS_BYTES,
        "dense.weight": tensor("Float32", 8, 6),
        "note": STORED_AS_BYTES,
    }
    model, new = fresh(kit, "fsdp")
    template = build_optim_load_template(model, new, Reader(entries))
    assert {"state.dense.weight.m", "param_group.dense.weight.lr"} == set(template)
    assert ["dense.weight"] == list(build_model_load_template(model, Reader(entries)))


@case(2)
def a_reader_without_a_common_file_is_asked_for_this_rank(kit: Kit) -> None:
    model, new = fresh(kit, "fsdp")
    reader = RankReader({"state.dense.weight.m": tensor("Float32", 8, 6)}, kit.rank)
    template = build_optim_load_template(model, new, reader)
    assert ["dense.weight"] == list(template["state"])
    refused(FileNotFoundError, build_optim_load_template, model, new, RankReader({}, 99))


@case(1)
def what_can_not_be_offered_is_refused(kit: Kit) -> None:
    model, new = fresh(kit, "plain")
    dtype = Reader({"state.dense.weight.m": tensor("Float33", 8, 6)})
    text = refused(UnsupportedConfigurationError, build_optim_load_template, model, new, dtype)
    assert "'state.dense.weight.m'" in text and "'Float33'" in text
    group = Reader({"state.dense.weight.m": tensor("Float32", 8, 6), "param_groups.1.lr": STORED_AS_BYTES})
    assert "param_groups.1.lr" in refused(IncompatibleStateError, build_optim_load_template, model, new, group)
    with warned("param_groups.1.lr", "left out"):
        build_optim_load_template(model, new, group, options=StateDictOptions(strict=False))
    shape = Reader({"dense.weight": tensor("Float32", 6, 8)})
    assert "[6, 8]" in refused(IncompatibleStateError, build_model_load_template, model, shape)
    nothing = Reader({"x": STORED_AS_BYTES})
    refused(InvalidStateDictError, build_model_load_template, model, nothing)
    refused(InvalidStateDictError, build_optim_load_template, model, new, nothing)
    refused(OptionTypeError, build_model_load_template, model, object())
    chained = type("ChainedOptimizer", (), {"param_groups": kit.groups(new), "state": {}})()
    refused(UnsupportedConfigurationError, build_optim_load_template, model, chained, nothing)


@case(1, kind=("adam", "sgd", "momentum"))
def state_keys_are_those_of_the_first_step(kit: Kit, kind: str) -> None:
    model, new = fresh(kit, "plain", kind)
    with silent():
        keys = infer_state_keys(new)
    kit.fake_step(model, new)
    assert {key for fqn in SHAPES for key in state_of(kit, model, new, fqn)} == set(keys)


@case(1)
def state_keys_of_an_unknown_class_are_a_warning_and_none(kit: Kit) -> None:
    _, new = fresh(kit, "plain", "custom")
    with warned("are not known"):
        assert [] == infer_state_keys(new)
