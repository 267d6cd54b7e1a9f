"""The protocols that a backend fulfils, and how one is chosen.

A backend brings a framework's tensors, models and optimizers and moves bytes. It decides nothing:
names, layouts, plans and verdicts are the core's. Its parts are found by structure, not by base class.

    Backend.tensors    what a tensor is; allocate, view, copy
    Backend.fabric     rank, world, and one primitive: exchange byte buffers with peers
    Backend.control    a key-value store, apart from the user's process groups
    Backend.model      a module (or several) as named values
    Backend.optimizer  an optimizer (or several) as groups and per-parameter state, never stepped
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

from .errors import BackendError
from .layout import Box, Shape
from .schema import TensorSpec

Tensor = Any
"""A framework's tensor as users hold it, sharded or plain."""
Local = Any
"""What the core moves data with: a plain tensor of the framework, this rank's part only."""
Place = Any
"""Where memory lives, in the framework's own terms; `None` means the host."""
Buffer = Any
"""One-dimensional bytes in memory that the fabric can send from and receive into."""
ParamId = int
"""Identity of a parameter object within one call."""


class Tensors(Protocol):
    """A framework's tensors. No method communicates."""

    def spec(self, value: Any) -> TensorSpec | None:
        """What `value` is, or None if it is no tensor.

        Raises `UnsupportedConfigurationError` for a tensor that no layout describes (``Partial``, …).
        """

    def is_meta(self, value: Tensor) -> bool:
        """Whether `value` has no storage yet."""

    def local(self, value: Tensor) -> Local:
        """This rank's part, sharing memory with `value`. Shape: that of the rank's box."""

    def place(self, value: Tensor) -> Place:
        """Where `value` lives; for a meta tensor, where its mesh lives."""

    def empty(self, shape: Shape, dtype: str, place: Place) -> Local:
        """A fresh local tensor. Raises `UnsupportedConfigurationError` for a dtype that the framework lacks."""

    def zeros(self, shape: Shape, dtype: str, place: Place) -> Local:
        """Like `empty`, filled with zeros."""

    def staging(self, shape: Shape, dtype: str) -> Local:
        """A fresh tensor on the host that devices copy to fast (pinned); kept and used again by the caller."""

    def wrap(self, local: Local, spec: TensorSpec, like: Tensor) -> Tensor:
        """A sharded tensor of `spec` around this rank's `local`, on the mesh (and of the kind) of `like`."""

    def view(self, local: Local, box: Box) -> Local:
        """The region `box` (in coordinates of `local`) of `local`, sharing its memory."""

    def storage(self, local: Local) -> Hashable:
        """Names the memory that `local` lies in; equal for all views of it."""

    def same_memory(self, a: Local, b: Local) -> bool:
        """Whether two tensors are the same elements of one storage, read in the same way."""

    def copy(self, pairs: Sequence[tuple[Local, Local]]) -> None:
        """For each (to, from) of equal shape: copy the values, converting dtype and place."""

    def raw(self, values: Sequence[Local]) -> list[bytes]:
        """The bytes of small tensors, with few device synchronisations."""

    def from_raw(self, data: bytes, spec: TensorSpec, place: Place) -> Local:
        """A fresh tensor of `spec.shape` with these bytes."""

    def buffer(self, nbytes: int) -> Buffer:
        """Fresh bytes that the fabric accepts."""

    def as_buffer(self, local: Local) -> Buffer | None:
        """`local`'s own bytes as a buffer, or None if it is not contiguous or the fabric can't reach it."""

    def host_bytes(self, local: Local) -> memoryview | None:
        """`local`'s own bytes, writable and sharing its memory; None if it is not contiguous on the host."""

    def over(self, memory: memoryview, dtype: str, shape: Shape) -> Local:
        """A tensor on the host over these writable bytes, sharing them and keeping them alive. Not empty."""

    def windows(self, buffer: Buffer, parts: Sequence[tuple[int, Shape, str]]) -> list[Local]:
        """Typed tensors over parts of `buffer`, each (byte offset, shape, dtype)."""


class Pending(Protocol):
    """An exchange under way."""

    def wait(self, timeout: float) -> None:
        """Return when it is done. Raises `TransferError` naming the peer if it fails or takes `timeout` seconds."""


