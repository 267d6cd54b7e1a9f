"""The caller's own values beside the state: what `extra=` may hold, and where in it something else stands."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedConfigurationError
from ..schema import MAX_DEPTH, refuse_leaf, take_apart

PLAIN = "numbers, text, bytes, None, lists, tuples and dicts, of Python's own types"


def take_extra(extra: Any) -> Any:
    """The skeleton of `extra`. Raises `UnsupportedConfigurationError`, which says where in it something can't stand."""
    try:
        return take_apart(extra, refuse_leaf)
    except UnsupportedConfigurationError:
        raise UnsupportedConfigurationError(f"extra= may hold {PLAIN}: {_fault(extra, 'extra', 0)}") from None


def _fault(value: Any, path: str, depth: int) -> str:
    """What is wrong in `value`, which is or isn't; empty if nothing is."""
    kind = type(value)
    if kind not in (list, tuple, dict):
        try:
            take_apart(value, refuse_leaf)
        except UnsupportedConfigurationError:
            return f"{path} is of type {kind.__module__}.{kind.__qualname__}"
        return ""
    if depth == MAX_DEPTH:
        return f"{path[:80]}… is nested more than {MAX_DEPTH} levels deep, or holds itself"
    if kind is not dict:
        return next((text for i, item in enumerate(value) if (text := _fault(item, f"{path}[{i}]", depth + 1))), "")
    for key, item in value.items():
        if text := _fault(key, f"the key {_name(key)} of {path}", depth + 1):
            return text
        if text := _fault(item, f"{path}[{_name(key)}]", depth + 1):
            return text
    return ""


def _name(key: Any) -> str:
    """A key as Python writes it, if it is of a type that does so without running a stranger's code."""
    return repr(key)[:60] if type(key) in (str, int, float, bool, bytes, type(None)) else f"({type(key).__name__})"
