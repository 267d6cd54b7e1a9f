"""How the optimizers of `torch.optim` lay out their state, read in their sources (torch 2.13)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

LIKE_PARAM, REPLICATED = "like_param", "replicated"

_BY_NAME: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Adadelta": (("square_avg", "acc_delta"), ("step",)),
    "Adafactor": (("variance",), ("step",)),
    "Adagrad": (("sum",), ("step",)),
    "Adam": (("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("step",)),
    "AdamW": (("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), ("step",)),
    "Adamax": (("exp_avg", "exp_inf"), ("step",)),
    "ASGD": (("ax",), ("step", "eta", "mu")),
    "LBFGS": ((), ("d", "t", "old_dirs", "old_stps", "ro", "al", "H_diag", "prev_flat_grad", "prev_loss")),
    "Muon": (("momentum_buffer",), ()),
    "NAdam": (("exp_avg", "exp_avg_sq"), ("step", "mu_product")),
    "RAdam": (("exp_avg", "exp_avg_sq"), ("step",)),
    "RMSprop": (("square_avg", "momentum_buffer", "grad_avg"), ("step",)),
    "Rprop": (("prev", "step_size"), ("step",)),
    "SGD": (("momentum_buffer",), ()),
    "SparseAdam": (("exp_avg", "exp_avg_sq"), ("step",)),
}
"""Class -> keys laid out like the parameter, and keys that every rank keeps whole.

Adafactor's ``row_var`` and ``col_var`` are in neither: they are statistics, and shapes tell which.
"""


def known_layouts() -> dict[type, dict[str, str]]:
    """For each optimizer class of `torch.optim`: state key -> "like_param" or "replicated"."""
    return {
        getattr(torch.optim, name): dict.fromkeys(like, LIKE_PARAM) | dict.fromkeys(whole, REPLICATED)
        for name, (like, whole) in _BY_NAME.items()
        if hasattr(torch.optim, name)
    }


def counters_on_device(kind: type) -> bool:
    """Whether a class keeps counters where the parameter is, whatever its group's fields say.

    ASGD does; all others do only with ``capturable`` or ``fused``
    (``torch.optim.Optimizer._process_value_according_to_param_policy``).
    """
    return issubclass(kind, torch.optim.ASGD)


_ADAM = ("step", "exp_avg", "exp_avg_sq")
_KEYS: dict[str, tuple[str, ...]] = {
    "ASGD": ("step", "eta", "mu", "ax"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adafactor": ("step", "row_var", "col_var", "variance"),
    "Adagrad": ("step", "sum"),
    "Adam": (*_ADAM, "max_exp_avg_sq"),
    "AdamW": (*_ADAM, "max_exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "Muon": ("momentum_buffer",),
    "NAdam": ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    "RAdam": _ADAM,
    "RMSprop": ("step", "square_avg", "momentum_buffer", "grad_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "SGD": ("momentum_buffer",),
    "SparseAdam": _ADAM,
}
"""Class -> all keys that a parameter's state can have, in the order in which the class makes them."""
_ONLY_IF = {"max_exp_avg_sq": "amsgrad", "grad_avg": "centered"}


def state_keys(optimizer: Any) -> list[str] | None:
    """State keys that an optimizer's class makes with its present fields; None for a class that is not known.

    A subclass with a `step` of its own may keep anything.
    """
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _KEYS and cls is getattr(torch.optim, cls.__name__, None):
            own_step = inspect.unwrap(type(optimizer).step) is not inspect.unwrap(cls.step)
            break
    else:
        return None
    if own_step:
        return None
    groups = optimizer.param_groups
    return [key for key in _KEYS[cls.__name__] if any(_made(cls.__name__, key, group) for group in groups)]


_START: dict[str, float | str] = {"mu_product": 1.0, "mu": 1.0, "eta": "lr", "step_size": "lr"}
"""Key -> what the class fills it with where that is not 0: a number, or the group's field that gives it."""


def first_state(optimizer: Any, group: Mapping[str, Any], param: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """What the optimizer's first step makes of `param`'s state before it updates it; None for a class not known.

    None as well for statistics of other shapes than the parameter's (Adafactor).
    """
    keys = state_keys(optimizer)
    name = next((cls.__name__ for cls in type(optimizer).__mro__ if cls.__name__ in _KEYS), "")
    if keys is None or name == "Adafactor":
        return None
    found = {}
    for key in keys if param.requires_grad else ():
        if _made(name, key, group):
            start = _START.get(key, 0.0)
            number = float(group[start] if isinstance(start, str) else start)
            whole = key in _BY_NAME[name][1]
            found[key] = torch.tensor(number) if whole else torch.full_like(param.detach(), number)
    return found


def _made(name: str, key: str, group: Mapping[str, Any]) -> bool:
    """Whether parameters of a group get the key."""
    if name == "Adafactor" and key != "step":
        return any((param.dim() > 1) == (key != "variance") for param in group["params"])
    if key == "momentum_buffer" and name != "Muon":
        return bool(group["momentum"])
    return key not in _ONLY_IF or bool(group[_ONLY_IF[key]])
