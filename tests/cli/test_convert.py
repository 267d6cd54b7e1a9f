"""`hyperstate convert` there and back, on a checkpoint that real ranks saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_look.py")
Run = Callable[..., Any]
MODEL = {f"layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "own"
    with Pool("numpy", 2) as pool:
        pool.run(BODIES, "save", folder=str(path), shape=[2], names=["fsdp"], first=2.0)
    return path


@pytest.mark.parametrize(("to", "suffix"), [("safetensors", ""), ("safetensors", ".safetensors"), ("ckpt", ".ckpt")])
def test_a_checkpoint_goes_into_another_format_and_back_unchanged(
    hyperstate: Run, saved: Path, tmp_path: Path, to: str, suffix: str
) -> None:
    other, back = tmp_path / f"other{suffix}", tmp_path / "back"
    done = hyperstate("convert", saved, other, "--to", to)
    assert (0, f"wrote {other} ({to}): ") == (done.code, done.out[: done.out.index(": ") + 2])
    assert 0 == hyperstate("convert", other, back).code
    assert 0 == hyperstate("verify", back).code
    assert 0 == hyperstate("diff", other, back).code
    lost = hyperstate("diff", saved, back, "--json", "-").json()["differences"]
    assert {("missing", False)} == {(one["kind"], one["name"] in MODEL) for one in lost}  # the optimizer's part


def test_names_are_changed_as_the_file_says(hyperstate: Run, saved: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"layers.0.weight": "first.weight"}))
    done = hyperstate("convert", saved, tmp_path / "new", "--names", names, "--json", "-").json()
    assert ("own", True) == (done["to"], done["nbytes"] > 0)
    listed = {tensor["name"] for tensor in hyperstate("inspect", tmp_path / "new", "--json", "-").json()["tensors"]}
    assert "first.weight" in listed and "layers.0.weight" not in listed


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{saved}", "{new}", "--to", "pickle"], "to='pickle' must be one of"),
        (["{saved}", "{new}", "--names", "{bad}"], "no JSON"),
        (["{saved}", "{new}", "--file-mib", "0"], "must be 1 at least"),
        (["{new}", "{saved}"], "holds neither"),
    ],
)
def test_what_can_not_be_done_is_said_in_one_line(
    hyperstate: Run, saved: Path, tmp_path: Path, arguments: list[str], text: str
) -> None:
    (tmp_path / "bad").write_text("{")
    filled = [one.format(saved=saved, new=tmp_path / "new", bad=tmp_path / "bad") for one in arguments]
    done = hyperstate("convert", *filled)
    assert 2 == done.code
    assert text in done.err and 1 == len(done.err.splitlines())
    assert not (tmp_path / "new").exists()
