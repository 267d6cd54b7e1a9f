"""Checkpoints: state goes into files and comes back, into every layout, or the old checkpoint stays."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hyperstate as hs
from hyperstate.agree import Call
from hyperstate.backend import load as load_backend
from hyperstate.testing.cases.tools import (
    FULL,
    SHAPES,
    build,
    build_stepped,
    case,
    close,
    grid,
    live,
    refused,
    shown,
    tensor,
    truth,
    warned,
)
from hyperstate.testing.kit import Kit

LENIENT = hs.StateDictOptions(strict=False)


@contextmanager
def folder(kit: Kit, part: bool = True) -> Iterator[Path]:
    """A fresh folder that all ranks see; it is removed when all have left the block (`part`), or rank 0 has."""
    call = Call(load_backend(kit.name), tuple(range(kit.world)), "folder", 30.0, "test/")
    mine = tempfile.mkdtemp(prefix="hyperstate-") if kit.rank == 0 else None
    path = Path(call.describe((), {"path": mine})["path"][0][1])
    try:
        yield path
        if part:
            call.ready()
    finally:
        if kit.rank == 0:
            shutil.rmtree(path)


def everything(kit: Kit, model: Any, optimizer: Any, ranks: Any = None) -> Any:
    """Full model and optimizer state, comparable."""
    return shown(kit, list(hs.get_state_dict(model, optimizer, options=FULL, ranks=ranks)))


def empty(kit: Kit, topology: str) -> tuple[Any, Any]:
    """A model of other values, and an optimizer that never stepped."""
    model = build(kit, topology, start=900.0)
    return model, kit.optimizer(model, lr=7.0)


# -- there and back ----------------------------------------------------------------------------------

MESHES = ["fsdp", "hsdp", "grid", "columns", "copies", "mix", "plain"]


@case(2, source=["fsdp", "copies", "plain"], target=["fsdp", "grid", "plain"])
@case(4, source=MESHES, target=MESHES)
def a_checkpoint_goes_into_every_layout(kit: Kit, source: str, target: str) -> None:
    """Bit for bit, and the next step is that of a run that nobody interrupted."""
    first = build_stepped(kit, source)
    second = empty(kit, target)
    with folder(kit) as path:
        hs.save(path / "c", *first)
        loaded = hs.load(path / "c", *second)
        if kit.rank == 0:
            hs.verify(path / "c")
    assert ([], [], []) == tuple(loaded.keys)
    assert everything(kit, *first) == everything(kit, *second)
    alone = build_stepped(kit, "plain")
    for each in (second, alone):
        kit.fake_step(*each, seed=7)
    values, state = truth(kit, *alone)
    full = hs.get_state_dict(*second, options=FULL)
    close(kit, values, full[0])
    close(kit, state, full[1]["state"])


@case(4)
def a_run_goes_on_through_files(kit: Kit) -> None:
    """4 FSDP -> 2 x 2 HSDP -> 2 ranks -> one -> 4 ranks, a step in each; never different from one process."""
    pair = kit.mesh((2, 2), ("outer", "inner"))["inner"]
    alone, stepper = build_stepped(kit, "plain", steps=1)
    model, optimizer = build_stepped(kit, "fsdp", steps=1)
    members = {"pair": range(2), "plain": range(1)}
    before: Any = range(4)
    with folder(kit) as path:
        for number, topology in enumerate(("hsdp", "pair", "plain", "fsdp"), start=1):
            here = members.get(topology, range(4))
            if topology == "pair":
                shapes = {fqn: kit.content(param).shape for fqn, param in kit.named(alone).items()}
                fresh = kit.with_parameters({f: tensor(kit, grid(s), (pair, ("S0",))) for f, s in shapes.items()})
            else:
                fresh = build(kit, topology, start=900.0)
            if kit.rank in before:
                hs.save(path / f"step-{number}", model, optimizer, ranks=before, keep=2)
            meet(kit)
            model, optimizer = fresh, kit.optimizer(fresh)
            if kit.rank in here:
                hs.load(path / f"step-{number}", model, optimizer, ranks=here)
            for each in ((alone, stepper), (model, optimizer)):
                kit.fake_step(*each, seed=number)
            if kit.rank in here:
                values, state = truth(kit, alone, stepper)
                full = hs.get_state_dict(model, optimizer, options=FULL, ranks=here)
                close(kit, values, full[0])
                close(kit, state, full[1]["state"])
            before = here
        assert ["step-3", "step-4"] == sorted(each.name for each in path.iterdir())


@case(4)
def pipeline_stages_go_into_one_model_and_back(kit: Kit) -> None:
    """Each half of the ranks holds a stage of its own, and a norm that both have."""
    row = kit.mesh((2, 2), ("outer", "inner"))["inner"]

    def stage(number: int, start: float) -> tuple[Any, Any]:
        own = {f"stages.{number}.weight": grid((5, 4), start + number), "norm": grid((3,), start + 7)}
        model = kit.with_parameters({fqn: tensor(kit, values, (row, ("S0",))) for fqn, values in own.items()})
        return model, kit.optimizer(model)

    def whole(start: float) -> tuple[Any, Any]:
        own = {f"stages.{n}.weight": grid((5, 4), start + n) for n in range(2)} | {"norm": grid((3,), start + 7)}
        model = kit.with_parameters({fqn: tensor(kit, values) for fqn, values in own.items()})
        return model, kit.optimizer(model)

    first, alone = stage(kit.rank // 2, 0.0), whole(0.0)
    kit.fake_step(*first)
    kit.fake_step(*alone)
    with folder(kit) as path:
        hs.save(path / "c", *first)
        together = whole(900.0)
        hs.load(path / "c", *together)
        for expected, found in zip(truth(kit, *alone), truth(kit, *together), strict=True):
            close(kit, expected, found)
        other = stage(1 - kit.rank // 2, 900.0)
        hs.load(path / "c", *other)
        hs.save(path / "d", *other)
        again = whole(400.0)
        hs.load(path / "d", *again)
    assert live(kit, *together) == live(kit, *again)


def meet(kit: Kit) -> None:
    """Wait for all ranks."""
    Call(load_backend(kit.name), tuple(range(kit.world)), "meet", 30.0, "test/").ready()


@case(1, 2, kind=["adam", "momentum", "sgd", "local"])
def training_goes_on_as_if_it_had_not_stopped(kit: Kit, kind: str) -> None:
    """A network with running statistics; the optimizer it goes into has never stepped."""
    mesh = kit.mesh((kit.world,), ("dp",))

    def start(seed: int) -> tuple[Any, Any]:
        model = kit.model(seed)
        model = model if kit.world == 1 else kit.shard(model, mesh)
        return model, kit.optimizer(model, kind)

    first, second = start(0), start(1)
    kit.train(*first, 2)
    with folder(kit) as path:
        hs.save(path / "c", *first, extra={"step": 2})
        form = "local" if kind == "local" else None
        step = hs.load(path / "c", *second, state_form=form).extra["step"]
    assert 2 == step
    assert live(kit, *first) == live(kit, *second)
    for each in (first, second):
        kit.train(*each, 2, step)
    assert live(kit, *first) == live(kit, *second)


@case(1, 2)
def values_keep_their_types(kit: Kit) -> None:
    model, optimizer = build(kit, "fsdp"), None
    optimizer = kit.optimizer(model, "custom")
    other = build(kit, "fsdp", start=900.0)
    target = kit.optimizer(other, "custom")
    odd: dict[Any, Any] = {
        "flag": True,
        "one": 1,
        "none": None,
        "pair": (1, [2.5, {"x": ()}]),
        3: "three",
        "inf": float("-inf"),
        "e": {},
    }
    kit.state(optimizer, kit.named(model)["dense.weight"]).update(odd)
    extra = {"rank": kit.rank, ("a", 1): [b"\x00\xff", 1 << 80, 2j, None]}
    with folder(kit) as path:
        hs.save(path / "c", model, optimizer, extra=extra)
        loaded = hs.load(path / "c", other, target)
    assert shown(kit, odd) == shown(kit, dict(kit.state(target, kit.named(other)["dense.weight"])))
    assert shown(kit, extra) == shown(kit, loaded.extra)
    assert list(range(kit.world)) == sorted(loaded.extras)


@case(1, 2, dtype=["bool", "int8", "uint16", "int64", "float16", "bfloat16", "float64", "float8_e5m2", "complex64"])
def every_dtype_comes_back(kit: Kit, dtype: str) -> None:
    line = (kit.mesh((kit.world,), ("dp",)), ("S0",))
    values: Any = [[1, 0, 1], [0, 1, 1], [1, 1, 0]]

    def make(numbers: Any) -> Any:
        parts = {
            "sharded": tensor(kit, numbers, line, dtype),
            "plain": tensor(kit, numbers, dtype=dtype),
            "one": tensor(kit, 1, dtype=dtype),
            "none": tensor(kit, [], dtype=dtype),
        }
        return kit.with_parameters(parts)

    first, second = make(values), make([[0, 0, 0]] * 3)
    with folder(kit) as path:
        hs.save(path / "c", first)
        hs.load(path / "c", second)
    assert live(kit, first) == live(kit, second)


@case(4, topology=["copies", "hsdp"])
def replicas_share_the_work(kit: Kit, topology: str) -> None:
    """Each rank writes its part of what two or four hold; over all, every byte is written once."""
    shapes = {f"layers.{i}": (64, 100) for i in range(16)}
    model = build(kit, topology, shapes=shapes, scale=1.0)
    with folder(kit) as path:
        hs.save(path / "c", model)
        sizes = [file.stat().st_size for file in sorted((path / "c" / "model").iterdir())]
        if kit.rank == 0:
            assert 16 * 6400 * 4 == hs.verify(path / "c").nbytes
    header = 4096
    assert 4 == len(sizes)
    assert all(4 * 6400 * 4 <= size <= 4 * 6400 * 4 + header for size in sizes), sizes


# -- beside the training -----------------------------------------------------------------------------


@case(1, 2, topology=["fsdp", "plain"])
def what_is_saved_beside_the_training_is_the_state_at_the_call(kit: Kit, topology: str) -> None:
    first, second = build_stepped(kit, topology), empty(kit, topology)
    for number in range(3):
        with folder(kit) as path:
            before = everything(kit, *first)
            handle = hs.async_save(path / "c", *first)
            kit.fake_step(*first, seed=5 + number)
            after = everything(kit, *first)  # collective calls of one's own go on meanwhile
            handle.wait()
            assert handle.done()
            hs.load(path / "c", *second)
            assert before == everything(kit, *second) != after


@case(1, 2)
def an_error_beside_the_training_is_told(kit: Kit) -> Any:
    model = build(kit, "fsdp")
    with folder(kit) as path:
        if kit.rank == 0:
            (path / "file").write_text("no folder")
        meet(kit)
        handle = hs.async_save(path / "file" / "c", model)
        text = refused(hs.CheckpointError, handle.wait)
        hs.save(path / "good", model)  # it has been told
        hs.async_save(path / "file" / "c", model)
        assert "before this one" in refused(hs.CheckpointError, hs.save, path / "better", model)
        assert ["file", "good"] == sorted(each.name for each in path.iterdir())
    return text.replace(str(path), "")


# -- what is refused ---------------------------------------------------------------------------------


@case(1, 2)
def names_that_do_not_match_are_listed_together(kit: Kit) -> Any:
    """Strict: an error, and nothing is changed. Not strict: they come back."""
    saved = {fqn: shape for fqn, shape in SHAPES.items() if fqn != "few.weight"} | {"more.weight": (4,)}
    source = build(kit, "fsdp", shapes=saved)
    first, second = (source, kit.optimizer(source)), build_stepped(kit, "fsdp", start=900.0)
    kit.fake_step(*first)
    before = live(kit, *second)
    with folder(kit) as path:
        hs.save(path / "c", *first)
        text = refused(hs.IncompatibleStateError, hs.load, path / "c", *second)
        assert before == live(kit, *second)
        loaded = hs.load(path / "c", *second, options=LENIENT)
    assert "missing: 'few.weight'" in text and "unexpected: 'more.weight'" in text
    assert ["few.weight"] == sorted(set(loaded.keys.missing_keys))
    assert ["more.weight"] == sorted(set(loaded.keys.unexpected_keys))
    after = live(kit, *second)
    assert before["model"]["few.weight"] == after["model"]["few.weight"]
    assert before["model"]["dense.bias"] != after["model"]["dense.bias"]
    return text


@case(1, 2)
def another_shape_is_refused(kit: Kit) -> Any:
    first = build(kit, "fsdp", shapes=SHAPES | {"few.weight": (1, 3)})
    second = build(kit, "fsdp", start=900.0)
    before = live(kit, second)
    with folder(kit) as path:
        hs.save(path / "c", first)
        text = refused(hs.IncompatibleStateError, hs.load, path / "c", second)
    assert "few.weight" in text and "shapes differ" in text
    assert before == live(kit, second)
    return text


@case(2)
def ranks_that_save_to_different_places_are_refused(kit: Kit) -> Any:
    model = build(kit, "fsdp")
    with folder(kit) as path:
        text = refused(hs.DisagreementError, hs.save, path / f"c{kit.rank}", model)
        assert [] == list(path.iterdir())
    return text.replace(str(path), "")


@case(1, 2)
def a_damaged_checkpoint_changes_nothing(kit: Kit) -> Any:
    first, second = build_stepped(kit, "fsdp"), build_stepped(kit, "fsdp", start=900.0)
    before = live(kit, *second)
    with folder(kit) as path:
        absent = refused(hs.CheckpointError, hs.load, path / "c", *second)
        hs.save(path / "c", *first)
        (file,) = list((path / "c" / "optim").glob(f"shard-{kit.world:05d}-*"))
        meet(kit)
        if kit.rank == 0:
            os.truncate(file, file.stat().st_size - 1)
        meet(kit)
        text = refused(hs.CheckpointError, hs.load, path / "c", *second)
    assert "holds no checkpoint" in absent and file.name in text
    assert before == live(kit, *second)
    return [absent.replace(str(path), ""), text.replace(str(path), "")]


@case(2)
def an_object_that_no_file_can_carry_is_refused(kit: Kit) -> Any:
    model = build(kit, "fsdp")
    optimizer = kit.optimizer(model, "custom")
    kit.state(optimizer, kit.named(model)["odd.bias"])["thing"] = SHAPES.keys()
    with folder(kit) as path:
        text = refused(hs.UnsupportedConfigurationError, hs.save, path / "c", model, optimizer)
        refused(hs.UnsupportedConfigurationError, hs.save, path / "c", model, extra={"thing": kit})
        with warned("implementation"):
            hs.save(path / "c", model, kit.optimizer(model, groups=[(list(SHAPES), {"implementation": kit})]))
    assert "odd.bias" in text and "thing" in text
    return text


# -- a checkpoint stands already ---------------------------------------------------------------------


@case(1, 2)
def a_save_over_a_checkpoint_replaces_it(kit: Kit) -> None:
    """Also one with fewer parts; nothing of the old one is left."""
    first, second = build_stepped(kit, "fsdp"), empty(kit, "plain")
    with folder(kit) as path:
        for number in range(3):
            kit.fake_step(*first, seed=number)
            hs.save(path / "c", *first)
            hs.load(path / "c", *second)
            assert everything(kit, *first) == everything(kit, *second)
        hs.save(path / "c", first[0])
        assert ["hyperstate.json", "model"] == sorted(each.name for each in (path / "c").iterdir())
        hs.load(path / "c", second[0])


@case(2)
def a_save_that_fails_on_one_rank_leaves_the_old_checkpoint(kit: Kit) -> Any:
    first, second = build_stepped(kit, "fsdp"), empty(kit, "fsdp")
    with folder(kit) as path:
        hs.save(path / "c", *first)
        before = everything(kit, *first)
        kit.fake_step(*first)
        names = sorted(each.name for each in (path / "c").iterdir())
        extra = {"rank": object() if kit.rank else None}
        text = refused(hs.UnsupportedConfigurationError, hs.save, path / "c", *first, extra=extra)
        hs.load(path / "c", *second)
        assert before == everything(kit, *second)
        assert names == sorted(each.name for each in (path / "c").iterdir())
    assert "rank 1" in text
    return text


@case(2, lost=(1,))
@case(4, lost=(2,))
def a_lost_rank_leaves_the_old_checkpoint(kit: Kit) -> Any:
    first = build_stepped(kit, "fsdp")
    with folder(kit, part=False) as path:
        hs.save(path / "c", *first)
        identity = hs.verify(path / "c").id
        meet(kit)
        if kit.rank == kit.world // 2:
            kit.die()
        text = refused((hs.AbsentRankError, hs.TransferError), hs.save, path / "c", *first, timeout=2.0)
        assert identity == hs.verify(path / "c").id
        assert f"rank {kit.world // 2}" in text
        time.sleep(0.2)  # others may still be reading
    return text.replace(str(path), "")
