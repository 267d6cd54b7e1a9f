"""State between PyTorch and MindSpore through files: each in jobs of its own, of other sizes and meshes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict as dsd
from twins import TWINS, assert_close, bits, optimizer, read

import hyperstate as hs
from hyperstate.checkpoint import convert
from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_files.py")
OTHER = {"torch": "mindspore", "mindspore": "torch"}


KINDS = [(net, "AdamW") for net in TWINS] + [("Linear", name) for name in ("SGD (Momentum)", "RMSprop", "Adagrad")]
"""test_interop_state.py tries all optimizers; a file carries what it carries."""


@pytest.fixture(scope="module")
def pools() -> Iterator[Any]:
    made = {(name, ranks): Pool(name, ranks) for name in OTHER for ranks in (2, 4)}
    yield made
    for pool in made.values():
        pool.stop()


def test_state_goes_round_through_both_frameworks(tmp_path: Path, pools: Any) -> None:
    """4 FSDP -> 2 x 2 HSDP -> MindSpore 2 -> MindSpore 2 x 2 -> TP x FSDP, uneven sizes and the optimizer included."""
    way = [("torch", 4, "hsdp"), ("mindspore", 2, "fsdp"), ("mindspore", 4, "grid"), ("torch", 4, "grid")]
    truth = pools["torch", 4].run(BODIES, "save", folder=str(tmp_path / "0"), topology="fsdp")[0]
    for number, (framework, ranks, topology) in enumerate(way):
        found = pools[framework, ranks].run(
            BODIES,
            "carry",
            source=str(tmp_path / str(number)),
            target=str(tmp_path / str(number + 1)),
            topology=topology,
        )
        assert [found[0]] * ranks == found
        assert truth == found[0], (framework, ranks, topology)
        hs.verify(tmp_path / str(number + 1))


def test_pytorchs_reader_reads_what_mindspore_wrote(tmp_path: Path, pools: Any) -> None:
    """Sharded by four ranks of MindSpore."""
    truth = pools["mindspore", 4].run(BODIES, "save", folder=str(tmp_path / "c"), topology="grid")[0]
    shapes = {name: content[1] for name, content in truth.items() if " " not in name}
    state: dict[str, Any] = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "c" / "model")), no_dist=True)
    for name, value in state.items():
        assert truth[name][2] == value.numpy().tobytes().hex(), name


def test_mindspores_loader_reads_what_pytorch_wrote(tmp_path: Path) -> None:
    twin = TWINS["Linear"]
    net = twin.build("torch", 0)
    hs.save(tmp_path / "c", net)
    (file,) = (tmp_path / "c" / "model").iterdir()
    found = ms.load_checkpoint(str(file), format="safetensors")
    wanted = load_file(file)
    assert sorted(wanted) == sorted(found)
    for name, value in wanted.items():
        np.testing.assert_array_equal(value.numpy(), found[name].asnumpy())


@pytest.mark.parametrize("source", ["torch", "mindspore"])
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_file_carries_every_layer_and_optimizer(name: str, kind: str, source: str, tmp_path: Path) -> None:
    ms.set_device("CPU")
    twin, other = TWINS[name], OTHER[source]
    net = twin.build(source, 0)
    trained = optimizer(source, kind, net)
    twin.train(net, trained, 2)
    hs.save(tmp_path / "a", net, trained)
    there = twin.build(other, 1)
    fresh = optimizer(other, kind, there)
    hs.load(tmp_path / "a", there, fresh)
    assert bits(read(net, trained)[0]) == bits(read(there, fresh)[0])
    assert bits(read(net, trained)[1]["state"]) == bits(read(there, fresh)[1]["state"])
    hs.save(tmp_path / "b", there, fresh)
    back = twin.build(source, 2)
    again = optimizer(source, kind, back)
    hs.load(tmp_path / "b", back, again)
    assert twin.train(net, trained, 1, first=2) == twin.train(back, again, 1, first=2)
    assert bits(hs.get_model_state_dict(net)) == bits(hs.get_model_state_dict(back))
    twin.train(there, fresh, 1, first=2)
    assert_close(net, there, twin.noise, 2e-6 if kind.startswith("SGD") else 1e-5)


def test_own_names_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    """Then MindSpore's own loader puts the file into a net; a load takes the names from the checkpoint."""
    ms.set_device("CPU")
    twin = TWINS["mixed"]
    net, other, third = (twin.build("mindspore", seed) for seed in range(3))
    hs.save(tmp_path / "c", net, options=hs.StateDictOptions(names="own"))
    (file,) = (tmp_path / "c" / "model").iterdir()
    missing, unexpected = ms.load_param_into_net(other, ms.load_checkpoint(str(file), format="safetensors"))
    assert ([], []) == (missing, unexpected)
    hs.load(tmp_path / "c", third)
    for parameter, one, two in zip(net.get_parameters(), other.get_parameters(), third.get_parameters(), strict=True):
        np.testing.assert_array_equal(parameter.asnumpy(), one.asnumpy())
        np.testing.assert_array_equal(parameter.asnumpy(), two.asnumpy())


