"""The reference backend: its toy framework and its adapter, apart from what the conformance suite checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import hyperstate as hs
from hyperstate.backend import load
from hyperstate.errors import TransferError, UnsupportedConfigurationError
from hyperstate.layout import Box, Layout, Mesh, whole
from hyperstate.schema import DTYPES, TensorSpec
from hyperstate_numpy import arrays, dtypes, job, optimizers, standin
from hyperstate_numpy.arrays import Parameter, Tensor, tensor
from hyperstate_numpy.job import run_ranks
from hyperstate_numpy.kit import Kit
from hyperstate_numpy.modules import Module, Perceptron, fully_shard, set_gradient
from hyperstate_numpy.sharded import DeviceMesh, DTensor, Partial, Replicate, Shard, StridedShard

FULL = hs.StateDictOptions(full_state_dict=True)
ON_ROOT = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

NUMPY = load("numpy")
TENSORS: Any = NUMPY.tensors
FABRIC: Any = NUMPY.fabric
CONTROL: Any = NUMPY.control


def row(*values: int) -> Tensor:
    """A buffer of these bytes."""
    return Tensor(np.array(values, np.uint8))


# -- number formats ----------------------------------------------------------------------------------

ANCHORS = [
    ("bfloat16", 1.0, 0x3F80),
    ("bfloat16", 3.140625, 0x4049),
    ("bfloat16", 1 + 2**-8, 0x3F80),  # a tie, to even
    ("bfloat16", 1 + 3 * 2**-8, 0x3F82),
    ("bfloat16", -np.inf, 0xFF80),
    ("bfloat16", 3.4e38, 0x7F80),
    ("float8_e4m3fn", 1.0, 0x38),
    ("float8_e4m3fn", -448.0, 0xFE),
    ("float8_e4m3fn", 2**-9, 0x01),
    ("float8_e4m3fn", 1e4, 0x7F),
    ("float8_e5m2", 1.0, 0x3C),
    ("float8_e5m2", 57344.0, 0x7B),
    ("float8_e5m2", -1e6, 0xFC),
    ("float8_e4m3fnuz", 1.0, 0x40),
    ("float8_e4m3fnuz", -0.0, 0x00),
    ("float8_e4m3fnuz", np.nan, 0x80),
    ("float8_e5m2fnuz", 1.0, 0x40),
    ("float8_e8m0fnu", 1.0, 0x7F),
    ("float8_e8m0fnu", 8.0, 0x82),
    ("float8_e8m0fnu", np.nan, 0xFF),
]


@pytest.mark.parametrize(("name", "number", "bits"), ANCHORS)
def test_known_numbers_have_their_known_bits(name: str, number: float, bits: int) -> None:
    assert bits == int(dtypes.encode(np.array(number), name))


@pytest.mark.parametrize("name", ["bfloat16", "float16", *(n for n in DTYPES if n.startswith("float8_"))])
def test_every_number_of_a_narrow_format_survives_the_way_through_float32(name: str) -> None:
    codes = np.arange(1 << 8 * DTYPES[name][0]).astype(np.uint16 if DTYPES[name][0] == 2 else np.uint8)
    stored = codes.view(dtypes.storage(name))
    numbers = dtypes.decode(stored, name)
    again = dtypes.encode(numbers.astype(np.float32), name)
    real = ~np.isnan(numbers)
    assert stored[real].tobytes() == again[real].tobytes()
    assert np.isnan(dtypes.decode(again[~real], name)).all()


@pytest.mark.parametrize("name", DTYPES)
def test_small_whole_numbers_survive_in_every_dtype(name: str) -> None:
    values = [1, 2] if name == "float8_e8m0fnu" else [True, False] if name == "bool" else [0, 1, 2, 4]
    made = tensor(values, name)
    assert (name, DTYPES[name][0] * len(values)) == (made.dtype, made.array.nbytes)
    assert values == np.real(made.numpy()).tolist()


def test_large_integers_lose_no_bit() -> None:
    assert [2**63 - 1, -(2**63)] == tensor([2**63 - 1, -(2**63)], "int64").tolist()
    assert [2**64 - 1] == tensor([2**64 - 1], "uint64").tolist()


def test_unknown_dtypes_are_named() -> None:
    with pytest.raises(UnsupportedConfigurationError, match="'float7'"):
        TENSORS.empty((2,), "float7", None)
    with pytest.raises(UnsupportedConfigurationError, match="<U1"):
        TENSORS.spec(np.array(["x"]))


# -- tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_come_back_as_they_were(name: str) -> None:
    spec = TensorSpec(name, (2, 3))
    data = bytes(range(spec.nbytes)) if name != "bool" else bytes([0, 1] * 3)
    assert [data] == TENSORS.raw([TENSORS.from_raw(data, spec, None)])
    with pytest.raises(ValueError, match=name):
        TENSORS.from_raw(data + b"x", spec, None)


def test_views_share_memory_and_scalars_have_them_too() -> None:
    full = tensor(np.arange(12).reshape(3, 4))
    TENSORS.copy([(TENSORS.view(full, Box((1, 2), (3, 4))), tensor([[-1, -2], [-3, -4]]))])
    assert [[0, 1, 2, 3], [4, 5, -1, -2], [8, 9, -3, -4]] == full.tolist()
    scalar = tensor(3)
    TENSORS.copy([(TENSORS.view(scalar, whole(())), tensor(5))])
    assert 5 == scalar.tolist()


def test_copies_convert_and_do_not_broadcast() -> None:
    target = TENSORS.empty((2,), "bfloat16", "sim")
    TENSORS.copy([(target, tensor([1.00390625, 7], "float64"))])
    assert ([1.0, 7.0], "sim") == (target.tolist(), target.device)
    with pytest.raises(ValueError, match=r"\(1,\) into \(2,\)"):
        TENSORS.copy([(target, tensor([1.0]))])


def test_fresh_memory_shows_that_nothing_was_written() -> None:
    assert [bytes([arrays.POISON] * 8)] == TENSORS.raw([TENSORS.empty((2,), "float32", None)])


def test_contiguous_tensors_are_buffers_and_others_are_not() -> None:
    full = tensor([[1, 2], [3, 4]], "int16")
    buffer = TENSORS.as_buffer(full)
    buffer.array[0] = 9
    assert [[9, 2], [3, 4]] == full.tolist()
    assert None is TENSORS.as_buffer(TENSORS.view(full, Box((0, 0), (2, 1))))
    assert None is TENSORS.as_buffer(full.clone("sim"))


def test_windows_are_typed_views_of_a_buffer() -> None:
    buffer = TENSORS.buffer(48)
    one, two, none = TENSORS.windows(buffer, [(0, (2, 1), "float64"), (16, (), "bfloat16"), (32, (0, 3), "int8")])
    TENSORS.copy([(one, tensor([[1], [2]], "float64")), (two, tensor(3, "bfloat16"))])
    assert np.array([1, 2], "<f8").tobytes() + b"\x40\x40" == buffer.array[:18].tobytes()
    assert (0, 3) == none.shape


def test_placements_become_the_boxes_of_the_core() -> None:
    def body(rank: int) -> Any:
        mesh = DeviceMesh(np.arange(6).reshape(3, 2), ("dp", "tp"))
        full = tensor(np.arange(7))
        return DTensor.distribute(full, mesh, [StridedShard(0, 2), Shard(0)]).to_local().tolist()

    # FSDP over TP: tp splits first (0-3 and 4-6), dp then splits each part (2, 2, 0 and 1, 1, 1)
    assert [[0, 1], [4], [2, 3], [5], [], [6]] == run_ranks(6, body)


def test_partial_tensors_are_refused_with_their_placement() -> None:
    value = DTensor(tensor([1.0]), DeviceMesh([0]), [Partial()], (1,))
    with pytest.raises(UnsupportedConfigurationError, match="Partial"):
        TENSORS.spec(value)


def test_a_slice_of_a_mesh_goes_through_the_calling_rank() -> None:
    def body(rank: int) -> Any:
        mesh = DeviceMesh(np.arange(4).reshape(2, 2), ("a", "b"))
        one, turned = mesh["a"], mesh["b", "a"]
        assert mesh.description == one.description.root
        return one.mesh.tolist(), turned.mesh.tolist()

    turned = [[0, 2], [1, 3]]
    assert [([0, 2], turned), ([1, 3], turned), ([0, 2], turned), ([1, 3], turned)] == run_ranks(4, body)


def test_meshes_refuse_unknown_names_and_foreign_ranks() -> None:
    with pytest.raises(KeyError, match="'tp'"):
        DeviceMesh([0], ("dp",))["tp"]
    with pytest.raises(ValueError, match="no member"):
        DeviceMesh([[1], [2]], ("dp", "tp"))["tp"]


# -- messages ----------------------------------------------------------------------------------------


def test_messages_of_a_pair_arrive_in_order() -> None:
    def body(rank: int) -> Any:
        sent = [row(rank, i) for i in range(5)]
        received = [row(9, 9) for _ in sent]
        pending = FABRIC.exchange([(1 - rank, b) for b in sent[:2]], [(1 - rank, b) for b in received[:2]])
        later = FABRIC.exchange([(1 - rank, b) for b in sent[2:]], [(1 - rank, b) for b in received[2:]])
        pending.wait(10)
        later.wait(10)
        return [b.array.tolist() for b in received], FABRIC.traffic()

    counts = {"exchanges": 2, "messages": 5, "bytes_sent": 10, "bytes_received": 10}
    assert [([[1 - r, i] for i in range(5)], counts) for r in (0, 1)] == run_ranks(2, body, timeout=20)


def test_empty_messages_never_come_and_cost_nothing() -> None:
    def body(rank: int) -> Any:
        FABRIC.exchange([(1 - rank, row())], []).wait(0.1)
        return FABRIC.traffic()["messages"]

    assert [0, 0] == run_ranks(2, body, timeout=20)


def lost_peer(error: str, then: Callable[[], None]) -> Callable[[int], Any]:
    """Rank 1 does `then`, the others wait for a message from it."""

    def body(rank: int) -> Any:
        if rank == 1:
            then()
            return ""
        with pytest.raises(TransferError, match=error) as caught:
            FABRIC.exchange([], [(1, row(0))]).wait(0.5 if "answer" in error else 20.0)
        return str(caught.value)

    return body


def test_a_peer_that_sends_nothing_is_named_after_the_timeout() -> None:
    gate = threading.Event()
    threading.Timer(2.0, gate.set).start()
    text, _ = run_ranks(2, lost_peer("rank 1: no answer within 0.5 s", lambda: bool(gate.wait())), timeout=20)
    assert text.startswith("rank 0 lost the connection")


def test_a_peer_that_dies_fails_transfers_at_once() -> None:
    start = time.monotonic()
    texts = run_ranks(3, lost_peer("rank 1: it died", job.die), timeout=20, lost=[1])
    assert texts[1] is None
    assert time.monotonic() - start < 10


def test_a_rank_dies_at_the_exchange_that_it_was_told_to() -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            Kit().die(exchange=2)
        for _ in range(2):
            mine, theirs = row(rank), row(9)
            try:
                FABRIC.exchange([(1 - rank, mine)], [(1 - rank, theirs)]).wait(10)
            except TransferError:
                return theirs.array.tolist()
        return None

    assert [[9], None] == run_ranks(2, body, timeout=20, lost=[1])


def test_unequal_ideas_of_a_message_are_an_error_on_both_sides() -> None:
    def body(rank: int) -> Any:
        two = row(1, 2)
        with pytest.raises(TransferError, match="rank 0 sends 2 bytes where rank 1 expects 1"):
            FABRIC.exchange(*(([(1, two)], []) if rank == 0 else ([], [(0, row(0))]))).wait(10)

    run_ranks(2, body, timeout=20)


def test_a_device_fabric_refuses_host_memory() -> None:
    def body(rank: int) -> Any:
        assert "sim" == TENSORS.buffer(4).device
        assert None is TENSORS.as_buffer(tensor([1.0]))
        with pytest.raises(TransferError, match="'cpu'.*'sim' only"):
            FABRIC.exchange([(1 - rank, row(1))], [])
        mine, theirs = row(rank).clone("sim"), TENSORS.buffer(1)
        FABRIC.exchange([(1 - rank, mine)], [(1 - rank, theirs)]).wait(10)
        return theirs.tolist()

    assert [[1], [0]] == run_ranks(2, body, timeout=20, device_only=True)


# -- the store, and the job --------------------------------------------------------------------------


def test_the_store_waits_counts_and_forgets() -> None:
    def body(rank: int) -> Any:
        assert None is CONTROL.get("never", 0.05)
        if rank == 0:
            time.sleep(0.1)
            CONTROL.set("key", b"value")
        found = CONTROL.get("key", 10)
        total = CONTROL.add("count", 2)
        CONTROL.memory()["mine"] = rank
        while CONTROL.add("count", 0) < 6:
            time.sleep(0.01)
        CONTROL.delete("key")
        return found, total, CONTROL.get("key", 0), CONTROL.memory()

    results: Any = run_ranks(3, body, timeout=20)
    assert [2, 4, 6] == sorted(total for _, total, _, _ in results)
    assert [(b"value", None, {"mine": rank}) for rank in range(3)] == [(f, g, m) for f, _, g, m in results]


def test_without_a_job_there_is_one_rank_and_no_store() -> None:
    assert (0, 1) == (FABRIC.rank(), FABRIC.world())
    with pytest.raises(TransferError, match="no job"):
        CONTROL.get("key", 0)


def test_a_job_reports_each_failed_rank() -> None:
    def body(rank: int) -> None:
        if rank:
            raise KeyError(f"from {rank}")

    with pytest.raises(job.JobError, match=r"(?s)rank 1.*from 1.*rank 2.*from 2"):
        run_ranks(3, body, timeout=20)


def test_a_rank_that_hangs_is_shown_where_it_stands_and_then_unwound() -> None:
    ended = []

    def body(rank: int) -> None:
        try:
            if rank:
                CONTROL.get("what nobody posts", 600)
        finally:
            ended.append(rank)

    with pytest.raises(job.JobError, match=r"(?s)rank 1:\ndid not end within 0.5 s.*what nobody posts"):
        run_ranks(2, body, timeout=0.5)
    assert [0, 1] == sorted(ended)


def test_a_rank_that_was_to_die_and_does_not_is_a_failure() -> None:
    with pytest.raises(job.JobError, match="rank 0:\nwas expected to die"):
        run_ranks(1, lambda rank: None, timeout=20, lost=[0])


# -- training ----------------------------------------------------------------------------------------


def bits(model: Any) -> dict[str, bytes]:
    """Full parameters and buffers, gathered by the toy framework itself."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).array.tobytes() for n, v in named}


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "local"])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_training_sharded_gives_the_bits_of_training_alone(kind: str, shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        kit = Kit()
        alone = kit.model(seed=3)
        sharded = kit.shard(kit.model(seed=3), kit.mesh(shape, ("outer", "inner")[-len(shape) :]))
        for model in (alone, sharded):
            kit.train(model, kit.optimizer(model, kind), 4)
        assert bits(alone) == bits(sharded)
        assert bits(kit.model(seed=3)) != bits(alone)

    run_ranks(int(np.prod(shape)), body)


def test_gradients_are_those_of_the_loss() -> None:
    model, step = Kit().model(seed=1), 1e-2
    batch = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)
    model.forward(batch)
    model.backward(model.forward(batch))  # of sum(output**2) / 2
    for fqn, param in model.named_parameters():
        if fqn == "layers.0.bias":
            continue  # the normalisation behind it takes it away again
        place = tuple(0 for _ in param.shape)
        losses = []
        for way in (step, -step):
            param.array[place] += way
            losses.append(float((model.forward(batch).astype(np.float64) ** 2).sum() / 2))
            param.array[place] -= way
        assert float(param.grad.array[place]) == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=0.02, abs=0.02)


