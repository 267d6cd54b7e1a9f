"""The names and signatures of ``torch.distributed.checkpoint.state_dict``, carried out by hyperstate.

    from hyperstate.compat.dcp import StateDictOptions, get_state_dict, set_state_dict

Flat optimizer dicts use PyTorch's prefix ``param_groups.``. What behaves differently, and why, stands
in docs/differences.md. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from .. import api
from ..errors import OptionError
from ..flatten import flatten_optim_state_dict
from ..options import StateDictOptions as _Options
from ..options import read_options
from ..setters import IncompatibleKeys

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]


@dataclass
class StateDictOptions:
    """PyTorch's options with PyTorch's field names; checked when a function gets them, as there.

    ``dsd_fqn_modifiers`` is accepted at its default alone: another value raises `OptionError`.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"


def get_model_state_dict(
    model: Any, *, submodules: set[Any] | None = None, options: Any = None
) -> dict[str, Any]:
    """`hyperstate.get_model_state_dict`."""
    return api.get_model_state_dict(model, submodules=submodules, options=_checked(options))


def get_optimizer_state_dict(
    model: Any, optimizers: Any, *, submodules: set[Any] | None = None, options: Any = None
) -> dict[str, Any]:
    """`hyperstate.get_optim_state_dict`; with `submodules` only their parameters."""
    return _optim_form(model, submodules, options, partial(api.get_optim_state_dict, model, _one_or_list(optimizers)))


def get_state_dict(
    model: Any, optimizers: Any, *, submodules: set[Any] | None = None, options: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`hyperstate.get_state_dict`: the model's and the optimizer's dict."""
    found: list[dict[str, Any]] = []

    def both(*, options: Any) -> dict[str, Any]:
        model_dict, optim_dict = api.get_state_dict(
            model, _one_or_list(optimizers), submodules=submodules, options=options
        )
        found.append(model_dict)
        return optim_dict

    optim_dict = _optim_form(model, submodules, options, both)
    return found[0], optim_dict


def set_model_state_dict(
    model: Any, model_state_dict: Mapping[Any, Any], *, options: Any = None
) -> IncompatibleKeys:
    """`hyperstate.set_model_state_dict`; also takes PyTorch's deprecated ``{module: state dict}``."""
    return api.set_model_state_dict(model, _by_fqn(model, model_state_dict), options=_checked(options))


def set_optimizer_state_dict(
    model: Any, optimizers: Any, optim_state_dict: Mapping[str, Any], *, options: Any = None
) -> None:
    """`hyperstate.set_optim_state_dict`."""
    api.set_optim_state_dict(model, _one_or_list(optimizers), optim_state_dict, options=_checked(options))


def set_state_dict(
    model: Any,
    optimizers: Any,
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: Mapping[str, Any],
    options: Any = None,
) -> IncompatibleKeys:
    """`hyperstate.set_state_dict`: both or neither."""
    return api.set_state_dict(
        model,
        _one_or_list(optimizers),
        model_state_dict=_by_fqn(model, model_state_dict),
        optim_state_dict=optim_state_dict,
        options=_checked(options),
    )


def _patch_model_state_dict(model: Any, *, options: Any = None) -> None:
    """Make ``model.state_dict`` and ``model.load_state_dict`` go through hyperstate, as PyTorch's helper does."""
    model.state_dict = partial(get_model_state_dict, model, options=options)
    model.load_state_dict = lambda state_dict: set_model_state_dict(model, state_dict, options=options)


def _patch_optimizer_state_dict(model: Any, *, optimizers: Any, options: Any = None) -> None:
    """Make the optimizers' own ``state_dict`` and ``load_state_dict`` go through hyperstate."""
    for optimizer in _as_list(optimizers):
        optimizer.state_dict = partial(get_optimizer_state_dict, model, optimizers, options=options)
        optimizer.load_state_dict = partial(set_optimizer_state_dict, model, optimizers, options=options)


def _checked(options: Any) -> Any:
    if getattr(options, "dsd_fqn_modifiers", "_fqn_modifiers") != "_fqn_modifiers":
        raise OptionError("dsd_fqn_modifiers is not supported: state-dict hooks of modules are honoured as they are")
    return options


def _optim_form(
    model: Any, submodules: Iterable[Any] | None, options: Any, getter: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """The optimizer dict, cut to `submodules` and flattened with PyTorch's prefix."""
    wanted = read_options(_checked(options))
    nested = getter(options=_nested(wanted))
    if submodules is not None:
        prefixes = api.prefixes_of(model, submodules)
        nested = _only(nested, tuple(prefixes))
    return flatten_optim_state_dict(nested, dialect="torch") if wanted.flatten_optimizer_state_dict else nested


def _nested(options: _Options) -> _Options:
    names = [name for name in options.__dataclass_fields__ if name != "flatten_optimizer_state_dict"]
    return _Options(**{name: getattr(options, name) for name in names})


def _only(nested: dict[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    if not nested:
        return nested
    state = {fqn: slots for fqn, slots in nested["state"].items() if fqn.startswith(prefixes)}
    groups = [
        {**group, "params": [fqn for fqn in group["params"] if fqn.startswith(prefixes)]}
        for group in nested["param_groups"]
    ]
    return {**nested, "state": state, "param_groups": [group for group in groups if group["params"]]}


def _by_fqn(model: Any, state_dict: Mapping[Any, Any]) -> Mapping[str, Any]:
    if not state_dict or not all(isinstance(value, Mapping) and not isinstance(key, str)
                                 for key, value in state_dict.items()):
        return state_dict
    return {
        prefix + name: value
        for module, part in state_dict.items()
        for prefix in api.prefixes_of(model, [module])
        for name, value in part.items()
    }


def _as_list(optimizers: Any) -> list[Any]:
    return list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]


def _one_or_list(optimizers: Any) -> Any:
    return list(optimizers) if isinstance(optimizers, Iterable) else optimizers
