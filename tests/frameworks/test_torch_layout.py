"""Layout arithmetic against the shards that PyTorch itself makes, by content, on a thousand random cases.

One process plays every rank in turn on a fake process group: no data moves, since each rank cuts its
own part of the full tensor. What a shard holds is read from its values, which number the elements.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import hyperstate as hs
from hyperstate import backend as backends
from hyperstate.layout import Box, Layout
from hyperstate.schema import TensorSpec

Shape = tuple[int, ...]
Make = Callable[[DeviceMesh], DTensor]
LARGEST_WORLD = 8
BATCHES, CASES = 10, 100


@contextmanager
def playing(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbered(shape: Shape) -> torch.Tensor:
    return torch.arange(prod(shape), dtype=torch.float64).view(shape)


def holder(weight: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    return module


# -- how a sharded tensor comes to be ------------------------------------------------------------------


def by_hand(rng: random.Random) -> tuple[Shape, Shape, Make]:
    """`distribute_tensor` with any plain placements: the same dimension may be split twice."""
    mesh_shape = random_mesh(rng, rng.randint(1, 3))
    shape = tuple(rng.randint(0, 9) for _ in range(rng.randint(1, 3)))
    places = [rng.choice([Replicate(), Shard(rng.randrange(len(shape)))]) for _ in mesh_shape]
    return mesh_shape, shape, lambda mesh: distribute_tensor(numbered(shape), mesh, places, src_data_rank=None)


def by_fsdp(rng: random.Random) -> tuple[Shape, Shape, Make]:
    """FSDP2 on one mesh dimension, HSDP on two."""
    mesh_shape = random_mesh(rng, rng.randint(1, 2))
    shape = tuple(rng.randint(1, 11) for _ in range(rng.randint(1, 3)))

    def make(mesh: DeviceMesh) -> DTensor:
        return fully_shard(holder(numbered(shape)), mesh=mesh).weight

    return mesh_shape, shape, make


def by_fsdp_over_tp(rng: random.Random) -> tuple[Shape, Shape, Make]:
    """FSDP2 or HSDP over a tensor that is sharded already: strided placements."""
    mesh_shape = random_mesh(rng, rng.randint(2, 3))
    shape = tuple(rng.randint(1, 11) for _ in range(rng.randint(1, 3)))
    inner = rng.choice([Replicate(), *map(Shard, range(len(shape)))])

    def make(mesh: DeviceMesh) -> DTensor:
        names = mesh.mesh_dim_names
        assert names is not None
        tp = distribute_tensor(numbered(shape), mesh[names[-1]], [inner], src_data_rank=None)
        return fully_shard(holder(tp), mesh=mesh[names[:-1]] if len(names) == 3 else mesh[names[0]]).weight

    return mesh_shape, shape, make


def by_parallel_style(rng: random.Random) -> tuple[Shape, Shape, Make]:
    """`parallelize_module`, with FSDP2 over it or without."""
    over = rng.random() < 0.7
    mesh_shape = random_mesh(rng, 2 if over else 1)
    shape = (rng.randint(1, 11), rng.randint(1, 11))
    style = rng.choice([ColwiseParallel, RowwiseParallel])

    def make(mesh: DeviceMesh) -> DTensor:
        net = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False, dtype=torch.float64))
        with torch.no_grad():
            net[0].weight.copy_(numbered(shape))
        tp = mesh["c"] if over else mesh
        parallelize_module(net, tp, {"0": style()}, src_data_rank=None)
        if over:
            fully_shard(net, mesh=mesh["b"])
        return net[0].weight

    return mesh_shape, shape, make


def random_mesh(rng: random.Random, ndim: int) -> Shape:
    while True:
        shape = tuple(rng.randint(1, 6) for _ in range(ndim))
        if prod(shape) <= LARGEST_WORLD:
            return shape


MAKERS = [by_hand, by_fsdp, by_fsdp_over_tp, by_parallel_style]


# -- what is compared ----------------------------------------------------------------------------------


def play(mesh_shape: Shape, make: Make) -> list[tuple[Layout, torch.Tensor, Any]]:
    """For each rank of the world: our layout as that rank reads it, PyTorch's local shard, the placements."""
    world = prod(mesh_shape)
    found = []
    for rank in range(world):
        with playing(rank, world):
            value = make(init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple("abc"[-len(mesh_shape) :])))
            spec = tensors().spec(value)
            assert spec is not None and spec.layout is not None
            found.append((spec.layout, value.to_local().detach().clone(), value.placements))
    return found


def tensors() -> Any:
    from hyperstate.backend import load

    return load("torch").tensors


