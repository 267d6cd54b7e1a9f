"""The toy framework's modules: a tree of named parameters and buffers, and enough layers to train a perceptron.

Every rank runs the same computation on the same data. A sharded parameter is gathered before its use
and gets its part of the full gradient, so training sharded and unsharded gives equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .arrays import META, Parameter, Tensor, empty, tensor, zeros
from .dtypes import Array, encode
from .sharded import AnyTensor, DeviceMesh, DTensor, Placement, Replicate, Shard, like, plain


class Module:
    """A node of the tree. Attributes that are modules become children; parameters and buffers are registered."""

    def __init__(self) -> None:
        self.children_: dict[str, Module] = {}
        self.parameters_: dict[str, AnyTensor] = {}
        self.buffers_: dict[str, AnyTensor] = {}
        self.transient: set[str] = set()
        """Names of the buffers that are not part of the state dict."""
        self.state_dict_pre_hooks: list[Callable[[Module], None]] = []
        """Called before the state of the tree is listed."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module):
            self.children_[name] = value
        object.__setattr__(self, name, value)

    def register_parameter(self, name: str, value: AnyTensor) -> None:
        """Add or replace a parameter."""
        self.parameters_[name] = value

    def register_buffer(self, name: str, value: AnyTensor, persistent: bool = True) -> None:
        """Add or replace a buffer."""
        self.buffers_[name] = value
        (self.transient.discard if persistent else self.transient.add)(name)

    def get_extra_state(self) -> Any:
        """What is to be saved besides tensors; classes that override this override `set_extra_state` too."""
        raise NotImplementedError

    def set_extra_state(self, state: Any) -> None:
        """Take back what `get_extra_state` gave."""
        raise NotImplementedError

    @property
    def has_extra_state(self) -> bool:
        """Whether the class has extra state."""
        return type(self).get_extra_state is not Module.get_extra_state

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """All modules with their prefixes, each ending in a dot but the root's, parents first."""
        yield prefix, self
        for name, child in self.children_.items():
            yield from child.named_modules(f"{prefix}{name}.")

    def own_parameters(self) -> Iterator[tuple[Module, str, AnyTensor]]:
        """Every place of a parameter in the tree: module, name, parameter."""
        for _, module in self.named_modules():
            for name, value in module.parameters_.items():
                yield module, name, value

    def named_parameters(self) -> Iterator[tuple[str, AnyTensor]]:
        """Parameters by FQN, tied ones under every name."""
        for prefix, module in self.named_modules():
            for name, value in module.parameters_.items():
                yield prefix + name, value

    def named_buffers(self) -> Iterator[tuple[str, AnyTensor]]:
        """Buffers by FQN, the transient ones too."""
        for prefix, module in self.named_modules():
            for name, value in module.buffers_.items():
                yield prefix + name, value

    def parameters(self) -> list[AnyTensor]:
        """The parameters, tied ones once."""
        return list({id(value): value for _, value in self.named_parameters()}.values())

    def to(self, device: str) -> Module:
        """Move parameters and buffers to a device, keeping the objects. Sharded ones move their local part."""
        for value in [*self.parameters(), *(value for _, value in self.named_buffers())]:
            own = plain(value)
            own.become(empty(own.shape, own.dtype, META) if device == META else own.clone(device))
        return self


def numbers(value: AnyTensor) -> Array:
    """The full tensor's numbers; gathers a sharded one."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).numpy()


def set_gradient(param: Any, full: Array) -> None:
    """Give `param` its part of the full gradient, in its own dtype and on its own device, laid out like itself."""
    part = full if isinstance(param, Tensor) else param.own_part(full)
    if param.requires_grad and part is not None:
        own = plain(param)
        param.grad = like(param, Tensor(encode(part, own.dtype).copy(), own.dtype, own.device))


def _product(a: Array, b: Array) -> Array:
    """``a @ b.T`` with sums in one fixed order, which a BLAS does not promise."""
    found: Array = (a[:, None, :] * b[None, :, :]).sum(axis=-1)
    return found


class Linear(Module):
    """``x @ weight.T + bias``; weight of shape (out, in), bias (out,)."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.width_in = width_in
        self.register_parameter("weight", Parameter(zeros((width_out, width_in))))
        self.register_parameter("bias", Parameter(zeros((width_out,))))
        self._seen: tuple[Array, Array] | None = None

    def forward(self, batch: Array) -> Array:
        """Shape (rows, in) to (rows, out)."""
        weight = numbers(self.parameters_["weight"])
        self._seen = batch, weight
        return _product(batch, weight) + numbers(self.parameters_["bias"])

    def backward(self, gradient: Array) -> Array:
        """Gradient by the output to gradient by the input; leaves the parameters' gradients."""
        assert self._seen is not None
        batch, weight = self._seen
        set_gradient(self.parameters_["weight"], _product(gradient.T.copy(), batch.T.copy()))
        set_gradient(self.parameters_["bias"], gradient.sum(axis=0))
        return _product(gradient, weight.T.copy())


