"""Fully-qualified parameter names inside longer keys."""

from __future__ import annotations

from collections.abc import Container


def split_key(key: str, known: Container[str]) -> tuple[str, str] | None:
    """(FQN, rest): the longest FQN in `known` that is followed by a dot in `key`, and what follows that dot.

    None if no FQN fits. One look into `known` per dot of the key, however many FQNs there are.
    """
    dot = key.rfind(".")
    while dot >= 0:
        if key[:dot] in known:
            return key[:dot], key[dot + 1 :]
        dot = key.rfind(".", 0, dot)
    return None
