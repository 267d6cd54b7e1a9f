"""The commands that README.md shows, run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pages

EXAMPLE = "tests/frameworks/test_torch_example.py"
"""The mark in README.md of the commands that start the example."""
LIMIT_S = 150.0


def shown(launcher: str) -> tuple[str, list[str]]:
    """The command of README.md that uses `launcher`, and the lines that it is said to print."""
    page = pages.read(pages.ROOT / "README.md")
    (block,) = [one for _, file, one in page.elsewhere if file == EXAMPLE and one.language == "console"]
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, *lines = part.splitlines()
        if f" {launcher} " in f" {command} ":
            return command, lines
    raise AssertionError(f"README.md shows no command with {launcher}")


def run(command: str, *more: str, **variables: str) -> tuple[int, list[str]]:
    """Exit status and lines of standard output of a command line with assignments in front.

    The launcher is this Python's own; `more` are arguments for it. Leaves no process behind.
    """
    words = shlex.split(command)
    assigned = dict(word.split("=", 1) for word in words if re.fullmatch(r"[A-Z_]+=\S*", word))
    launcher, *arguments = words[len(assigned) :]
    folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [str(folder / launcher), *more, *arguments],
        cwd=pages.ROOT,
        env=environment | assigned | variables,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said.splitlines()
