"""A trainer in the manner of torchtitan: HSDP, checkpoints beside the training, resume by itself.

    torchrun --nproc-per-node 4 torchtitan_loop.py --folder run --steps 4 --replicate 2

Start it again with more steps, on the same or on another number of ranks: it goes on from the newest checkpoint.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hyperstate as hs


class Trainer:
    """Model, optimizer, schedule, and what torchtitan calls the train state."""

    def __init__(self, job):
        self.job, self.step, self.saving = job, 0, None
        shape = (job.replicate, dist.get_world_size() // job.replicate)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(3)]
        for block in blocks:
            fully_shard(block, mesh=mesh)
        self.model = fully_shard(nn.Sequential(*blocks), mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.8)

    def load(self):
        """The newest checkpoint, if there is one."""
        found = sorted(Path(self.job.folder).glob("step-*"), key=lambda path: int(path.name[5:]))
        if found:
            train_state = hs.load(found[-1], self.model, self.optimizer).extra
            self.step = train_state["step"]
            self.schedule.load_state_dict(train_state["lr_scheduler"])

    def save(self):
        """Returns when this rank's part is in host memory. One save goes on at a time; two checkpoints stay."""
        train_state = {"step": self.step, "lr_scheduler": self.schedule.state_dict()}
        path = Path(self.job.folder, f"step-{self.step}")
        self.saving = hs.async_save(path, self.model, self.optimizer, extra=train_state, keep=2)

    def train(self):
        """Steps on data that depend on the step alone; a checkpoint every second one."""
        while self.step < self.job.steps:
            batch = torch.randn(4, 10, generator=torch.Generator().manual_seed(self.step))
            loss = (self.model(batch) - 1).square().mean()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.step += 1
            if dist.get_rank() == 0:
                print(self.step, f"{loss.item():.5f}")
            if self.step % 2 == 0:
                self.save()
        if self.saving is not None:
            self.saving.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--replicate", type=int, default=1)
    dist.init_process_group("gloo")
    trainer = Trainer(parser.parse_args())
    trainer.load()
    trainer.train()
    dist.destroy_process_group()
