"""Conversions, with PyTorch, safetensors and transformers as judges."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import state_dict as dsd

import hyperstate as hs
from hyperstate.checkpoint import convert, origins
from hyperstate.cli.example import fetch
from hyperstate.testing import Pool
from hyperstate_torch.kit import Kit

BODIES = Path(__file__).with_name("bodies_torch_checkpoints.py")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(seed: int, steps: int = 2) -> tuple[Any, Any]:
    model = Kit().model(seed, (9, 13, 5))
    groups = [
        {"params": list(model.layers.parameters()), "betas": (0.8, 0.9), "lr": torch.tensor(0.125)},
        {"params": list(model.norm.parameters()), "weight_decay": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
    Kit().train(model, optimizer, steps)
    return model, optimizer


def assert_same(first: tuple[Any, Any], second: tuple[Any, Any]) -> None:
    for name, value in first[0].state_dict().items():
        assert torch.equal(value, second[0].state_dict()[name]), name
    one, two = first[1].state_dict(), second[1].state_dict()
    assert str(one["param_groups"]) == str(two["param_groups"])
    for number, slots in one["state"].items():
        assert slots.keys() == two["state"][number].keys()
        assert all(torch.equal(value, two["state"][number][key]) for key, value in slots.items())


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_a_checkpoint_of_dcp_becomes_ours(flat: bool, tmp_path: Path) -> None:
    first, second = trained(0), trained(1, 0)
    options = dsd.StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": dsd.get_model_state_dict(first[0]),
        "optim": dsd.get_optimizer_state_dict(*first, options=options),
        "step": 7,
        "random": torch.arange(4),
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "own")
    hs.verify(tmp_path / "own")
    extra = hs.load(tmp_path / "own", *second).extra
    assert_same(first, second)
    assert 7 == extra["step"] and torch.equal(torch.arange(4), extra["random"])
    Kit().train(*first, 2, 2)
    Kit().train(*second, 2, 2)
    assert_same(first, second)


def test_a_checkpoint_of_one_object_is_looked_into(tmp_path: Path) -> None:
    """As PyTorch's tutorial saves: ``dcp.save({"app": Stateful})``."""
    first, second = trained(0), trained(1, 0)
    state = {"model": dsd.get_model_state_dict(first[0]), "optim": dsd.get_optimizer_state_dict(*first)}
    dcp.save({"app": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    convert(tmp_path / "dcp", tmp_path / "own")
    hs.load(tmp_path / "own", *second)
    assert_same(first, second)


def test_a_checkpoint_of_nothing_is_not_written(tmp_path: Path) -> None:
    dcp.save({"a": {"deep": {"tensor": torch.ones(3)}}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(hs.CheckpointError, match="holds no values of a model or optimizer"):
        convert(tmp_path / "dcp", tmp_path / "own")
    with pytest.raises(hs.CheckpointError, match="holds no tensors of the section 'model'"):
        convert(tmp_path / "dcp", tmp_path / "m.safetensors", to="safetensors")
    assert ["dcp"] == [path.name for path in tmp_path.iterdir()]


def test_a_sharded_checkpoint_of_dcp_becomes_ours(tmp_path: Path, pool4: Pool) -> None:
    wanted = pool4.run(BODIES, "saves_with_dcp", folder=str(tmp_path / "dcp"))[0]
    convert(tmp_path / "dcp", tmp_path / "own")
    found = pool4.run(BODIES, "resume", folder=str(tmp_path / "own"), shape=[2, 2])[0]
    assert wanted == found["loaded"]


def test_our_checkpoint_becomes_one_of_dcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 64 bytes, so that tensors are cut in many chunks."""
    monkeypatch.setattr(origins, "BLOCK", 64)
    first, second = trained(0), trained(1)
    hs.save(tmp_path / "own", *first, extra={"step": 7})
    convert(tmp_path / "own", tmp_path / "dcp", to="dcp")
    state: dict[str, Any] = {
        "model": dsd.get_model_state_dict(second[0]),
        "optim": dsd.get_optimizer_state_dict(*second),
        "extra": None,
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dsd.set_state_dict(*second, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert {"step": 7} == state["extra"]
    assert_same(first, second)
    convert(tmp_path / "dcp", tmp_path / "back")
    third = trained(2)
    assert {"step": 7} == hs.load(tmp_path / "back", *third).extra["extra"]
    assert_same(first, third)


@pytest.mark.parametrize("limit", [1 << 30, 300], ids=["one file", "several"])
def test_our_checkpoint_becomes_ordinary_safetensors_and_back(limit: int, tmp_path: Path, pool4: Pool) -> None:
    pool4.run(BODIES, "save", folder=str(tmp_path / "own"), shape=[4])
    target = tmp_path / "hf"
    convert(tmp_path / "own", target, to="safetensors", file_bytes=limit)
    files = sorted(file.name for file in target.iterdir())
    if limit == 300:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == [name for name in files if name.endswith(".safetensors")]
        found = {name: load_file(target / file)[name] for name, file in index["weight_map"].items()}
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    else:
        assert ["model.safetensors"] == files
        found = load_file(target / "model.safetensors")
    model = Kit().model(3, (9, 13, 5))
    hs.load(tmp_path / "own", model)
    assert sorted(model.state_dict()) == sorted(found)
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
    convert(target, tmp_path / "back")
    other = Kit().model(4, (9, 13, 5))
    hs.load(tmp_path / "back", other)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_shards_of_dcps_safetensors_become_ours(tmp_path: Path, pool4: Pool) -> None:
    pool4.run(BODIES, "save", folder=str(tmp_path / "own"), shape=[2, 2])
    convert(tmp_path / "own" / "model", tmp_path / "copy")
    one, two = Kit().model(3, (9, 13, 5)), Kit().model(4, (9, 13, 5))
    hs.load(tmp_path / "own", one)
    hs.load(tmp_path / "copy", two)
    assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())


def test_names_are_mapped(tmp_path: Path) -> None:
    first = trained(0)
    hs.save(tmp_path / "a", *first)
    convert(tmp_path / "a", tmp_path / "b", names=lambda fqn: f"outer.{fqn}")
    second = trained(1)

    class Outer(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.outer = inner

    hs.load(tmp_path / "b", Outer(second[0]), second[1])
    assert_same(first, second)
    convert(tmp_path / "b", tmp_path / "one.safetensors", to="safetensors", names={"outer.norm.weight": "scale"})
    assert torch.equal(first[0].norm.weight, load_file(tmp_path / "one.safetensors")["scale"])
    with pytest.raises(hs.OptionError, match="one name"):
        convert(tmp_path / "a", tmp_path / "c", names=lambda fqn: "same")


def test_every_dtype_goes_through(tmp_path: Path) -> None:
    values = {
        str(dtype).removeprefix("torch."): torch.tensor([[1, 0, 2]]).to(dtype)
        for dtype in (torch.bool, torch.int8, torch.uint16, torch.float16, torch.bfloat16, torch.float8_e5m2)
    }
    values |= {"none": torch.empty(0, 3), "one": torch.tensor(3.0)}
    save_file(values, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "out.safetensors", to="safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert values.keys() == found.keys()
    for name, value in values.items():
        assert (value.dtype, value.shape) == (found[name].dtype, found[name].shape)
        assert torch.equal(value.float(), found[name].float())


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hs.CheckpointError, match="holds neither"):
        convert(tmp_path, tmp_path / "x")
    with pytest.raises(hs.OptionError, match="to="):
        convert(tmp_path, tmp_path / "x", to="pickle")
    (tmp_path / ".metadata").write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(hs.CheckpointError, match="nothing was imported or run"):
        convert(tmp_path, tmp_path / "x")
    assert not (tmp_path / "x").exists()


LARGE = """
import resource, sys
from hyperstate.checkpoint import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2])
convert(sys.argv[2], sys.argv[3], to="safetensors")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_conversion_holds_two_blocks_at_most(tmp_path: Path) -> None:
    value = torch.arange(48 << 20, dtype=torch.int32).reshape(-1, 1024)
    save_file({"large": value}, tmp_path / "in.safetensors")
    command = [
        sys.executable,
        "-c",
        LARGE,
        *(str(tmp_path / name) for name in ("in.safetensors", "own", "out.safetensors")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) * 1024 <= 2 * origins.BLOCK + (8 << 20)
    assert (tmp_path / "in.safetensors").stat().st_size > 6 * origins.BLOCK
    assert torch.equal(value, load_file(tmp_path / "out.safetensors")["large"])


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_transformers_loads_what_was_exported(kind: str, tmp_path: Path) -> None:
    import transformers as hf

    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 50,
    }
    config: Any = {
        "llama": lambda: hf.LlamaConfig(**small, num_key_value_heads=1),
        "gpt2": lambda: hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32),
        "mixtral": lambda: hf.MixtralConfig(**small, num_key_value_heads=1, num_local_experts=2),
    }[kind]()
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    hs.save(tmp_path / "own", model)
    convert(tmp_path / "own", tmp_path / "hf", to="safetensors", file_bytes=20_000)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path / "hf")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, loaded(tokens).logits)


