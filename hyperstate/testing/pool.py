"""Real ranks for tests: processes that stay up between cases, with hard timeouts, leaving nothing behind.

    with Pool("torch", ranks=4) as pool:
        pool.run(path, "case_name", timeout=60)

A rank body is found by file path and function name and is called with the backend's kit. A failure,
a hang or a lost rank ends the pool's processes; the next `run` starts fresh ones.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ..backend import GROUP

MARK = "\x1ehyperstate "
"""Start of the lines on standard output that are a worker's answers."""
START_TIMEOUT_S = 120.0


class RankFailure(AssertionError):  # noqa: N818  # a failed assertion, not an error of this library
    """What went wrong, by rank."""


def kit_module(name: str) -> Any:
    """The module ``<package>.kit`` of the backend `name`: its test fixture for the conformance suite."""
    (point,) = {p for p in metadata.entry_points(group=GROUP) if p.name == name}
    return importlib.import_module(point.module + ".kit")


class Pool:
    """`ranks` worker processes of one backend."""

    def __init__(self, backend: str, ranks: int) -> None:
        self.backend, self.ranks = backend, ranks
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def run(
        self, path: str | Path, function: str, *, timeout: float = 60.0, lost: tuple[int, ...] = (), **arguments: Any
    ) -> list[Any]:
        """Run `function(kit, **arguments)` of the file on every rank; the JSON-able results by rank.

        Ranks in `lost` are expected to die and give None. Raises `RankFailure` with every rank's traceback.
        """
        kit = kit_module(self.backend)
        if hasattr(kit, "run_here"):
            return list(kit.run_here(self.ranks, Path(path), function, timeout, lost, arguments))
        if not self._workers:
            self._start()
        job = {"path": str(path), "function": function, "arguments": arguments}
        for worker in self._workers:
            worker.ask(job)
        answers = [worker.answer(timeout if rank not in lost else 1.0) for rank, worker in enumerate(self._workers)]
        bad = {r: a for r, a in enumerate(answers) if "error" in a and r not in lost}
        if bad or lost:
            logs = {rank: self._workers[rank].log() for rank in bad}
            self.stop()
            if bad:
                raise RankFailure("\n".join(f"--- rank {r}:\n{a['error']}\n{logs[r]}" for r, a in bad.items()))
        return [answer.get("result") for answer in answers]

    def _start(self) -> None:
        port = _free_port()
        self._workers = [_Worker(self.backend, rank, self.ranks, port) for rank in range(self.ranks)]
        for worker in self._workers:
            ready = worker.answer(START_TIMEOUT_S)
            if "error" in ready:
                log = worker.log()
                self.stop()
                raise RankFailure(f"rank {worker.rank} did not start: {ready['error']}\n{log}")

    def stop(self) -> None:
        """End all workers and their children."""
        for worker in self._workers:
            worker.kill()
        self._workers = []


class _Worker:
    """One rank's process, in a process group of its own."""

    def __init__(self, backend: str, rank: int, ranks: int, port: int) -> None:
        self.rank = rank
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `kill`
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hyperstate.testing.worker", backend, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
            start_new_session=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._answers.put(line[len(MARK) :])
        self._answers.put(json.dumps({"error": "the process ended"}))

    def ask(self, job: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer will say that the process ended

    def answer(self, timeout: float) -> Any:
        try:
            return json.loads(self._answers.get(timeout=timeout))
        except queue.Empty:
            return {"error": f"no answer within {timeout:g} s"}

    def log(self) -> str:
        """The end of what the process wrote to standard error."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4000))
        return self._log.read().decode(errors="replace")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
