"""The model of ``train_any.py`` in MindSpore."""

import mindspore as ms
from mindspore import nn

import hyperstate_mindspore as hm

tensor = ms.Tensor


def join():
    """Join the job that msrun started; returns this process' rank."""
    ms.set_device("CPU")
    hm.join()
    return ms.communication.get_rank()


def build():
    """A sharded model and its optimizer."""
    model = nn.SequentialCell(nn.Dense(8, 16), nn.LayerNorm((16,), epsilon=1e-5), nn.Tanh(), nn.Dense(16, 5))
    hm.shard_module(model, hm.init_device_mesh([ms.communication.get_group_size()]))
    return model, nn.Adam(model.trainable_params(), learning_rate=0.01)


def train(model, optimizer, data):
    """One step; returns the loss of this rank's data."""
    step = hm.value_and_grad(lambda data: model(data).square().mean(), model, optimizer.parameters)
    loss, gradients = step(data)
    optimizer(gradients)
    return float(loss)


def leave():
    """End the job."""
