"""`hyperstate doctor`: what works on this machine, and what to install for what does not."""

from __future__ import annotations

import json as jsonlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..backend import VARIABLE, how_to_install, installed
from ..errors import OptionError
from ..testing import Pool, RankFailure
from ..transfer import BUCKET_VARIABLE, message_limit
from .common import DIFFERENT, Json, check_target, refusing, report, steps
from .demo import first_words
from .probe import MARK

PACKAGES = {
    "torch": ("torch", "torch_npu", "numpy", "safetensors"),
    "mindspore": ("mindspore", "hyper_parallel", "numpy"),
    "numpy": ("numpy",),
}
"""Distributions whose versions matter to a backend."""
OPTIONAL = {"fsspec": "checkpoints behind URLs (s3://, gs://)"}
FINE, NOTE, BAD = "fine", "note", "bad"
SELFTEST = Path(__file__).with_name("selftest.py")
RANKS = 2


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: str
    """FINE, NOTE (absent, and not needed by what is there) or BAD."""
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Backend:
    """A registered backend on this machine."""

    name: str
    usable: bool
    versions: dict[str, str]
    devices: list[str] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Start no ranks: leave out the self-test.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that each step of each backend may take.")] = 120.0,
    json: Json = None,
) -> None:
    """Which backends, devices and collectives work here, and what to install. Two local ranks of each backend that is
    installed move a small state.

    Exit code 1: something that is installed or set does not work, or no backend can be used.
    """
    with refusing("doctor"):
        check_target(json)
        os.environ.setdefault("GLOG_v", "3")  # else MindSpore's ranks log a warning for each connection
        names = installed()
        backends = []
        with steps("looking at the backends", len(names)) as step:
            for name in names:
                backends.append(examine(name, quick=quick, timeout=timeout))
                step(1)
        general = [*surroundings(), *_usable(backends)]
        value = {
            "hyperstate": metadata.version("hyperstate-dist"),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "fine": not any(finding.state == BAD for finding in _all(general, backends)),
            "backends": [asdict(backend) for backend in backends],
            "findings": [asdict(finding) for finding in general],
        }
        report(json, value, lambda console: _show(console, value, general, backends))
    if not value["fine"]:
        raise typer.Exit(DIFFERENT)


def _all(general: list[Finding], backends: list[Backend]) -> Iterator[Finding]:
    yield from general
    for backend in backends:
        yield from backend.findings


# -- one backend -------------------------------------------------------------------------------------


def examine(name: str, *, quick: bool, timeout: float) -> Backend:
    """Everything about one backend."""
    versions = {package: found for package in PACKAGES.get(name, ()) if (found := version(package))}
    answer = _facts(name, timeout)
    if "absent" in answer:
        return Backend(name, False, versions, findings=[Finding(name, NOTE, *_halves(answer["absent"]))])
    findings = _clashes(name, versions)
    if "error" in answer:
        findings.append(Finding(name, BAD, f"does not start: {answer['error']}", f"reinstall {name}"))
        return Backend(name, False, versions, findings=findings)
    if not quick:
        findings.append(_selftest(name, timeout))
    usable = not any(finding.state == BAD for finding in findings)
    return Backend(name, usable, versions, answer.get("devices", []), answer.get("collectives", []), findings)


def version(package: str) -> str:
    """The installed version of a distribution; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _halves(text: str) -> tuple[str, str]:
    """What is wrong and what to do, of an error's text."""
    wrong, _, remedy = text.partition(": pip install")
    return wrong, f"pip install{remedy}" if remedy else ""


def _facts(name: str, timeout: float) -> dict[str, Any]:
    """What the backend tells (`probe`)."""
    command = [sys.executable, "-P", "-m", "hyperstate.cli.probe", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout:g} s"}
    for line in done.stdout.split("\n"):  # `splitlines` would split at the mark
        if line.startswith(MARK):
            found: dict[str, Any] = jsonlib.loads(line[len(MARK) :])
            return found
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return {"error": f"the process ended with exit code {done.returncode}: {last}"}