# -- the public functions ----------------------------------------------------------------------------


def stepped(kit: Kit, shape: Sequence[int] | None, steps: int = 3, seed: int = 0) -> tuple[Any, Any]:
    model = kit.model(seed)
    if shape is not None:
        model = kit.shard(model, kit.mesh(shape, ("outer", "inner")[-len(shape) :]))
    optimizer = kit.optimizer(model)
    kit.train(model, optimizer, steps)
    return model, optimizer


def moments(optimizer: Any, model: Any) -> dict[str, bytes]:
    state = [(n, k, v) for n, p in model.named_parameters() for k, v in optimizer.state[p].items()]
    return {f"{n} {k}": (v.full_tensor() if isinstance(v, DTensor) else v).array.tobytes() for n, k, v in state}


@pytest.mark.parametrize("device_only", [False, True])
def test_state_moves_from_hsdp_to_fsdp_by_every_way_bit_for_bit(device_only: bool) -> None:
    def body(rank: int) -> None:
        kit = Kit()
        model, optimizer = stepped(kit, (2, 2))
        everywhere = hs.get_state_dict(model, optimizer, options=FULL)
        on_root = hs.get_state_dict(model, optimizer, options=ON_ROOT)
        shards = hs.get_state_dict(model, optimizer)
        assert (on_root == ({}, {})) == (rank > 0)
        for passed, options in ((everywhere, FULL), (on_root, BROADCAST), (shards, None)):
            other, fresh = stepped(kit, (4,), steps=0, seed=9)
            hs.set_state_dict(other, fresh, model_state_dict=passed[0], optim_state_dict=passed[1], options=options)
            assert bits(model) == bits(other)
            assert moments(optimizer, model) == moments(fresh, other)

    run_ranks(4, body, device_only=device_only)


