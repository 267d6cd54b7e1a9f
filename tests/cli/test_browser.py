"""The pages in a real headless browser: they show, to their end, and nothing goes wrong in it."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hyperstate as hs
from hyperstate_numpy.job import run_ranks
from hyperstate_numpy.kit import Kit

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
Run = Callable[..., Any]
Pixels = list[bytes]
"""Rows of (red, green, blue) bytes."""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no headless browser (chromium, google-chrome) is installed")


def pixels(data: bytes) -> Pixels:
    """The rows of an 8-bit PNG of colours without palette, not interlaced (https://www.w3.org/TR/png-3/)."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, packed, width, height, kind = 8, b"", 0, 0, 0
    while at < len(data):
        length, name = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if name == b"IHDR":
            width, height, depth, kind = struct.unpack(">IIBB", body[:10])
            assert 8 == depth and kind in (2, 6)
        packed += body if name == b"IDAT" else b""
        at += length + 12
    step = 3 if kind == 2 else 4
    raw, line = zlib.decompress(packed), bytes(width * step)
    rows = []
    for row in range(height):
        first = row * (1 + width * step)
        line = unfiltered(raw[first], bytearray(raw[first + 1 : first + 1 + width * step]), line, step)
        rows.append(line if step == 3 else b"".join(line[i : i + 3] for i in range(0, len(line), 4)))
    return rows


def unfiltered(kind: int, line: bytearray, above: bytes, step: int) -> bytes:
    for i in range(len(line) if kind else 0):
        left = line[i - step] if i >= step else 0
        corner = above[i - step] if i >= step else 0
        up = above[i]
        if kind == 4:
            guess = left + up - corner
            added = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
        else:
            added = (0, left, up, (left + up) // 2)[kind]
        line[i] = (line[i] + added) & 255
    return bytes(line)


def look(page: Path, height: int) -> tuple[Pixels, str, str]:
    """A screenshot, the document as the browser has it, and what it had to say of errors."""
    shot = page.with_suffix(".png")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command = [str(BROWSER), *flags, f"--window-size=940,{height}", f"--user-data-dir={page.parent / 'profile'}"]
    said = ""
    for what in (f"--screenshot={shot}", "--dump-dom"):
        done = subprocess.run([*command, what, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
        said += "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return pixels(shot.read_bytes()), done.stdout, said


def check(page: Path, height: int) -> None:
    """Everything that the page says is drawn, in its colours, and the browser reports nothing."""
    rows, dom, said = look(page, height)
    source = page.read_text(encoding="utf-8")
    assert "" == said
    assert source.count("<rect") == dom.count("<rect")
    wanted = {bytes.fromhex(one) for one in re.findall(r'fill="#([0-9a-f]{6})"', source)}
    found = {row[i : i + 3] for row in rows for i in range(0, len(row), 3)}
    assert len(wanted) > 3
    assert set() == wanted - found
    inked = [number for number, row in enumerate(rows) if set(row) != {255}]
    assert height - 300 < max(inked) < height - 1  # the page fills the window, and ends inside it


def test_a_browser_shows_the_whole_page_that_visualize_writes(hyperstate: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    hyperstate("visualize", "--mesh", "replica=2,fsdp=2,tp=2", "--html", page)
    check(page, 1250)


def test_a_browser_shows_what_a_notebook_shows_of_a_live_state(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        kit = Kit()
        model = kit.shard(kit.model(0), kit.mesh([2, 2], ["replica", "fsdp"]))
        picture = hs.visualize_sharding(hs.get_model_state_dict(model))
        return str(picture._repr_html_())

    (html,) = set(run_ranks(4, body, timeout=30))
    page = tmp_path / "cell.html"
    page.write_text(f"<!DOCTYPE html><meta charset='utf-8'><title>cell</title><body>{html}</body>", encoding="utf-8")
    check(page, 1250)


def test_a_console_error_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<!DOCTYPE html><title>bad</title><script>undefined.x</script>", encoding="utf-8")
    rows, _, said = look(page, 200)
    assert "TypeError" in said
    assert {b"\xff\xff\xff"} == {row[i : i + 3] for row in rows for i in range(0, len(row), 3)}
