"""Files and folders that the demo reads: real ones to the verdict, wrong ones to one clear message."""

from __future__ import annotations

import functools
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hyperstate.cli.example import NBYTES, FetchError, fetch
from hyperstate.testing import Pool
from hyperstate_torch.demo_inputs import RefusedInputError, open_input

Run = Callable[..., Any]
BODIES = Path(__file__).with_name("bodies_torch.py")


def weights() -> dict[str, torch.Tensor]:
    """A tiny language model as such folders hold it: bfloat16, a scalar parameter, an integer buffer, uneven sizes."""
    numbers = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (67, 10),
        "model.norm.weight": (10,),
        "logit_scale": (),
    }
    for layer in range(2):
        parts = {"self_attn.q_proj": (10, 10), "self_attn.k_proj": (5, 10), "mlp.up_proj": (23, 10)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    made = {name: torch.randn(shape, generator=numbers).bfloat16() for name, shape in shapes.items()}
    return made | {"model.position_ids": torch.arange(9)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with two weight files and their index."""
    tensors = weights()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, tmp_path / file)
    write_index(tmp_path, files)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    return tmp_path


def write_index(folder: Path, files: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of 2018. Needs the package index; there is no test of real input without it."""
    return fetch(tmp_path_factory.mktemp("example"))


def test_a_hugging_face_folder_reaches_the_verdict(hyperstate: Run, folder: Path) -> None:
    done = hyperstate("demo", "--backend", "torch", "--model", f"hf:{folder}", "--json", "-")
    assert (0, "") == (done.code, done.err)
    found = done.json()
    assert found["equal"]
    assert found["title"].startswith("llama in ")
    assert "10 tensors, 1,450 elements" in found["title"]
    assert found["costs"][0]["call"].startswith("the file into 4 ranks")


def test_a_folder_is_read_tensor_by_tensor(folder: Path) -> None:
    for values in (True, False):
        found = open_input(str(folder), None, values).values
        assert found is not None
        assert weights().keys() == found.keys()
        for name, tensor in weights().items():
            assert (tensor.dtype, tensor.shape) == (found[name].dtype, found[name].shape)
            assert torch.equal(tensor, found[name]) if values else found[name].is_meta


def test_the_example_of_2018_reaches_the_verdict(hyperstate: Run, example: Path) -> None:
    done = hyperstate("demo", "--backend", "torch", "--fetch-example", "--cache", example.parent, "--json", "-")
    assert (0, "") == (done.code, done.err)
    found = done.json()
    assert found["equal"]
    assert "16 tensors, 1,423,618 elements" in found["title"]
    assert ["after loading", "right after the move"] == [check["what"].split(":")[0] for check in found["checks"]][:2]


def test_the_example_trains_on_as_in_one_process(example: Path) -> None:
    with Pool("torch", 4) as ranks:
        results = ranks.run(BODIES, "the_example_trains_on_as_in_one_process", timeout=120, file=str(example))
    expected = {"before": [], "after": [], "moved": True, "steps": [1564502.0], "lr": 0.0001}
    assert [expected] * 4 == results


def test_a_file_that_is_not_the_example_is_fetched_again(example: Path) -> None:
    whole = example.read_bytes()
    assert NBYTES == len(whole)
    example.write_bytes(whole[:-1] + b"?")
    assert whole == fetch(example.parent).read_bytes()


def test_an_index_without_the_example_is_one_message(hyperstate: Run, tmp_path: Path) -> None:
    done = hyperstate(
        "demo",
        "--fetch-example",
        "--cache",
        tmp_path,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
        PIP_CONFIG_FILE="/dev/null",
    )
    assert 2 == done.code
    assert "pip could not fetch resemblyzer==0.1.4 from the package index" in done.err
    assert 1 == len(done.err.strip().splitlines())


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(FetchError, match="can't be kept"):
        fetch(tmp_path / "cache")


def test_own_training_state_by_name_reaches_the_verdict(hyperstate: Run, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": [*model[1].parameters(), *model[2].parameters()], "lr": 0.5}],
        lr=0.1,
    )
    model(torch.rand(4, 5)).sum().backward()
    optimizer.step()
    torch.save({"epoch": 3, "net": model.state_dict(), "opt": optimizer.state_dict()}, tmp_path / "own.pt")
    done = hyperstate("demo", "--backend", "torch", "--checkpoint", tmp_path / "own.pt", "--ranks", 2, "--json", "-")
    assert (0, "") == (done.code, done.err)
    found = done.json()
    assert (True, ["2-rank FSDP", "2×1 HSDP"]) == (found["equal"], found["meshes"])


# -- wrong input -------------------------------------------------------------------------------------


class Runs:
    """Pickled, this would run code."""

    def __reduce__(self) -> Any:
        return print, ("this must never run",)


def refusal(folder: Path | None = None, file: Path | None = None) -> str:
    """Why the input is refused; the same whether or not the rank reads the values."""
    said = []
    for values in (True, False):
        with pytest.raises(RefusedInputError) as caught:
            open_input(folder and str(folder), file and str(file), values)
        said.append(str(caught.value))
    assert said[0] == said[1]
    return said[0]


def test_pickled_code_is_refused_and_does_not_run(hyperstate: Run, tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2)}, "more": Runs()}, tmp_path / "code.pt")
    with zipfile.ZipFile(tmp_path / "code.pt") as archive:
        assert any(b"this must never run" in archive.read(name) for name in archive.namelist())
    done = hyperstate("demo", "--backend", "torch", "--ranks", 2, "--checkpoint", tmp_path / "code.pt", "--verbose")
    assert (2, "") == (done.code, done.out)
    assert "weights_only=True), which runs no code of the file" in done.err
    assert "this must never run" not in done.err


