"""examples/train_any.py on MindSpore, by the command that README.md shows."""

from __future__ import annotations

import socket
from pathlib import Path

import launched


def _port() -> int:
    """A free port whose successor is free too: the ranks' store listens there."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def test_the_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    command, lines = launched.shown("msrun")
    status, said = launched.run(command, f"--master_port={_port()}", f"--log_dir={tmp_path}", GLOG_v="3")
    assert lines == [line for line in said if line in lines]
    assert 0 == status


def test_both_frameworks_print_the_same() -> None:
    assert launched.shown("torchrun")[1] == launched.shown("msrun")[1]
