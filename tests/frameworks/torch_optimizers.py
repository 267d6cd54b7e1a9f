"""Every optimizer class of `torch.optim`, with the options that change what it keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch_nets import Parts, like, listed, noise, push

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "adadelta": ("Adadelta", {"lr": 0.1}),
    "adadelta_capturable_off_foreach": ("Adadelta", {"lr": 0.1, "foreach": True}),
    "adafactor": ("Adafactor", {"lr": 0.1}),
    "adagrad": ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "adagrad_fused": ("Adagrad", {"lr": 0.1, "fused": True}),
    "adam": ("Adam", {"lr": 0.1}),
    "adam_amsgrad": ("Adam", {"lr": 0.1, "amsgrad": True}),
    "adam_foreach": ("Adam", {"lr": 0.1, "foreach": True}),
    "adam_fused": ("Adam", {"lr": 0.1, "fused": True}),
    "adam_tensor_lr": ("Adam", {"lr": torch.tensor(0.1)}),
    "adamw": ("AdamW", {"lr": 0.1, "weight_decay": 0.3}),
    "adamax": ("Adamax", {"lr": 0.1}),
    "asgd": ("ASGD", {"lr": 0.1, "t0": 1.0}),
    "muon": ("Muon", {"lr": 0.1}),
    "nadam": ("NAdam", {"lr": 0.1}),
    "radam": ("RAdam", {"lr": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "rmsprop_plain": ("RMSprop", {"lr": 0.1}),
    "rprop": ("Rprop", {"lr": 0.1}),
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd_momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "sgd_nesterov_maximize": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "sgd_fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
}
"""Name -> class and options. SparseAdam (sparse gradients) and LBFGS (closures) have tests of their own."""

APART = {"LBFGS", "SparseAdam"}


def model_for(name: str, seed: int) -> Parts:
    """Matrices for all; a vector as well but for Muon, which takes none."""
    values = {"a.weight": noise("a", (6, 5), seed), "b": noise("b", (5, 3), seed)}
    if name != "muon":
        values["c"] = noise("c", (7,), seed)
    return Parts(values)


def make(name: str, model: nn.Module, lr: float | None = None) -> torch.optim.Optimizer:
    kind, options = CONFIGS[name]
    made = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    if lr is not None:
        made["lr"] = torch.tensor(lr) if isinstance(made["lr"], torch.Tensor) else lr
    found: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), **made)
    return found


class Local(torch.optim.Optimizer):
    """Works on local tensors, as fused and wrapped optimizers do: state is plain, of the local shard's shape."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                weight, grad = (t.to_local() if hasattr(t, "to_local") else t for t in (p, p.grad))
                slots = self.state[p]
                if not slots:
                    slots |= {"m": torch.zeros_like(weight), "step": 0, "notes": (None, "x", [1.5])}
                slots["m"].mul_(0.9).add_(grad)
                slots["step"] += 1
                weight.sub_(group["lr"] * slots["m"] / (1 - 0.9 ** slots["step"]))


class Factored(torch.optim.Optimizer):
    """Row and column means of squared gradients, as sharded tensors where the parameter is one."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                slots, square = self.state[p], p.grad.square()
                if p.ndim < 2:
                    slots["v"] = slots["v"].add(square) if slots else square
                    p.sub_(group["lr"] * p.grad / (slots["v"].sqrt() + 1e-3))
                    continue
                row, col = self._means(square)
                if slots:
                    row, col = slots["row"].add(row), slots["col"].add(col)
                slots["row"], slots["col"] = row, col
                scale = like((_whole(row)[:, None] * _whole(col)[None, :]).sqrt() + 1e-3, p)
                p.sub_(group["lr"] * p.grad / scale)

    @staticmethod
    def _means(square: Any) -> tuple[Any, Any]:
        from torch.distributed.tensor import Replicate

        row, col = square.sum(dim=1), square.sum(dim=0)
        if hasattr(col, "redistribute"):
            col = col.redistribute(placements=[Replicate()] * col.device_mesh.ndim)
        return row, col


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class Blocks(torch.optim.Optimizer):
    """Keeps codes and per-block scales of the local shard: sizes that do not follow the parameter's."""

    block = 4

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                weight, grad = (t.to_local() if hasattr(t, "to_local") else t for t in (p, p.grad))
                flat = grad.reshape(-1)
                count = -(-max(flat.numel(), 1) // self.block)
                padded = torch.zeros(count * self.block)
                padded[: flat.numel()] = flat
                scales = padded.view(count, self.block).abs().amax(dim=1)
                codes = (padded.view(count, self.block) / (scales[:, None] + 1e-9) * 100 + 100).to(torch.uint8)
                self.state[p] |= {"codes": codes.reshape(-1)[: flat.numel()].clone(), "absmax": scales}
                weight.sub_(group["lr"] * grad)


ODD = {"local": Local, "factored": Factored, "blocks": Blocks}


def steps(name: str, model: Any, optimizer: Any, count: int, first: int = 0) -> None:
    """`count` updates with made-up gradients."""
    for seed in range(first, first + count):
        push(model, optimizer, seed)
    assert listed(optimizer)