def test_meta_models_live_where_their_mesh_or_the_caller_says() -> None:
    model = Kit().model(seed=4)
    values = hs.get_model_state_dict(model, options=FULL)
    other = Perceptron((5, 7, 3)).to("meta")
    kept = dict(other.named_parameters())
    with pytest.raises(hs.UnsupportedConfigurationError, match="device="):
        hs.set_model_state_dict(other, values, options=FULL)
    hs.set_model_state_dict(other, values, options=FULL, device="sim")
    assert bits(model) == bits(other)
    assert {"sim"} == {value.device for value in other.parameters()}
    assert kept == dict(other.named_parameters())

    def body(rank: int) -> None:
        sharded = fully_shard(Perceptron((5, 7, 3)).to("meta"), DeviceMesh([0, 1], device_type="sim"))
        for _, buffer in sharded.named_buffers():
            buffer.become(arrays.empty(buffer.shape, buffer.dtype))
        hs.set_model_state_dict(sharded, values if rank == 0 else {}, options=BROADCAST)
        assert bits(model) == bits(sharded)
        assert {"sim"} == {value.to_local().device for value in sharded.parameters()}

    run_ranks(2, body)


def test_extra_state_and_hooks_take_part() -> None:
    class Counter(Module):
        seen: Any = 0

        def get_extra_state(self) -> Any:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    def counter(seen: int) -> Module:
        root, inner = Module(), Counter()
        root.inner = inner  # type: ignore[attr-defined]  # children are set as attributes
        inner.seen = seen
        root.state_dict_pre_hooks.append(lambda module: setattr(module.inner, "seen", module.inner.seen + 1))
        return root

    saved = hs.get_model_state_dict(counter(6))
    assert {"inner._extra_state": {"seen": 7}} == saved
    other: Any = counter(0)
    hs.set_model_state_dict(other, saved)
    assert 7 == other.inner.seen


