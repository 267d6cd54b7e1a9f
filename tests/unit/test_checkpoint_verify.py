"""`verify` finds what was damaged and names it; a load reads what it needs and no more."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from pathlib import Path

import pytest

import hyperstate as hs
from hyperstate.checkpoint import storage
from hyperstate_numpy.job import run_ranks
from hyperstate_numpy.kit import Kit

FILE = "model/shard-00001-model-00001-of-00001.safetensors"


def model_of(kit, value=1.0):
    return kit.with_parameters({"first": kit.tensor([[value] * 5] * 4), "second": kit.tensor([value] * 7)})


@pytest.fixture
def path(tmp_path):
    hs.save(tmp_path / "c", model_of(Kit()))
    return tmp_path / "c"


def manifest(path, change):
    found = json.loads((path / "hyperstate.json").read_text())
    change(found)
    (path / "hyperstate.json").write_text(json.dumps(found))


def header_of(path):
    data = (path / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data, 8 + length


def rewrite(path, change):
    """Give the file another header of the same length."""
    header, data, end = header_of(path)
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= end - 8
    (path / FILE).write_bytes(data[:8] + text.ljust(end - 8) + data[end:])


@pytest.mark.parametrize("name", ["first", "second"])
def test_one_flipped_bit_is_found(path, name):
    header, data, end = header_of(path)
    start, stop = header[name]["data_offsets"]
    changed = bytearray(data)
    changed[end + (start + stop) // 2] ^= 0x10
    (path / FILE).write_bytes(changed)
    with pytest.raises(hs.CheckpointError) as caught:
        hs.verify(path)
    assert f"{FILE}: bytes {end + start} to {end + stop} of '{name}' are not" in str(caught.value)
    assert 1 == len(re.findall("are not those that were written", str(caught.value)))


def test_all_that_is_wrong_is_listed(path):
    header, data, end = header_of(path)
    changed = bytearray(data)
    for name in ("first", "second"):
        changed[end + header[name]["data_offsets"][0]] ^= 1
    (path / FILE).write_bytes(changed)
    with pytest.raises(hs.CheckpointError, match=r"(?s)'first'.*'second'"):
        hs.verify(path)


def test_a_file_that_is_missing_short_or_long_is_named(path):
    content = (path / FILE).read_bytes()
    for wrong in (content[:-1], content + b"x", b"", content[:100]):
        (path / FILE).write_bytes(wrong)
        for call in (lambda: hs.verify(path), lambda: hs.load(path, model_of(Kit()))):
            with pytest.raises(hs.CheckpointError, match=f"{FILE} has {len(wrong)} bytes"):
                call()
    (path / FILE).unlink()
    for call in (lambda: hs.verify(path), lambda: hs.load(path, model_of(Kit()))):
        with pytest.raises(hs.CheckpointError, match=f"{FILE} is missing"):
            call()


def test_a_file_of_another_save_is_refused(path, tmp_path):
    hs.save(tmp_path / "other", model_of(Kit(), 2.0))
    (path / FILE).write_bytes((tmp_path / "other" / FILE).read_bytes())
    for call in (lambda: hs.verify(path), lambda: hs.load(path, model_of(Kit()))):
        with pytest.raises(hs.CheckpointError, match="of another save"):
            call()


def test_a_header_that_does_not_match_the_manifest_is_found(path):
    def swap(header):
        header["first"]["shape"] = [5, 4]

    rewrite(path, swap)
    with pytest.raises(hs.CheckpointError, match=r"header has float32\[5, 4\].*where the manifest has 'first'"):
        hs.verify(path)


def test_a_tensor_that_the_manifest_does_not_know_is_found(path):
    def forget(found):
        found["tensors"] = [row for row in found["tensors"] if row[1] != "second"]
        found["entries"] = [row for row in found["entries"] if row[0][1] != "second"]

    manifest(path, forget)
    with pytest.raises(hs.CheckpointError, match="'second' is not in the manifest"):
        hs.verify(path)


def test_a_tensor_that_is_not_all_there_is_found(path):
    def cut(found):
        found["tensors"][0][3] = [5, 5]

    manifest(path, cut)
    with pytest.raises(hs.CheckpointError, match="'first': its chunks hold 20 of 25 elements"):
        hs.verify(path)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(hs.CheckpointError, match="holds no checkpoint"):
            hs.verify(place)


def test_files_of_others_are_not_replaced(tmp_path):
    (tmp_path / "c" / "model").mkdir(parents=True)
    (tmp_path / "c" / "model" / "mine.safetensors").write_text("mine")
    with pytest.raises(hs.CheckpointError, match=r"mine\.safetensors is not from a checkpoint"):
        hs.save(tmp_path / "c", model_of(Kit()))
    assert "mine" == (tmp_path / "c" / "model" / "mine.safetensors").read_text()


def test_what_is_pruned_is_checkpoints_of_the_same_name_alone(tmp_path):
    for name in ("run-7", "run-9", "other-1", "run-x", "run-10"):
        hs.save(tmp_path / name, model_of(Kit()))
    (tmp_path / "run-8").mkdir()
    (tmp_path / "run-7" / "notes.txt").write_text("mine")
    hs.save(tmp_path / "run-11", model_of(Kit()), keep=2)
    assert ["other-1", "run-10", "run-11", "run-7", "run-8", "run-x"] == sorted(
        each.name for each in tmp_path.iterdir()
    )
    assert ["notes.txt"] == [each.name for each in (tmp_path / "run-7").iterdir()]
    with pytest.raises(hs.OptionError, match="keep=0"):
        hs.save(tmp_path / "run-12", model_of(Kit()), keep=0)
    with pytest.raises(hs.CheckpointError, match="ends in a number"):
        hs.save(tmp_path / "run-x", model_of(Kit()), keep=1)


def test_a_save_with_a_lower_number_prunes_no_later_checkpoint(tmp_path):
    for name in ("step-40", "step-50", "step-90", "step-100"):
        hs.save(tmp_path / name, model_of(Kit()))
    hs.save(tmp_path / "step-60", model_of(Kit()), keep=2)
    assert ["step-100", "step-50", "step-60", "step-90"] == sorted(each.name for each in tmp_path.iterdir())


def test_a_link_never_leads_pruning_to_a_checkpoint_elsewhere_or_to_the_new_one(tmp_path):
    archive, runs = tmp_path / "archive", tmp_path / "runs"
    hs.save(archive, model_of(Kit()))
    hs.save(runs / "run-2", model_of(Kit()))
    (runs / "run-1").symlink_to(archive)
    (runs / "run-3").symlink_to(runs / "run-2")
    hs.save(runs / "run-3", model_of(Kit()), keep=1)
    assert [1, 1] == [hs.verify(path).files for path in (archive, runs / "run-2")]
    assert ["run-1", "run-2", "run-3"] == sorted(each.name for each in runs.iterdir())


@pytest.mark.parametrize("name", ["hyperstate.json", FILE])
def test_a_pipe_in_place_of_a_file_holds_nobody(path, name):
    (path / name).unlink()
    os.mkfifo(path / name)
    for look in (hs.verify, lambda path: hs.load(path, model_of(Kit()))):
        with pytest.raises(hs.CheckpointError, match="it is no file"):
            look(path)


def test_hidden_folders_of_others_stay(tmp_path):
    hs.save(tmp_path / "c-1", model_of(Kit()))
    for name in (".data-of-mine", ".old-notes"):
        (tmp_path / "c-1" / name).mkdir()
    hs.save(tmp_path / "c-1", model_of(Kit()))
    assert [".data-of-mine", ".old-notes", "hyperstate.json", "model"] == sorted(
        each.name for each in (tmp_path / "c-1").iterdir()
    )
    hs.save(tmp_path / "c-2", model_of(Kit()), keep=1)
    assert [".data-of-mine", ".old-notes"] == sorted(each.name for each in (tmp_path / "c-1").iterdir())


def test_a_manifest_that_cannot_be_looked_at_counts_as_there(tmp_path, monkeypatch):
    """A file system that answers with an error must not make a save take the place for an empty one."""
    hs.save(tmp_path / "c", model_of(Kit()))
    real = Path.stat

    def failing(self, **options):
        if self.name == "hyperstate.json":
            raise OSError(errno.EIO, "Input/output error")
        return real(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", failing)
        with pytest.raises(hs.CheckpointError, match=r"can't look at .*hyperstate\.json: Input/output error"):
            hs.save(tmp_path / "c", model_of(Kit()))
    assert 1 == hs.verify(tmp_path / "c").files


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_reads_its_own_part_alone(tmp_path, monkeypatch, ranks):
    """Rows are cut among the ranks that load; the files are of three."""
    shape = (24, 1000)

    def sharded(kit, value):
        full = kit.tensor([[value] * shape[1]] * shape[0])
        return kit.with_parameters({"w": kit.sharded_tensor(full, kit.mesh((kit.world,), ("dp",)), ("S0",))})

    run_ranks(3, lambda _: hs.save(tmp_path / "c", sharded(Kit(), 1.0)), timeout=30)
    counted, lock = {}, threading.Lock()

    def count(rank, size):
        with lock:
            counted[rank] = counted.get(rank, 0) + size

    mapped, read_into = storage._LocalReader.map, storage._LocalReader.read_into

    def map_(self, start, nbytes):
        count(here.rank, nbytes)
        return mapped(self, start, nbytes)

    def read(self, view, start):
        count(here.rank, len(view) if start > 8 else 0)  # headers apart
        return read_into(self, view, start)

    here = threading.local()
    monkeypatch.setattr(storage._LocalReader, "map", map_)
    monkeypatch.setattr(storage._LocalReader, "read_into", read)

    def body(rank):
        here.rank = rank
        model = sharded(Kit(), 0.0)
        hs.load(tmp_path / "c", model)
        assert Kit().content(Kit().named(model)["w"]).data == "0000803f" * (24 * 1000 // ranks)

    run_ranks(ranks, body, timeout=30)
    assert dict.fromkeys(range(ranks), 24 * 1000 * 4 // ranks) == counted


def files_in(path):
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())


OTHERS = ["model/config.json", "model/tokenizer/words.txt", "optim/notes.txt"]


@pytest.mark.parametrize("how", ["saved over", "saved over by less", "pruned", "pruned and saved again"])
def test_what_others_put_into_the_folders_of_a_checkpoint_stays(tmp_path, how):
    kit = Kit()
    model = model_of(kit)
    optimizer = kit.optimizer(model)
    kit.fake_step(model, optimizer)
    path = tmp_path / "c-1"
    hs.save(path, model, optimizer)
    ours = files_in(path)
    for name in OTHERS:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)
    if how.startswith("saved over"):
        hs.save(path, model, None if how.endswith("less") else optimizer)
    else:
        hs.save(tmp_path / "c-2", model, keep=1)
    if how == "pruned and saved again":
        hs.save(path, model, optimizer)
    expected = {"saved over": ours, "saved over by less": ours[:2], "pruned": [], "pruned and saved again": ours}[how]
    assert sorted([*expected, *OTHERS]) == files_in(path)
    assert OTHERS == [(path / name).read_text() for name in OTHERS]
    if expected:
        assert hs.verify(path).files == len(expected) - 1
    assert [] == [each.name for each in path.iterdir() if each.name.startswith(".")]


def test_a_file_of_a_checkpoint_that_was_damaged_goes_with_it(path):
    os.truncate(path / FILE, 3)
    (path / "model" / "mine.bin").write_text("mine")
    hs.save(path, model_of(Kit(), 2.0))
    assert ["hyperstate.json", "model/mine.bin", FILE] == files_in(path)
    assert 1 == hs.verify(path).files


def sharded(kit, value):
    mesh = kit.mesh([kit.world], ["fsdp"])
    whole = kit.tensor([[value + 10 * row + column for column in range(6)] for row in range(4 * kit.world)])
    return kit.with_parameters({"first": kit.sharded_tensor(whole, mesh, ["S0"]), "second": kit.tensor([value] * 7)})


def swap(files):
    first, second = (file.read_bytes() for file in files)
    files[0].write_bytes(second)
    files[1].write_bytes(first)


DAMAGE = {
    "emptied": (
        lambda files: os.truncate(files[1], 0),
        "has 0 bytes, the manifest says {size}; bytes {at} to {end} of",
    ),
    "cut": (lambda files: os.truncate(files[1], files[1].stat().st_size - 3), "; bytes {cut} to {end} of 'first'"),
    "swapped": (swap, "its header has float32[4, 6] from [8, 0] at byte {at} where the manifest has 'first': float32"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_on_all_ranks_with_file_tensor_and_bytes_and_nothing_changes(tmp_path, damage):
    hurt, words = DAMAGE[damage]
    run_ranks(3, lambda _: hs.save(tmp_path / "c", sharded(Kit(), 1.0)))
    files = sorted((tmp_path / "c" / "model").iterdir())[1:]  # both hold a shard of `first` and nothing else
    size, at = files[0].stat().st_size, files[0].stat().st_size - 4 * 24
    hurt(files)

    def body(rank):
        kit = Kit()
        model = sharded(kit, 500.0)
        before = {fqn: kit.content(param) for fqn, param in kit.named(model).items()}
        with pytest.raises(hs.CheckpointError) as caught:
            hs.load(tmp_path / "c", model)
        assert before == {fqn: kit.content(param) for fqn, param in kit.named(model).items()}
        return str(caught.value)

    (text,) = set(run_ranks(3, body, timeout=30))
    with pytest.raises(hs.CheckpointError) as caught:
        hs.verify(tmp_path / "c")
    expected = words.format(size=size, at=at, end=size, cut=size - 3)
    for said in (text, str(caught.value)):
        assert expected in said
        assert files[1].name in said and "'first'" in said
