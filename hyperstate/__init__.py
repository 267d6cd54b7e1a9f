"""One API for the state of sharded training, the same from a PyTorch and a MindSpore script.

Importing this package imports no framework. `hyperstate.api` tells what each function does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import (
        build_model_load_template,
        build_optim_load_template,
        get_model_state_dict,
        get_optim_state_dict,
        get_state_dict,
        infer_state_keys,
        set_model_state_dict,
        set_optim_state_dict,
        set_state_dict,
        unflatten_optim_state_dict,
    )
    from .backend import use_backend
    from .checkpoint import async_save, load, save, verify
    from .errors import (
        AbsentRankError,
        AmbiguousLayoutError,
        BackendError,
        CheckpointError,
        DisagreementError,
        HyperstateError,
        IncompatibleStateError,
        InvalidStateDictError,
        OptionError,
        OptionTypeError,
        ParticipantsError,
        TransferError,
        UnsupportedConfigurationError,
    )
    from .flatten import flatten_optim_state_dict
    from .options import StateDictOptions
    from .pictures.visualize import visualize_sharding
    from .setters import IncompatibleKeys
    from .statelayout import register_state_layout

_HOMES = {
    "api": (
        "build_model_load_template",
        "build_optim_load_template",
        "get_model_state_dict",
        "get_optim_state_dict",
        "get_state_dict",
        "infer_state_keys",
        "set_model_state_dict",
        "set_optim_state_dict",
        "set_state_dict",
        "unflatten_optim_state_dict",
    ),
    "backend": ("use_backend",),
    "checkpoint": ("async_save", "load", "save", "verify"),
    "errors": (
        "AbsentRankError",
        "AmbiguousLayoutError",
        "BackendError",
        "CheckpointError",
        "DisagreementError",
        "HyperstateError",
        "IncompatibleStateError",
        "InvalidStateDictError",
        "OptionError",
        "OptionTypeError",
        "ParticipantsError",
        "TransferError",
        "UnsupportedConfigurationError",
    ),
    "flatten": ("flatten_optim_state_dict",),
    "options": ("StateDictOptions",),
    "setters": ("IncompatibleKeys",),
    "statelayout": ("register_state_layout",),
    "pictures.visualize": ("visualize_sharding",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AbsentRankError",
    "AmbiguousLayoutError",
    "BackendError",
    "CheckpointError",
    "DisagreementError",
    "HyperstateError",
    "IncompatibleKeys",
    "IncompatibleStateError",
    "InvalidStateDictError",
    "OptionError",
    "OptionTypeError",
    "ParticipantsError",
    "StateDictOptions",
    "TransferError",
    "UnsupportedConfigurationError",
    "async_save",
    "build_model_load_template",
    "build_optim_load_template",
    "flatten_optim_state_dict",
    "get_model_state_dict",
    "get_optim_state_dict",
    "get_state_dict",
    "infer_state_keys",
    "load",
    "register_state_layout",
    "save",
    "set_model_state_dict",
    "set_optim_state_dict",
    "set_state_dict",
    "unflatten_optim_state_dict",
    "use_backend",
    "verify",
    "visualize_sharding",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
