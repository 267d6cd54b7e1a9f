"""Saves and loads that ranks ask for in different ways, and a save that outlives the script."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

import hyperstate as hs
from hyperstate.checkpoint import convert
from hyperstate_numpy.job import run_ranks
from hyperstate_numpy.kit import Kit


def model_of(kit, value=1.0):
    return kit.with_parameters({"first": kit.tensor([[value] * 5] * 4), "second": kit.tensor([value] * 7)})


def refusals(call):
    """What each of two ranks is told."""

    def body(rank):
        with pytest.raises(hs.DisagreementError) as caught:
            call(Kit(), rank)
        return str(caught.value)

    return set(run_ranks(2, body, timeout=20))


@pytest.mark.parametrize("strict", [0, 1])
def test_ranks_that_are_not_equally_strict_are_refused_at_once(tmp_path, strict):
    hs.save(tmp_path / "c", Kit().with_parameters({"first": Kit().tensor([[0.0] * 5] * 4)}))
    (text,) = refusals(
        lambda kit, rank: hs.load(
            tmp_path / "c", model_of(kit), options=hs.StateDictOptions(strict=rank == strict), timeout=5
        )
    )
    assert f"strict= must be the same on all ranks (rank 0: {strict == 0}, rank 1: {strict == 1})" in text


def test_ranks_that_save_with_different_options_are_refused(tmp_path):
    for name, values in {"names": ("own", "neutral"), "ignore_frozen_params": (True, False)}.items():
        (text,) = refusals(
            lambda kit, rank, name=name, values=values: hs.save(
                tmp_path / "c",
                model_of(kit),
                options=hs.StateDictOptions(**({"names": "own"} | {name: values[rank]})),
                timeout=5,
            )
        )
        assert f"rank 0: {name}={values[0]!r}; rank 1: {name}={values[1]!r}" in text
    assert not (tmp_path / "c").exists()


SCRIPT = """
import sys, threading
import hyperstate as hs
from hyperstate.checkpoint import convert
from hyperstate.checkpoint import storage
from hyperstate_numpy.kit import Kit

real = storage.Local.writer

def after_the_script(self, name):
    threading.main_thread().join()
    if sys.argv[2] == "broken":
        raise hs.CheckpointError("no room")
    return real(self, name)

storage.Local.writer = after_the_script
kit = Kit()
hs.async_save(sys.argv[1], kit.with_parameters({"w": kit.tensor([[1.0] * 1024] * 512)}))
"""


@pytest.mark.parametrize("how", ["whole", "broken"])
def test_a_save_that_the_script_does_not_wait_for_is_finished_or_its_error_is_shown(tmp_path, how):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "c"), how],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    if how == "whole":
        assert ("", 1) == (done.stderr, hs.verify(tmp_path / "c").files)
    else:
        assert "failed, and nobody waited for it" in done.stderr and "no room" in done.stderr


def test_a_path_that_is_a_file_is_refused_on_all_ranks_and_the_file_stays(tmp_path):
    (tmp_path / "notes").write_text("mine")
    for call in (hs.save, hs.load):

        def body(rank, call=call):
            with pytest.raises(hs.CheckpointError) as caught:
                call(tmp_path / "notes", model_of(Kit()))
            return str(caught.value)

        (text,) = set(run_ranks(2, body, timeout=20))
        assert str(tmp_path / "notes") in text
        assert {hs.save: "is a file, and a checkpoint is a folder", hs.load: "Not a directory"}[call] in text
    assert "mine" == (tmp_path / "notes").read_text()


READ_ONLY = """
import os, sys
import hyperstate as hs
from hyperstate.checkpoint import convert
from hyperstate_numpy.job import run_ranks
from hyperstate_numpy.kit import Kit

folder, path = sys.argv[1], sys.argv[1] + "/c"

def model(kit, value):
    return kit.with_parameters({"w": kit.tensor([[float(value)] * 3] * 4)})

def refused(rank):
    try:
        hs.save(path, model(Kit(), 2))
    except hs.CheckpointError as error:
        return str(error)

run_ranks(2, lambda rank: [hs.save(path, model(Kit(), 1)) for _ in range(2)])
os.chmod(path, 0o555)
if os.getuid() == 0:  # whom no mode holds
    os.chown(path, 65534, 65534)
    os.setuid(65534)
