"""`hyperstate.testing.Kit` for toy: what the conformance suite needs to make and to look into."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import toy

from hyperstate.testing.kit import Content
from hyperstate.testing.worker import load_file

_BFLOAT16, _FLOAT8 = "toy has NumPy's dtypes, and NumPy has no bfloat16", "toy has NumPy's dtypes: there is no float8"
GAPS = {
    "checkpoints.every_dtype_comes_back-1r-bfloat16": _BFLOAT16,
    "checkpoints.every_dtype_comes_back-1r-float8_e5m2": _FLOAT8,
    "checkpoints.training_goes_on_as_if_it_had_not_stopped-1r-local": "toy has no optimizer with local state",
    "matching.dtypes_are_converted_to_the_targets_and_never_against_their_meaning": _BFLOAT16,
    "matching.state_keeps_the_checkpoints_dtype_unless_the_target_has_another": _BFLOAT16,
    "values.every_dtype_goes_round_bit_for_bit-1r-bfloat16-plain": _BFLOAT16,
    "values.every_dtype_goes_round_bit_for_bit-1r-float8_e4m3fn-plain": _FLOAT8,
    "values.every_dtype_goes_round_bit_for_bit-1r-float8_e5m2-plain": _FLOAT8,
}
"""Cases, or single runs of them, that toy fails, each with the reason."""


def run_here(
    ranks: int, path: Path, function: str, timeout: float, lost: Sequence[int], arguments: Mapping[str, Any]
) -> list[Any]:
    """The rank is this process. (`hyperstate.testing.Pool` starts processes for kits that have no `run_here`.)"""
    assert ranks == 1 and not lost and timeout
    return [getattr(load_file(str(path)), function)(Kit(), **arguments)]


class Kit:
    """See `hyperstate.testing.Kit`."""

    name, rank, world = "toy", 0, 1

    def mesh(self, shape: Sequence[int], names: Sequence[str]) -> Any:  # noqa: ARG002  # only to be passed on
        """Toy has no meshes, and cases that only ask for one get None."""
        return

    def shard(self, model: Any, mesh: Any) -> Any:
        raise NotImplementedError("toy has no sharded tensors")

    def sharded_tensor(self, full: Any, mesh: Any, placements: Sequence[str]) -> Any:
        raise NotImplementedError("toy has no sharded tensors")

    def model(self, seed: int = 0, sizes: Sequence[int] = (5, 7, 3)) -> toy.Model:
        numbers = np.random.default_rng(seed)
        shapes: dict[str, tuple[int, ...]] = {"norm.weight": (sizes[1],), "norm.bias": (sizes[1],)}
        for i, (width, height) in enumerate(pairwise(sizes)):
            shapes |= {f"layers.{i}.weight": (height, width), f"layers.{i}.bias": (height,)}
        values = {name: toy.tensor(numbers.uniform(-1, 1, shape)) for name, shape in shapes.items()}
        model: toy.Model = self.with_parameters(values)
        for name in ("running_mean", "running_var"):
            self.add_buffer(model, f"norm.{name}", toy.tensor(np.ones(sizes[1])))
        self.add_buffer(model, "norm.num_batches_tracked", toy.tensor(0, "int64"))
        return model

    def with_parameters(self, values: dict[str, Any]) -> Any:
        for value in values.values():
            value.trainable = value.dtype.startswith(("float", "bfloat", "complex"))
        return toy.Model(values)

    def add_buffer(self, model: Any, name: str, value: Any, persistent: bool = True) -> None:
        model.buffers[name] = value
        if not persistent:
            model.transient.add(name)

    def freeze(self, model: Any, fqn: str) -> None:
        model.parameters[fqn].trainable = False

    def named(self, model: Any) -> dict[str, Any]:
        return {**model.parameters, **model.buffers}

    def optimizer(self, model: Any, kind: str = "adam", lr: float = 0.01, groups: Any = None) -> toy.Optimizer:
        members: Any = list(dict.fromkeys(model.parameters.values()))
        if groups is not None:
            members = [{"params": [model.parameters[fqn] for fqn in fqns], **fields} for fqns, fields in groups]
        if kind == "custom":
            return type("Custom", (toy.Optimizer,), {})(members, lr=lr)
        if kind == "momentum":
            return toy.Momentum(members, lr=lr, momentum=0.9)
        if kind == "adam":
            return toy.Adam(members, lr=lr, betas=(0.9, 0.999), capturable=False)
        if kind == "sgd":
            return toy.Optimizer(members, lr=lr)
        raise NotImplementedError(f"toy has no optimizer of the kind {kind!r}")

    def state(self, optimizer: Any, parameter: Any) -> MutableMapping[Any, Any]:
        found: MutableMapping[Any, Any] = optimizer.state[parameter]
        return found

    def groups(self, optimizer: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = optimizer.param_groups
        return found

    def train(self, model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
        for step in range(first, first + steps):
            model.backward(step)
            optimizer.step()
            for buffer in model.buffers.values():
                buffer.array += 1

    def fake_step(self, model: Any, optimizer: Any, seed: int = 0) -> None:
        model.backward(seed)
        optimizer.step()

    def tensor(self, values: Any, dtype: str = "float32") -> toy.Tensor:
        return toy.tensor(values, dtype)

    def content(self, value: Any) -> Content:
        return Content(value.dtype, value.shape, value.array.tobytes().hex())

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, toy.Tensor)

    def is_sharded(self, value: Any) -> bool:  # noqa: ARG002  # none is
        return False

    def on_host(self, value: Any) -> bool:  # noqa: ARG002  # all are
        return True

    def traffic(self, reset: bool = False) -> dict[str, int]:  # noqa: ARG002  # nothing to reset
        return dict.fromkeys(("exchanges", "messages", "bytes_sent", "bytes_received"), 0)

    def die(self, exchange: int = 0) -> None:
        raise NotImplementedError("toy's only rank is the test's own process")
