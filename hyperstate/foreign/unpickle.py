"""Reading the pickled metadata of other libraries' checkpoints, without `pickle`.

A pickle is a program. This interprets the few instructions of which such metadata is made: it imports
nothing, calls nothing, and makes nothing but numbers, strings, tuples, lists, dicts and `Record`s.
Time and memory grow with the length of the data alone, and nothing in here recurses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import CheckpointError

LIMIT = 1 << 28
"""Bytes: longer metadata is refused."""
_STACK, _NAME, _NUMBER, _DIMS = 1 << 20, 200, 32, 64
"""Most items on the stack, characters of a class name, bytes of an integer, dimensions of a tensor."""

_METADATA = frozenset({
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
})  # fmt: skip
_STORAGE = frozenset({"_StorageInfo", "StorageInfo", "_HFStorageInfo"})
_PATHS = frozenset({"Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath"})
_HYPER = ("hyper_parallel.core.checkpoint.", "hyper_parallel.core.distributed_checkpoint.")
_DTYPES = ("bfloat", "bits", "bool", "complex", "float", "int", "qint", "quint", "uint")


@dataclass(eq=False, slots=True)
class Record:
    """An object of one of the known classes."""

    kind: str
    """Name of the class, without its module."""
    args: tuple[Any, ...] = ()
    """What it was made from."""
    state: Any = None
    """Its fields: a dict by name, or whatever the class saved instead."""


@dataclass(frozen=True, slots=True)
class _Class:
    """A known class or function, not yet used."""

    module: str
    name: str


class _Refused(Exception):  # noqa: N818  # never leaves this module
    pass


def loads(data: bytes, where: str) -> Any:
    """What the pickle `data` holds; `where` names it in errors.

    Raises `CheckpointError` for data that is too long or damaged, and for any instruction or class
    that checkpoint metadata does not consist of.
    """
    if len(data) > LIMIT:
        raise CheckpointError(f"{where}: {len(data)} bytes of metadata; more than {LIMIT} are refused")
    machine = _Machine(data)
    try:
        return machine.run()
    except _Refused as error:
        raise CheckpointError(f"{where}: refused at byte {machine.at}: {error}") from None
    except (IndexError, struct.error, UnicodeDecodeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: damaged at byte {machine.at}: {error}") from None


def _refuse(text: str) -> NoReturn:
    raise _Refused(text)


def _find(module: Any, name: Any) -> Any:
    """The stand-in for a global. A dtype becomes its name."""
    if not (isinstance(module, str) and isinstance(name, str)):
        _refuse("a class name that is no string")
    if len(module) + len(name) > _NAME:
        _refuse(f"a class name of {len(module) + len(name)} characters")
    known = (
        (module == "torch.distributed.checkpoint.metadata" and name in _METADATA)
        or (module.startswith("torch.distributed.checkpoint.") and name in _STORAGE)
        or (module.startswith(_HYPER) and name in _METADATA | _STORAGE)
        or (module in ("pathlib", "pathlib._local") and name in _PATHS)
        or (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"))
    )
    if known:
        return _Class(module, name)
    if module == "torch" and name.startswith(_DTYPES):
        return f"torch.{name}"
    _refuse(f"{module}.{name} is no part of checkpoint metadata; nothing was imported or run")


def _make(cls: Any, args: Any) -> Any:
    """The stand-in for ``cls(*args)``."""
    if not isinstance(cls, _Class) or not isinstance(args, tuple):
        _refuse(f"a call of a {type(cls).__name__}")
    if cls.name == "Size":
        return _size(args)
    if cls.name == "_get_layout":
        return args[0] if len(args) == 1 and isinstance(args[0], str) else _refuse("a layout that is no string")
    if cls.name == "OrderedDict":
        return {} if not args else _refuse("an OrderedDict made from arguments")
    return Record(cls.name, args)


def _size(args: tuple[Any, ...]) -> tuple[int, ...]:
    (dims,) = args
    if not isinstance(dims, (tuple, list)) or len(dims) > _DIMS or not all(type(dim) is int for dim in dims):
        _refuse("a size that is no short tuple of integers")
    return tuple(dims)


class _Machine:
    """The stack machine that pickles are written for (protocols 2 to 5)."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def run(self) -> Any:
        data, stack = self.data, self.stack
        while self.at < len(data):
            code = data[self.at]
            if code == _STOP:
                return stack.pop()
            step = _STEPS.get(code)
            if step is None:
                _refuse(f"the instruction {bytes([code])!r} is not one of checkpoint metadata")
            self.at += 1
            step(self)
            if len(stack) > _STACK:
                _refuse(f"more than {_STACK} values at once")
        raise ValueError("the data ends early")

    def read(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise ValueError(f"{count} bytes are announced, {len(self.data) - self.at} are left")
        found = self.data[self.at : end]
        self.at = end
        return found

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.read(struct.calcsize(form)))[0]

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + _NAME)
        if end < 0:
            _refuse("a class name without an end")
        found = self.data[self.at : end].decode()
        self.at = end + 1
        return found

    def to_mark(self) -> list[Any]:
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            _refuse(f"a {type(self.stack[-1]).__name__} where a {kind.__name__} belongs")
        return self.stack[-1]


