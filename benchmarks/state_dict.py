"""hyperstate beside PyTorch's own state-dict API and beside bare send/recv, in one run.

    python benchmarks/state_dict.py --model gpt --ranks 4
    python benchmarks/state_dict.py --model many --ranks 4 --repeat 1
    python benchmarks/state_dict.py --model gpt --ranks 4 --hsdp

Per operation: CPU seconds summed over ranks, wall seconds, MiB over the loopback interface, and peak
memory above the start (MiB: root / largest of the others). `gpt`: 197 tensors, 152 M parameters,
uneven shards. `many`: 3000 tensors of 1024 elements. Ratios are medians over the repeats; the order of
the contestants alternates. The machine's own noise is in every figure: CPU seconds and bytes are the
ones to quote.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MIB = 2**20


def build(kind: str, mesh: Any) -> Any:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    if kind == "many":
        model: Any = nn.ParameterList([nn.Parameter(torch.randn(64, 16)) for _ in range(3000)])
        return fully_shard(nn.Sequential(model), mesh=mesh)
    width, vocabulary = 768, 24577

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            parts = {"query": 1, "key": 1, "value": 1, "output": 1}
            self.attention = nn.ModuleDict({name: nn.Linear(width, width) for name in parts})
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList([Block() for _ in range(12)])
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

        def forward(self, tokens: Any) -> Any:
            raise NotImplementedError("its gradients are made up; no batch is ever run")

    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def new_optimizer(model: Any, stepped: bool) -> Any:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def loopback() -> int:
    with Path("/proc/net/dev").open() as file:
        line = next(line for line in file if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def status(name: str) -> int:
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


@contextmanager
def measured(result: dict[str, float]) -> Iterator[None]:
    import torch.distributed as dist

    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    start, wire, cpu, wall = status("VmRSS"), loopback(), time.process_time(), time.perf_counter()
    dist.barrier()
    yield
    result["cpu"] = time.process_time() - cpu
    result["wall"] = time.perf_counter() - wall
    dist.barrier()
    result["peak"] = (status("VmHWM") - start) / MIB
    result["wire"] = (loopback() - wire) / MIB


def floor(nbytes: int, to_root: bool) -> None:
    """The same bytes over bare send/recv: every other rank to the root, or back, in 64 MiB messages."""
    import torch
    import torch.distributed as dist

    peers = range(1, dist.get_world_size()) if dist.get_rank() == 0 else [0]
    sending = (dist.get_rank() != 0) == to_root
    for left in range(nbytes, 0, -64 * MIB):
        size = min(left, 64 * MIB)
        buffers = [torch.empty(size, dtype=torch.uint8) for _ in peers]
        works = [
            dist.isend(b, peer, tag=7) if sending else dist.irecv(b, peer, tag=7)
            for b, peer in zip(buffers, peers, strict=True)
        ]
        for work in works:
            work.wait()


def operations(model: Any, args: argparse.Namespace) -> dict[str, dict[str, Callable[[], Any]]]:
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict as dcp

    import hyperstate as hs

    optimizer = new_optimizer(model, True)
    # The mean shard, equal on all ranks: the floor's messages must match, uneven shards or not.
    local = sum(p.numel() * 4 for p in model.parameters()) // (dist.get_world_size() // (2 if args.hsdp else 1))
    full_cpu = {"full_state_dict": True, "cpu_offload": True}
    bcast = {"full_state_dict": True, "broadcast_from_rank0": True}
    root = dist.get_rank() == 0
    model_dict = hs.get_model_state_dict(model, options=hs.StateDictOptions(**full_cpu))
    optim_dict = hs.get_optim_state_dict(model, optimizer, options=hs.StateDictOptions(**full_cpu))
    whole = hs.get_model_state_dict(model, options=hs.StateDictOptions(full_state_dict=True))

    def theirs(call: Callable[..., Any], *objects: Any, **options: bool) -> Callable[[], Any]:
        # PyTorch's setters overwrite the caller's dict, so each run gets a fresh one (shallow: no bytes).
        return lambda: call(
            *(shallow(o) if isinstance(o, dict) else o for o in objects), options=dcp.StateDictOptions(**options)
        )

    def ours(call: Callable[..., Any], *objects: Any, **options: bool) -> Callable[[], Any]:
        return lambda: call(*objects, options=hs.StateDictOptions(**options))

    def fresh(whose: Callable[..., Callable[[], Any]], call: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            return whose(call, model, new_optimizer(model, False), optim_dict if root else {}, **bcast)()

        return run

    rows: dict[str, dict[str, Callable[[], Any]]] = {
        "get_model full+cpu": {
            "torch": theirs(dcp.get_model_state_dict, model, **full_cpu),
            "hyperstate": ours(hs.get_model_state_dict, model, **full_cpu),
            "floor": lambda: floor(local, True),
        },
        "get_optim full+cpu": {
            "torch": theirs(dcp.get_optimizer_state_dict, model, optimizer, **full_cpu),
            "hyperstate": ours(hs.get_optim_state_dict, model, optimizer, **full_cpu),
            "floor": lambda: floor(2 * local, True),
        },
        "get_optim flat full+cpu": {
            "torch": theirs(
                dcp.get_optimizer_state_dict, model, optimizer, **full_cpu, flatten_optimizer_state_dict=True
            ),
            "hyperstate": ours(
                hs.get_optim_state_dict, model, optimizer, **full_cpu, flatten_optimizer_state_dict=True
            ),
        },
        "set_model bcast": {
            "torch": theirs(dcp.set_model_state_dict, model, model_dict if root else {}, **bcast),
            "hyperstate": ours(hs.set_model_state_dict, model, model_dict if root else {}, **bcast),
            "floor": lambda: floor(local, False),
        },
        "set_optim bcast warm": {
            "torch": theirs(dcp.set_optimizer_state_dict, model, optimizer, optim_dict if root else {}, **bcast),
            "hyperstate": ours(hs.set_optim_state_dict, model, optimizer, optim_dict if root else {}, **bcast),
            "floor": lambda: floor(2 * local, False),
        },
        "set_optim bcast fresh": {
            "torch": fresh(theirs, dcp.set_optimizer_state_dict),
            "hyperstate": fresh(ours, hs.set_optim_state_dict),
        },
        "set_model full": {
            "torch": theirs(dcp.set_model_state_dict, model, whole, full_state_dict=True),
            "hyperstate": ours(hs.set_model_state_dict, model, whole, full_state_dict=True),
        },
    }
    return {name: row for name, row in rows.items() if not args.only or args.only in name}


def shallow(value: Any) -> Any:
    """A copy of dicts and lists that shares the tensors."""
    if isinstance(value, dict):
        return {key: shallow(item) for key, item in value.items()}
    return [shallow(item) for item in value] if isinstance(value, list) else value


def rank_main(args: argparse.Namespace) -> None:
    import warnings

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = (
        init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))
        if args.hsdp
        else (init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)))
    )
    model = build(args.model, mesh)
    results: dict[str, dict[str, list[Any]]] = {}
    for name, row in operations(model, args).items():
        for repeat in range(args.repeat):
            order = list(row.items()) if repeat % 2 == 0 else list(row.items())[::-1]
            for who, call in order:
                figures: dict[str, float] = {}
                with measured(figures):
                    kept = call()
                del kept
                gathered: list[Any] = [None] * world
                dist.all_gather_object(gathered, figures)
                results.setdefault(name, {}).setdefault(who, []).append(gathered)
        if dist.get_rank() == 0:
            show(name, results[name], args.json)
    dist.destroy_process_group()


def show(name: str, row: dict[str, list[Any]], as_json: bool) -> None:
    summary = {}
    for who, repeats in row.items():
        summary[who] = {
            "cpu": statistics.median(sum(f["cpu"] for f in ranks) for ranks in repeats),
            "wall": statistics.median(max(f["wall"] for f in ranks) for ranks in repeats),
            "wire": statistics.median(ranks[0]["wire"] for ranks in repeats),
            "peak_root": statistics.median(ranks[0]["peak"] for ranks in repeats),
            "peak_others": statistics.median(max(f["peak"] for f in ranks[1:]) for ranks in repeats),
        }
    pairs = zip(row["torch"], row["hyperstate"], strict=True)
    ratio = statistics.median(sum(f["cpu"] for f in a) / max(1e-9, sum(f["cpu"] for f in b)) for a, b in pairs)
    if as_json:
        print(json.dumps({"operation": name, "cpu_ratio": ratio, **summary}), flush=True)
        return
    print(f"{name}: PyTorch needs {ratio:.1f} times our CPU", flush=True)
    for who, f in summary.items():
        print(
            f"   {who:10} cpu {f['cpu']:7.2f} s  wall {f['wall']:6.2f} s  wire {f['wire']:7.1f} MiB  "
            f"peak {f['peak_root']:6.0f} / {f['peak_others']:.0f} MiB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "many"), default="gpt")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hsdp", action="store_true", help="2 replicas of ranks/2 shards")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(args)
        return
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    base = {**os.environ, "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Strict malloc: freed memory goes back at once, so that peaks are what was needed.
    base |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**base, "RANK": str(rank)}) for rank in range(args.ranks)
    ]
    sys.exit(max(process.wait() for process in ranks))


if __name__ == "__main__":
    main()