def test_fields_keep_the_form_in_which_the_group_holds_them() -> None:
    first, second = Module(), Module()
    for module in (first, second):
        module.register_parameter("w", Parameter(tensor([1.0])))
    rate = tensor(0.5)
    source = optimizers.SGD(first.parameters(), lr=0.25)
    target = optimizers.SGD(second.parameters(), lr=rate)
    hs.set_optim_state_dict(second, target, hs.get_optim_state_dict(first, source))
    assert target.param_groups[0]["lr"] is rate
    assert 0.25 == rate.tolist()
    hs.set_optim_state_dict(first, source, hs.get_optim_state_dict(second, target))
    assert (float, 0.25) == (type(source.param_groups[0]["lr"]), source.param_groups[0]["lr"])


def test_numpy_arrays_may_be_passed_as_values() -> None:
    module = Module()
    module.register_parameter("w", Parameter(tensor([[0.0, 0.0]])))
    hs.set_model_state_dict(module, {"w": np.array([[1.0, 2.0]])})
    assert [[1.0, 2.0]] == dict(module.named_parameters())["w"].tolist()  # type: ignore[union-attr]  # a plain one


# -- somebody else's sharded tensors -----------------------------------------------------------------


def foreign(full: dict[str, Any], mesh: standin.Mesh, placements: Sequence[Any]) -> Module:
    module = Module()
    for name, values in full.items():
        value: Any = standin.DTensor.distribute(tensor(values), mesh, placements)
        value.requires_grad = True
        module.register_parameter(name, value)
    return module


