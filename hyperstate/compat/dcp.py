"""The names and signatures of ``torch.distributed.checkpoint.state_dict``, carried out by hyperstate.

    from hyperstate.compat.dcp import StateDictOptions, get_state_dict, set_state_dict

Flat optimizer dicts use PyTorch's prefix ``param_groups.``. ``submodules=`` and state dicts keyed by module
are deprecated there and here alike, and work. What behaves differently, and why, stands in
docs/differences.md. Nothing here imports torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from .. import api
from ..flows import get

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

# PyTorch's names for types of values, for scripts that annotate with them.
FQNS_T = set[str]
PrimitiveType = Any
ValueType = Any
DictValueType = dict[str, ValueType]
ListDictValueType = list[DictValueType]
OptimizerStateType = dict[str, DictValueType | ListDictValueType]


class _IncompatibleKeys(NamedTuple):
    """Two fields, as scripts unpack PyTorch's."""

    missing_keys: list[str]
    unexpected_keys: list[str]


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
) -> dict[str, ValueType]:
    """`hyperstate.get_model_state_dict`."""
    return api.get_model_state_dict(model, submodules=_chosen(submodules), options=options)


def get_optimizer_state_dict(
    model: Any, optimizers: Any, *, submodules: set[Any] | None = None, options: Any = None
) -> OptimizerStateType:
    """`hyperstate.get_optim_state_dict`. As in PyTorch, `submodules` leaves nothing of an optimizer out."""
    _chosen(submodules)
    return get("get_optim_state_dict", model, _one_or_list(optimizers), None, options, None, None, "torch")[1]


def get_state_dict(
    model: Any, optimizers: Any, *, submodules: set[Any] | None = None, options: Any = None
) -> tuple[dict[str, ValueType], OptimizerStateType]:
    """`hyperstate.get_state_dict`: the model's and the optimizer's dict."""
    return get("get_state_dict", model, _one_or_list(optimizers), _chosen(submodules), options, None, None, "torch")


def set_model_state_dict(model: Any, model_state_dict: Mapping[Any, Any], *, options: Any = None) -> _IncompatibleKeys:
    """`hyperstate.set_model_state_dict`; also takes PyTorch's deprecated ``{module: state dict}``."""
    report = api.set_model_state_dict(model, _by_fqn(model, model_state_dict), options=options)
    return _IncompatibleKeys(report.missing_keys, report.unexpected_keys)


def set_optimizer_state_dict(
    model: Any, optimizers: Any, optim_state_dict: OptimizerStateType, *, options: Any = None
) -> None:
    """`hyperstate.set_optim_state_dict`."""
    api.set_optim_state_dict(model, _one_or_list(optimizers), optim_state_dict, options=options)


def set_state_dict(
    model: Any,
    optimizers: Any,
    *,
    model_state_dict: Mapping[Any, Any],
    optim_state_dict: OptimizerStateType,
    options: Any = None,
) -> _IncompatibleKeys:
    """`hyperstate.set_state_dict`: both or neither. Reports on the model's keys, as PyTorch does."""
    report = api.set_state_dict(
        model,
        _one_or_list(optimizers),
        model_state_dict=_by_fqn(model, model_state_dict),
        optim_state_dict=optim_state_dict,
        options=options,
    )
    return _IncompatibleKeys(report.missing_keys, report.unexpected_keys)


def _patch_model_state_dict(model: Any, *, options: Any = None) -> None:
    """Make ``model.state_dict`` and ``model.load_state_dict`` go through hyperstate, as PyTorch's helper does."""
    model.state_dict = partial(get_model_state_dict, model, options=options)
    model.load_state_dict = lambda state_dict: set_model_state_dict(model, state_dict, options=options)


def _patch_optimizer_state_dict(model: Any, *, optimizers: Any, options: Any = None) -> None:
    """Make the optimizers' own ``state_dict`` and ``load_state_dict`` go through hyperstate."""
    several = _one_or_list(optimizers)
    for optimizer in several if isinstance(several, list) else [several]:
        optimizer.state_dict = partial(get_optimizer_state_dict, model, several, options=options)
        optimizer.load_state_dict = partial(set_optimizer_state_dict, model, several, options=options)


def _chosen(submodules: Iterable[Any] | None) -> Iterable[Any] | None:
    """`submodules`, of which an empty set means all; its use is deprecated."""
    if not submodules:
        return None
    _deprecated("submodules= is deprecated in PyTorch; filter the returned state dict by its keys instead")
    return submodules


def _deprecated(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=4)


def _by_fqn(model: Any, state_dict: Mapping[Any, Any]) -> Mapping[str, Any]:
    """`state_dict` by FQN, where it is keyed by module."""
    if not state_dict or not all(
        isinstance(value, Mapping) and not isinstance(key, str) for key, value in state_dict.items()
    ):
        return state_dict
    _deprecated("a model state dict keyed by module is deprecated in PyTorch; put the module's prefix before its keys")
    return {
        prefix + name: value
        for module, part in state_dict.items()
        for prefix in api.prefixes_of(model, [module])
        for name, value in part.items()
    }


def _one_or_list(optimizers: Any) -> Any:
    return list(optimizers) if isinstance(optimizers, Iterable) else optimizers
