"""The code blocks of README.md and docs/ run, and print what the pages show (tests/support/pages.py has the marks).

HYPERSTATE_TEST_BACKEND chooses the programs by their frameworks, ``torch,mindspore`` those that need both.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pages
import pytest
from processes import ranks_say, run

CHOSEN = {name.strip() for name in os.environ.get("HYPERSTATE_TEST_BACKEND", "").split(",") if name.strip()}
READ = [pages.read(path) for path in pages.PAGES]
PROGRAMS = [one for page in READ for one in page.programs if not CHOSEN or CHOSEN == one.frameworks]
FRAMEWORKS = ({"numpy"}, {"torch"}, {"mindspore"}, {"torch", "mindspore"})


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.id)
def test_the_page_s_code_runs_and_prints_what_is_shown(program: pages.Program, tmp_path: Path) -> None:
    if program.script:
        script = tmp_path / f"page_{program.page.stem}.py"
        script.write_text(program.script, encoding="utf-8")
        assert program.shown == "".join(ranks_say(script, program.ranks, tmp_path))
    for command, output in program.commands:
        name, *words = shlex.split(command)
        assert "hyperstate" == name, f"{command}: only commands of hyperstate are run from pages"
        done = run([sys.executable, "-m", "hyperstate.cli", *words], tmp_path)
        assert output.rstrip() == "\n".join(line.rstrip() for line in done.splitlines()).rstrip()


@pytest.mark.parametrize("page", READ, ids=lambda page: page.path.stem)
def test_every_block_of_code_has_a_mark_that_is_true(page: pages.Page) -> None:
    assert [] == [f"{page.path.name}:{block.line}" for block in page.unmarked]
    for program in page.programs:
        assert program.frameworks in FRAMEWORKS
    for mark, says, block in page.elsewhere:
        where = f"{page.path.name}:{block.line}"
        if mark == "from":
            assert block.text in (pages.ROOT / says).read_text(encoding="utf-8"), where
        elif mark == "tested by":
            assert says.startswith("tests/") and (pages.ROOT / says).is_file(), where
        else:
            assert len(says.split()) >= 3, f"{where}: a reason, please"


@pytest.mark.parametrize("page", READ, ids=lambda page: page.path.stem)
def test_commands_stand_where_they_are_run(page: pages.Page) -> None:
    """Shell blocks install and launch; what hyperstate prints is shown, and checked, in console blocks."""
    text = page.path.read_text(encoding="utf-8")
    shell = re.findall(r"^```(?:sh|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [] == [line for block in shell for line in block.splitlines() if line.startswith("hyperstate ")]
    assert not re.search(r"^```(py|pycon|shell)$", text, re.MULTILINE), "python, console, sh, text: other names hide"
