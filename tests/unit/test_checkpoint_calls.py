"""Saves and loads that ranks ask for in different ways, and a save that outlives the script."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import hyperstate as hs
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
