"""hyperstate's backend for toy (an entry point of the group ``hyperstate.backends``), to be read from the top.

`tensors` is what the core moves data with, `objects` are models and optimizers as named values. Below stand the parts
of which a framework with several ranks has more: a fabric and a key-value store. `kit` is for the conformance suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import toy

from hyperstate.errors import OptionTypeError, TransferError, UnsupportedConfigurationError

from .objects import ToyModel, ToyOptimizer
from .tensors import ToyTensors

__all__ = ["backend"]


class ToyFabric:
    """One rank, which has nobody to exchange bytes with."""

    def rank(self) -> int:
        """The calling process' rank."""
        return 0

    def world(self) -> int:
        """Number of ranks."""
        return 1

    def timeout(self) -> float:
        """Seconds that a call waits for others by default."""
        return 60.0

    def exchange(self, sends: Sequence[Any], recvs: Sequence[Any]) -> Any:
        """Start sending and receiving; with several ranks, return what has a ``wait(timeout)`` for the end of it."""
        raise TransferError(f"toy has one rank and can't exchange {len(sends) + len(recvs)} messages")


class ToyControl:
    """The key-value store of the job: a dict. Several ranks share one, which does not use the fabric."""

    def __init__(self) -> None:
        self._store: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._notes: dict[str, Any] = {}

    def set(self, key: str, value: bytes) -> None:
        """Publish."""
        self._store[key] = value

    def get(self, key: str, timeout: float) -> bytes | None:  # noqa: ARG002  # nobody else could bring it
        """The value, or None if it does not come."""
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns the sum."""
        self._counters[key] = self._counters.get(key, 0) + amount
        return self._counters[key]

    def delete(self, key: str) -> None:
        """Forget a key."""
        self._store.pop(key, None)
        self._counters.pop(key, None)

    def memory(self) -> dict[str, Any]:
        """This rank's own notes."""
        return self._notes


class ToyBackend:
    """The parts, put together."""

    name = "toy"

    def __init__(self) -> None:
        self.tensors, self.fabric, self.control = ToyTensors(), ToyFabric(), ToyControl()

    def owns(self, value: Any) -> bool:
        """Whether `value` is toy's."""
        return isinstance(value, (toy.Model, toy.Optimizer, toy.Tensor))

    def model(self, model: Any, device: Any = None, names: str = "own") -> ToyModel:  # noqa: ARG002  # names are PyTorch's, and there is one place
        """A model, or a sequence of models."""
        return ToyModel([model] if isinstance(model, toy.Model) else list(model))

    def optimizer(self, optimizer: Any, names: str = "own") -> ToyOptimizer:  # noqa: ARG002  # the same
        """An optimizer, or a sequence of optimizers."""
        given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        for one in given:
            if not isinstance(one, toy.Optimizer):
                raise UnsupportedConfigurationError(f"a {type(one).__qualname__} is no optimizer of toy")
        return ToyOptimizer(given, self.tensors)

    def ranks_of(self, value: Any) -> tuple[int, ...]:
        """Of ``ranks=``: a sequence of numbers; toy has no meshes or groups."""
        try:
            return tuple(map(int, value))
        except (TypeError, ValueError) as error:
            raise OptionTypeError(f"ranks= must be a sequence of ranks, not {value!r}") from error


@cache
def backend() -> ToyBackend:
    """The process' backend."""
    return ToyBackend()
