"""Rank bodies: sharded tensors of MindSpore, cells that keep shards and are trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.experimental import optim

import hyperstate as hs
from hyperstate_mindspore import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    dtensor_of,
    init_device_mesh,
    layouts,
    shard_module,
    unsharded,
    value_and_grad,
)
from hyperstate_mindspore.sharded import StridedShard

FULL = hs.StateDictOptions(full_state_dict=True)
ROOT = hs.StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
DTYPES = (ms.float32, ms.float16, ms.bfloat16, ms.float64, ms.int8, ms.uint8, ms.int64, ms.bool_)


def refused(error: type[Exception], call: Any, *arguments: Any, **named: Any) -> str:
    """The text with which `call` raises `error`."""
    try:
        call(*arguments, **named)
    except error as found:
        return str(found)
    raise AssertionError(f"{call} did not raise {error.__name__}")


def counting(*shape: int) -> Any:
    return np.arange(int(np.prod(shape))).reshape(shape)


# -- meshes and tensors ------------------------------------------------------------------------------


def meshes(kit: Any) -> None:
    mesh = init_device_mesh((2, 2), ("outer", "inner"))
    place = divmod(kit.rank, 2)
    assert place == mesh.get_coordinate()
    assert (2, 4, 2, 2) == (mesh.ndim, mesh.size(), mesh.size("outer"), mesh.size(1))
    inner, outer = mesh["inner"], mesh["outer"]
    assert [2 * place[0], 2 * place[0] + 1] == inner.mesh.tolist()
    assert [place[1], place[1] + 2] == outer.mesh.tolist()
    assert (place[1],) == inner.get_coordinate() and place[1] == mesh.get_local_rank("inner")
    assert mesh.mesh.T.tolist() == mesh["inner", "outer"].mesh.tolist()
    assert mesh is inner.root_mesh and mesh["outer", "inner"] is mesh
    assert None is DeviceMesh([1 - min(kit.rank, 1)]).get_coordinate()
    assert "no dimension 'x'" in refused(KeyError, lambda: mesh["x"])
    assert "has 3 ranks, the job has 4" in refused(ValueError, init_device_mesh, (3,))
    assert "names ranks" in refused(ValueError, DeviceMesh, [0, 7])
    refused(ValueError, DeviceMesh, [0, 0])


CHUNKS = {
    # Rows of each of 4 ranks, as torch.chunk cuts: ceil-sized, then what is left, then nothing.
    8: [(0, 2), (2, 4), (4, 6), (6, 8)],
    7: [(0, 2), (2, 4), (4, 6), (6, 7)],
    5: [(0, 2), (2, 4), (4, 5), (5, 5)],
    3: [(0, 1), (1, 2), (2, 3), (3, 3)],
    0: [(0, 0)] * 4,
}


def parts_are_cut_as_torch_chunk_cuts(kit: Any) -> None:
    mesh = init_device_mesh((4,))
    for rows, chunks in CHUNKS.items():
        full, (start, stop) = counting(rows, 3), chunks[kit.rank]
        by_row = distribute_tensor(ms.Tensor(full), mesh, [Shard(0)])
        assert full[start:stop].tolist() == by_row.to_local().asnumpy().tolist()
        by_column = distribute_tensor(ms.Tensor(full.T.copy()), mesh, [Shard(1)])
        assert full.T[:, start:stop].tolist() == by_column.to_local().asnumpy().tolist()
        assert (rows, 3) == by_row.shape and (3, rows) == by_column.shape


def full_tensors_have_every_bit(kit: Any, dtype: int) -> None:
    kind = DTYPES[dtype]
    line, table = init_device_mesh((4,)), init_device_mesh((2, 2))
    layout_of_each = [
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (line, [Replicate()]),
        (table, [Replicate(), Shard(0)]),
        (table, [Shard(0), Shard(1)]),
        (table, [Shard(1), Shard(1)]),
        (table, [StridedShard(0, 2), Shard(0)]),
        (DeviceMesh([[3, 1], [2, 0]]), [Shard(0), Shard(1)]),
        (DeviceMesh([[0, 1], [2, 3]], ("a", "b"))["b"], [Shard(0)]),
    ]
    for shape in ((7, 5), (3, 3), (1, 9), (0, 4)):
        full = ms.Tensor(counting(*shape) % 5).astype(kind)
        for mesh, placements in layout_of_each:
            found = distribute_tensor(full, mesh, placements).full_tensor()
            assert (kind, shape) == (found.dtype, tuple(found.shape))
            assert full.asnumpy().tobytes() == found.asnumpy().tobytes()
    scalar = distribute_tensor(ms.Tensor(3).astype(kind), line, [Replicate()])
    assert () == scalar.shape and scalar.full_tensor().asnumpy() == ms.Tensor(3).astype(kind).asnumpy()


def placements_change(kit: Any) -> None:
    table = init_device_mesh((2, 2), ("a", "b"))
    full = ms.Tensor(counting(7, 5).astype(np.float32))
    start = distribute_tensor(full, table, [Replicate(), Shard(0)])
    for placements in ([Shard(0), Shard(1)], [Replicate(), Replicate()], [Shard(0), Shard(0)]):
        moved = start.redistribute(placements)
        expected = distribute_tensor(full, table, placements)
        assert tuple(placements) == moved.placements
        assert expected.to_local().asnumpy().tolist() == moved.to_local().asnumpy().tolist()
        start = moved.redistribute(table, [Shard(1), Replicate()])
    assert "another mesh" in refused(ValueError, start.redistribute, init_device_mesh((4,)), [Shard(0)])


def made_from_local_parts(kit: Any) -> None:
    mesh = init_device_mesh((2,))
    part = ms.Tensor(np.full((2, 3), kit.rank, np.float32))
    even = DTensor.from_local(part, mesh, [Shard(0)])
    assert (4, 3) == even.shape and even.to_local() is part
    assert [0, 0, 1, 1] == even.full_tensor().asnumpy()[:, 0].tolist()
    rows = 3 if kit.rank == 0 else 2
    uneven = DTensor.from_local(ms.Tensor(np.full((rows,), kit.rank)), mesh, [Shard(0)], shape=(5,))
    assert [0, 0, 0, 1, 1] == uneven.full_tensor().asnumpy().tolist()
    assert "does not fit" in refused(ValueError, DTensor.from_local, part, mesh, [Shard(0)], (7, 3))
    assert "does not fit" in refused(ValueError, DTensor.from_local, part, mesh, [Shard(0)], (4,))
    assert "needs 1 placements" in refused(hs.UnsupportedConfigurationError, DTensor.from_local, part, mesh, [])
    assert "shards dim 2" in refused(hs.UnsupportedConfigurationError, DTensor.from_local, part, mesh, [Shard(2)])


# -- cells that keep shards --------------------------------------------------------------------------


class Net(nn.Cell):
    """On 4 ranks `narrow` is uneven, the last part of `few` has no elements, and rank 0 alone holds `single`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.wide, self.norm = nn.Dense(5, 8), nn.BatchNorm1d(8)
        self.narrow, self.few = nn.Dense(8, 5), nn.Dense(5, 3)
        self.scale = ms.Parameter(ms.Tensor(1.5, ms.float32), name="scale")
        self.single = ms.Parameter(ms.Tensor(np.zeros((1, 3), np.float32)), name="single")
        numbers = np.random.default_rng(seed)
        for parameter in self.trainable_params():
            values = numbers.standard_normal(tuple(parameter.shape)).astype(np.float32)
            parameter.set_data(ms.Tensor(values))

    def construct(self, batch: Any) -> Any:
        return self.few(ms.ops.tanh(self.narrow(self.norm(self.wide(batch))))) * self.scale + self.single


