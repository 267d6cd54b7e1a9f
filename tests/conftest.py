"""Which backend is under test, and its ranks.

HYPERSTATE_TEST_BACKEND names the backends of a run (separated by commas). Unset means every registered
one. No backend is ever skipped: one that is named and can't be loaded fails the run at its start, one
that is merely registered fails the tests that need it. Unit tests need none. What is skipped, with the reason,
is a kind of device (HYPERSTATE_TEST_DEVICE) that this machine lacks: the kit's `absent` tells.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from hyperstate import backend as backends
from hyperstate.errors import BackendError
from hyperstate.testing import Pool
from hyperstate.testing.pool import kit_module

VARIABLE = "HYPERSTATE_TEST_BACKEND"
RUN_LIMIT_S = 45 * 60.0
"""The whole run ends after this time, whatever it waits for. (One test: `faulthandler_timeout` in pyproject.toml.)"""

settings.register_profile("hyperstate", deadline=None, max_examples=100)
settings.load_profile("hyperstate")
# The user's choice for scripts; tests choose for themselves.
os.environ.pop(backends.VARIABLE, None)


def named_backends() -> list[str]:
    """The backends that the environment asks for; empty if it asks for none."""
    return [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]


def backends_under_test() -> list[str]:
    names = named_backends() or list(backends.installed())
    if not names:
        raise pytest.UsageError("no backend is registered: install this package before testing it")
    return names


def pytest_configure(config: pytest.Config) -> None:
    for name in named_backends():
        try:
            backends.load(name)
        except BackendError as error:
            raise pytest.UsageError(f"{VARIABLE}={os.environ[VARIABLE]}: {error}") from None
    timer = threading.Timer(RUN_LIMIT_S, _end_run, (config,))
    timer.daemon = True
    timer.start()
    config.add_cleanup(timer.cancel)


def _end_run(config: pytest.Config) -> None:
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    sys.__stderr__.write(f"\nthe run took more than {RUN_LIMIT_S:.0f} s and was ended here:\n")
    faulthandler.dump_traceback(sys.__stderr__)
    os._exit(pytest.ExitCode.INTERRUPTED)


@pytest.fixture(scope="session", params=backends_under_test())
def backend_name(request: pytest.FixtureRequest) -> str:
    """The backend under test, loaded."""
    name: str = request.param
    backends.load(name)
    return name


@pytest.fixture(scope="session")
def pool(backend_name: str) -> Iterator[Callable[[int], Pool]]:
    """``pool(4)``: four ranks of the backend under test. They start at the first `run` and stay up between tests."""
    pools: dict[int, Pool] = {}
    absent: Callable[[], str] | None = getattr(kit_module(backend_name), "absent", None)
    reason = absent() if absent is not None else ""

    def ranks(count: int) -> Pool:
        if reason:
            pytest.skip(reason)
        return pools.setdefault(count, Pool(backend_name, count))

    yield ranks
    for each in pools.values():
        each.stop()
