"""hyperstate's checkpoints beside PyTorch's DCP writers and beside plain sequential writes, in one run.

    python benchmarks/checkpoint.py --ranks 1 --mib 512
    python benchmarks/checkpoint.py --ranks 4 --mib 512 --optimizer
    python benchmarks/checkpoint.py --ranks 2 --tensors 3000 --mib 16

Each rank holds its FSDP shard of a model of `--mib` MiB in `--tensors` float32 tensors; `--optimizer` adds Adam's two
moments. Contestants: hyperstate; DCP with FileSystemWriter; DCP with HuggingFaceStorageWriter (the model alone, its
tensors as given); and `plain`: every rank writes the same bytes to one file with ordinary sequential writes and
fsync, reads them back into memory that is allocated anew, as the others do. Every contestant's files are on the
medium when its time ends. Wall seconds of the slowest rank; the order of the contestants alternates; medians and the
least over the repeats. `held` is how long `async_save` holds the caller, beside a copy of the same bytes in memory.
Loads read what is in the system's cache of files.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 2**20
BLOCK = 16 * MIB


def build(args: argparse.Namespace, mesh: Any) -> tuple[Any, Any]:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    columns = 1024 if args.mib * MIB // 4 // args.tensors >= 1 << 20 else 64
    rows = max(1, args.mib * MIB // 4 // args.tensors // columns)
    torch.manual_seed(0)
    parts = [nn.ParameterList([nn.Parameter(torch.randn(rows, columns))]) for _ in range(args.tensors)]
    model: Any = nn.Sequential(*parts)
    if mesh is not None:
        for part in parts if args.tensors < 200 else []:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if not args.optimizer:
        return model, None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def local_tensors(model: Any, optimizer: Any) -> list[Any]:
    values = list(model.parameters())
    if optimizer is not None:
        values += [v for slots in optimizer.state.values() for k, v in slots.items() if k != "step"]
    return [(v.to_local() if hasattr(v, "to_local") else v).detach() for v in values]


class Contestants:
    """What is measured: pairs of save and load, each into a folder of its own."""

    def __init__(self, args: argparse.Namespace, root: Path, rank: int, world: int) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, self.root = rank, root
        mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
        self.model, self.optimizer = build(args, mesh)
        self.locals = local_tensors(self.model, self.optimizer)
        self.nbytes = sum(t.numel() * 4 for t in self.locals)
        self.views = [memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in self.locals]
        self.number = 0

    def state(self, flat: bool = False) -> dict[str, Any]:
        from torch.distributed.checkpoint import state_dict as dsd

        options = dsd.StateDictOptions(flatten_optimizer_state_dict=flat)
        found: dict[str, Any] = {"model": dsd.get_model_state_dict(self.model)}
        if self.optimizer is not None:
            found["optim"] = dsd.get_optimizer_state_dict(self.model, self.optimizer, options=options)
        return found

    def tensors(self) -> dict[str, Any]:
        """Everything as one level of tensors: all that the writer of safetensors takes."""
        found = dict(self.state()["model"])
        if self.optimizer is not None:
            names = {id(p): fqn for fqn, p in self.model.named_parameters()}
            for param, slots in self.optimizer.state.items():
                found |= {f"state.{names[id(param)]}.{key}": value for key, value in slots.items() if key != "step"}
        return found

    # -- saving ---------------------------------------------------------------------------------------

    def save_hyperstate(self, path: Path) -> None:
        import hyperstate as hs

        hs.save(path, self.model, self.optimizer)

    def save_dcp(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), storage_writer=dcp.FileSystemWriter(path))

    def save_hf(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        path.mkdir(exist_ok=True)
        dcp.save(self.tensors(), storage_writer=dcp.HuggingFaceStorageWriter(str(path), save_distributed=True))

    def save_plain(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        with (path / f"rank{self.rank}").open("wb", buffering=0) as file:
            for view in self.views:
                for start in range(0, len(view), BLOCK):
                    file.write(view[start : start + BLOCK])
            os.fsync(file.fileno())

    # -- loading --------------------------------------------------------------------------------------

    def load_hyperstate(self, path: Path) -> None:
        import hyperstate as hs

        hs.load(path, self.model, self.optimizer)

    def load_dcp(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict as dsd

        state = self.state()
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        dsd.set_model_state_dict(self.model, state["model"])
        if self.optimizer is not None:
            dsd.set_optimizer_state_dict(self.model, self.optimizer, state["optim"])

    def load_hf(self, path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self.tensors(), storage_reader=dcp.HuggingFaceStorageReader(str(path)))

    def load_plain(self, path: Path) -> None:
        with (path / f"rank{self.rank}").open("rb", buffering=0) as file:
            for view in self.views:
                for start in range(0, len(view), BLOCK):
                    file.readinto(view[start : start + BLOCK])

    # -- beside the training --------------------------------------------------------------------------

    def held(self, path: Path) -> tuple[float, float]:
        """Seconds for which `async_save` holds the caller, and for a copy in memory."""
        import torch

        import hyperstate as hs

        start = time.perf_counter()
        handle = hs.async_save(path, self.model, self.optimizer)
        held = time.perf_counter() - start
        handle.wait()
        if not hasattr(self, "copies"):
            self.copies = [torch.empty_like(t) for t in self.locals]
        start = time.perf_counter()
        for copy, value in zip(self.copies, self.locals, strict=True):
            copy.copy_(value)
        return held, time.perf_counter() - start


NAMES = ("hyperstate", "dcp", "hf", "plain")


def rank_main(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    them = Contestants(args, Path(args.folder), rank, world)
    times: dict[str, list[float]] = {}

    def measure(name: str, call: Callable[[Path], Any], path: Path) -> None:
        gc.collect()
        os.sync()
        if world > 1:
            dist.barrier()
        start = time.perf_counter()
        call(path)
        took = torch.tensor(time.perf_counter() - start)
        if world > 1:
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
        times.setdefault(name, []).append(float(took))

    for repeat in range(args.repeat + 1):  # the first round warms up
        for name in NAMES if repeat % 2 else NAMES[::-1]:
            path = Path(args.folder) / f"{name}-{repeat}"
            measure(f"save {name}", getattr(them, f"save_{name}"), path)
            measure(f"load {name}", getattr(them, f"load_{name}"), path)
            if world > 1:
                dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
        path = Path(args.folder) / f"async-{repeat}"
        held, copy = them.held(path)
        times.setdefault("held hyperstate", []).append(held)
        times.setdefault("held plain", []).append(copy)
        if world > 1:
            dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
    if rank == 0:
        print("RESULT" + json.dumps({"nbytes": them.nbytes, "times": {k: v[1:] for k, v in times.items()}}))
    if world > 1:
        dist.destroy_process_group()


def report(found: dict[str, Any], args: argparse.Namespace) -> None:
    times, mib = found["times"], found["nbytes"] / MIB * args.ranks
    print(f"{args.ranks} rank(s), {args.tensors} tensors, {mib:.0f} MiB in all, {args.repeat} repeats")
    for operation in ("save", "load", "held"):
        for name in NAMES if operation != "held" else ("hyperstate", "plain"):
            each, own = times[f"{operation} {name}"], times[f"{operation} hyperstate"]
            ratio = statistics.median(a / b for a, b in zip(each, own, strict=True))
            print(
                f"  {operation} {name:11} median {statistics.median(each):7.3f} s   least {min(each):7.3f} s   "
                f"{mib / statistics.median(each):7.0f} MiB/s   takes {ratio:5.2f} of hyperstate's time"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256, help="MiB of the model")
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--optimizer", action="store_true", help="save Adam's state too")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    args = parser.parse_args()
    if os.environ.get("BENCH_RANK"):
        rank_main(args)
        return
    folder = tempfile.mkdtemp(prefix="hyperstate-bench-", dir=args.folder)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    command = [sys.executable, __file__, "--folder", folder, f"--ranks={args.ranks}", f"--mib={args.mib}"]
    command += [f"--tensors={args.tensors}", f"--repeat={args.repeat}", *["--optimizer"] * args.optimizer]
    ranks = []
    for rank in range(args.ranks):
        names = {"RANK": rank, "WORLD_SIZE": args.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, "BENCH_RANK": "1", "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in names.items()}}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        output = [process.communicate()[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    report(json.loads(next(line for line in output[0].splitlines() if line.startswith("RESULT"))[6:]), args)


if __name__ == "__main__":
    main()