OPTIMIZERS = {
    "nn.Momentum": lambda params: nn.Momentum(params, 0.05, 0.9),
    "nn.AdamWeightDecay": lambda params: nn.AdamWeightDecay(params, 0.01),
    "nn.Adam": lambda params: nn.Adam(params, 0.01),
    "nn.SGD": lambda params: nn.SGD(params, 0.05, momentum=0.9),
    "experimental.AdamW": lambda params: optim.AdamW(params, lr=0.01),
    "experimental.SGD": lambda params: optim.SGD(params, lr=0.05, momentum=0.9),
}


def data(step: int, rank: int = 0) -> Any:
    return ms.Tensor(np.random.default_rng(1000 * rank + step).standard_normal((6, 5)).astype(np.float32))


def loss_of(net: Any) -> Any:
    return lambda batch: net(batch).square().mean()


def values_of(net: Any) -> dict[str, Any]:
    with unsharded(net):
        return {fqn: np.array(value.asnumpy()) for fqn, value in net.parameters_and_names()}


def mesh_for(kit: Any, kind: str) -> Any:
    if kind == "fsdp":
        return init_device_mesh((kit.world,))
    table = init_device_mesh((2, kit.world // 2), ("outer", "inner"))
    return table if kind == "hsdp" else table["outer"]


def sharded_training_is_the_plain_one(kit: Any, optimizer: str, mesh: str) -> None:
    """All ranks see the same data: the mean gradient is each rank's own."""
    plain, net = Net(0), shard_module(Net(0), mesh_for(kit, mesh))
    plain.set_train(), net.set_train()
    one, other = OPTIMIZERS[optimizer](plain.trainable_params()), OPTIMIZERS[optimizer](net.trainable_params())
    alone = ms.value_and_grad(loss_of(plain), None, one.parameters)
    step = value_and_grad(loss_of(net), net, other.parameters)
    for number in range(4):
        expected, gradients = alone(data(number))
        one(gradients)
        actual, gradients = step(data(number))
        other(gradients)
        np.testing.assert_allclose(float(expected), float(actual), rtol=1e-5)
    found = values_of(net)
    for fqn, value in plain.parameters_and_names():
        np.testing.assert_allclose(value.asnumpy(), found[fqn], rtol=1e-5, atol=1e-6, err_msg=fqn)
    for parameter in net.trainable_params():  # what stands in for a part without elements stays zero
        if layouts.recorded(parameter).padded:
            assert not parameter.asnumpy().any()


TOLERANCES = {"float64": 1e-14, "float32": 1e-6, "float16": 4e-3, "bfloat16": 4e-2}


def gradients_are_means_over_the_mesh(kit: Any, dtype: str) -> None:
    """Ranks see different data; the truth is computed from whole weights on every rank's data."""
    kind = getattr(ms, dtype)
    weight = ms.Tensor(np.random.default_rng(5).standard_normal((3, 5)).astype(np.float32)).astype(kind)
    net = nn.Cell()
    net.insert_param_to_cell("weight", ms.Parameter(weight, name="weight"))
    shard_module(net, init_device_mesh((kit.world,)))
    batches = [data(0, rank).astype(kind) for rank in range(kit.world)]
    wide = ms.float64 if dtype == "float64" else ms.float32  # no sum of bfloat16 on CPU
    step = value_and_grad(lambda batch: (batch.astype(wide) * net.weight.astype(wide).sum(0)).sum(), net)
    _, (found,) = step(batches[kit.rank])
    rows = [batch.asnumpy().astype(np.float64).sum(0) for batch in batches]
    local = layouts.recorded(net.weight).local_shape
    assert (kind, layouts.recorded(net.weight).kept_shape) == (found.dtype, tuple(found.shape))
    truth = np.broadcast_to(np.mean(rows, 0), (3, 5))[: local[0]]
    np.testing.assert_allclose(truth, found.asnumpy().astype(np.float64)[: local[0]], rtol=0, atol=TOLERANCES[dtype])


def plans_say_what_is_sharded_and_how(kit: Any) -> None:
    mesh = init_device_mesh((2,), ("tp",))
    net = shard_module(Net(0), mesh, {"wide.*": [Shard(0)], "narrow.weight": [Shard(1)], "few.*": None})
    shapes = {fqn: tuple(p.shape) for fqn, p in net.parameters_and_names()}
    assert ((4, 5), (5, 4), (3, 5)) == tuple(shapes[f"{name}.weight"] for name in ("wide", "narrow", "few"))
    assert (8,) == shapes["norm.moving_mean"] and () == shapes["scale"]
    assert not layouts.is_sharded(net.few.weight) and not layouts.is_sharded(net.norm.moving_mean)
    assert (Replicate(),) == layouts.recorded(net.scale).placements
    computed = shard_module(Net(0), mesh, lambda fqn, p: [Shard(p.ndim - 1)] if p.ndim else None)
    assert (8, 3 - kit.rank) == tuple(computed.wide.weight.shape) and not layouts.is_sharded(computed.scale)
    assert "'few.wieght'" in refused(ValueError, shard_module, Net(0), mesh, {"few.wieght": [Shard(0)]})
    assert "sharded already" in refused(ValueError, shard_module, net, mesh)
    untouched = Net(0)
    refused(hs.UnsupportedConfigurationError, shard_module, untouched, mesh, {"wide.weight": [Shard(7)]})
    assert not any(layouts.is_sharded(p) for p in untouched.get_parameters())


def tied_parameters_are_sharded_once(kit: Any) -> None:
    net = nn.Cell()
    net.encode, net.decode = nn.Dense(4, 6, has_bias=False), nn.Dense(4, 6, has_bias=False)
    net.decode.weight = net.encode.weight
    full = counting(6, 4).astype(np.float32)
    net.encode.weight.set_data(ms.Tensor(full))
    shard_module(net, init_device_mesh((2,)))
    assert (3, 4) == tuple(net.decode.weight.shape) and net.decode.weight is net.encode.weight
    found = hs.get_model_state_dict(net, options=FULL)
    assert [full.tolist()] * 2 == [found[f"{name}.weight"].asnumpy().tolist() for name in ("encode", "decode")]


def a_sharded_cell_can_not_be_called(kit: Any) -> None:
    net = shard_module(Net(0), init_device_mesh((2,)))
    assert "unsharded" in refused(hs.UnsupportedConfigurationError, net, data(0))
    with unsharded(net):
        inside = net(data(0)).asnumpy()
        net.scale.set_data(ms.Tensor(2.5, ms.float32))
    assert Net(0)(data(0)).asnumpy().tolist() == inside.tolist()
    assert 2.5 == float(net.scale)  # changes made inside stay


def views_of_parameters(kit: Any) -> None:
    net = shard_module(Net(0), init_device_mesh((2,)))
    view = dtensor_of(net.wide.weight)
    assert (8, 5) == view.shape
    assert Net(0).wide.weight.asnumpy().tolist() == view.full_tensor().asnumpy().tolist()
    assert "not sharded" in refused(ValueError, dtensor_of, Net(0).scale)


def a_lost_rank_is_named(kit: Any) -> str:
    net = shard_module(Net(0), init_device_mesh((kit.world,)))
    step = value_and_grad(loss_of(net), net)
    step(data(0))
    if kit.rank == kit.world - 1:
        kit.die()
    return refused(hs.TransferError, step, data(1))


# -- hyperstate on them ------------------------------------------------------------------------------


def trained(kit: Any, seed: int, optimizer: str, mesh: Any, steps: int) -> tuple[Any, Any, Any]:
    net = Net(seed).set_train()
    if mesh is not None:
        shard_module(net, mesh)
    made = OPTIMIZERS[optimizer](net.trainable_params())
    step = value_and_grad(loss_of(net), net, made.parameters)
    go_on(step, made, range(steps))
    return net, made, step


def go_on(step: Any, optimizer: Any, numbers: Any) -> list[float]:
    losses = []
    for number in numbers:
        loss, gradients = step(data(number))
        optimizer(gradients)
        losses.append(float(loss))
    return losses


FORMS = {"sharded": (hs.StateDictOptions(), hs.StateDictOptions()), "full": (FULL, FULL), "root": (ROOT, BROADCAST)}


def s45_training_goes_on_in_a_new_sharded_cell(kit: Any, optimizer: str, form: str) -> None:
    """Out of one sharded cell into a fresh one, which steps on bit-equal; the fresh optimizer is never stepped."""
    mesh = init_device_mesh((kit.world,)) if kit.world == 2 else init_device_mesh((2, 2))
    net, made, step = trained(kit, 0, optimizer, mesh, 3)
    new, fresh, new_step = trained(kit, 1, optimizer, mesh, 0)
    get, put = FORMS[form]
    model, state = hs.get_state_dict(net, made, options=get)
    hs.set_state_dict(new, fresh, model_state_dict=model, optim_state_dict=state, options=put)
    assert go_on(step, made, [3, 4]) == go_on(new_step, fresh, [3, 4])
    expected, actual = values_of(net), values_of(new)
    assert {k: v.tobytes() for k, v in expected.items()} == {k: v.tobytes() for k, v in actual.items()}


def a_plain_state_goes_into_shards_and_back(kit: Any, optimizer: str) -> None:
    plain, one, _ = trained(kit, 0, optimizer, None, 3)
    net, other, _ = trained(kit, 1, optimizer, init_device_mesh((kit.world,)), 1)
    model, state = hs.get_state_dict(plain, one, options=FULL)
    hs.set_state_dict(net, other, model_state_dict=model, optim_state_dict=state, options=FULL)
    back_model, back_state = hs.get_state_dict(net, other, options=FULL)
    assert shown(model) == shown(back_model)
    assert shown(state) == shown(back_state)


def shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    return (str(value.dtype), tuple(value.shape), value.asnumpy().tobytes()) if hasattr(value, "asnumpy") else value


def loads_into_shards_without_values(kit: Any) -> None:
    """A cell made without values is sharded first; each rank then gets memory for its part alone."""
    mesh = init_device_mesh((kit.world,))
    with nn.utils.no_init_parameters():
        lazy = nn.SequentialCell(nn.Dense(5, 7), nn.Dense(7, 3))
    shard_module(lazy, mesh)
    assert all(p.has_init for p in lazy.get_parameters() if not layouts.recorded(p).padded)
    refused(hs.UnsupportedConfigurationError, lambda: unsharded(lazy).__enter__())
    source = nn.SequentialCell(nn.Dense(5, 7), nn.Dense(7, 3))
    for n, parameter in enumerate(source.get_parameters()):
        parameter.set_data(ms.Tensor(100 * n + counting(*parameter.shape).astype(np.float32)))
    state = hs.get_model_state_dict(source, options=FULL) if kit.rank == 0 else {}  # plain: the caller alone
    hs.set_model_state_dict(lazy, state, options=BROADCAST)
    assert not any(p.has_init for p in lazy.get_parameters())
    found = values_of(lazy)
    assert {k: p.asnumpy().tolist() for k, p in source.parameters_and_names()} == {
        k: v.tolist() for k, v in found.items()
    }
