"""One rank of a `Pool`: ``python -m hyperstate.testing.worker BACKEND PARENT``, jobs on standard input."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from functools import lru_cache
from types import ModuleType
from typing import Any

from .pool import MARK, kit_module


@lru_cache
def load_file(path: str) -> ModuleType:
    """The module in the file `path`, whether or not it is importable by name."""
    name = "hyperstate_rank_body_" + "".join(c if c.isalnum() else "_" for c in path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(backend: str, parent: int) -> None:
    """Join the job, then answer one line per job until standard input closes or the process `parent` ends."""
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    try:
        kit = kit_module(backend).Kit()
        _say({"ready": True})
    except Exception:  # noqa: BLE001  # the test's own process reports it
        _say({"error": traceback.format_exc()})
        return
    for line in sys.stdin:
        job = json.loads(line)
        try:
            result = getattr(load_file(job["path"]), job["function"])(kit, **job["arguments"])
            _say({"result": result})
        except Exception:  # noqa: BLE001  # the same
            _say({"error": traceback.format_exc()})


def _say(answer: Any) -> None:
    sys.stdout.write(MARK + json.dumps(answer) + "\n")
    sys.stdout.flush()


def _end_with_parent(parent: int) -> None:
    """Leave no process behind when the test run is killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
