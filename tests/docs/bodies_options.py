"""Rank bodies: the cells of docs/options.md that say that a field changes nothing there."""

from __future__ import annotations

import warnings
from typing import Any

import hyperstate as hs

NOT_DEFAULT = {
    "full_state_dict": True,
    "cpu_offload": True,
    "ignore_frozen_params": True,
    "broadcast_from_rank0": True,
    "flatten_optimizer_state_dict": True,
    "strict": False,
    "keep_submodule_prefixes": False,
}


def a_field_changes_nothing(kit: Any, called: str, field: str, folder: str) -> None:
    """Two calls of a function, one with the field at another value than the default, have the same effect."""
    base = {"full_state_dict": True} if field == "broadcast_from_rank0" else {}
    plain, other = (hs.StateDictOptions(**base, **more, names="neutral") for more in ({}, {field: NOT_DEFAULT[field]}))
    assert effect(kit, called, plain, f"{folder}/plain") == effect(kit, called, other, f"{folder}/other")


def effect(kit: Any, function: str, options: Any, folder: str) -> Any:
    model, optimizer = build(kit, 0)
    kit.train(model, optimizer, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if function.startswith("get_"):
            return got(kit, function, model, optimizer, options)
        if function.endswith("_template"):
            hs.save(folder, model, optimizer)
            return template(kit, function, folder, options)
        target, fresh = build(kit, 1)
        if function.startswith("set_"):
            put(kit, function, (model, optimizer), (target, fresh), options)
        else:
            hs.save(folder, model, optimizer, options=options if function == "save" else None)
            hs.load(folder, target, fresh, options=options if function == "load" else None)
    return contents(kit, target, fresh)


def build(kit: Any, seed: int) -> tuple[Any, Any]:
    """Sharded, and with a frozen parameter."""
    model = kit.shard(kit.model(seed), kit.mesh((kit.world,), ("dp",)))
    kit.freeze(model, "layers.1.bias")
    return model, kit.optimizer(model)


def got(kit: Any, function: str, model: Any, optimizer: Any, options: Any) -> Any:
    if function == "get_model_state_dict":
        return shown(kit, hs.get_model_state_dict(model, options=options))
    return shown(kit, getattr(hs, function)(model, optimizer, options=options))


def template(kit: Any, function: str, folder: str, options: Any) -> Any:
    target, fresh = build(kit, 1)
    if function == "build_model_load_template":
        return shown(kit, hs.build_model_load_template(target, folder, options=options))
    return shown(kit, hs.build_optim_load_template(target, fresh, folder, options=options))


def put(kit: Any, function: str, old: Any, new: Any, options: Any) -> None:
    whole = hs.StateDictOptions(full_state_dict=options.full_state_dict, names="neutral")
    model_dict, optim_dict = hs.get_state_dict(*old, options=whole)
    if function == "set_model_state_dict":
        hs.set_model_state_dict(new[0], model_dict, options=options)
    elif function == "set_optim_state_dict":
        hs.set_optim_state_dict(*new, optim_dict, options=options)
    else:
        hs.set_state_dict(*new, model_state_dict=model_dict, optim_state_dict=optim_dict, options=options)


def contents(kit: Any, model: Any, optimizer: Any) -> Any:
    named = kit.named(model)
    return shown(kit, named), [
        shown(kit, dict(kit.state(optimizer, p))) for g in kit.groups(optimizer) for p in g["params"]
    ]


def shown(kit: Any, value: Any) -> Any:
    """By content."""
    if kit.is_tensor(value):
        return kit.is_sharded(value), kit.content(value)
    if isinstance(value, dict):
        return {key: shown(kit, item) for key, item in value.items()}
    return [shown(kit, item) for item in value] if isinstance(value, (list, tuple)) else repr(value)
