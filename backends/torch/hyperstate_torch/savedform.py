"""An optimizer's own state dict, for classes that save in a way of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hyperstate.errors import UnsupportedConfigurationError

State = dict[Any, Any]


def overrides(optimizer: Any, name: str) -> bool:
    method = getattr(type(optimizer), name, None)
    return method is not None and method is not getattr(torch.optim.Optimizer, name)


def saves_its_own_way(optimizer: Any) -> bool:
    hooks = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
    return overrides(optimizer, "state_dict") or any(getattr(optimizer, name, None) for name in hooks)


def saved(optimizer: Any) -> State:
    """The optimizer's own state dict; the class' method, since checkpoint libraries replace the object's."""
    saved: State = type(optimizer).state_dict(optimizer)
    if not isinstance(saved, Mapping) or "state" not in saved or "param_groups" not in saved:
        raise UnsupportedConfigurationError(
            f"{type(optimizer).__qualname__}.state_dict() gives no 'state' and 'param_groups'; save it by itself"
        )
    numbered(optimizer, saved["param_groups"])
    return saved


def numbered(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> dict[Any, torch.Tensor]:
    """Parameter objects by the numbers that a state dict of the optimizer gives them."""
    counts = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(group["params"]) for group in groups]
    if counts != given:
        raise UnsupportedConfigurationError(
            f"{type(optimizer).__qualname__} has groups of {counts} parameters, but its state dict shows {given}"
        )
    pairs = zip(optimizer.param_groups, groups, strict=True)
    return {n: p for live, shown in pairs for n, p in zip(shown["params"], live["params"], strict=True)}
