"""What a backend adds to be tested by the conformance suite: one class, `Kit`, in ``<package>/kit.py``.

A kit makes small deterministic models and optimizers of its framework on the calling rank, and reads
values back as plain bytes, so that the cases compare across frameworks. A kit module may also define
``run_here(ranks, path, function, timeout, lost, arguments)`` if its ranks are threads, not processes, and
``GAPS``, a dict from the name of a case (``loads.a_plain_model``), or the id of one run of it, to the reason why this
backend fails it: such a case must fail (``xfail``, strict), so that the day on which it passes is seen. A function
``absent`` may tell why the device under test is not here, or "": the cases are then skipped with that reason.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol


class Content(NamedTuple):
    """A plain tensor as bytes: neutral dtype, shape, row-major little-endian data (hex)."""

    dtype: str
    shape: tuple[int, ...]
    data: str


class Kit(Protocol):
    """Made once per rank; making it joins the job."""

    name: str
    rank: int
    world: int

    def mesh(self, shape: Sequence[int], names: Sequence[str]) -> Any:
        """A mesh over all ranks, row-major, that ``mesh[name]`` slices. All ranks must call this, in one order."""

    def model(self, seed: int = 0, sizes: Sequence[int] = (5, 7, 3)) -> Any:
        """A plain multilayer perceptron: ``layers.0.weight`` of shape (7, 5), ``layers.0.bias`` (7,), ``layers.1…``.

        Equal seeds give bit-equal models on all ranks. Between layers stands a normalisation ``norm``
        with running statistics (float buffers and a 0-d int64 counter ``num_batches_tracked``).
        """

    def shard(self, model: Any, mesh: Any) -> Any:
        """Shard the model's parameters as FSDP does; over a 2-D mesh as HSDP does. Returns the model to use."""

    def sharded_tensor(self, full: Any, mesh: Any, placements: Sequence[str]) -> Any:
        """A sharded tensor of `full` (a plain tensor, equal on all ranks). Placements: "R", "S0", "S1", …"""

    def with_parameters(self, values: dict[str, Any]) -> Any:
        """A model whose parameters are exactly these tensors (plain or sharded), by FQN (dots nest).

        One tensor object under two names makes a tied parameter. Integer and bool tensors need no gradient.
        """

    def add_buffer(self, model: Any, name: str, value: Any, persistent: bool = True) -> None:
        """Register a buffer on the model itself; one that is not persistent is not part of its state dict."""

    def freeze(self, model: Any, fqn: str) -> None:
        """Make a parameter need no gradient."""

    def named(self, model: Any) -> Mapping[str, Any]:
        """All live parameters (under every name) and buffers (persistent or not) by FQN: the very objects."""

    def optimizer(
        self,
        model: Any,
        kind: str = "adam",
        lr: float = 0.01,
        groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]] | None = None,
    ) -> Any:
        """ "adam"; "sgd" (no state); "momentum"; "local": Adam with the plain float32 tensors ``m`` and ``v`` of the
        local shard's shape and an int ``step``; "custom": descent that keeps whatever a case puts into `state`,
        in a new class at each call, so that ``register_state_layout`` of one case does not reach another.

        `groups` are (FQNs, further fields) per param group, in order; by default all parameters form one.
        """

    def state(self, optimizer: Any, parameter: Any) -> MutableMapping[Any, Any]:
        """The live state of a parameter, empty if it has none; what is written into it becomes its state."""

    def groups(self, optimizer: Any) -> list[dict[str, Any]]:
        """The live param groups; ``params`` holds the parameters."""

    def train(self, model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
        """Some steps on data that depend on the step number alone; every rank sees the same data."""

    def fake_step(self, model: Any, optimizer: Any, seed: int = 0) -> None:
        """One optimizer step with gradients that depend on name, shape and seed alone (for models without forward)."""

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        """A plain tensor from nested lists of numbers."""

    def content(self, value: Any) -> Content:
        """A plain tensor, or the local part of a sharded one."""

    def is_tensor(self, value: Any) -> bool:
        """Whether a value is the framework's tensor, plain or sharded."""

    def is_sharded(self, value: Any) -> bool:
        """Whether a value is the framework's sharded tensor."""

    def on_host(self, value: Any) -> bool:
        """Whether a tensor's memory is the host's."""

    def traffic(self, reset: bool = False) -> dict[str, int]:
        """Counts of this rank since the last reset: exchanges, messages, bytes_sent, bytes_received."""

    def die(self, exchange: int = 0) -> None:
        """End this rank without a word to the others: at once, or when its `exchange`-th exchange from now starts."""