def _clashes(name: str, versions: dict[str, str]) -> list[Finding]:
    """Installed packages that do not go together."""
    numpy = versions.get("numpy", "0")
    if name == "mindspore" and numpy.partition(".")[0].isdecimal() and int(numpy.partition(".")[0]) >= 2:
        text = f"mindspore {versions.get('mindspore', '?')} is built against numpy 1, and numpy {numpy} is installed"
        return [Finding(name, BAD, text, "pip install 'numpy<2'")]
    return []


def _selftest(name: str, timeout: float) -> Finding:
    start = time.monotonic()
    what = f"{name}: {RANKS} ranks"
    try:
        with Pool(name, RANKS) as pool:
            results = pool.run(SELFTEST, "selftest", timeout=timeout)
    except RankFailure as failure:
        return Finding(what, BAD, first_words(failure), "look at the loopback network (firewall, name of this host)")
    except ModuleNotFoundError as error:
        return Finding(what, NOTE, f"not tried: the backend has no kit for tests ({error.name})")
    spent = time.monotonic() - start
    unequal = sorted({name for result in results for name in result["unequal"]})
    if unequal or not results[0]["compared"]:
        return Finding(what, BAD, f"values differ after a move: {', '.join(unequal) or 'nothing was compared'}")
    sent = sum(result["sent"] for result in results)
    compared = results[0]["compared"]
    return Finding(what, FINE, f"{compared} tensors equal after a move ({sent} bytes between ranks, {spent:.1f} s)")


# -- the rest ----------------------------------------------------------------------------------------


def surroundings() -> list[Finding]:
    """Environment variables and optional packages."""
    found = []
    named = os.environ.get(VARIABLE)
    if named and named not in installed():
        text = f"{VARIABLE}={named!r} names no registered backend"
        found.append(Finding(VARIABLE, BAD, text, f"set it to one of: {', '.join(installed())}"))
    try:
        message_limit(RANKS)
    except OptionError as error:
        found.append(Finding(BUCKET_VARIABLE, BAD, str(error), f"unset {BUCKET_VARIABLE}"))
    for package, use in OPTIONAL.items():
        if find_spec(package) is None:
            found.append(Finding(package, NOTE, f"not installed; it serves {use}", f"pip install {package}"))
    return found


def _usable(backends: list[Backend]) -> list[Finding]:
    if any(backend.usable for backend in backends):
        return []
    text = "no backend can be used"
    return [Finding("backends", BAD, text, f"install a framework: {how_to_install('torch')}")]


# -- for people --------------------------------------------------------------------------------------

_MARKS = {FINE: "[green]fine[/]", NOTE: "[dim]note[/]", BAD: "[bold red]bad [/]"}


def _show(console: Console, value: dict[str, Any], general: list[Finding], backends: list[Backend]) -> None:
    console.print(f"hyperstate {value['hyperstate']}, Python {value['python']}, {value['system']}", markup=False)
    for backend in backends:
        versions = ", ".join(f"{package} {number}" for package, number in backend.versions.items())
        console.print(f"\n[bold]{backend.name}[/]: {'can be used' if backend.usable else 'cannot be used'}")
        for word, text in (
            ("versions", versions),
            ("devices", ", ".join(backend.devices)),
            ("collectives", ", ".join(backend.collectives)),
        ):
            if text:
                console.print(f"  {word:12}{text}", markup=False)
        for finding in backend.findings:
            _line(console, finding)
    if general:
        console.print()
    for finding in general:
        _line(console, finding)
    console.print("\n[bold green]FINE[/]" if value["fine"] else "\n[bold red]NOT FINE[/]")


def _line(console: Console, finding: Finding) -> None:
    console.print(f"  {_MARKS[finding.state]}", end="  ")
    remedy = f". To do: {finding.remedy}" if finding.remedy else ""
    console.print(f"{finding.what}: {finding.text}{remedy}", markup=False)
