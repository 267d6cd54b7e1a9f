"""What MindSpore's optimizers keep, read in their sources (MindSpore 2.10).

A class is known by the part of MindSpore that it comes from and its name: ``nn``, ``experimental``
and ``mint`` each have an Adam, and they keep different things.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LIKE_PARAM, REPLICATED = "like_param", "replicated"


@dataclass(frozen=True)
class Known:
    """State of one optimizer class. Keys are the attributes that hold it, one tensor for each parameter."""

    like: tuple[str, ...] = ()
    """Keys whose tensors have the parameter's shape."""
    whole: tuple[str, ...] = ()
    """Keys with a number for each parameter."""
    other: tuple[str, ...] = ()
    """Keys with statistics of another shape."""
    fills: dict[str, float | str] = field(default_factory=dict)
    """Initial value of a key where it is not 0: the number, or the constructor argument that gives it."""
    fields: tuple[str, ...] = ()
    """Attributes with values of constructor arguments that have other names."""
    fixed: tuple[str, ...] = ()
    """Fields that take effect in the constructor only."""
    only_if: dict[str, str] = field(default_factory=dict)
    """Key -> the field that must be true for the key to exist."""

    @property
    def keys(self) -> tuple[str, ...]:
        """All state keys."""
        return self.like + self.whole + self.other


_MOMENTS = ("exp_avg", "exp_avg_sq")
_ADAM = Known(("moment1", "moment2", "vhat"), only_if={"vhat": "use_amsgrad"})

KNOWN: dict[tuple[str, str], Known] = {
    ("nn", "Adagrad"): Known(("accum",), fills={"accum": "accum"}),
    ("nn", "Adadelta"): Known(("accum", "accum_update")),
    ("nn", "AdaFactor"): Known(
        ("exp_avg",), other=("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"), only_if={"exp_avg": "beta1"}
    ),
    ("nn", "Adam"): _ADAM,
    ("nn", "AdamOffload"): Known(("moment1", "moment2")),
    ("nn", "AdamWeightDecay"): Known(("moments1", "moments2")),
    ("nn", "AdaMax"): Known(("moment1", "moment2")),
    ("nn", "ASGD"): Known(("ax",), ("mu", "eta"), fills={"mu": 1.0}),
    ("nn", "FTRL"): Known(("moments", "linear"), fills={"moments": "initial_accum"}),
    ("nn", "Lamb"): Known(("moments1", "moments2")),
    ("nn", "LazyAdam"): Known(("moment1", "moment2")),
    ("nn", "Momentum"): Known(("moments",)),
    ("nn", "ProximalAdagrad"): Known(("accum",), fills={"accum": "accum"}),
    ("nn", "RMSProp"): Known(("mg", "ms", "moment"), fills={"ms": 1.0}, only_if={"mg": "centered"}),
    ("nn", "Rprop"): Known(("prev", "step_size"), fields=("etaminus", "etaplus", "step_size_min", "step_size_max")),
    ("nn", "SGD"): Known(("accum", "stat"), fills={"stat": 1.0}, fixed=("dampening",)),
    ("experimental", "Adadelta"): Known(("accum", "accum_update")),
    ("experimental", "Adagrad"): Known(("accum",), fills={"accum": "initial_accumulator_value"}),
    ("experimental", "Adam"): Known((*_MOMENTS, "max_exp_avg_sq")),
    ("experimental", "Adamax"): Known(("exp_avg", "exp_inf")),
    ("experimental", "AdamW"): Known((*_MOMENTS, "max_exp_avg_sq")),
    ("experimental", "SpeedAdamW"): Known(_MOMENTS),
    ("experimental", "ASGD"): Known(("ax",), ("mu", "eta"), fills={"mu": 1.0}),
    ("experimental", "NAdam"): Known(_MOMENTS, ("mu_product",), fills={"mu_product": 1.0}),
    ("experimental", "RAdam"): Known(_MOMENTS),
    ("experimental", "RMSprop"): Known(("mean_grad", "mean_square", "moment")),
    ("experimental", "Rprop"): Known(("prev", "step_size")),
    ("experimental", "SGD"): Known(("accum", "stat"), fills={"stat": 1.0}),
    ("mint", "Adam"): Known((*_MOMENTS, "max_exp_avg_sq"), only_if={"max_exp_avg_sq": "amsgrad"}),
    ("mint", "AdamW"): Known((*_MOMENTS, "max_exp_avg_sq"), only_if={"max_exp_avg_sq": "amsgrad"}),
    ("mint", "FusedAdamW"): Known((*_MOMENTS, "max_exp_avg_sq"), only_if={"max_exp_avg_sq": "amsgrad"}),
    ("mint", "SGD"): Known(("momentum_buf",)),
}

IMPLEMENTATION = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "use_locking", "use_lazy", "use_offload", "param_names"}
)
"""Fields that are the target's: how parameters are updated rather than to what."""

COUNTERS = frozenset({"global_step", "state_step", "step_t", "step"})
"""Attributes in which optimizers count their steps."""


def family(kind: type) -> tuple[str, str]:
    """The part of MindSpore that a class (or the nearest base that MindSpore has) comes from, and its name there."""
    for cls in kind.__mro__:
        parts = cls.__module__.split(".")
        if parts[0] == "mindspore" and "optim" in parts and (parts[1], cls.__name__) in KNOWN:
            return parts[1], cls.__name__
    return "", kind.__name__


def known(kind: type) -> Known | None:
    """What is known of a class or of the nearest of its bases; None for a class of the user's own making."""
    return KNOWN.get(family(kind))


def layouts(kind: type) -> dict[Any, str]:
    """State key -> "like_param" or "replicated"."""
    entry = known(kind)
    if entry is None:
        return {}
    return dict.fromkeys(entry.like, LIKE_PARAM) | dict.fromkeys(entry.whole, REPLICATED)


def state_keys(kind: type, fields: dict[str, Any]) -> list[str] | None:
    """State keys of a class whose param group has these fields; None for an unknown class."""
    entry = known(kind)
    if entry is None:
        return None
    return [key for key in entry.keys if key not in entry.only_if or fields.get(entry.only_if[key])]
