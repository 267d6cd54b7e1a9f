"""What README.md and docs/ show runs, and gives what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = ("checkpoints.md", "errors.md", "optimizer-state.md", "templates.md")
LIMIT_S = 120.0


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_the_readme_s_script_prints_what_the_readme_shows(tmp_path: Path) -> None:
    (script,), (shown,) = blocks(README, "python"), blocks(README, "text")
    assert 11 == len([line for line in script.splitlines() if line.strip()])
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run(*launcher, "--redirects", "1", "--log-dir", str(tmp_path / "log"), str(tmp_path / "train.py"))
    said = [path.read_text(encoding="utf-8") for path in sorted((tmp_path / "log").rglob("stdout.log"))]
    assert shown == "".join(said)


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_of_the_documents_run_and_print_what_is_shown(name: str) -> None:
    path = ROOT / "docs" / name
    assert blocks(path, "python")
    said = "".join(run("-c", snippet) for snippet in blocks(path, "python"))
    assert "".join(blocks(path, "text")) == said


def test_the_readme_has_two_commands_of_one_line() -> None:
    commands = blocks(README, "sh")
    assert [1, 1] == [len(command.splitlines()) for command in commands]
    assert commands[0].rstrip().endswith(".venv/bin/hyperstate demo")
    assert commands[1].strip() in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")) if "://" not in link]
    assert [] == [link for link in links if not (path.parent / link.partition("#")[0]).is_file()]


def test_the_documents_name_every_error() -> None:
    from hyperstate import errors

    named = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    listed = set(
        re.findall(r"^\| `(\w+Error)` \|", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert named - {"HyperstateError"} == listed
