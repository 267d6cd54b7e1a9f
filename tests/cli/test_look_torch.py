"""The commands on PyTorch's own checkpoints, a live state in pictures, and docs/cli.md as it is written."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as dcp_save
from typer.testing import CliRunner

import hyperstate as hs
from hyperstate.cli.app import app
from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_look_torch.py")
DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"
Run = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of PyTorch's DCP, saved by one process."""
    torch.manual_seed(0)
    state = {"layers.0.weight": torch.randn(7, 5), "layers.0.bias": torch.randn(7).bfloat16(), "step": 3}
    dcp_save({"model": state}, storage_writer=FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    return tmp_path / "dcp"


def test_inspect_reads_a_folder_of_dcp_without_pytorch(hyperstate: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('torch must not be imported')")
    found = hyperstate("inspect", folder, "--json", "-", PYTHONPATH=str(tmp_path)).json()
    assert "PyTorch DCP" == found["format"]
    assert {"model.layers.0.weight": ("float32", [7, 5]), "model.layers.0.bias": ("bfloat16", [7])} == {
        one["name"]: (one["dtype"], one["shape"]) for one in found["tensors"]
    }
    assert [["__0_0.distcp", [0, 0], [7, 5]]] == next(t for t in found["tensors"] if t["shape"] == [7, 5])["chunks"]
    assert (1, [("__0_0.distcp", 2, 154)]) == (
        found["values"],
        [(file["name"], file["chunks"], file["nbytes"]) for file in found["files"]],
    )


def test_diff_and_verify_read_dcp(hyperstate: Run, folder: Path) -> None:
    assert 0 == hyperstate("diff", folder, folder).code
    done = hyperstate("verify", folder)
    assert 0 == done.code
    assert "PyTorch DCP" in done.out and "no checksums" in done.out


def test_a_plan_takes_its_schema_from_dcp(hyperstate: Run, folder: Path) -> None:
    found = hyperstate("plan", folder, "--from", "fsdp=2", "--json", "-").json()
    assert (2, 154) == (found["tensors"], found["nbytes"])


def test_a_live_sharded_state_is_drawn_on_every_rank_alike_and_nothing_is_sent() -> None:
    with Pool("torch", 2) as ranks:
        first, second = ranks.run(BODIES, "pictures", timeout=60)
    assert first == second
    assert 0 == first["sent"]
    assert "mesh fsdp=2: 2 ranks\n   0  1" in first["state"]
    assert "0.weight: float32 [7, 5], 140 B; 2 regions, each on 1 rank\n" in first["state"]
    assert first["model"] == first["state"]
    # Of 7 rows of 5, 7, 3 rows of 7, and 3, rank 0 has 4, 4, 2 and 2; two float32 moments and a counter each.
    assert [2 * 4 * (20 + 4 + 14 + 2) + 4 * 4, 2 * 4 * (15 + 3 + 7 + 1) + 4 * 4] == first["memory"]
    assert first["html"].startswith('<div class="hyperstate">')


def shown() -> dict[str, str]:
    """By command line, the output that the document shows."""
    text = DOCUMENT.read_text(encoding="utf-8")
    found = re.findall(r"^```text\n\$ hyperstate (.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    return dict(found)


def test_the_document_shows_what_the_commands_print(
    hyperstate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (schema,) = re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    json.loads(schema)
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    Path("schema.json").write_text(schema, encoding="utf-8")
    outputs = shown()
    commands = {"demo", "doctor", "inspect", "diff", "verify", "convert", "plan", "visualize"}
    assert commands == {line.split()[0] for line in outputs}
    for line, expected in outputs.items():
        if line != "doctor":  # other machines, other versions
            out = hyperstate(*shlex.split(line), **({"COLUMNS": "80"} if line.startswith("demo") else {})).out
            out = "\n".join(each.rstrip() for each in out.splitlines())
            assert without_times(expected).strip() == without_times(out).strip(), line


def without_times(text: str) -> str:
    """A demo's seconds, which have two decimals, and the version of NumPy are those of a machine."""
    return re.sub(r"numpy [\d.]+", "numpy #", re.sub(r"\b\d+\.\d\d$", "#", text, flags=re.MULTILINE))


def test_every_command_is_in_the_document(hyperstate: Run) -> None:
    commands = set(re.findall(r"^│ (\w+) ", hyperstate("--help").out, re.MULTILINE))
    listed = set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))
    assert commands
    assert commands <= listed


def test_urls_of_any_store_are_read_and_written(tmp_path: Path) -> None:
    """In this process: it alone sees fsspec's memory."""
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    runs = f"memory://{tmp_path.name}/runs"
    hs.save(f"{runs}/step-1", model, optimizer)

    def run(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, words)
        assert code == done.exit_code, done.output
        return str(done.output)

    assert run("inspect", f"{runs}/step-1").startswith(f"{runs}/step-1: hyperstate checkpoint\n6 tensors, 216 B")
    assert "WHOLE: hyperstate, 2 files, 6 tensors" in run("verify", f"{runs}/step-1")
    assert "step-1: 6 tensors in 2 files\n" in run("visualize", f"{runs}/step-1")
    assert "2 tensors, 72 B" in run("plan", f"{runs}/step-1", "--from", "fsdp=2")
    for name, to in (("own", "own"), ("hf", "safetensors"), ("one.safetensors", "safetensors"), ("one.ckpt", "ckpt")):
        target = f"{runs}/{name}"
        assert f"wrote {target} ({to})\n" == run("convert", f"{runs}/step-1", target, "--to", to)
        run("verify", target)
        assert "EQUAL: 2 names compared" in run("diff", f"{runs}/step-1", target, "--filter", "[wb]*")
    assert "not behind a URL" in run("convert", f"{runs}/step-1", f"{runs}/dcp", "--to", "dcp", code=2)
    assert "holds neither" in run("inspect", f"{runs}/none", code=2)
    assert "Protocol not known" in run("inspect", "nosuch://bucket/c", code=2)
    assert [] == [each.name for each in Path.cwd().iterdir() if ":" in each.name]
