"""Scripts on real ranks, as a launcher starts them: a process each, with hard timeouts, leaving none behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

LIMIT_S = 180.0


def ranks_say(script: Path, ranks: int, folder: Path, *words: str, **variables: str) -> list[str]:
    """What the script, started in `folder` with these arguments, prints on each rank. Fails if it fails on any."""
    command = [sys.executable, str(script), *words]
    if ranks == 1:
        return [run(command, folder, **variables)]
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), **variables}
    started = [_start(command, folder, RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(ranks)]
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in started]
    finally:
        for process in started:
            _end(process)
    wrong = [f"rank {n}: {said[n][1][-3000:]}" for n in range(ranks) if started[n].returncode]
    assert [] == wrong, "\n".join(wrong)
    return [out for out, _ in said]


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Standard output of a command that must succeed."""
    process = _start(command, folder, **variables)
    try:
        out, complaints = process.communicate(timeout=LIMIT_S)
    finally:
        _end(process)
    assert 0 == process.returncode, complaints[-3000:]
    return out


def _start(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_v": "3", **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