# -- files that nobody here wrote ----------------------------------------------------------------------


class Speaker(torch.nn.Module):
    """The net of resemblyzer 0.1.4, as its package describes it."""

    def __init__(self) -> None:
        super().__init__()
        self.similarity_weight = torch.nn.Parameter(torch.zeros(1))
        self.similarity_bias = torch.nn.Parameter(torch.zeros(1))
        self.lstm = torch.nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = torch.nn.Linear(256, 256)


def test_a_real_training_checkpoint_goes_through_every_format(tmp_path: Path) -> None:
    """Weights, Adam's moments and steps; then PyTorch's own load of both dicts takes them back unchanged."""
    held = torch.load(fetch(), weights_only=True, map_location="cpu")
    first, second = Speaker(), Speaker()
    pairs = [(net, torch.optim.Adam(net.parameters(), lr=0.5, foreach=False)) for net in (first, second)]
    hs.set_state_dict(
        *pairs[0],
        model_state_dict=held["model_state"],
        optim_state_dict=held["optimizer_state"],
        options=hs.StateDictOptions(full_state_dict=True),
    )
    hs.save(tmp_path / "a", *pairs[0], extra={"step": held["step"]})
    convert(tmp_path / "a", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "b")
    assert held["step"] == hs.load(tmp_path / "b", *pairs[1]).extra["extra"]["step"]
    assert held["model_state"].keys() == second.state_dict().keys()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in held["model_state"].items())
    numbers = held["optimizer_state"]["param_groups"][0]["params"]
    found = pairs[1][1].state_dict()["state"]
    for position, number in enumerate(numbers):
        slots = held["optimizer_state"]["state"][number]
        assert slots.keys() == found[position].keys()
        for key, value in slots.items():
            assert torch.equal(torch.as_tensor(value, dtype=torch.float32), torch.as_tensor(found[position][key])), key


def test_a_real_file_of_safetensors_goes_through_every_format(tmp_path: Path) -> None:
    """silero-vad 6.2.3: sixteen kilohertz, as published."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([*command, "silero-vad==6.2.3"], check=True, timeout=120)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("silero_vad_16k.safetensors")]
        (tmp_path / "in.safetensors").write_bytes(wheel.read(name))
    way = [("own", "own"), ("dcp", "dcp"), ("own2", "own"), ("c.ckpt", "ckpt"), ("hf", "safetensors"), ("own3", "own")]
    source = tmp_path / "in.safetensors"
    for target, to in [*way, ("out.safetensors", "safetensors")]:
        convert(source, tmp_path / target, to=to, file_bytes=200_000)
        source = tmp_path / target
    wanted, found = load_file(tmp_path / "in.safetensors"), load_file(source)
    assert len(list((tmp_path / "hf").glob("model-*"))) > 1
    assert wanted.keys() == found.keys()
    assert all(value.dtype == found[name].dtype and torch.equal(value, found[name]) for name, value in wanted.items())
