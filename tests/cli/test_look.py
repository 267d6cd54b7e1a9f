"""`hyperstate inspect`, `diff`, `verify` and `visualize` on checkpoints that real ranks saved."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hyperstate.checkpoint import convert
from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_look.py")
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints: `fsdp` and `hsdp` are of one state, the others each of another."""
    folder = tmp_path_factory.mktemp("saved")
    with Pool("numpy", 4) as pool:

        def save(name: str, shape: list[int], names: list[str], **change: Any) -> None:
            pool.run(BODIES, "save", folder=str(folder / name), shape=shape, names=names, **change)

        save("fsdp", [4], ["fsdp"], first=2.0)
        save("hsdp", [2, 2], ["replica", "fsdp"], first=2.0)
        save("near", [4], ["fsdp"], first=2.5)
        save("faster", [4], ["fsdp"], first=2.0, lr=0.5)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "fsdp", tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def hugging_face(saved: Path, tmp_path: Path) -> Path:
    convert(saved / "fsdp", tmp_path / "hf", to="safetensors", file_bytes=150)
    return tmp_path / "hf"


def safetensors(path: Path, **tensors: tuple[str, list[int]]) -> None:
    """A file of zeros, written after the format's description."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * int(dtype[1:]) // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


# -- inspect -----------------------------------------------------------------------------------------


def test_inspect_shows_the_tree_with_dtypes_shapes_and_cuts(hyperstate: Run, saved: Path) -> None:
    done = hyperstate("inspect", saved / "fsdp")
    assert (0, "") == (done.code, done.err)
    assert "model  9 tensors, 384 B" in done.out
    assert "│   │   └── weight  float32 [7, 5]  140 B  4 regions along dim 0" in done.out
    assert "├── num_batches_tracked  int64 []  8 B" in done.out
    assert "optim  12 tensors, 640 B" in done.out
    assert "param group 0: 6 parameters (" in done.out and "lr=0.01" in done.out


def test_inspect_tells_which_file_holds_which_region(hyperstate: Run, saved: Path) -> None:
    found = hyperstate("inspect", saved / "fsdp", "--filter", "layers.0.weight", "--json", "-").json()
    (tensor,) = found["tensors"]
    assert ("float32", [7, 5], 140, True) == (tensor["dtype"], tensor["shape"], tensor["nbytes"], tensor["sharded"])
    assert [([0, 0], [2, 5]), ([2, 0], [4, 5]), ([4, 0], [6, 5]), ([6, 0], [7, 5])] == [
        (start, stop) for _, start, stop in tensor["chunks"]
    ]
    assert 4 == len({file for file, *_ in tensor["chunks"]})
    text = hyperstate("inspect", saved / "fsdp", "--filter", "layers.0.weight", "--held").out
    assert "[2:4, 0:5] in model/shard-00002" in text


def test_inspect_sums_below_a_depth_and_keeps_to_a_section(hyperstate: Run, saved: Path) -> None:
    text = hyperstate("inspect", saved / "fsdp", "--depth", 1, "--section", "model").out
    assert "├── layers  4 tensors, 264 B" in text
    assert "optim " not in text


def test_inspect_reads_a_folder_of_safetensors(hyperstate: Run, hugging_face: Path) -> None:
    done = hyperstate("inspect", hugging_face, "--json", "-")
    found = done.json()
    assert ("safetensors", 9) == (found["format"], len(found["tensors"]))
    assert 1 < len(found["files"])
    assert 384 == sum(file["nbytes"] for file in found["files"]) == found["nbytes"]


def test_a_mindspore_file_is_inspected_compared_verified_planned_for_and_drawn(
    hyperstate: Run, saved: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.ckpt"
    convert(saved / "fsdp", path, to="ckpt")
    found = hyperstate("inspect", path, "--json", "-").json()
    assert ("MindSpore", 9, 384) == (found["format"], len(found["tensors"]), found["nbytes"])
    assert 0 == hyperstate("diff", saved / "fsdp", path, "--filter", "layers.*").code
    assert "WHOLE: MindSpore, 9 tensors" in hyperstate("verify", path).out
    planned = hyperstate("plan", path, "--from", "fsdp=2", "--json", "-").json()
    assert {"dim 0 by fsdp": 6, "plain": 3} == planned["from"]["tensors"]
    assert [384] == hyperstate("visualize", path, "--json", "-").json()["memory"]


@pytest.mark.parametrize("command", ["inspect", "verify", "visualize", "diff"])
def test_where_there_is_no_checkpoint_one_line_says_so(hyperstate: Run, tmp_path: Path, command: str) -> None:
    for path, said in ((tmp_path / "none", "no such file or folder"), (tmp_path, "holds neither")):
        done = hyperstate(command, path, *([path] if command == "diff" else []))
        assert (2, "") == (done.code, done.out)
        assert said in done.err
        assert 1 == len(done.err.strip().splitlines())


# -- diff --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [[], ["--digest"]])
def test_one_state_from_two_meshes_is_equal(hyperstate: Run, saved: Path, mode: list[str]) -> None:
    done = hyperstate("diff", saved / "fsdp", saved / "hsdp", *mode)
    assert (0, "EQUAL: 27 names compared, 0 differences\n", "") == done


def test_diff_names_the_value_how_far_it_is_off_and_where(hyperstate: Run, saved: Path) -> None:
    done = hyperstate("diff", saved / "fsdp", saved / "near")
    assert 1 == done.code
    # Between 2.0 and 2.5 lie 2**21 float32 numbers.
    assert "layers.0.bias: 1 of 7 elements, at most 0.5, 2,097,152 ulp; first at 2\n" in done.out
    assert done.out.endswith("DIFFERENT: 27 names compared, 1 difference\n")


def test_diff_by_digest_only_says_that_values_differ(hyperstate: Run, saved: Path) -> None:
    for other in ("near", "hsdp"):
        done = hyperstate("diff", saved / other, saved / "near", "--digest", "--json", "-")
        names = [one["name"] for one in done.json()["differences"]]
        assert (0, []) == (done.code, names) if other == "near" else (1, ["layers.0.bias"]) == (done.code, names)


def test_diff_sees_fields_of_param_groups(hyperstate: Run, saved: Path) -> None:
    found = hyperstate("diff", saved / "fsdp", saved / "faster", "--json", "-").json()
    names = [one["name"] for one in found["differences"] if one["name"].startswith("param_group")]
    assert 6 == len(names)
    assert "param_group.layers.0.bias.lr" in names


def test_diff_over_formats_tells_what_only_one_side_has(hyperstate: Run, saved: Path, hugging_face: Path) -> None:
    found = hyperstate("diff", saved / "fsdp", hugging_face, "--json", "-").json()
    assert {"missing"} == {one["kind"] for one in found["differences"]}
    assert all(one["name"].startswith("state.") for one in found["differences"])
    assert 0 == hyperstate("diff", saved / "fsdp", hugging_face, "--filter", "layers.*").code
    turned = hyperstate("diff", hugging_face, saved / "fsdp", "--json", "-").json()
    assert {"unexpected"} == {one["kind"] for one in turned["differences"]}


def test_diff_tells_shapes_and_dtypes(hyperstate: Run, tmp_path: Path) -> None:
    safetensors(tmp_path / "x.safetensors", a=("F32", [2, 3]), b=("F32", [4]))
    safetensors(tmp_path / "y.safetensors", a=("F32", [3, 2]), b=("F16", [4]))
    found = hyperstate("diff", tmp_path / "x.safetensors", tmp_path / "y.safetensors", "--json", "-").json()
    assert [("shape", "a", "[2, 3]", "[3, 2]"), ("dtype", "b", "float32", "float16")] == [
        (one["kind"], one["name"], one["first"], one["second"]) for one in found["differences"]
    ]


# -- verify ------------------------------------------------------------------------------------------


def test_verify_says_that_a_checkpoint_is_whole(hyperstate: Run, saved: Path, hugging_face: Path) -> None:
    assert (0, "WHOLE: hyperstate, 8 files, 21 tensors, 1.0 KiB\n", "") == hyperstate("verify", saved / "fsdp")
    done = hyperstate("verify", hugging_face)
    assert 0 == done.code
    assert "9 tensors, 384 B; the format has no checksums" in done.out


def test_verify_finds_one_wrong_bit_and_names_it(hyperstate: Run, copy: Path) -> None:
    file = sorted(copy.glob("model/*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    done = hyperstate("verify", copy)
    assert 1 == done.code
    assert done.out.startswith("DAMAGED: hyperstate\n")
    assert f"model/{file.name}: bytes" in done.out and "are not those that were written" in done.out


def test_verify_finds_a_missing_and_a_cut_file(hyperstate: Run, copy: Path) -> None:
    first, second = sorted(copy.glob("model/*.safetensors"))[:2]
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    done = hyperstate("verify", copy, "--json", "-")
    assert 1 == done.code
    assert not done.json()["whole"]
    assert f"{first.name} is missing" in done.json()["problems"]


# -- visualize ---------------------------------------------------------------------------------------


def test_visualize_draws_what_the_files_hold(hyperstate: Run, saved: Path) -> None:
    done = hyperstate("visualize", saved / "fsdp", "--json", "-")
    found = done.json()
    assert 8 == len(found["holders"])
    assert 384 + 640 == sum(found["memory"])
    assert "memory per file" in hyperstate("visualize", saved / "fsdp").out


def test_visualize_draws_what_a_mesh_would_hold(hyperstate: Run, saved: Path) -> None:
    found = hyperstate("visualize", saved / "fsdp", "--mesh", "fsdp=2", "--json", "-").json()
    kinds = {kind["name"]: kind["regions"] for kind in found["kinds"]}
    assert [[[0, 0], [4, 5], [0]], [[4, 0], [7, 5], [1]]] == kinds["layers.0.weight"]
    # Buffers are plain: they are on both ranks.
    assert [[[0], [7], [0, 1]]] == kinds["norm.running_mean"]


def test_visualize_draws_a_mesh_alone(hyperstate: Run) -> None:
    done = hyperstate("visualize", "--mesh", "dp=2,tp=2")
    assert (0, "") == (done.code, done.err)
    assert "mesh dp=2, tp=2: 4 ranks" in done.out


def test_visualize_writes_a_page(hyperstate: Run, saved: Path, tmp_path: Path) -> None:
    done = hyperstate("visualize", saved / "fsdp", "--html", tmp_path / "page.html")
    assert 0 == done.code
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a checkpoint, or a mesh"),
        (["--mesh", "pp=2"], "'pp' is unknown"),
        (["--mesh", "fsdp=2", "--html", "none/page.html"], "can't be written"),
    ],
)
def test_what_can_t_be_drawn_is_one_line(hyperstate: Run, words: list[str], said: str) -> None:
    done = hyperstate("visualize", *words)
    assert (2, "") == (done.code, done.out)
    assert said in done.err


def test_diff_of_nothing_is_no_equality(hyperstate: Run, saved: Path) -> None:
    done = hyperstate("diff", saved / "fsdp", saved / "near", "--filter", "no.such.name")
    assert (2, "") == (done.code, done.out)
    assert "no name matches 'no.such.name'" in done.err


def test_diff_shows_counters_and_fields_as_numbers(hyperstate: Run, saved: Path) -> None:
    found = hyperstate("diff", saved / "fsdp", saved / "faster", "--json", "-").json()["differences"]
    assert {("0.01", "0.5")} == {(one["first"], one["second"]) for one in found if one["name"].endswith(".lr")}


# -- what all of them share --------------------------------------------------------------------------


def test_inspect_s_filter_and_section_hold_for_all_that_is_shown(hyperstate: Run, saved: Path) -> None:
    found = hyperstate("inspect", saved / "fsdp", "--filter", "*layers.0.weight*", "--json", "-").json()
    assert {"layers.0.weight", "state.layers.0.weight.exp_avg", "state.layers.0.weight.exp_avg_sq"} == {
        one["name"] for one in found["tensors"]
    }
    assert 1 == found["values"]  # its step
    assert [["layers.0.weight"]] == [group["params"] for group in found["param_groups"]]
    assert all(file["chunks"] for file in found["files"])
    model = hyperstate("inspect", saved / "fsdp", "--section", "model", "--json", "-").json()
    assert ([], 0) == (model["param_groups"], model["values"])
    assert {"model"} == {file["name"].partition("/")[0] for file in model["files"]}
    text = hyperstate("inspect", saved / "fsdp", "--section", "model").out
    assert "param group" not in text and "optim" not in text and "other value" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--filter", "no.such"], "holds nothing that --filter no.such fits"),
        (["--section", "x"], "must be model or optim"),
    ],
)
def test_inspect_of_nothing_is_one_line(hyperstate: Run, saved: Path, words: list[str], said: str) -> None:
    done = hyperstate("inspect", saved / "fsdp", *words)
    assert (2, "") == (done.code, done.out)
    assert said in done.err and 1 == len(done.err.splitlines())


@pytest.mark.parametrize("command", ["inspect", "verify", "visualize", "diff", "convert"])
def test_a_file_that_is_no_checkpoint_is_one_clear_sentence(hyperstate: Run, tmp_path: Path, command: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    second = {"diff": [tmp_path / "notes.txt"], "convert": [tmp_path / "new"]}.get(command, [])
    done = hyperstate(command, tmp_path / "notes.txt", *second)
    assert (2, "") == (done.code, done.out)
    assert 1 == len(done.err.splitlines())
    assert "notes.txt is a file" in done.err
    assert ["notes.txt"] == [each.name for each in tmp_path.iterdir()]


def test_one_thing_is_not_called_several(hyperstate: Run, tmp_path: Path) -> None:
    safetensors(tmp_path / "one.safetensors", a=("F32", [2]))
    text = hyperstate("inspect", tmp_path / "one.safetensors").out
    assert "\n1 tensor, 8 B, 1 file\n" in text and "one.safetensors: 1 chunk, 8 B" in text
    assert "WHOLE: safetensors, 1 file, 1 tensor, 8 B;" in hyperstate("verify", tmp_path / "one.safetensors").out
    assert hyperstate("visualize", tmp_path / "one.safetensors").out.startswith("one.safetensors: 1 tensor in 1 file\n")
    done = hyperstate("diff", tmp_path / "one.safetensors", tmp_path / "one.safetensors")
    assert "EQUAL: 1 name compared, 0 differences\n" == done.out


def test_visualize_draws_the_names_that_match_alone(hyperstate: Run, saved: Path) -> None:
    for words in ([], ["--mesh", "fsdp=2"]):
        found = hyperstate("visualize", saved / "fsdp", *words, "--filter", "layers.0.*", "--json", "-").json()
        assert {"layers.0.weight", "layers.0.bias"} == {kind["name"] for kind in found["kinds"]}
        done = hyperstate("visualize", saved / "fsdp", *words, "--filter", "no.such")
        assert (2, "") == (done.code, done.out) and "no.such" in done.err
    assert "block.o_proj" not in hyperstate("visualize", "--mesh", "tp=2", "--filter", "*.q_proj.*").out


def test_a_file_url_is_a_path(hyperstate: Run, saved: Path, tmp_path: Path) -> None:
    url = f"file://{saved / 'fsdp'}"
    assert f"{url}: hyperstate checkpoint\n" in hyperstate("inspect", url).out
    assert 0 == hyperstate("verify", url).code
    assert 0 == hyperstate("diff", url, saved / "hsdp").code
    assert 384 + 640 == sum(hyperstate("visualize", url, "--json", "-").json()["memory"])
    assert 9 == hyperstate("plan", url, "--from", "fsdp=2", "--json", "-").json()["tensors"]
    for name, to in (
        ("own", "own"),
        ("one.safetensors", "safetensors"),
        ("folder", "safetensors"),
        ("one.ckpt", "ckpt"),
    ):
        target = f"file://{tmp_path / name}"
        assert 0 == hyperstate("convert", url, target, "--to", to).code
        assert (tmp_path / name).exists()
        assert 0 == hyperstate("diff", url, target, "--filter", "layers.*").code


COMMANDS = ("demo", "doctor", "inspect", "diff", "verify", "convert", "plan", "visualize")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_tells_its_json_and_its_exit_codes(hyperstate: Run, command: str) -> None:
    done = hyperstate(command, "--help", COLUMNS="100", TERM="dumb")
    assert (0, "") == (done.code, done.err)
    assert "--json" in done.out and "xit code" in done.out
    words = [line.strip(" │") for line in done.out.splitlines()]
    prose = words[3 : next(i for i, line in enumerate(words) if line.startswith("╭"))]
    # Lines are broken at the width alone: a line is followed by a word that would not have fitted into it.
    for line, following in pairwise(prose):
        assert not line or not following or 98 <= len(line) + 1 + len(following.split()[0]), (line, following)
    assert 2 == hyperstate(command, "--no-such-option").code


def test_a_bar_is_shown_on_a_terminal_alone(hyperstate: Run, saved: Path, tmp_path: Path) -> None:
    script = f"""
import pty, sys
status = pty.spawn([sys.executable, "-m", "hyperstate.cli", "verify", {str(saved / "fsdp")!r}])
sys.exit(status >> 8)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert 0 == done.returncode
    assert "reading" in done.stdout and "━" in done.stdout
    assert "" == hyperstate("verify", saved / "fsdp").err