@pytest.mark.parametrize("batch", range(BATCHES))
def test_boxes_hold_what_pytorch_puts_into_each_shard(batch: int) -> None:
    rng = random.Random(batch)
    for case in range(CASES):
        mesh_shape, shape, make = rng.choice(MAKERS)(rng)
        ranks = play(mesh_shape, make)
        layout = ranks[0][0]
        for rank, (own, local, placements) in enumerate(ranks):
            what = f"case {case}: mesh {mesh_shape}, shape {shape}, {placements}, rank {rank}"
            assert layout == own, what
            box = layout.box(shape, rank)
            assert box is not None, what
            region = numbered(shape)[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
            assert region.numel() == local.numel(), what
            assert region.flatten().tolist() == local.flatten().tolist(), what


def test_boxes_of_one_layout_tile_the_tensor_once_per_replica() -> None:
    rng = random.Random(99)
    for _ in range(100):
        mesh_shape, shape, make = rng.choice(MAKERS)(rng)
        layout = play(mesh_shape, make)[0][0]
        seen = torch.zeros(shape)
        for rank in range(prod(mesh_shape)):
            box = layout.box(shape, rank)
            assert box is not None
            seen[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] += 1
        assert {float(len(layout.replicas))} >= set(seen.flatten().tolist())


def test_fsdp_over_tensor_parallelism_of_seven_rows_by_hand() -> None:
    """An anchor: dp=3, tp=2. Tensor parallelism splits first: rows 0-3 and 4-6; the shards of rank 4 are empty."""

    def make(mesh: DeviceMesh) -> DTensor:
        tp = distribute_tensor(numbered((7, 1)), mesh["c"], [Shard(0)], src_data_rank=None)
        return fully_shard(holder(tp), mesh=mesh["b"]).weight

    ranks = play((3, 2), make)
    assert [[0, 1], [4], [2, 3], [5], [], [6]] == [local.flatten().tolist() for _, local, _ in ranks]
    boxes = [ranks[0][0].box((7, 1), rank) for rank in range(6)]
    assert [(0, 2), (4, 5), (2, 4), (5, 6), (4, 4), (6, 7)] == [(b.start[0], b.stop[0]) for b in boxes if b]


def test_a_strided_placement_that_no_order_explains_is_refused_by_name() -> None:
    """A left-to-right strided shard has rows that are no box: a wrong guess would be silent."""
    with playing(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        value = distribute_tensor(
            numbered((8, 2)), mesh, [Shard(0), _StridedShard(0, split_factor=2)], src_data_rank=None
        )
        with pytest.raises(hs.UnsupportedConfigurationError, match="split_factor=2"):
            hs.get_model_state_dict(holder(value))


def test_wrapping_a_shard_again_gives_an_equal_tensor() -> None:
    """The inverse direction: from our layout back to PyTorch's placements."""
    rng = random.Random(7)
    for _ in range(100):
        mesh_shape, _, make = rng.choice(MAKERS)(rng)
        world = prod(mesh_shape)
        with playing(rng.randrange(world), world):
            value = make(init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple("abc"[-len(mesh_shape) :])))
            spec = tensors().spec(value)
            again = tensors().wrap(value.to_local().detach().clone(), spec, value)
            assert (value.placements, value.shape, spec) == (again.placements, again.shape, tensors().spec(again))
            assert torch.equal(value.to_local(), again.to_local())


def test_a_statistic_of_a_strided_shard_gets_the_placements_that_pytorch_would_give() -> None:
    """Row means of a parameter under FSDP over tensor parallelism are laid out as its rows are."""

    def made(mesh: DeviceMesh, shape: Shape) -> DTensor:
        tp = distribute_tensor(numbered(shape), mesh["b"], [Shard(0)], src_data_rank=None)
        return fully_shard(holder(tp), mesh=mesh["a"]).weight

    for rank in range(6):
        with playing(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("a", "b"))
            weight, rows = made(mesh, (7, 4)), made(mesh, (7,))
            spec = tensors().spec(weight)
            reduced = TensorSpec(spec.dtype, (7,), Layout(spec.layout.mesh, spec.layout.splits[:1]))
            wrapped = tensors().wrap(rows.to_local().detach().clone(), reduced, weight)
            assert (rows.placements, rows.shape) == (wrapped.placements, wrapped.shape)
            assert tensors().spec(rows) == tensors().spec(wrapped)


@pytest.mark.parametrize("box", [Box((0, 2), (2, 4)), Box((3, 0), (4, 3)), Box((2, 0), (1, 3)), Box((-1, 0), (1, 3))])
def test_a_region_beyond_a_tensor_is_refused_and_not_clipped(box: Box) -> None:
    with pytest.raises(IndexError, match="beyond"):
        backends.load("torch").tensors.view(numbered((3, 3)), box)
