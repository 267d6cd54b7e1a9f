"""examples/integrations on real ranks: stopped, and gone on with on other ranks, they train as if never stopped."""

from __future__ import annotations

import re
from pathlib import Path

import processes
import pytest
import torch
from transformers import LlamaForCausalLM

import hyperstate as hs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "integrations"
STANDINS = {"PYTHONPATH": str(ROOT / "tests" / "support" / "standins")}
"""HyperParallel can't be installed from a registry."""


def losses(name: str, ranks: int, folder: Path, *words: str, **variables: str) -> tuple[dict[int, float], str]:
    """What rank 0 prints of each step, and the rest of it; the others print nothing."""
    said, *others = processes.ranks_say(FOLDER / name, ranks, folder, *words, **variables)
    assert [""] * (ranks - 1) == others
    lines = re.findall(r"^(\d+) (\d\.\d{5})$", said, re.MULTILINE)
    return {int(step): float(loss) for step, loss in lines}, said.splitlines()[-1]


def test_a_trainer_in_the_manner_of_torchtitan_goes_on_on_another_mesh(tmp_path: Path) -> None:
    job = ("torchtitan_loop.py",)
    whole, _ = losses(*job, 2, tmp_path, "--folder", "whole", "--steps", "6")
    first, _ = losses(*job, 4, tmp_path, "--folder", "run", "--steps", "3", "--replicate", "2")
    rest, _ = losses(*job, 2, tmp_path, "--folder", "run", "--steps", "6")
    assert ([1, 2, 3], [3, 4, 5, 6]) == (list(first), list(rest))
    assert whole == pytest.approx(first | rest, abs=1e-4)
    assert ["step-4", "step-6"] == sorted(path.name for path in (tmp_path / "run").iterdir())


def test_a_script_in_the_manner_of_hugging_face_goes_on_and_its_model_can_be_opened(tmp_path: Path) -> None:
    whole, _ = losses("huggingface_fsdp2.py", 2, tmp_path, "whole", "4")
    first, _ = losses("huggingface_fsdp2.py", 2, tmp_path, "out", "3")
    rest, _ = losses("huggingface_fsdp2.py", 3, tmp_path, "out", "4")
    assert ([1, 2, 3], [3, 4]) == (list(first), list(rest))
    assert whole == pytest.approx(first | rest, abs=1e-4)
    assert ["checkpoint-2", "checkpoint-4", "final"] == sorted(path.name for path in (tmp_path / "out").iterdir())
    final = LlamaForCausalLM.from_pretrained(tmp_path / "out" / "final")
    again = LlamaForCausalLM(final.config)
    hs.load(tmp_path / "out" / "checkpoint-4", again)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in final.state_dict().items())


def test_a_strategy_of_fabric_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole, _ = losses("fabric_strategy.py", 2, tmp_path, "whole", "4")
    first, _ = losses("fabric_strategy.py", 2, tmp_path, "out", "2")
    rest, _ = losses("fabric_strategy.py", 3, tmp_path, "out", "4")
    assert ([1, 2], [3, 4]) == (list(first), list(rest))
    assert whole == pytest.approx(first | rest, abs=1e-4)


def test_a_loop_of_hyperparallel_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    job = ("hyper_parallel_loop.py",)
    whole, _ = losses(*job, 2, tmp_path, "whole", "4", **STANDINS)
    first, moved = losses(*job, 2, tmp_path, "out", "2", **STANDINS)
    rest, moved_again = losses(*job, 4, tmp_path, "out", "4", **STANDINS)
    assert whole == pytest.approx(first | rest, abs=1e-4)
    assert ([1, 2], [3, 4]) == (list(first), list(rest))
    assert "goes on alike: True state of shape (4, 6)" == moved
    assert "goes on alike: True state of shape (2, 6)" == moved_again


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_integration_is_short_and_documented(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80
    assert f"`examples/integrations/{path.name}`" in (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
