"""What MindSpore and PyTorch call the same things, by type of cell and of optimizer; read both ways.

The neutral form has PyTorch's names. Cells of ``mindspore.mint.nn`` have them already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms

from .rules import family

# -- cells -----------------------------------------------------------------------------------------

_AFFINE = {"gamma": "weight", "beta": "bias"}
_STATISTICS = _AFFINE | {"moving_mean": "running_mean", "moving_variance": "running_var"}

CELLS: dict[str, dict[str, str]] = {
    "_BatchNorm": _STATISTICS,
    "_InstanceNorm": _STATISTICS,
    "LayerNorm": _AFFINE,
    "GroupNorm": _AFFINE,
    "Embedding": {"embedding_table": "weight"},
    "EmbeddingLookup": {"embedding_table": "weight"},
    "PReLU": {"w": "weight"},
}
"""Class of ``mindspore.nn`` (and its subclasses) -> attribute -> PyTorch's name for it."""

SAME = frozenset(
    {
        *("Dense", "BiDense", "_Conv", "_RNNBase", "_RNNCellBase", "MultiheadAttention"),
        *("EmbeddingExt", "LayerNormExt", "PReLUExt"),
    }
)
"""Classes of ``mindspore.nn`` with PyTorch's names."""

INSIDE: dict[str, str] = {"BatchNorm3d": "bn2d."}
"""Class -> the place inside it of the cell that holds its parameters; PyTorch has no such place."""

COUNTED = frozenset({"_BatchNorm"})
"""Classes without the ``num_batches_tracked`` that PyTorch's have."""

CARRIED = "hyperstate_carried"
"""Attribute of a cell that holds what PyTorch has and the cell has not, by name."""


def _bases(cell: Any) -> list[str]:
    """Names of the classes of a cell that are MindSpore's, the most special first."""
    return [kind.__name__ for kind in type(cell).__mro__ if kind.__module__.startswith("mindspore.nn.layer")]


def cell_name(cell: Any, name: str) -> str | None:
    """PyTorch's name for the parameter `name` of `cell`; None if no table tells.

    A user's own cell has the names that the user gave.
    """
    bases = _bases(cell)
    for base in bases:
        if name in CELLS.get(base, {}):
            return CELLS[base][name]
        if base in SAME:
            return name
    return None if bases else name


def model_names(
    members: Iterable[tuple[str, Any, str]], cells: Iterable[tuple[str, Any]]
) -> tuple[dict[str, str], list[str]]:
    """FQN -> neutral FQN, and the FQNs that no table knows (they keep their names).

    `members` are (prefix, cell, name) of parameters and buffers, `cells` (prefix, cell) of all cells; a prefix is
    empty or ends in a dot.
    """
    hidden = {prefix + INSIDE[base]: prefix for prefix, cell in cells for base in _bases(cell) if base in INSIDE}
    found, unknown = {}, []
    for prefix, cell, name in members:
        neutral = cell_name(cell, name)
        if neutral is None:
            unknown.append(prefix + name)
        found[prefix + name] = hidden.get(prefix, prefix) + (neutral or name)
    return found, unknown


def carried(cell: Any) -> dict[str, Any]:
    """Values that PyTorch keeps for such a cell and the cell itself has no place for; kept beside it, live."""
    if not COUNTED & set(_bases(cell)):
        return {}
    kept: dict[str, Any] | None = vars(cell).get(CARRIED)
    if kept is None:
        kept = {"num_batches_tracked": ms.Tensor(0, ms.int64)}
        object.__setattr__(cell, CARRIED, kept)
    return kept


# -- optimizers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerNames:
    """How one optimizer class goes over into PyTorch's state and fields of the same meaning."""

    state: Mapping[str, str] = field(default_factory=dict)
    """State key -> neutral one; keys that are not here have the same name."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Field -> neutral one; fields that are not here have the same name."""
    tuples: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Neutral field -> the fields that are its items."""
    counter: str = ""
    """The attribute that counts steps; each parameter's ``step`` is derived from it."""
    ahead: int = 0
    """Steps taken when the counter is 0."""
    powers: Mapping[str, int] = field(default_factory=dict)
    """Attribute that holds a beta to the power of the step -> number of the beta."""
    carries_step: bool = False
    """PyTorch counts steps for each parameter, this class does not: ``step`` is kept beside the optimizer."""
    begun: str = ""
    """What tells that the momentum buffer holds something: a state key that is then 0, or a counter."""
    only_if: Mapping[str, str] = field(default_factory=dict)
    """Neutral state key -> neutral field without which PyTorch keeps no such state."""
    decoupled: bool = False
    """Whether weight decay is decoupled from the gradient."""
    foreign: frozenset[str] = frozenset()
    """State keys for which PyTorch has nothing of the same meaning."""


