"""What the cases share: how a case says where it runs, topologies, ground truth, comparisons."""

from __future__ import annotations

import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeVar

from hyperstate import StateDictOptions
from hyperstate.testing.kit import Content, Kit

MARK = "conformance_runs"
F = TypeVar("F", bound=Callable[..., Any])
Placed = tuple[Any, tuple[str, ...]]
"""A mesh (None: plain) and placements."""


@dataclass(frozen=True)
class Run:
    """Where a case runs."""

    ranks: int
    arguments: dict[str, Any] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    timeout: float = 60.0


def case(*ranks: int, lost: tuple[int, ...] = (), timeout: float = 60.0, **choices: Sequence[Any]) -> Callable[[F], F]:
    """Run the function on each number of `ranks` with each combination of `choices`. May be stacked."""

    def mark(function: F) -> F:
        runs = [
            Run(count, dict(zip(choices, values, strict=True)), lost, timeout)
            for count in ranks
            for values in product(*choices.values())
        ]
        setattr(function, MARK, [*runs, *getattr(function, MARK, [])])
        return function

    return mark


# -- options -----------------------------------------------------------------------------------------

FULL = StateDictOptions(full_state_dict=True)
ON_ROOT = StateDictOptions(full_state_dict=True, cpu_offload=True)
ON_HOST = StateDictOptions(cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL_FLAT = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
LENIENT = StateDictOptions(full_state_dict=True, strict=False)
LENIENT_BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)

# -- numbers and topologies --------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {
    "dense.weight": (8, 6),
    "dense.bias": (8,),
    "odd.weight": (5, 6),
    "odd.bias": (5,),
    "few.weight": (3, 3),
}
"""Parameters of `build`: on 4 ranks `odd` is uneven and the last shard of `few` is empty."""


def grid(shape: Sequence[int], start: float = 0.0) -> Any:
    """Nested lists of the numbers `start`, `start` + 1, …; float32 holds them exactly."""
    if not shape:
        return start
    inner = 1
    for size in shape[1:]:
        inner *= size
    return [grid(shape[1:], start + i * inner) for i in range(shape[0])]