class Fabric(Protocol):
    """Moves bytes between ranks. Only used after every participant has agreed."""

    def rank(self) -> int:
        """This process' global rank; 0 if there is no job."""

    def world(self) -> int:
        """Number of ranks of the job; 1 if there is none."""

    def timeout(self) -> float:
        """Default timeout of a call, in seconds."""

    def exchange(self, sends: Sequence[tuple[int, Buffer]], recvs: Sequence[tuple[int, Buffer]]) -> Pending:
        """Start sending and receiving; messages of one pair of ranks arrive in order. Zero-size buffers never come."""


class Control(Protocol):
    """A key-value store that all ranks of the job share."""

    def set(self, key: str, value: bytes) -> None:
        """Publish."""

    def get(self, key: str, timeout: float) -> bytes | None:
        """The value, waiting up to `timeout` seconds for it; None if it does not come."""

    def add(self, key: str, amount: int) -> int:
        """Atomically add to a counter that starts at 0; returns the sum."""

    def delete(self, key: str) -> None:
        """Forget a key."""

    def memory(self) -> dict[str, Any]:
        """This rank's own notes; the same dict for each call, a new one when the job's store is a new one."""


@dataclass(frozen=True)
class ModelEntry:
    """One name of the model's state dict."""

    value: Any
    """A tensor (live), or for extra state any object."""
    kind: str
    """"param", "buffer" or "extra"."""
    frozen: bool = False
    tied: str = ""
    """For a further name of a tied parameter: the first name."""


class Model(Protocol):
    """One module or several, seen as named values."""

    def entries(self) -> Mapping[str, ModelEntry]:
        """The state dict by FQN, in the framework's order, under all names of tied parameters."""

    def parameters(self) -> Mapping[ParamId, tuple[str, ...]]:
        """FQNs of each parameter object, the canonical one first."""

    def parameter(self, fqn: str) -> Tensor:
        """The parameter of a canonical FQN."""

    def prefixes(self, submodules: Any) -> Sequence[str]:
        """FQN prefixes, each ending in a dot, of modules inside this model. Raises `OptionError` for another's."""

    def writer(self, fqn: str) -> Tensor | None:
        """The tensor whose memory a new value is written into; None if the value goes through `assign`."""

    def assign(self, values: Mapping[str, Any]) -> None:
        """Take over values that have no memory to be written into: meta parameters, extra state, custom loaders.

        Called once per load of a model, after all writing in place, even with no values.
        """


@dataclass
class ParamGroup:
    """A param group: identities of its parameters, and every other field (live)."""

    params: list[ParamId]
    fields: dict[str, Any] = field(default_factory=dict)


class Optimizer(Protocol):
    """One optimizer or several with disjoint parameters."""

    def types(self) -> Sequence[type]:
        """Classes of the optimizers, for the registry of state layouts."""

    def groups(self) -> Sequence[ParamGroup]:
        """The groups in order."""

    def state(self) -> Mapping[ParamId, Mapping[Any, Any]]:
        """Live state of each parameter that has some."""

    def shared(self) -> Mapping[Any, Any]:
        """State that belongs to the optimizer and to no parameter."""

    def rules(self) -> Mapping[Any, Any]:
        """What is known of these classes' state: key -> "like_param" or "replicated"."""

    def state_keys(self) -> Sequence[Sequence[str] | None]:
        """For each optimizer the state keys that its class makes with its present fields; None for an unknown class."""

    def fresh_form(self, param: ParamId) -> str:
        """How a fresh optimizer keeps sharded state of this parameter: "" as sharded tensors, "local" as plain ones."""

    def counter_place(self, param: ParamId) -> Place:
        """Where a fresh counter of this parameter lives."""

    def commit(
        self,
        state: Mapping[ParamId, Mapping[Any, Any]],
        cleared: Iterable[ParamId],
        fields: Sequence[Mapping[str, Any] | None],
        shared: Mapping[Any, Any] | None,
    ) -> None:
        """Replace the state of the given parameters as a set, clear others, and set fields per group.

        The state container, the per-parameter dicts and the group dicts keep their identity.
        """


class Backend(Protocol):
    """What an entry point of the group ``hyperstate.backends`` loads (called without arguments)."""

    name: str
    tensors: Tensors
    fabric: Fabric
    control: Control

    def owns(self, value: Any) -> bool:
        """Whether `value` is a model, optimizer or tensor of this framework. Imports nothing."""

    def model(self, model: Any, device: Any = None, names: str = "own") -> Model:
        """Describe a model or a sequence of them; runs state-dict pre-hooks. `device` is for meta parameters.

        `names` is "own" or "neutral" (PyTorch's names for what both frameworks have).
        """

    def optimizer(self, optimizer: Any, names: str = "own") -> Optimizer:
        """Describe an optimizer or a sequence of them; `names` says how state keys and group fields are called."""

    def ranks_of(self, value: Any) -> tuple[int, ...]:
        """Global ranks of ``ranks=``: a sequence of numbers, a mesh, or a process group."""


