"""What the files around the code promise each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CASES = ROOT / "hyperstate" / "testing" / "cases"
LIBRARY = [path for part in ("hyperstate", "backends") for path in (ROOT / part).rglob("*.py") if path.parent != CASES]


def test_ci_runs_the_second_command_of_the_readme_and_nothing_else():
    script = ROOT / ".ci" / "run"
    commands = re.findall(r"^```sh\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert ["set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."', commands[1]] == lines
    assert script.stat().st_mode & 0o111


def test_the_wheel_holds_exactly_the_core_and_the_adapters():
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    found = [path.parent for path in ROOT.glob("backends/*/*/__init__.py")]
    assert {"hyperstate", *(str(path.relative_to(ROOT)) for path in found)} == set(packages)
    assert sorted(Path(name).name for name in packages) == PROJECT["tool"]["check-wheel-contents"]["toplevel"]
    for name in packages:
        assert (ROOT / name / "py.typed").is_file()


def test_every_adapter_is_registered_and_under_the_import_contracts():
    adapters = {path.parent.name for path in ROOT.glob("backends/*/*/__init__.py")}
    points = PROJECT["project"]["entry-points"]["hyperstate.backends"]
    assert {f"{name}:backend" for name in adapters} == set(points.values())
    contracts = {contract["type"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
    assert adapters == set(contracts["independence"]["modules"])
    assert adapters | {"torch", "mindspore", "numpy"} <= set(contracts["forbidden"]["forbidden_modules"])
    assert {"hyperstate", *adapters} == set(PROJECT["tool"]["importlinter"]["root_packages"])


def test_no_folder_of_ours_can_shadow_a_framework():
    """The traps of pytest's import modes: packages under tests/, importable folders under backends/."""
    assert [] == list((ROOT / "tests").rglob("__init__.py"))
    assert [] == [*ROOT.glob("backends/*.py"), *ROOT.glob("backends/*/*.py")]
    folders = {path.name for path in (ROOT / "tests").iterdir()}
    assert set() == folders & {"torch", "mindspore", "numpy", "dist", "build"}


def test_tools_are_pinned_alike_in_tox_and_in_the_extra_for_developers():
    pins = [name for name in PROJECT["project"]["optional-dependencies"]["dev"] if "==" in name]
    tox = (ROOT / "tox.ini").read_text().split()
    assert pins
    assert [] == [pin for pin in pins if pin not in tox]


@pytest.mark.parametrize("path", sorted(LIBRARY), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_of_the_library_has_at_most_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400
