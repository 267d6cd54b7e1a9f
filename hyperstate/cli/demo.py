"""`hyperstate demo`: checks the options, starts the ranks, and joins what they report into one `Outcome`.

The demo of a backend is the function ``rank_main(kit, *, folder, file)`` in ``<package>/demo.py``; it runs on
every rank and returns the fields of hyperstate_torch's `Report`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ..backend import GROUP, VARIABLE, how_to_install, installed, load
from ..errors import BackendError
from ..testing import Pool, RankFailure
from .example import FetchError, fetch

PREFERRED = ("torch", "mindspore", "numpy")
MODEL_PREFIX = "hf:"
# Freed memory goes back to the system at once, so that a peak is what was needed.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class RefusedError(Exception):
    """The demo can't run as asked; the text says why."""


@dataclass(frozen=True)
class Choice:
    """What was asked for on the command line."""

    backend: str | None
    ranks: int
    model: str | None
    checkpoint: Path | None
    fetch_example: bool
    cache: Path | None
    timeout: float
    verbose: bool


@dataclass(frozen=True)
class Cost:
    """What one call cost all ranks together. Bytes and seconds; None where the system does not tell."""

    call: str
    by: str
    sent: int | None
    messages: int | None
    peak_root: int | None
    peak_others: int | None
    cpu: float | None
    wall: float


@dataclass(frozen=True)
class Check:
    """One comparison of values: how many were compared, and the names of some that differ."""

    what: str
    compared: int
    differences: list[str]
    decides: bool = True
    """Whether the verdict depends on it."""

    @property
    def equal(self) -> bool:
        """Whether something was compared and all of it was equal."""
        return self.compared > 0 and not self.differences


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    backend: str
    versions: str
    ranks: int
    title: str
    meshes: list[str]
    how: str
    """Why equal bits can be expected."""
    legend: str
    """What the figures are."""
    costs: list[Cost]
    checks: list[Check]

    @property
    def equal(self) -> bool:
        """The verdict."""
        deciding = [check for check in self.checks if check.decides]
        return bool(deciding) and all(check.equal for check in deciding)


def run(choice: Choice) -> Outcome:
    """Run the demo. Raises `RefusedError`."""
    if choice.ranks < 2 or choice.ranks % 2:
        raise RefusedError(f"--ranks {choice.ranks}: the second mesh has 2 replicas, so an even number is needed")
    folder, file = _input(choice)
    name, script = _backend(choice.backend)
    os.environ[VARIABLE] = name  # the option wins over the environment, in the ranks too
    for variable, value in MALLOC.items():
        os.environ.setdefault(variable, value)
    try:
        with Pool(name, choice.ranks) as pool:
            reports = pool.run(script, "rank_main", timeout=choice.timeout, folder=folder, file=file)
    except RankFailure as failure:
        raise RefusedError(
            str(failure) if choice.verbose else first_words(failure) + "; --verbose shows all that the ranks wrote"
        ) from None
    return join(name, reports)


def _input(choice: Choice) -> tuple[str | None, str | None]:
    """(folder, file) that the ranks read; None where not asked for."""
    given = {
        "--model": choice.model,
        "--checkpoint": choice.checkpoint,
        "--fetch-example": choice.fetch_example or None,
    }
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise RefusedError(f"{' and '.join(named)} exclude each other")
    if choice.cache is not None and not choice.fetch_example:
        raise RefusedError("--cache goes with --fetch-example only")
    if choice.model is not None and not choice.model.startswith(MODEL_PREFIX):
        raise RefusedError(
            f"--model {choice.model}: write {MODEL_PREFIX}FOLDER, a folder with config.json and *.safetensors"
        )
    if choice.model is not None:
        return str(Path(choice.model.removeprefix(MODEL_PREFIX)).absolute()), None
    try:
        found = fetch(choice.cache) if choice.fetch_example else choice.checkpoint
    except FetchError as error:
        raise RefusedError(str(error)) from None
    return None, str(found.absolute()) if found is not None else None


def _backend(wanted: str | None) -> tuple[str, Path]:
    """The backend's name and the file of its demo."""
    names = installed()
    if wanted is None:
        usable = [name for name in PREFERRED if name in names and importlib.util.find_spec(name) is not None]
        if not usable:
            raise RefusedError(f"no framework is installed; install one: {how_to_install('torch')}")
        wanted = usable[0]
    try:
        load(wanted)
    except BackendError as error:
        raise RefusedError(str(error)) from None
    package = next(point.module for point in metadata.entry_points(group=GROUP) if point.name == wanted)
    found = importlib.util.find_spec(f"{package}.demo")
    if found is None or found.origin is None:
        raise RefusedError(f"the backend {wanted!r} has no demo; registered backends are: {', '.join(names)}")
    return wanted, Path(found.origin)


def first_words(failure: RankFailure) -> str:
    """The first rank's own words, without the traceback."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    blocks = [i for i, line in enumerate(lines) if line.startswith("--- rank")]
    ends = [*blocks[1:], len(lines)]
    told = {lines[i].strip("- :"): _last_error(lines[i + 1 : end]) for i, end in zip(blocks, ends, strict=True)}
    if not told:
        return f"the ranks failed: {lines[0] if lines else failure}"
    rank, text = next(
        ((rank, text) for rank, text in told.items() if "no answer" not in text), next(iter(told.items()))
    )
    return f"{rank} failed: {text}"


def _last_error(lines: Sequence[str]) -> str:
    """The line of a rank's output that names the error: the last one of its traceback."""
    named = [line for line in lines if line.split(":")[0].replace(".", "").isidentifier() and ":" in line]
    return (named or list(lines) or ["it said nothing"])[-1 if named else 0]


def join(backend: str, reports: Sequence[Mapping[str, Any]]) -> Outcome:
    """One outcome of what the ranks reported. Raises `RefusedError` if they refused their input."""
    root = reports[0]
    if root["refused"]:
        raise RefusedError(root["refused"])
    costs = [_cost(ranks) for ranks in zip(*(report["costs"] for report in reports), strict=False)]
    checks = [_check(ranks) for ranks in zip(*(report["checks"] for report in reports), strict=False)]
    meshes, how, legend = list(root["meshes"]), root["how"], root["legend"]
    return Outcome(backend, root["versions"], len(reports), root["title"], meshes, how, legend, costs, checks)


def _cost(ranks: Sequence[Mapping[str, Any]]) -> Cost:
    root = ranks[0]
    others = [rank["peak"] for rank in ranks[1:]]
    return Cost(
        root["call"],
        root["by"],
        _sum([rank["sent"] for rank in ranks]),
        _sum([rank["messages"] for rank in ranks]),
        root["peak"],
        None if None in others else max(others, default=None),
        _sum([rank["cpu"] for rank in ranks]),
        max(rank["wall"] for rank in ranks),
    )


def _sum(values: Sequence[Any]) -> Any:
    return None if None in values else sum(values)


def _check(ranks: Sequence[Mapping[str, Any]]) -> Check:
    """Ranks that compared nothing have no say; the root always has."""
    differences = sorted({name for rank in ranks for name in rank["differences"]})
    return Check(ranks[0]["what"], ranks[0]["compared"], differences, ranks[0]["decides"])