GROUP = "hyperstate.backends"
VARIABLE = "HYPERSTATE_BACKEND"
_FRAMEWORKS = {"torch": "torch", "mindspore": "mindspore", "numpy": "hyperstate_numpy"}
_loaded: dict[str, Backend] = {}
_override: ContextVar[str | None] = ContextVar("hyperstate_backend", default=None)


def installed() -> tuple[str, ...]:
    """Names of the registered backends, whether or not their framework is installed."""
    return tuple(sorted({point.name for point in metadata.entry_points(group=GROUP)}))


def load(name: str) -> Backend:
    """The backend called `name`. Raises `BackendError` that lists what there is and what to install."""
    if name in _loaded:
        return _loaded[name]
    points = [point for point in metadata.entry_points(group=GROUP) if point.name == name]
    if not points:
        raise BackendError(f"there is no backend {name!r}; registered are: {', '.join(installed()) or 'none'}")
    if len({point.value for point in points}) > 1:
        raise BackendError(f"{len(points)} packages register a backend {name!r}: {[p.value for p in points]}")
    try:
        factory: Callable[[], Backend] = points[0].load()
    except ModuleNotFoundError as error:
        if error.name != _FRAMEWORKS.get(name, name):
            raise
        raise BackendError(
            f"the backend {name!r} needs a framework that is not installed: {how_to_install(name)}"
        ) from None
    return _loaded.setdefault(name, factory())


def how_to_install(extra: str) -> str:
    """What to type for what an extra of this distribution brings."""
    return f"pip install 'hyperstate-dist[{extra}]' (in a clone: '.[{extra}]')"


def use_backend(name: str) -> AbstractContextManager[Backend]:
    """Use the backend `name` inside the ``with`` block, whatever the environment says.

    Raises `BackendError` at once for one that can't be loaded.
    """
    return _using(name, load(name))


@contextmanager
def _using(name: str, backend: Backend) -> Iterator[Backend]:
    token = _override.set(name)
    try:
        yield backend
    finally:
        _override.reset(token)


def _owner(values: Iterable[Any]) -> Backend | None:
    values = [value for value in values if value is not None]
    return next((backend for backend in _usable() if any(map(backend.owns, values))), None)


def _usable() -> Iterator[Backend]:
    """The backends whose frameworks the script has imported; some come twice."""
    yield from list(_loaded.values())  # first, for reading what is registered takes milliseconds
    for point in metadata.entry_points(group=GROUP):
        # One that another thread has loaded meanwhile counts as well.
        if _FRAMEWORKS.get(point.name, point.name) in sys.modules or point.name in _loaded:
            yield load(point.name)


def choose_for_call(*values: Any) -> tuple[Backend, BackendError | None]:
    """As `choose`, for calls that other ranks make too: the backend that is named, and the error if it is not theirs.

    The error can then travel. Without a name nobody can tell where the other ranks are, and it is raised here.
    """
    try:
        return choose(*values), None
    except BackendError as error:
        named = _override.get() or os.environ.get(VARIABLE)
        if not named or named not in _loaded:
            raise
        return _loaded[named], error


def choose(*values: Any) -> Backend:
    """The backend for these objects: by `use_backend`, by HYPERSTATE_BACKEND, or by their type.

    Imports no framework that the script has not imported. Raises `BackendError` on a mismatch.
    """
    named = _override.get() or os.environ.get(VARIABLE)
    if named:
        backend = load(named)
        given = [value for value in values if value is not None]
        if given and not any(backend.owns(value) for value in given):
            other = _owner(given)
            belongs = f"belongs to the backend {other.name!r}" if other else "belongs to no installed backend"
            raise BackendError(
                f"{VARIABLE} or use_backend says {named!r}, but a {type(given[0]).__qualname__} {belongs}; "
                f"registered are: {', '.join(installed())}"
            )
        return backend
    found = _owner(values)
    if found is None:
        kinds = ", ".join(type(value).__qualname__ for value in values if value is not None) or "nothing"
        raise BackendError(
            f"no backend serves {kinds}; set {VARIABLE} to one of: {', '.join(installed())}, "
            f"or install a framework: {how_to_install('torch')}"
        )
    return found
