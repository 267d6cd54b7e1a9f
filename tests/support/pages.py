"""The code blocks of README.md and docs/*.md, and the marks that say how they are tested.

A mark is an HTML comment on a line of its own:

    <!-- run: torch 4 -->      the blocks from here to the next such mark are one program, run on 4 ranks of PyTorch;
                               also numpy, mindspore, or torch+mindspore, and no number for one process alone
    <!-- tested by: FILE -->   the next block is run by this file of tests/
    <!-- from: FILE -->        the next block stands in this file as it is
    <!-- not run: reason -->   the next block is not run

Of a program, ``python`` blocks are run in order in one namespace; then the ``$`` commands of ``console`` blocks, in the
same folder. ``text`` blocks are what the python blocks print, all ranks after each other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = ("python", "console")
"""Languages whose blocks need a mark."""
_FENCE = re.compile(r"^```(\w*)$")
_MARK = re.compile(r"^<!-- (run|tested by|from|not run): (.+) -->$")


@dataclass(frozen=True)
class Block:
    """What stands between fences; `line` is the number of its first line."""

    language: str
    line: int
    text: str


@dataclass
class Program:
    """Blocks under one ``run`` mark."""

    page: Path
    frameworks: frozenset[str]
    ranks: int
    blocks: list[Block] = field(default_factory=list)

    @property
    def id(self) -> str:
        lines = [block.line for block in self.of("python") + self.of("console")]
        return f"{self.page.stem}-{min(lines, default=0)}-{'+'.join(sorted(self.frameworks))}-{self.ranks}"

    def of(self, language: str) -> list[Block]:
        return [block for block in self.blocks if block.language == language]

    @property
    def script(self) -> str:
        """The python blocks, each on the lines that it has in the page, so that tracebacks point there."""
        text = ""
        for block in self.of("python"):
            text += "\n" * (block.line - 1 - text.count("\n")) + block.text
        return text

    @property
    def shown(self) -> str:
        """What the page says that the script prints."""
        return "".join(block.text for block in self.of("text") if not block.text.startswith("$ "))

    @property
    def commands(self) -> list[tuple[str, str]]:
        """(command, output) of the console blocks."""
        parts = [part for block in self.of("console") for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]]
        return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


@dataclass
class Page:
    """A page, read."""

    path: Path
    programs: list[Program] = field(default_factory=list)
    elsewhere: list[tuple[str, str, Block]] = field(default_factory=list)
    """(mark, what it says, block) of those blocks that are in no program."""
    unmarked: list[Block] = field(default_factory=list)


def read(path: Path) -> Page:
    """A page's blocks under their marks."""
    page, once = Page(path), None
    for found in _parts(path.read_text(encoding="utf-8")):
        if isinstance(found, tuple):
            kind, value = found
            once = None if kind == "run" else found
            if kind == "run":
                frameworks, _, ranks = value.partition(" ")
                page.programs.append(Program(path, frozenset(frameworks.split("+")), int(ranks or 1)))
        elif once is not None:
            page.elsewhere.append((*once, found))
            once = None
        elif page.programs:
            page.programs[-1].blocks.append(found)
        elif found.language in CODE:
            page.unmarked.append(found)
    page.programs = [each for each in page.programs if each.of("python") or each.of("console")]
    return page


def _parts(text: str) -> list[Block | tuple[str, str]]:
    found: list[Block | tuple[str, str]] = []
    lines, inside = text.splitlines(), None
    for number, line in enumerate(lines, start=1):
        if inside is None:
            if fence := _FENCE.match(line):
                inside = (fence[1], number + 1)
            elif mark := _MARK.match(line):
                found.append((mark[1], mark[2]))
        elif line == "```":
            language, start = inside
            found.append(Block(language, start, "".join(f"{each}\n" for each in lines[start - 1 : number - 1])))
            inside = None
    assert inside is None, f"a block of line {inside} has no end"
    return found
