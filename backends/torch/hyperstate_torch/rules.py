"""How the optimizers of `torch.optim` lay out their state, read in their sources (torch 2.13)."""

from __future__ import annotations

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
