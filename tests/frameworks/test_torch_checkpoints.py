"""Checkpoints on PyTorch: between jobs of different sizes, and as other programs read them."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import hyperstate as hs
from hyperstate.testing import Pool
from hyperstate.testing.kit import Content
from hyperstate.testing.pool import RankFailure
from hyperstate_torch.kit import Kit

BODIES = Path(__file__).with_name("bodies_torch_checkpoints.py")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, pool4: Pool) -> Path:
    """What four ranks have saved."""
    path = tmp_path_factory.mktemp("four") / "c"
    pool4.run(BODIES, "save", folder=str(path), shape=[4])
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same run in this one process, without any file."""
    from bodies_torch_checkpoints import full, started

    kit = Kit()
    model, optimizer = started(kit, None, 0)
    kit.train(model, optimizer, 2)
    loaded = full(kit, model, optimizer)
    kit.train(model, optimizer, 2, 2)
    return {"loaded": loaded, "trained": full(kit, model, optimizer)}


def close(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert expected.keys() == actual.keys()
    for name, content in expected.items():
        first, second = (_tensor(Content(*each)) for each in (content, actual[name]))
        torch.testing.assert_close(second, first, rtol=1e-5, atol=1e-6)


def _tensor(content: Content) -> torch.Tensor:
    dtype = getattr(torch, content.dtype)
    return torch.frombuffer(bytearray.fromhex(content.data), dtype=dtype).reshape(tuple(content.shape))


def test_state_goes_through_jobs_of_other_sizes(
    written: Path, alone: Any, tmp_path: Path, pool2: Pool, pool4: Pool
) -> None:
    """4 FSDP -> 2 x 2 HSDP -> 2 ranks -> 1 process: the same bytes, and the next steps of one process' run."""
    from bodies_torch_checkpoints import full, resume, started

    kit = Kit()
    truth: Any = None
    for pool, shape in ((pool4, [4]), (pool4, [2, 2]), (pool2, [2])):
        results = pool.run(BODIES, "resume", folder=str(written), shape=shape)
        assert [results[0]] * pool.ranks == results
        truth = truth or results[0]["loaded"]
        assert truth == results[0]["loaded"]
        close(alone["trained"], results[0]["trained"])
    here = resume(kit, str(written), [])
    assert truth == {name: [c[0], list(c[1]), c[2]] for name, c in here["loaded"].items()}
    close(alone["loaded"], here["loaded"])
    close(alone["trained"], here["trained"])
    model, optimizer = started(kit, None, 2)
    hs.load(written, model, optimizer)
    hs.save(tmp_path / "one", model, optimizer)
    other = started(kit, None, 3)
    hs.load(tmp_path / "one", *other)
    assert full(kit, model, optimizer) == full(kit, *other)


def test_pytorchs_own_reader_reads_the_model(written: Path, pool2: Pool, pool4: Pool) -> None:
    wanted = pool4.run(BODIES, "resume", folder=str(written), shape=[4])[0]["loaded"]
    for pool, shape in ((pool4, [4]), (pool4, [2, 2]), (pool2, [2])):
        found = pool.run(BODIES, "dcp_reads", folder=str(written), shape=shape)
        assert {name: content for name, content in wanted.items() if " " not in name} == found[0]


def test_pytorchs_own_reader_reads_the_moments(written: Path, pool4: Pool) -> None:
    assert [True] * 4 == pool4.run(BODIES, "dcp_reads_moments", folder=str(written), shape=[2, 2])


def test_safetensors_opens_each_file(written: Path) -> None:
    files = sorted(written.glob("*/*.safetensors"))
    assert 8 == len(files)
    rows = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert "pt" == opened.metadata()["format"]
            for name in opened.keys():  # noqa: SIM118  # it is no dict
                rows += opened.get_tensor(name).shape[0] if name == "layers.0.weight" else 0
    assert 13 == rows


def test_one_process_writes_a_file_that_loads_as_a_state_dict(tmp_path: Path) -> None:
    """Counters of the model stand in it like all tensors; each dtype under the name that safetensors has for it."""
    kit = Kit()
    model = kit.model(0)
    model.register_buffer("brief", torch.arange(4, dtype=torch.bfloat16))
    model.register_buffer("tiny", torch.arange(4.0).to(torch.float8_e4m3fn))
    model.register_buffer("flags", torch.tensor([True, False]))
    hs.save(tmp_path / "c", model)
    (file,) = (tmp_path / "c" / "model").iterdir()
    found = load_file(file)
    assert sorted(model.state_dict()) == sorted(found)
    for name, value in model.state_dict().items():
        assert value.dtype == found[name].dtype and value.shape == found[name].shape
        assert torch.equal(value.float(), found[name].float()), name


def test_training_and_collective_calls_go_on_beside_a_save(tmp_path: Path, pool4: Pool) -> None:
    found = pool4.run(BODIES, "saves_while_groups_are_busy", folder=str(tmp_path))
    assert [["step-2"]] * 4 == found


def test_a_meta_model_is_loaded(tmp_path: Path) -> None:
    kit = Kit()
    model = kit.model(0)
    hs.save(tmp_path / "c", model)
    with torch.device("meta"):
        empty = type(model)((5, 7, 3))
    hs.load(tmp_path / "c", empty, device="cpu")
    for name, value in model.state_dict().items():
        assert torch.equal(value, empty.state_dict()[name]), name


def test_tied_parameters_are_written_once_and_read_under_any_name(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self, seed: float) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(4, 3)
            self.head = torch.nn.Linear(3, 4, bias=False)
            self.head.weight = self.embed.weight
            torch.nn.init.constant_(self.embed.weight, seed)

    first, second = Tied(1.0), Tied(2.0)
    hs.save(tmp_path / "c", first)
    hs.load(tmp_path / "c", second)
    assert torch.equal(first.head.weight, second.head.weight) and second.head.weight is second.embed.weight
    (file,) = (tmp_path / "c" / "model").iterdir()
    assert ["embed.weight"] == list(load_file(file))

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(3, 4, bias=False)

    alone = Head()
    hs.load(tmp_path / "c", alone)
    assert torch.equal(first.head.weight, alone.head.weight)


def test_an_optimizer_with_tensor_fields_and_several_groups_comes_back(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        model = Kit().model(0)
        groups = [
            {"params": list(model.layers.parameters()), "lr": torch.tensor(0.1), "initial_lr": 0.3},
            {"params": list(model.norm.parameters()), "weight_decay": 0.5},
        ]
        return model, torch.optim.Adam(groups, lr=torch.tensor(0.2), amsgrad=True, foreach=False)

    first, second = make(), make()
    Kit().train(*first, 2)
    first[1].param_groups[0]["lr"].fill_(0.7)
    hs.save(tmp_path / "c", *first)
    hs.load(tmp_path / "c", *second)
    assert torch.tensor(0.7) == second[1].param_groups[0]["lr"]
    Kit().train(*first, 2)
    Kit().train(*second, 2)
    wanted, found = first[1].state_dict(), second[1].state_dict()
    assert str(wanted["param_groups"]) == str(found["param_groups"])
    for number, slots in wanted["state"].items():
        for key, value in slots.items():
            assert torch.equal(value, found["state"][number][key])


def test_extra_state_comes_back_whatever_it_is(tmp_path: Path) -> None:
    class Counting(torch.nn.Module):
        def __init__(self, state: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))
            self.state = state

        def get_extra_state(self) -> Any:
            return self.state

        def set_extra_state(self, state: Any) -> None:
            self.state = state

    for state in ({"history": [torch.arange(4.0), 3], "scale": torch.tensor(2.0)}, torch.arange(5), (1, None), b"\x00"):
        first, second = Counting(state), Counting(torch.arange(3))
        hs.save(tmp_path / "c", first)
        hs.load(tmp_path / "c", second)
        assert str(state) == str(second.state)


# -- URLs ----------------------------------------------------------------------------------------------


def filled(value: float) -> Any:
    model = Kit().model(0)
    for param in model.parameters():
        torch.nn.init.constant_(param, value)
    return model


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_url_holds_checkpoints_as_a_folder_does(kind: str, tmp_path: Path) -> None:
    url = f"{kind}://{tmp_path}/c-7"
    other = filled(0.0)
    for value in (1.0, 2.0, 3.0):
        hs.save(url, filled(value), extra=value)
        hs.verify(url)
        assert value == hs.load(url, other).extra
        assert {value} == set(other.layers[0].weight.flatten().tolist())
    assert (tmp_path / "c-7").exists() == (kind == "file")
    hs.save(url.replace("c-7", "c-10"), filled(4.0), keep=1)
    hs.load(url.replace("c-7", "c-10"), other)
    assert {4.0} == set(other.norm.weight.tolist())
    with pytest.raises(hs.CheckpointError, match="holds no checkpoint"):
        hs.load(url, other)


def test_files_behind_a_url_stand_in_place_the_first_time(tmp_path: Path) -> None:
    import fsspec

    url = f"memory://{tmp_path}/c"
    hs.save(url, filled(1.0))
    store = fsspec.filesystem("memory")
    assert [f"{tmp_path}/c/hyperstate.json", f"{tmp_path}/c/model"] == sorted(store.ls(f"{tmp_path}/c", detail=False))
    hs.save(url, filled(2.0))
    names = sorted(name.rpartition("/")[2] for name in store.ls(f"{tmp_path}/c", detail=False))
    assert 2 == len(names) and names[0].startswith(".data-") and "hyperstate.json" == names[1]


def test_files_of_others_behind_a_url_stay(tmp_path: Path) -> None:
    import fsspec

    url, store = f"memory://{tmp_path}/c-1", fsspec.filesystem("memory")
    notes = f"{tmp_path}/c-1/model/notes.txt"
    store.pipe_file(notes, b"mine")
    for value in (1.0, 2.0):
        hs.save(url, filled(value))
        assert b"mine" == store.cat_file(notes)
        assert 1 == hs.verify(url).files
    hs.save(url.replace("c-1", "c-2"), filled(3.0), keep=1)
    assert [notes] == store.find(f"{tmp_path}/c-1")


def test_a_url_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(hs.CheckpointError, match="nosuch"):
        hs.save("nosuch://bucket/c", filled(1.0))


# -- kills ---------------------------------------------------------------------------------------------

KILLS = int(os.environ.get("HYPERSTATE_TEST_KILLS", "1"))
"""How often each kind of kill is tried; more for a thorough run."""


@pytest.mark.parametrize("victims", [[0], [1], [0, 1]], ids=["rank 0", "rank 1", "all"])
def test_killed_ranks_leave_a_checkpoint_that_is_whole(victims: list[int], tmp_path: Path) -> None:
    """The last one that both ranks have seen end, or the one that was being written."""
    for attempt in range(KILLS):
        path = tmp_path / str(attempt) / "c"
        path.parent.mkdir()
        with Pool("torch", 2) as pool, ThreadPoolExecutor(1) as thread:
            running = thread.submit(pool.run, BODIES, "saves_for_ever", folder=str(path), timeout=60.0)
            while not all(Path(f"{path}.{rank}").exists() for rank in range(2)):
                assert not running.done(), running.result()
                time.sleep(0.05)
            time.sleep(random.uniform(0.0, 0.3))
            for rank in victims:
                os.kill(pool._workers[rank]._process.pid, signal.SIGKILL)
            with pytest.raises(RankFailure, match="the process ended") as caught:
                running.result()
            if victims == [1]:
                assert "AbsentRankError" in str(caught.value) or "TransferError" in str(caught.value)
        told = [int(Path(f"{path}.{rank}").read_text() or 0) for rank in range(2)]
        hs.verify(path)
        model = Kit().model(0, (65, 257, 63))
        number = hs.load(path, model).extra
        assert max(told) <= number <= max(told) + 1
        for name, value in model.state_dict().items():
            assert (value == number).all(), name
