"""One script for every framework: train a sharded model, move its whole state into a new one, train both on.

    HYPERSTATE_BACKEND=torch torchrun --standalone --nproc-per-node 2 examples/train_any.py
    HYPERSTATE_BACKEND=mindspore msrun --worker_num=2 --local_worker_num=2 --join=True examples/train_any.py

The variable chooses the model definition, ``net_torch.py`` or ``net_mindspore.py``; nothing else differs.
"""

import importlib
import os

import numpy as np

import hyperstate as hs

STEPS = 3
SHAPES = {"0.weight": (16, 8), "0.bias": (16,), "1.weight": (16,), "1.bias": (16,), "3.weight": (5, 16), "3.bias": (5,)}
"""Names are neutral: those that PyTorch has. Five rows over two ranks: an uneven shard."""

net = importlib.import_module(f"net_{os.environ['HYPERSTATE_BACKEND']}")


def values(seed):
    """The same start in every framework."""
    numbers = np.random.default_rng(seed)
    return {name: net.tensor(numbers.standard_normal(shape, np.float32)) for name, shape in SHAPES.items()}


def batch(step, rank):
    """Each rank trains on data of its own."""
    return net.tensor(np.random.default_rng([step, rank]).standard_normal((4, 8), np.float32))


rank = net.join()
on_every_rank = hs.StateDictOptions(full_state_dict=True, names="neutral")
to_root = hs.StateDictOptions(full_state_dict=True, cpu_offload=True, names="neutral")
from_root = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, names="neutral")

model, optimizer = net.build()
hs.set_model_state_dict(model, values(seed=0), options=on_every_rank)
losses = [net.train(model, optimizer, batch(step, rank)) for step in range(STEPS)]

weights, state = hs.get_state_dict(model, optimizer, options=to_root)
new, fresh = net.build()
hs.set_state_dict(new, fresh, model_state_dict=weights, optim_state_dict=state, options=from_root)

go_on = range(STEPS, 2 * STEPS)
old_losses = [net.train(model, optimizer, batch(step, rank)) for step in go_on]
new_losses = [net.train(new, fresh, batch(step, rank)) for step in go_on]
if rank == 0:
    print("trained  ", *(f"{loss:.3f}" for loss in losses))
    print("weights  ", *weights)
    print("state    ", *(f"{key}{list(value.shape)}" for key, value in sorted(state["state"]["3.weight"].items())))
    print("goes on  ", *(f"{loss:.3f}" for loss in old_losses))
    print("new model", *(f"{loss:.3f}" for loss in new_losses), "equal to the bit:", old_losses == new_losses)
net.leave()