def step(module: Module, optimizer: Any) -> None:
    for _, param in module.named_parameters():
        set_gradient(param, np.cos(np.arange(int(np.prod(param.shape)), dtype=np.float32)).reshape(param.shape))
    optimizer.step()


def test_a_foreign_layout_is_read_without_its_module() -> None:
    mesh = standin.Mesh("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
    value = standin.DTensor(tensor(np.zeros((2, 3))), mesh, [standin.Replicate(), standin.Shard(1)])
    layout = Layout(Mesh((2, 2), (0, 1, 2, 3)), ((), (1,)))
    assert TensorSpec("float32", (2, 6), layout) == TENSORS.spec(value)
    assert (-1, 0) == value.layout.tensor_map
    assert NUMPY.owns(value)
    assert (0, 1, 2, 3) == NUMPY.ranks_of(mesh)


def test_foreign_tensors_keep_local_state_and_round_trip() -> None:
    full = {"a": np.arange(24.0).reshape(4, 6), "b": np.arange(4.0)}

    def body(rank: int) -> None:
        mesh = standin.Mesh("cpu", [[0, 1], [2, 3]], ("replicate", "shard"))
        one = foreign(full, mesh, [standin.Replicate(), standin.Shard(0)])
        first = optimizers.Adam(one.parameters())
        step(one, first)
        alone = Module()
        for name, values in full.items():
            alone.register_parameter(name, Parameter(tensor(values)))
        single = optimizers.Adam(alone.parameters())
        step(alone, single)
        model, optim = hs.get_state_dict(one, first, options=FULL)
        assert bits(alone) == {name: value.array.tobytes() for name, value in model.items()}
        got = {f"{n} {k}": v.array.tobytes() for n, slots in optim["state"].items() for k, v in slots.items()}
        assert moments(single, alone) == got
        flat = standin.Mesh("cpu", [0, 1, 2, 3], ("shard",))
        two = foreign({name: values * 0 for name, values in full.items()}, flat, [standin.Shard(0)])
        second = optimizers.Adam(two.parameters())
        hs.set_state_dict(two, second, model_state_dict=model, optim_state_dict=optim, options=FULL)
        for name, param in two.named_parameters():
            kept = second.state[param]["exp_avg"]
            assert isinstance(kept, Tensor)
            assert optim["state"][name]["exp_avg"].array[rank : rank + 1].tobytes() == kept.array.tobytes()

    run_ranks(4, body)


def test_uneven_foreign_shards_are_refused() -> None:
    mesh = standin.Mesh("cpu", [0, 1])
    with pytest.raises(ValueError, match="uneven"):
        standin.DTensor.distribute(tensor(np.zeros((3, 2))), mesh, [standin.Shard(0)])
    like = standin.DTensor(tensor(np.zeros((2, 2))), mesh, [standin.Shard(0)])
    spec = TensorSpec("float32", (3, 2), Layout(Mesh((2,), (0, 1)), ((0,), ())))
    with pytest.raises(UnsupportedConfigurationError, match="evenly"):
        TENSORS.wrap(tensor(np.zeros((2, 2))), spec, like)


def test_wrapping_makes_placements_of_the_kind_that_is_there() -> None:
    mesh = standin.Mesh("cpu", [[0, 1], [2, 3]])
    like = standin.DTensor(tensor(np.zeros((2, 2))), mesh, [standin.Replicate(), standin.Shard(0)])
    spec = TensorSpec("float32", (2, 4), Layout(Mesh((2, 2), (0, 1, 2, 3)), ((), (0,))))
    made = TENSORS.wrap(tensor(np.zeros((2, 2))), spec, like)
    assert (standin.Shard(1), standin.Replicate()) == made.placements
    native = DTensor(tensor(np.zeros((2,))), DeviceMesh([[0, 1], [2, 3]]), [Replicate(), Replicate()], (2,))
    both = TensorSpec("float32", (8,), Layout(Mesh((2, 2), (0, 1, 2, 3)), ((1, 0),)))
    assert (StridedShard(0, 2), Shard(0)) == TENSORS.wrap(tensor(np.zeros((2,))), both, native).placements
