"""Joining a job, and the key-value store that its ranks share.

A job is started by ``msrun``, which puts MS_ROLE and MS_SCHED_HOST/MS_SCHED_PORT into the environment, or by anything
that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as ``torchrun`` does.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import mindspore as ms
from mindspore.communication import GlobalComm, get_group_size, get_rank
from mindspore.communication.management import _init_with_store, init
from mindspore.mint.distributed import TCPStore, distributed

from hyperstate.errors import TransferError

from .presence import Presence, address_towards

PORT_VARIABLE = "HYPERSTATE_STORE_PORT"
"""Where the store of a job that msrun started listens; by default `PORT_DISTANCE` from the scheduler's."""
PORT_DISTANCE = 1000
"""MindSpore itself listens on ports right after the scheduler's."""
DEFAULT_TIMEOUT_S = 300.0
"""MindSpore's own default for its store and for `init_process_group`."""
_JOB_KEY, _HERE_KEY = "hyperstate/job", "hyperstate/here/{}"

_default_timeout = DEFAULT_TIMEOUT_S
_store: Any = None
_presence: Presence | None = None


def join(timeout: timedelta = timedelta(seconds=DEFAULT_TIMEOUT_S)) -> None:
    """Join the job that the environment describes: initialise MindSpore's communication and the store.

    To be called once on every rank, in place of ``mindspore.communication.init`` and after
    ``mindspore.set_device``; does nothing in a process without a job. `timeout` bounds the start, and is the default
    timeout of each call of hyperstate. Raises `TransferError` if the others do not come.
    """
    global _default_timeout  # noqa: PLW0603  # a process is in one job
    _default_timeout = timeout.total_seconds()
    if not GlobalComm.INITED:
        if "MS_ROLE" in os.environ:
            init()
        elif "MASTER_PORT" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            _init_by_store(timeout)
    if world() > 1:
        presence()


def _init_by_store(timeout: timedelta) -> None:
    global _store  # noqa: PLW0603  # the same
    number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _store = _connect(_master(), number == 0, count, timeout)
    kind = {"CPU": "mccl", "Ascend": "hccl"}.get(ms.get_context("device_target"))
    try:
        _init_with_store(kind, timeout=timeout, world_size=count, rank=number, store=_store)
    except RuntimeError as error:
        raise TransferError(f"rank {number} can't join the job of {count} ranks: {error}") from error


def _master() -> tuple[str, int]:
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"])


def rank() -> int:
    """This process' global rank; 0 if there is no job."""
    return int(get_rank()) if GlobalComm.INITED else 0


def world() -> int:
    """Number of ranks of the job; 1 if there is none."""
    return int(get_group_size()) if GlobalComm.INITED else 1


def default_timeout() -> float:
    """Default timeout of a call, in seconds: the one given to `join`."""
    return _default_timeout


def enable_messages() -> None:
    """Make MindSpore's point-to-point functions find this rank.

    `send`, `isend` and the functions on objects look for the rank in the group "hccl_world_group", whatever the
    world group is called (mindspore 2.10.0, `get_cache_group_rank`'s default argument is bound at import).
    """
    distributed._GROUP_RANK_CACHE.setdefault("hccl_world_group", rank())


def store() -> Any:
    """The job's store. Where `join` was not called, rank 0 must be on its way to its first call."""
    presence()
    return _store


def presence() -> Presence:
    """This rank's mark of life. Made with the store, before any call: who dies early must be missed too."""
    global _store, _presence  # noqa: PLW0603  # the same
    if _store is None:
        timeout = timedelta(seconds=_default_timeout)
        if "MS_ROLE" in os.environ:
            _store = _store_beside_scheduler(timeout)
        elif "MASTER_PORT" in os.environ:
            _store = _connect(_master(), False, world(), timeout)
        else:
            raise TransferError(
                "nothing tells where the job's key-value store is; call hyperstate_mindspore.join() instead of init(), "
                "or start the job by msrun, or set MASTER_ADDR and MASTER_PORT"
            )
    if _presence is None:
        _presence = Presence(address_towards(_store.host), world(), _find)
        _store.set(_HERE_KEY.format(rank()), _presence.address.encode())
    return _presence


def _find(peer: int) -> str:
    found: bytes = _store.get(_HERE_KEY.format(peer))
    return found.decode()


def _store_beside_scheduler(timeout: timedelta) -> Any:
    """A store of our own: msrun's scheduler keeps none for scripts. Rank 0 runs on the scheduler's machine."""
    host, scheduler = os.environ["MS_SCHED_HOST"], os.environ["MS_SCHED_PORT"]
    away = PORT_DISTANCE if int(scheduler) + PORT_DISTANCE < 1 << 16 else -PORT_DISTANCE
    port = int(os.environ.get(PORT_VARIABLE) or int(scheduler) + away)
    found = _connect((host, port), rank() == 0, world(), timeout)
    mine = f"{host}:{scheduler}".encode()
    if rank() == 0:
        found.set(_JOB_KEY, mine)
    theirs = found.get(_JOB_KEY)
    if theirs != mine:
        raise TransferError(
            f"the key-value store at {host}:{port} belongs to the job {theirs.decode(errors='replace')}, not to "
            f"{mine.decode()}; set {PORT_VARIABLE} to a free port, the same on all ranks"
        )
    return found


def _connect(where: tuple[str, int], keeper: bool, count: int, timeout: timedelta) -> Any:
    host, port = where
    try:
        address = socket.gethostbyname(host)  # MindSpore's store takes numbers alone
        return TCPStore(address, port, world_size=count, is_master=keeper, timeout=timeout, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise TransferError(
            f"rank {os.environ.get('RANK_ID') or os.environ.get('RANK') or 0} can't "
            f"{'keep' if keeper else 'reach'} the job's key-value store at {host}:{port}; if another program uses "
            f"that port, choose one by {PORT_VARIABLE} (msrun) or MASTER_PORT. MindSpore says: {error}"
        ) from error