def placing(kit: Kit, topology: str, shapes: Mapping[str, Sequence[int]] = SHAPES) -> dict[str, Placed]:
    """How each parameter lies in a topology.

    "plain"; "fsdp" over all ranks; "hsdp", "grid" (two dims sharded), "columns" and "copies" on a 2 x n mesh;
    "mix": some plain, some sharded, on three meshes (S33).
    """
    line = kit.mesh((kit.world,), ("dp",))
    if topology == "plain":
        return {fqn: (None, ()) for fqn in shapes}
    if topology == "fsdp":
        return {fqn: (line, ("S0",)) for fqn in shapes}
    table = kit.mesh((2, kit.world // 2), ("outer", "inner"))
    if topology == "mix":
        kinds: list[Placed] = [(line, ("S0",)), (None, ()), (table["inner"], ("S0",)), (table, ("R", "S0"))]
        return {fqn: kinds[i % len(kinds)] for i, fqn in enumerate(shapes)}
    matrix = {"hsdp": ("R", "S0"), "grid": ("S0", "S1"), "columns": ("R", "S1"), "copies": ("R", "R")}[topology]
    vector = {"grid": ("S0", "R"), "columns": ("S0", "R")}.get(topology, matrix)
    return {fqn: (table, matrix if len(shape) > 1 else vector) for fqn, shape in shapes.items()}


def tensor(kit: Kit, values: Any, placed: Placed = (None, ()), dtype: str = "float32") -> Any:
    """`values` as a plain tensor or as a sharded one."""
    plain = kit.tensor(values, dtype)
    mesh, placements = placed
    return plain if mesh is None else kit.sharded_tensor(plain, mesh, placements)


def build(
    kit: Kit, topology: str, start: float = 0.0, shapes: Mapping[str, Sequence[int]] = SHAPES, scale: float = 1000.0
) -> Any:
    """A model of `SHAPES` whose n-th parameter counts from `start` + `scale` n."""
    places = placing(kit, topology, shapes)
    return kit.with_parameters(
        {fqn: tensor(kit, grid(shapes[fqn], start + scale * n), places[fqn]) for n, fqn in enumerate(shapes)}
    )


def build_stepped(kit: Kit, topology: str, kind: str = "adam", steps: int = 2, start: float = 0.0) -> tuple[Any, Any]:
    """A model as of `build`, and an optimizer that has taken some steps."""
    model = build(kit, topology, start)
    optimizer = kit.optimizer(model, kind)
    for step in range(steps):
        kit.fake_step(model, optimizer, seed=step)
    return model, optimizer


# -- what is there -----------------------------------------------------------------------------------


def shown(kit: Kit, value: Any) -> Any:
    """`value` in a form that compares by content and by type: ``True`` is not ``1``, a tuple no list."""
    if kit.is_tensor(value):
        return ("sharded" if kit.is_sharded(value) else "plain", *kit.content(value))
    if isinstance(value, Mapping):
        return {(type(key).__name__, key): shown(kit, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [shown(kit, item) for item in value])
    return (type(value).__name__, repr(value))


def live(kit: Kit, model: Any, optimizer: Any = None) -> dict[str, Any]:
    """Everything that the live objects hold on this rank, read without the library."""
    named = kit.named(model)
    result: dict[str, Any] = {"model": {fqn: shown(kit, value) for fqn, value in named.items()}}
    if optimizer is not None:
        names = {id(value): fqn for fqn, value in reversed(list(named.items()))}
        groups = kit.groups(optimizer)
        result["state"] = {
            names[id(param)]: shown(kit, dict(kit.state(optimizer, param))) for g in groups for param in g["params"]
        }
        result["groups"] = [
            ([names[id(param)] for param in g["params"]], {k: shown(kit, v) for k, v in g.items() if k != "params"})
            for g in groups
        ]
    return result


def numbers(content: Content) -> list[float]:
    """The elements of a float32, float64 or integer tensor."""
    code = {"float32": "f", "float64": "d", "int64": "q", "int32": "i", "uint8": "B", "bool": "?"}[content.dtype]
    data = bytes.fromhex(content.data)
    return [float(x) for x in struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)]


def close(kit: Kit, expected: Any, actual: Any, tolerance: float = 1e-5, where: str = "") -> None:
    """Assert that two trees are equal, float tensors to rounding, everything else exactly."""
    if isinstance(expected, Mapping):
        assert list(map(repr, sorted(expected, key=repr))) == list(map(repr, sorted(actual, key=repr))), where
        for key in expected:
            close(kit, expected[key], actual[key], tolerance, f"{where}.{key}")
    elif kit.is_tensor(expected):
        assert kit.is_tensor(actual), f"{where} is a {type(actual).__name__}"
        assert not kit.is_sharded(expected) and not kit.is_sharded(actual), where
        first, second = kit.content(expected), kit.content(actual)
        assert first[:2] == second[:2], where
        off = [abs(x - y) - tolerance * max(1.0, abs(x)) for x, y in zip(numbers(first), numbers(second), strict=True)]
        assert max(off, default=0.0) <= 0.0, where
    else:
        assert shown(kit, expected) == shown(kit, actual), where


def state_of(kit: Kit, model: Any, optimizer: Any, fqn: str) -> dict[Any, Any]:
    """The live state of a parameter."""
    return dict(kit.state(optimizer, kit.named(model)[fqn]))


def truth(kit: Kit, model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Model values and optimizer state by FQN of an unsharded model: what full forms must give."""
    named = kit.named(model)
    params = {id(param) for group in kit.groups(optimizer) for param in group["params"]}
    state = {fqn: state_of(kit, model, optimizer, fqn) for fqn, value in named.items() if id(value) in params}
    return dict(named), {fqn: slots for fqn, slots in state.items() if slots}


# -- calls -------------------------------------------------------------------------------------------

SOON_S = 10.0
"""A refusal must come well before any timeout."""


Errors = type[Exception] | tuple[type[Exception], ...]


def refused(error: Errors, call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text with which `call` raises `error` (that very class, or one of them); it must come soon."""
    wanted = [each.__name__ for each in (error if isinstance(error, tuple) else (error,))]
    start = time.monotonic()
    try:
        call(*args, **kwargs)
    except error as found:
        assert type(found).__name__ in wanted, f"{type(found).__name__}: {found}"
        took = time.monotonic() - start
        assert took < SOON_S, f"the refusal took {took:.1f} s"
        return str(found)
    raise AssertionError(f"{getattr(call, '__name__', call)} did not raise {wanted}")


class _Warnings:
    """Records warnings by thread: ranks may be threads, and `warnings.catch_warnings` serves one at a time."""

    def __init__(self) -> None:
        self._lock, self._depth = threading.Lock(), 0
        self._found: list[tuple[int, str]] = []
        self._context: Any = None

    @contextmanager
    def recorded(self) -> Iterator[list[str]]:
        """The texts of this thread's warnings, complete when the block ends."""
        texts: list[str] = []
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._context = warnings.catch_warnings()
                self._context.__enter__()
                warnings.simplefilter("always")
                warnings.showwarning = self._note  # restored by the context
            start = len(self._found)
        try:
            yield texts
        finally:
            with self._lock:
                texts += [text for thread, text in self._found[start:] if thread == threading.get_ident()]
                self._depth -= 1
                if self._depth == 0:
                    self._context.__exit__(None, None, None)

    def _note(self, message: Any, *_: Any, **__: Any) -> None:
        self._found.append((threading.get_ident(), str(message)))


_warnings = _Warnings()


@contextmanager
def warned(*words: str) -> Iterator[None]:
    """Assert that this rank gets a warning with all these words inside the block."""
    with _warnings.recorded() as texts:
        yield
    assert any(all(word in text for word in words) for text in texts), f"no warning with {words} in {texts}"


@contextmanager
def silent() -> Iterator[None]:
    """Assert that this rank gets no warning inside the block."""
    with _warnings.recorded() as texts:
        yield
    assert texts == []


def on_root(kit: Kit, value: Any, root: int = 0) -> Any:
    """`value` on the root rank, an empty dict elsewhere: what a script passes with ``broadcast_from_rank0``."""
    return value if kit.rank == root else {}