Step = Callable[[_Machine], None]


def _push(make: Callable[[_Machine], Any]) -> Step:
    return lambda m: m.stack.append(make(m))


def _integer(m: _Machine, form: str) -> int:
    size = m.number(form)
    if not 0 <= size <= _NUMBER:
        _refuse(f"an integer of {size} bytes")
    return int.from_bytes(m.read(size), "little", signed=True)


def _tuple_of(count: int) -> Step:
    def step(m: _Machine) -> None:
        if len(m.stack) < count:
            raise IndexError("the stack is empty")
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return step


def _drop(m: _Machine) -> None:
    m.to_mark()


def _append(m: _Machine) -> None:
    item = m.stack.pop()
    m.top(list).append(item)


def _extend(m: _Machine) -> None:
    items = m.to_mark()
    m.top(list).extend(items)


def _set_items(m: _Machine) -> None:
    _put(m, m.to_mark())


def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _put(m, [key, value])


def _put(m: _Machine, items: list[Any]) -> None:
    target = m.top(dict)
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int, Record):  # hashing a deep tuple would recurse
            _refuse(f"a {type(key).__name__} as key of a dict")
        target[key] = value


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    m.top(Record).state = state


def _reduce(m: _Machine) -> None:
    args, cls = m.stack.pop(), m.stack.pop()
    m.stack.append(_make(cls, args))


def _global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.stack.append(_find(module, name))


def _remember(m: _Machine, index: int) -> None:
    if index > len(m.memo):  # writers number in order; anything else would only claim memory
        _refuse(f"memo {index} after {len(m.memo)}")
    m.memo[index : index + 1] = [m.stack[-1]]


_STOP = ord(".")
_STEPS: dict[int, Step] = {
    0x80: lambda m: None if m.number("<B") <= 5 else _refuse("an unknown protocol"),
    0x95: lambda m: m.number("<Q"),
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): _drop,
    ord("N"): _push(lambda _: None),
    0x88: _push(lambda _: True),
    0x89: _push(lambda _: False),
    ord("J"): _push(lambda m: m.number("<i")),
    ord("K"): _push(lambda m: m.number("<B")),
    ord("M"): _push(lambda m: m.number("<H")),
    ord("G"): _push(lambda m: m.number(">d")),
    0x8A: _push(lambda m: _integer(m, "<B")),
    0x8B: _push(lambda m: _integer(m, "<i")),
    0x8C: _push(lambda m: m.read(m.number("<B")).decode(errors="surrogatepass")),
    ord("X"): _push(lambda m: m.read(m.number("<I")).decode(errors="surrogatepass")),
    0x8D: _push(lambda m: m.read(m.number("<Q")).decode(errors="surrogatepass")),
    ord("C"): _push(lambda m: m.read(m.number("<B"))),
    ord("B"): _push(lambda m: m.read(m.number("<I"))),
    0x8E: _push(lambda m: m.read(m.number("<Q"))),
    ord("]"): _push(lambda _: []),
    ord("a"): _append,
    ord("e"): _extend,
    ord(")"): _push(lambda _: ()),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    ord("t"): _push(lambda m: tuple(m.to_mark())),
    ord("}"): _push(lambda _: {}),
    ord("s"): _set_item,
    ord("u"): _set_items,
    ord("c"): _push(lambda m: _find(m.line(), m.line())),
    0x93: _global,
    ord("R"): _reduce,
    0x81: _reduce,
    ord("b"): _build,
    ord("q"): lambda m: _remember(m, m.number("<B")),
    ord("r"): lambda m: _remember(m, m.number("<I")),
    0x94: lambda m: _remember(m, len(m.memo)),
    ord("h"): _push(lambda m: m.memo[m.number("<B")]),
    ord("j"): _push(lambda m: m.memo[m.number("<I")]),
}
"""Instruction -> what it does. Absent are other ways to name code, buffers, persistent ids, and forms in text."""
