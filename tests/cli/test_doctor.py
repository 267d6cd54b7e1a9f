"""`hyperstate doctor`: what it finds is so, and what is wrong comes with a remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperstate.backend import installed
from hyperstate.cli.doctor import BAD, version


def broken(folder: Path, name: str, code: str) -> str:
    """Register a backend whose import runs `code`; the folder to put on PYTHONPATH."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hyperstate.backends]\n{name} = {name}_adapter:backend\n")
    (folder / f"{name}_adapter.py").write_text(code)
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


def test_every_backend_under_test_moves_a_state_between_two_ranks(
    hyperstate: Callable[..., Any], backend_name: str
) -> None:
    done = hyperstate("doctor", "--json", "-")
    assert 0 == done.code, done.out
    found = {one["name"]: one for one in done.json()["backends"]}[backend_name]
    assert found["usable"]
    assert found["versions"]["numpy"] == version("numpy")
    assert "cpu" in found["devices"] and found["collectives"]
    (finding,) = [one for one in found["findings"] if "2 ranks" in one["what"]]
    assert "fine" == finding["state"]
    assert "6 tensors equal after a move" in finding["text"]


def test_quick_starts_no_rank_and_lists_every_registered_backend(hyperstate: Callable[..., Any]) -> None:
    done = hyperstate("doctor", "--quick")
    assert (0, "") == (done.code, done.err)
    assert "ranks" not in done.out
    assert [True] * len(installed()) == [f"\n{name}: can" in done.out for name in installed()]
    assert done.out.endswith("\nFINE\n")


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [("HYPERSTATE_BACKEND", "pytorhc", "set it to one of: "), ("HYPERSTATE_BUCKET_MIB", "much", "unset HYPERSTATE")],
)
def test_a_variable_that_says_nothing_known_is_bad(
    hyperstate: Callable[..., Any], variable: str, value: str, remedy: str
) -> None:
    done = hyperstate("doctor", "--quick", **{variable: value})
    assert 1 == done.code
    assert value in done.out and remedy in done.out
    assert done.out.endswith("\nNOT FINE\n")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os._exit(11)", "the process ended with exit code 11"),
        ("raise OSError('libcuda.so.1 is missing')", "OSError: libcuda.so.1 is missing"),
        ("import time; time.sleep(600)", "no answer within 8 s"),
    ],
)
def test_a_framework_that_breaks_while_it_starts_is_bad_and_harms_no_other(
    hyperstate: Callable[..., Any], tmp_path: Path, code: str, said: str
) -> None:
    place = broken(tmp_path, "shaky", code)
    done = hyperstate("doctor", "--quick", "--timeout", 8 if "sleep" in code else 100, "--json", "-", PYTHONPATH=place)
    assert 1 == done.code
    found = {one["name"]: one for one in done.json()["backends"]}
    assert (False, [BAD]) == (found["shaky"]["usable"], [one["state"] for one in found["shaky"]["findings"]])
    assert said in found["shaky"]["findings"][0]["text"]
    if "sleep" not in code:
        assert found["numpy"]["usable"]


def test_a_framework_that_is_not_installed_is_a_note_with_the_line_to_install_it(
    hyperstate: Callable[..., Any], tmp_path: Path
) -> None:
    place = broken(tmp_path, "lonely", "import lonely")
    done = hyperstate("doctor", "--quick", "--json", "-", PYTHONPATH=place)
    assert 0 == done.code
    (finding,) = {one["name"]: one for one in done.json()["backends"]}["lonely"]["findings"]
    assert ("note", "pip install 'hyperstate-dist[lonely]' (in a clone: '.[lonely]')") == (
        finding["state"],
        finding["remedy"],
    )


def test_numpy_2_beside_mindspore_is_bad(hyperstate: Callable[..., Any], tmp_path: Path) -> None:
    # Two distributions of these names and versions, found before the real ones.
    for name, number in (("numpy", "2.1.0"), ("mindspore", "2.10.0")):
        info = tmp_path / f"{name}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    adapter = tmp_path / "hyperstate_mindspore"
    adapter.mkdir()
    (adapter / "__init__.py").write_text("def backend(): return object()\n")
    done = hyperstate("doctor", "--quick", PYTHONPATH=str(tmp_path))
    assert 1 == done.code
    assert "mindspore 2.10.0 is built against numpy 1, and numpy 2.1.0 is installed" in done.out
    assert "To do: pip install 'numpy<2'" in done.out