(text,) = set(run_ranks(2, refused))
assert "can't write" in text and path in text and "Permission denied" in text, text
found = model(Kit(), 0)
hs.load(path, found)
assert [[1.0] * 3] * 4 == Kit().named(found)["w"].tolist()
assert ["hyperstate.json", "model"] == sorted(os.listdir(path))
"""


def test_a_folder_that_may_not_be_written_to_is_an_error_on_all_ranks_and_keeps_its_checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, folder], capture_output=True, text=True, timeout=60, check=False
        )
    assert 0 == done.returncode, done.stderr


REPLACING = """
import sys
import numpy as np
import hyperstate as hs
from hyperstate.checkpoint import convert
from hyperstate_numpy.arrays import Tensor
from hyperstate_numpy.kit import Kit

kit = Kit()
model = kit.with_parameters({f"layers.{i}": Tensor(np.zeros(1 << 12, np.float32)) for i in range(8)})
optimizer = kit.optimizer(model)
kit.fake_step(model, optimizer)
step = 0
while True:
    step += 1
    for param in kit.named(model).values():
        param.array[...] = step
    hs.save(sys.argv[1], model, optimizer, extra=step)
    print(step, flush=True)
"""


def test_who_loads_while_another_process_saves_to_the_path_gets_one_checkpoint_whole(tmp_path):
    path = tmp_path / "c"
    process = subprocess.Popen([sys.executable, "-c", REPLACING, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert "1\n" == process.stdout.readline()

        def body(rank):
            kit, found = Kit(), []
            for _ in range(50):
                values = {f"layers.{i}": kit.tensor([0.0] * (1 << 12)) for i in range(8)}
                model = kit.with_parameters(values)
                extra = hs.load(path, model, kit.optimizer(model)).extra
                found.append((extra, {n for param in kit.named(model).values() for n in set(param.tolist())}))
            return found

        first, second = run_ranks(2, body, timeout=150)
        assert 4 == hs.verify(path).files + 2
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert first == second
    assert [(step, {float(step)}) for step, _ in first] == first
    assert 3 < len({step for step, _ in first})


class Notes(list):
    """A callback that keeps what it is told, checked: numbers rise and end at the total."""

    def __call__(self, done, total, what):
        assert not self or self[-1][0] < done
        assert done <= total and type(what) is str
        self.append((done, total, what))


def test_progress_tells_each_rank_its_own_bytes_up_to_the_last_one(tmp_path):
    def body(rank):
        kit = Kit()
        mesh = kit.mesh([2], ["fsdp"])
        rows = kit.tensor([[1.0] * 5] * 7)
        model = kit.with_parameters({"first": kit.sharded_tensor(rows, mesh, ["S0"]), "second": kit.tensor([1.0] * 3)})
        notes = {name: Notes() for name in ("save", "async_save", "load")}
        hs.save(tmp_path / "c", model, progress=notes["save"])
        hs.async_save(tmp_path / "d", model, progress=notes["async_save"]).wait()
        hs.load(tmp_path / "c", model, progress=notes["load"])
        return {name: found[-1] for name, found in notes.items()}

    first, second = run_ranks(2, body, timeout=30)
    # Rank 0 has four of the seven rows of five numbers, and writes the plain three.
    files = [f"model/shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)]
    assert (92, 92, files[0]) == first["save"] == first["async_save"]
    assert (60, 60, files[1]) == second["save"] == second["async_save"]
    assert [(92, 92), (72, 72)] == [first["load"][:2], second["load"][:2]]
    notes = Notes()
    hs.verify(tmp_path / "c", progress=notes)
    assert [152, 152] == list(notes[-1][:2])
    for to, name in (("own", "own"), ("safetensors", "one.safetensors"), ("ckpt", "one.ckpt")):
        notes = Notes()
        convert(tmp_path / "c", tmp_path / name, to=to, progress=notes)
        assert [152, 152] == list(notes[-1][:2])
        assert {"first", "second"} == {what for _, _, what in notes}


def test_what_a_progress_callback_raises_is_an_error_on_all_ranks_and_the_old_checkpoint_stays(tmp_path):
    def broken(*_):
        raise ValueError("the bar is closed")

    def body(rank):
        model = model_of(Kit(), 5.0)
        hs.save(tmp_path / "c", model)
        texts = []
        for call in (hs.save, hs.load):
            with pytest.raises(hs.HyperstateError) as caught:
                call(tmp_path / "c", model_of(Kit(), 6.0), progress=None if rank else broken)
            texts.append(str(caught.value))
        hs.load(tmp_path / "c", model)
        return texts, [param.tolist() for param in Kit().named(model).values()]

    first, second = run_ranks(2, body, timeout=30)
    assert first == second
    assert all("rank 0: ValueError: the bar is closed" in text for text in first[0])
    assert [[[5.0] * 5] * 4, [5.0] * 7] == first[1]
