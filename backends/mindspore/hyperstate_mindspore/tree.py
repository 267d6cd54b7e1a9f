"""The cell tree as the user built it: places of parameters, without MindSpore's wrappers and optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import nn
from mindspore.experimental.optim.optimizer import Optimizer as ExperimentalOptimizer

_WRAPPER_MODULES = ("mindspore.nn.wrap.", "mindspore.parallel.", "mindspore.train.amp", "mindspore.boost.")
_WRAPPED = ("network", "_backbone", "_network")
"""Attributes under which the cells of those modules (WithLossCell, TrainOneStepCell, …) keep the user's cell."""

_STATISTICS = ("moving_mean", "moving_variance", "running_mean", "running_var", "num_batches_tracked")
"""What normalisations keep as Parameters without gradient and PyTorch as buffers."""


class Visit(NamedTuple):
    """A cell at one of its places in the tree."""

    cell: Any
    prefix: str
    """Of its FQNs: empty or ending in a dot."""


class Member(NamedTuple):
    """A Parameter at one of its places."""

    visit: int
    """Number of the cell's visit."""
    cell: Any
    prefix: str
    name: str
    parameter: Any

    @property
    def fqn(self) -> str:
        return self.prefix + self.name

    @property
    def statistic(self) -> bool:
        """Whether it is a running statistic: a buffer in PyTorch's words."""
        return not self.parameter.requires_grad and self.name in _STATISTICS and _normalises(self.cell)


def _normalises(cell: Any) -> bool:
    """Whether a cell is one of MindSpore's own that keep running statistics, or derived from one."""
    return any(kind.__module__.startswith("mindspore.") and "Norm" in kind.__name__ for kind in type(cell).__mro__)


def is_optimizer(cell: Any) -> bool:
    """Whether a cell is an optimizer: every one of MindSpore's is a Cell."""
    return isinstance(cell, (nn.Optimizer, ExperimentalOptimizer))


def wrapped(cell: Any) -> tuple[str, Any] | None:
    """Attribute and cell inside, if `cell` is a wrapper of MindSpore's (or derived from one)."""
    if any(kind.__module__.startswith(_WRAPPER_MODULES) for kind in type(cell).__mro__):
        for name in _WRAPPED:
            if cell._cells.get(name) is not None:
                return name, cell._cells[name]
    return None


def unwrapped(cell: Any) -> Any:
    """The user's cell inside any number of wrappers."""
    while (found := wrapped(cell)) is not None:
        cell = found[1]
    return cell


def walk(root: Any) -> list[Visit]:
    """All cells in the order of `Cell.state_dict`, shared ones at each of their places; no optimizers."""
    visits: list[Visit] = []

    def descend(cell: Any, prefix: str) -> None:
        visits.append(Visit(cell, prefix))
        inner = wrapped(cell)
        for name, child in cell._cells.items():
            if child is None or is_optimizer(child):
                continue
            descend(child, prefix if inner is not None and name == inner[0] else f"{prefix}{name}.")

    descend(root, "")
    return visits


def members(visits: Sequence[Visit]) -> Iterator[Member]:
    """The Parameters at each of their places.

    A ``ParameterTuple`` puts its members among its cell's parameters once more, under `Parameter.name`
    (`TrainOneStepCell` does so with all weights): that is no place, if the Parameter has another.
    """
    found: list[tuple[Member, bool]] = []
    for number, (cell, prefix) in enumerate(visits):
        listed = {
            id(member) for value in vars(cell).values() if isinstance(value, ms.ParameterTuple) for member in value
        }
        for name, parameter in cell._params.items():
            if parameter is not None:
                # A lazily initialised parameter that became another object.
                parameter = parameter if parameter.inited_param is None else parameter.inited_param
                found.append((Member(number, cell, prefix, name, parameter), id(parameter) in listed))
    placed = {id(member.parameter) for member, in_tuple in found if not in_tuple}
    yield from (member for member, in_tuple in found if not in_tuple or id(member.parameter) not in placed)


def parameters(root: Any) -> Iterator[Member]:
    """Each Parameter object once, at its first place."""
    seen: set[int] = set()
    for member in members(walk(root)):
        if id(member.parameter) not in seen:
            seen.add(id(member.parameter))
            yield member