class BatchNorm(Module):
    """Normalises columns by the batch's statistics, of which it keeps running averages."""

    def __init__(self, width: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = np.float32(momentum), np.float32(eps)
        self.register_parameter("weight", Parameter(tensor(np.ones(width))))
        self.register_parameter("bias", Parameter(zeros((width,))))
        self.register_buffer("running_mean", zeros((width,)))
        self.register_buffer("running_var", tensor(np.ones(width)))
        self.register_buffer("num_batches_tracked", zeros((), "int64"))
        self._seen: tuple[Array, Array, Array] | None = None

    def forward(self, batch: Array) -> Array:
        """Shape (rows, width), at least 2 rows."""
        mean, var = batch.mean(axis=0), batch.var(axis=0)
        rows = np.float32(len(batch))
        self._track("running_mean", mean)
        self._track("running_var", var * (rows / (rows - 1)))
        self._plain("num_batches_tracked").array += 1
        scale = 1 / np.sqrt(var + self.eps)
        normal = (batch - mean) * scale
        weight = numbers(self.parameters_["weight"])
        self._seen = normal, scale, weight
        found: Array = normal * weight + numbers(self.parameters_["bias"])
        return found

    def backward(self, gradient: Array) -> Array:
        """See `Linear.backward`."""
        assert self._seen is not None
        normal, scale, weight = self._seen
        set_gradient(self.parameters_["weight"], (gradient * normal).sum(axis=0))
        set_gradient(self.parameters_["bias"], gradient.sum(axis=0))
        inner = gradient * weight
        found: Array = scale * (inner - inner.mean(axis=0) - normal * (inner * normal).mean(axis=0))
        return found

    def _plain(self, name: str) -> Tensor:
        value = self.buffers_[name]
        assert isinstance(value, Tensor)
        return value

    def _track(self, name: str, new: Array) -> None:
        kept = self._plain(name)
        kept.array[...] = (1 - self.momentum) * kept.array + self.momentum * new


class Sequence_(Module):  # noqa: N801  # "Sequence" is the abstract base class
    """Children named "0", "1", …"""

    def __init__(self, modules: Sequence[Module]) -> None:
        super().__init__()
        self.children_ |= {str(i): module for i, module in enumerate(modules)}


class Perceptron(Module):
    """Linear layers ``layers.0``, ``layers.1``, …; a BatchNorm ``norm`` and a tanh behind the first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.linears = [Linear(n, m) for n, m in pairwise(sizes)]
        self.layers = Sequence_(self.linears)
        self.norm = BatchNorm(sizes[1])

    def forward(self, batch: Array) -> Array:
        """Shape (rows, first size) to (rows, last size)."""
        self._bent = np.tanh(self.norm.forward(self.linears[0].forward(batch)))
        result = self._bent
        for layer in self.linears[1:]:
            result = layer.forward(result)
        return result

    def backward(self, gradient: Array) -> None:
        """Leaves every parameter's gradient."""
        for layer in reversed(self.linears[1:]):
            gradient = layer.backward(gradient)
        self.linears[0].backward(self.norm.backward(gradient * (1 - self._bent * self._bent)))


def fully_shard(module: Module, mesh: DeviceMesh) -> Module:
    """Shard every parameter along its first dimension over a 1-D mesh (FSDP), or over the last of a 2-D mesh (HSDP).

    0-d parameters are replicated; buffers stay plain. Parameters become new objects: build optimizers
    afterwards. Returns `module`.
    """
    made: dict[int, DTensor] = {}
    for inner, name, value in list(module.own_parameters()):
        if isinstance(value, DTensor):
            continue
        if id(value) not in made:
            last: Placement = Shard(0) if value.shape else Replicate()
            placements = [*[Replicate()] * (len(mesh.shape) - 1), last]
            made[id(value)] = DTensor.distribute(value, mesh, placements)
            made[id(value)].requires_grad = value.requires_grad
        inner.parameters_[name] = made[id(value)]
    return module