_BETAS = {"betas": ("beta1", "beta2")}
_POWERS = {"beta1_power": 0, "beta2_power": 1}
_MOMENTS = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
_MOMENTS_S = {"moments1": "exp_avg", "moments2": "exp_avg_sq"}
_ADAM = OptimizerNames(_MOMENTS, tuples=_BETAS, counter="global_step", powers=_POWERS)
_AMSGRAD = {"max_exp_avg_sq": "amsgrad"}
_PLAIN = OptimizerNames(counter="step_t")

OPTIMIZERS: dict[tuple[str, str], OptimizerNames] = {
    ("nn", "Adam"): OptimizerNames(
        _MOMENTS | {"vhat": "max_exp_avg_sq"}, {"use_amsgrad": "amsgrad"}, _BETAS, "global_step", powers=_POWERS
    ),
    ("nn", "AdamOffload"): _ADAM,
    ("nn", "LazyAdam"): _ADAM,
    ("nn", "AdamWeightDecay"): OptimizerNames(_MOMENTS_S, tuples=_BETAS, counter="global_step", decoupled=True),
    ("nn", "Lamb"): OptimizerNames(_MOMENTS_S, tuples=_BETAS, counter="global_step", decoupled=True),
    ("nn", "AdaMax"): OptimizerNames(
        {"moment1": "exp_avg", "moment2": "exp_inf"}, {}, _BETAS, "global_step", powers={"beta1_power": 0}
    ),
    ("nn", "Adagrad"): OptimizerNames({"accum": "sum"}, counter="global_step"),
    ("nn", "Adadelta"): OptimizerNames(
        {"accum": "square_avg", "accum_update": "acc_delta"}, {"epsilon": "eps"}, counter="global_step"
    ),
    ("nn", "ASGD"): OptimizerNames(counter="global_step"),
    ("nn", "Momentum"): OptimizerNames({"moments": "momentum_buffer"}, {"use_nesterov": "nesterov"}),
    ("nn", "RMSProp"): OptimizerNames(
        {"ms": "square_avg", "mg": "grad_avg"},
        {"decay": "alpha", "epsilon": "eps"},
        counter="global_step",
        foreign=frozenset({"moment"}),  # holds updates that the learning rate has scaled already
    ),
    ("nn", "Rprop"): OptimizerNames(
        tuples={"etas": ("etaminus", "etaplus"), "step_sizes": ("step_size_min", "step_size_max")},
        counter="global_step",
    ),
    ("nn", "SGD"): OptimizerNames({"accum": "momentum_buffer"}, begun="stat"),
    ("experimental", "Adadelta"): OptimizerNames(
        {"accum": "square_avg", "accum_update": "acc_delta"}, carries_step=True
    ),
    ("experimental", "Adagrad"): OptimizerNames({"accum": "sum"}, counter="step_t"),
    ("experimental", "Adam"): OptimizerNames(counter="state_step", only_if=_AMSGRAD),
    ("experimental", "AdamW"): OptimizerNames(counter="state_step", only_if=_AMSGRAD, decoupled=True),
    ("experimental", "SpeedAdamW"): OptimizerNames(counter="state_step", decoupled=True),
    ("experimental", "Adamax"): _PLAIN,
    ("experimental", "ASGD"): _PLAIN,
    ("experimental", "NAdam"): _PLAIN,
    ("experimental", "RAdam"): _PLAIN,
    ("experimental", "Rprop"): _PLAIN,
    ("experimental", "RMSprop"): OptimizerNames(
        {"mean_square": "square_avg", "mean_grad": "grad_avg", "moment": "momentum_buffer"},
        carries_step=True,
        only_if={"grad_avg": "centered", "momentum_buffer": "momentum"},
    ),
    ("experimental", "SGD"): OptimizerNames({"accum": "momentum_buffer"}, begun="stat"),
    ("mint", "Adam"): OptimizerNames(counter="state_step"),
    ("mint", "AdamW"): OptimizerNames(counter="state_step", ahead=1, decoupled=True),
    ("mint", "FusedAdamW"): OptimizerNames(counter="state_step", ahead=1, decoupled=True),
    ("mint", "SGD"): OptimizerNames({"momentum_buf": "momentum_buffer"}, {}, begun="step_t"),
}


def optimizer_names(kind: type) -> OptimizerNames | None:
    """The table of an optimizer class; None if there is none."""
    return OPTIMIZERS.get(family(kind))