WRONG: dict[str, tuple[Any, str]] = {
    "empty": (b"", "can't be read with torch.load"),
    "text": (b"not a checkpoint", "can't be read with torch.load"),
    "bare pickle": (pickle.dumps(Runs()), "can't be read with torch.load"),
    "list": ([torch.ones(2)], "holds a list, no dict of tensors"),
    "numbers": ({"a": 1}, "must hold one model"),
    "two models": ({"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}}, "['a', 'b'] are models"),
    "no float": ({"w": torch.ones(2, dtype=torch.int64)}, "no floating-point tensor to train"),
    "name below a tensor": ({"a": torch.ones(2), "a.b": torch.ones(2)}, "can't be a parameter's"),
    "empty name": ({"a..b": torch.ones(2)}, "can't be a parameter's"),
    "name of a method": ({"forward": torch.ones(2)}, "can't be a parameter's"),
    "unknown optimizer": (
        {"net": {"w": torch.ones(2)}, "opt": {"state": {0: {"odd": torch.ones(2)}}, "param_groups": [{"params": [0]}]}},
        "optimizer state ['odd']",
    ),
    "groups of no form": (
        {"net": {"w": torch.ones(2)}, "opt": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [[0]]}},
        "whose 'state' or 'param_groups' have another form",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_that_is_no_training_state_is_refused(tmp_path: Path, kind: str) -> None:
    content, said = WRONG[kind]
    path = tmp_path / "file.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert said in refusal(file=path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    whole = io.BytesIO()
    torch.save({"w": torch.ones(1000)}, whole)
    (tmp_path / "cut.pt").write_bytes(whole.getvalue()[:-200])
    assert "can't be read with torch.load" in refusal(file=tmp_path / "cut.pt")
    save_file({"w": torch.ones(1000)}, tmp_path / "cut.safetensors")
    content = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[:-200])
    assert "can't be read as safetensors" in refusal(file=tmp_path / "cut.safetensors")


def test_optimizer_state_that_fits_no_parameter_is_refused_on_all_ranks(hyperstate: Run, tmp_path: Path) -> None:
    state = {"state": {7: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": 1}}}
    torch.save({"net": {"w": torch.ones(3)}, "opt": {**state, "param_groups": [{"params": [7]}]}}, tmp_path / "a.pt")
    done = hyperstate("demo", "--backend", "torch", "--ranks", 2, "--checkpoint", tmp_path / "a.pt")
    assert (2, "") == (done.code, done.out)
    assert "integer keys can't be matched" in done.err


def test_a_folder_must_have_its_parts(folder: Path) -> None:
    assert "there is no folder" in refusal(folder / "none")
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    name, file = next(iter(files.items()))
    changed = functools.partial(write_index, folder)
    changed({**files, "extra.weight": file})
    assert "lacks ['extra.weight']" in refusal(folder)
    changed({**files, name: "gone.safetensors"})
    assert "'gone.safetensors'" in refusal(folder)
    index.write_text("{}")
    assert "no 'weight_map'" in refusal(folder)
    index.write_text("{")
    assert "can't be read as JSON" in refusal(folder)
    index.unlink()
    (folder / "again.safetensors").write_bytes((folder / file).read_bytes())
    assert "which another file" in refusal(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "no *.safetensors file" in refusal(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/outside.safetensors", "a/b.safetensors", "..", "", "a\\b"]
)
def test_an_index_may_not_point_out_of_its_folder(folder: Path, file: str) -> None:
    save_file({"w": torch.ones(2)}, folder.parent / "outside.safetensors")
    write_index(folder, {"w": file})
    assert "only a file of this folder may stand there" in refusal(folder)
