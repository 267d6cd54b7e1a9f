"""Saves that are broken off: at every step of the storage, by SIGKILL at any moment, by a full disk.

What is there afterwards is the old checkpoint or the new one, and the next save works.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import hyperstate as hs
from hyperstate.checkpoint import saving, storage
from hyperstate_numpy import job
from hyperstate_numpy.job import JobError, run_ranks
from hyperstate_numpy.kit import Kit

KILLS = int(os.environ.get("HYPERSTATE_TEST_KILLS", "3"))
"""How many processes are killed; more for a thorough run."""
WIDTH = 1 << 16


class Crash(BaseException):
    """The process ends here."""


class Frail:
    """A store that crashes at its n-th step: before it, or with it half done; after that nothing works any more."""

    def __init__(self, store, steps):
        self._store, self._left = store, steps

    def __getattr__(self, name):
        found = getattr(self._store, name)
        if name not in ("publish", "move", "remove", "settle", "writer"):
            return found

        def step(*args):
            self._left[0] -= 1
            if self._left[0] < 0:
                raise Crash
            return found(*args)

        return step


def model_of(kit, value):
    return kit.with_parameters({f"layers.{i}": kit.tensor([[float(value)] * 3] * 4) for i in range(4)})


def values(kit, model):
    """The one number in all parameters."""
    (found,) = {number for param in kit.named(model).values() for row in param.tolist() for number in row}
    return found


def loaded(kit, path):
    model = model_of(kit, -1)
    hs.verify(path)
    hs.load(path, model)
    return values(kit, model)


@pytest.mark.parametrize("before", [0, 1, 2], ids=["fresh", "over one", "over one and a broken save"])
def test_a_crash_at_any_step_leaves_the_old_checkpoint_or_the_new_one(tmp_path, monkeypatch, before):
    kit, steps, seen = Kit(), [0], []
    monkeypatch.setattr(saving, "open_store", lambda path: Frail(storage.open_store(path), steps))

    def save(path, value, limit=1 << 30):
        steps[0] = limit
        hs.save(path, model_of(kit, value))

    for limit in range(100):
        path = tmp_path / str(limit)
        mine = path / "model" / "mine.txt"
        if before:
            save(path, 1)
            mine.write_text("of somebody else")
        if before == 2:
            with pytest.raises(Crash):
                save(path, 2, 1 + limit % 9)
        old = loaded(kit, path) if before else None
        try:
            save(path, 3, limit)
        except Crash:
            seen.append((old, loaded(kit, path) if (path / "hyperstate.json").exists() else None))
        else:
            break
        save(path, 4)
        assert 4 == loaded(kit, path)
        assert not before or mine.read_text() == "of somebody else"
        assert ["hyperstate.json", "model"] == sorted(each.name for each in path.iterdir())
    else:
        raise AssertionError("a save has no more than 100 steps")
    assert len(seen) >= 5
    assert [] == [found for old, found in seen if found not in (old, 3)]
    assert {False, True} == {found == 3 for _, found in seen}


WRITER = (
    textwrap.dedent(
        """
    import sys
    import hyperstate as hs
    from hyperstate_numpy.kit import Kit
    import numpy as np
    from hyperstate_numpy.arrays import Tensor

    path, keep = sys.argv[1:]
    kit = Kit()
    values = {f"layers.{i}": Tensor(np.zeros(%d, np.float32)) for i in range(8)}
    model = kit.with_parameters(values)
    step = 0
    while True:
        step += 1
        for param in kit.named(model).values():
            param.array[...] = step
        where = f"{path}/step-{step}" if keep == "keep" else path
        hs.save(where, model, extra={"step": step}, keep=2 if keep == "keep" else None)
        print(step, flush=True)
    """
    )
    % WIDTH
)


def last_of(process):
    """Kill the process at some moment; the last save that it reported."""
    first = process.stdout.readline()
    time.sleep(random.uniform(0.0, 0.25))
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()
    process.wait(timeout=30)
    return int((first + rest).split()[-1])


def read(kit, path):
    model = kit.with_parameters({f"layers.{i}": kit.tensor([0.0] * WIDTH) for i in range(8)})
    hs.verify(path)
    step = hs.load(path, model).extra["step"]
    for param in kit.named(model).values():
        assert (param.array == step).all()
    return step


@pytest.mark.parametrize("keep", ["keep", "over"])
def test_a_killed_process_leaves_a_checkpoint_that_is_whole(tmp_path, keep):
    """The last one that was reported, or the one that was being written."""
    kit = Kit()
    path = tmp_path / "c"
    for _ in range(KILLS):
        shutil.rmtree(path, ignore_errors=True)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), keep], stdout=subprocess.PIPE, text=True
        ) as process:
            last = last_of(process)
        if keep == "over":
            assert read(kit, path) in (last, last + 1)
            continue
        whole = {read(kit, each) for each in path.iterdir() if (each / "hyperstate.json").exists()}
        assert last in whole
        assert whole <= {last - 2, last - 1, last, last + 1}


FULL_DISK = textwrap.dedent(
    """
    import resource, signal, sys
    import hyperstate as hs
    from hyperstate_numpy.kit import Kit

    kit = Kit()
    def model(width, value):
        return kit.with_parameters({"w": kit.tensor([value] * width), "v": kit.tensor([value] * 9)})
    hs.save(sys.argv[1], model(8, 1.0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        hs.save(sys.argv[1], model(9_000, 2.0))
    except hs.CheckpointError as error:
        print(error)
    hs.save(sys.argv[1] + "2", model(8, 3.0))
    """
)


def test_a_disk_that_is_full_is_an_error_and_leaves_the_old_checkpoint(tmp_path):
    """A limit on the size of files stands for the disk's."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "c")], capture_output=True, text=True, timeout=60, check=False
    )
    assert "" == done.stderr
    assert "nothing was changed" in done.stdout and "can't write" in done.stdout and "shard-00001" in done.stdout
    kit = Kit()
    model = kit.with_parameters({"w": kit.tensor([0.0] * 8), "v": kit.tensor([0.0] * 9)})
    hs.load(tmp_path / "c", model)
    assert 1.0 == values_of(kit, model)
    assert ["hyperstate.json", "model"] == sorted(each.name for each in (tmp_path / "c").iterdir())


def values_of(kit, model):
    (found,) = {number for param in kit.named(model).values() for number in param.tolist()}
    return found


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_rank_that_ends_in_the_middle_of_a_save_leaves_the_old_checkpoint(tmp_path, monkeypatch, dead):
    """At the start of its own files; the others are told, and the checkpoint is the old one."""
    write = saving.Job._write_file

    def dying(self, *args):
        return job.die() if self.call.me == dead else write(self, *args)

    def body(rank):
        kit = Kit()
        model = kit.shard(kit.model(0), kit.mesh((3,), ("dp",)))
        hs.save(tmp_path / "c", model)
        if rank == dead:
            monkeypatch.setattr(saving.Job, "_write_file", dying)
        hs.load(tmp_path / "c", model)  # all meet, so that the patch is in place
        with pytest.raises((hs.AbsentRankError, hs.TransferError)):
            hs.save(tmp_path / "c", model, timeout=1.5)

    try:
        run_ranks(3, body, timeout=30, lost=(dead,))
    except JobError as error:
        raise AssertionError(str(error)) from error
    monkeypatch.undo()
    alone = Kit().model(1)
    hs.load(tmp_path / "c", alone)
    assert Kit().content(Kit().named(Kit().model(0))["norm.weight"]) == Kit().content(Kit().named(alone)["norm.weight"])
    hs.verify(tmp_path / "c")
