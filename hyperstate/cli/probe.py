"""What a backend says of this machine, asked in a process of its own: a framework may be slow to start, or crash.

    python -m hyperstate.cli.probe BACKEND

prints one line of JSON after `MARK`: what ``facts()`` in ``<package>/doctor.py`` gives, or the error. A backend
without such a module has no facts.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from importlib import metadata
from typing import Any

from ..backend import GROUP, load
from ..errors import BackendError

MARK = "\x1ehyperstate "


def ask(name: str) -> dict[str, Any]:
    """Facts of the backend `name`: versions (by package), devices, collectives; or ``error``."""
    try:
        load(name)
    except BackendError as error:
        return {"absent": str(error)}
    package = next(point.module for point in metadata.entry_points(group=GROUP) if point.name == name)
    if importlib.util.find_spec(f"{package}.doctor") is None:
        return {}
    found: dict[str, Any] = importlib.import_module(f"{package}.doctor").facts()
    return found


if __name__ == "__main__":
    try:
        answer = ask(sys.argv[1])
    except Exception as failure:  # noqa: BLE001  # whatever a framework raises is the answer
        answer = {"error": f"{type(failure).__name__}: {failure}"}
    sys.stdout.write(MARK + json.dumps(answer) + "\n")