def test_a_checkpoint_of_dcp_goes_into_mindspore(tmp_path: Path) -> None:
    """Written by PyTorch's own functions alone, optimizer included."""
    ms.set_device("CPU")
    twin = TWINS["Linear"]
    net = twin.build("torch", 0)
    trained = optimizer("torch", "AdamW", net)
    twin.train(net, trained, 2)
    state = {"model": dsd.get_model_state_dict(net), "optim": dsd.get_optimizer_state_dict(net, trained)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "own")
    there = twin.build("mindspore", 1)
    fresh = optimizer("mindspore", "AdamW", there)
    hs.load(tmp_path / "own", there, fresh)
    assert bits(read(net, trained)[0]) == bits(read(there, fresh)[0])
    assert bits(read(net, trained)[1]["state"]) == bits(read(there, fresh)[1]["state"])


@pytest.mark.parametrize("way", ["plain", "sliced", "with a checksum"])
def test_mindspores_ckpt_files_are_read(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "large": ms.Tensor(np.arange(3000, dtype=np.float32).reshape(30, 100)),
        "one": ms.Tensor(3.0, ms.float32),
        "half": ms.Tensor(np.arange(6).reshape(2, 3), ms.bfloat16),
        "flags": ms.Tensor(np.array([True, False])),
        "count": ms.Tensor(np.array([5], np.int64)),
    }
    if way == "sliced":
        monkeypatch.setattr(ms.train.serialization, "SLICE_SIZE", 1)
    rows = [{"name": name, "data": value} for name, value in values.items()]
    ms.save_checkpoint(rows, str(tmp_path / "in.ckpt"), crc_check=way == "with a checksum", append_dict={"epoch": 3})
    convert(tmp_path / "in.ckpt", tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "out.safetensors", to="safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert sorted([*values, "epoch"]) == sorted(found)
    for name, value in values.items():
        assert bits(value) == bits(found[name]), name


def test_mindspore_reads_the_ckpt_files_that_we_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a tensor is cut into slices."""
    from hyperstate.checkpoint import ckpt, origins

    monkeypatch.setattr(origins, "BLOCK", 256)
    monkeypatch.setattr(ckpt, "SLICE", 1000)
    net = TWINS["mixed"].build("torch", 0)
    hs.save(tmp_path / "own", net)
    convert(tmp_path / "own", tmp_path / "out.ckpt", to="ckpt")
    found = ms.load_checkpoint(str(tmp_path / "out.ckpt"))
    wanted = net.state_dict()
    assert sorted(wanted) == sorted(found)
    for name, value in wanted.items():
        assert bits(value) == bits(found[name]), name
    convert(tmp_path / "out.ckpt", tmp_path / "back")
    other = TWINS["mixed"].build("torch", 1)
    hs.load(tmp_path / "back", other)
    assert bits(wanted) == bits(other.state_dict())
