"""What README.md and docs/ promise beside their code."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pages
import pytest

import hyperstate
from hyperstate import errors
from hyperstate.testing.worker import load_file

README = pages.ROOT / "README.md"


def test_the_readme_s_script_has_eighteen_lines() -> None:
    (program,) = pages.read(README).programs
    assert 18 == len([line for block in program.of("python") for line in block.text.splitlines() if line.strip()])


def test_the_readme_has_two_commands_of_one_line() -> None:
    commands = re.findall(r"^```sh\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert [1, 1] == [len(command.splitlines()) for command in commands]
    assert commands[0].rstrip().endswith(".venv/bin/hyperstate demo")
    assert commands[1].strip() in (pages.ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")) if "://" not in link]
    assert [] == [link for link in links if not (path.parent / link.partition("#")[0]).is_file()]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"([\w-]+\.md)$", (pages.ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(path.name for path in pages.PAGES if path != README) == sorted(listed)


def test_the_documents_name_every_error() -> None:
    named = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    text = (pages.ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert named - {"HyperstateError"} == set(re.findall(r"^\| `(\w+Error)` \|", text, re.MULTILINE))


# -- options.md ------------------------------------------------------------------------------------------

OPTIONS = (pages.ROOT / "docs" / "options.md").read_text(encoding="utf-8")
OBJECTS = {
    "model",
    "optimizer",
    "state_dict",
    "model_state_dict",
    "optim_state_dict",
    "state",
    "flat",
    "reader",
    "path",
}
"""What a call is about, rather than how it is done."""


def test_the_options_are_all_there_with_their_defaults() -> None:
    want = [(field.name, repr(field.default).replace("'", '"')) for field in fields(hyperstate.StateDictOptions)]
    assert want == re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", OPTIONS, re.MULTILINE)
    in_other_tables = re.findall(r"^\| `(\w+)` \| [^`]", OPTIONS, re.MULTILINE)
    assert [name for name, _ in want] * 2 == in_other_tables


def test_the_arguments_are_those_of_the_signatures() -> None:
    rows = re.findall(r"^\| `(\w+)=` \| ([^|]+) \|", OPTIONS, re.MULTILINE)
    said = {(function, name) for name, functions in rows for function in re.findall(r"`(\w+)`", functions)}
    public = {name: getattr(hyperstate, name) for name in hyperstate.__all__}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    without = ("infer_state_keys", "register_state_layout", "use_backend")
    real = {
        (function, name)
        for function, value in functions.items()
        if function not in without
        for name in inspect.signature(value).parameters
        if name not in OBJECTS | {"options"}
    }
    assert sorted(real) == sorted(said)


# -- pictures --------------------------------------------------------------------------------------------


def test_the_pictures_are_what_the_library_draws() -> None:
    folder = pages.ROOT / "docs" / "images"
    drawn = load_file(str(folder / "draw.py")).pictures()
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.svg"))}
