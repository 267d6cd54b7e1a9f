"""What `hyperstate demo` trains: its own small net, a Hugging Face folder, or a checkpoint file.

The tensors of a folder or file become the parameters of a plain module tree (`Tree`), whatever net they
came from; nothing of the original code is needed. No file is read with pickle's freedom.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import nn

from hyperstate.backend import how_to_install

INDEX = "model.safetensors.index.json"
TRAINED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "exp_avg": torch.optim.Adam,
    "momentum_buffer": torch.optim.SGD,
    "square_avg": torch.optim.RMSprop,
}
"""The optimizer class that a file's state keys tell of."""


MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]


class RefusedInputError(Exception):
    """The folder or file can't be used; the text says why."""


@dataclass
class Input:
    """What to train. A rank that does not hold the values has meta tensors in their place."""

    title: str
    build: Callable[[int], nn.Module]
    """The plain model: of a seed for the built-in net; on the meta device for a folder or file."""
    optimizer: MakeOptimizer
    """Makes a fresh optimizer of named parameters."""
    values: dict[str, torch.Tensor] | None = None
    """Where a folder or file was read: its tensors by FQN."""
    optimizer_state: dict[str, Any] | None = None
    """The file's optimizer state, if it has some, as ``optimizer.state_dict()`` once gave it."""

    def new_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A fresh optimizer of `model`; its parameters come in the order in which a file lists its tensors."""
        named = dict(model.named_parameters())
        return self.optimizer({name: named[name] for name in self.values or named if name in named})


def adamw(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer where no file asks for another.

    Not fused: the last bits of the fused kernel depend on where a shard ends (torch 2.13, CPU).
    """
    return torch.optim.AdamW(list(named.values()), lr=1e-3, foreach=False)


def open_input(folder: str | None, file: str | None, values: bool) -> Input:
    """The input of a run; real values only if `values`. Raises `RefusedInputError`."""
    if folder is not None:
        return _from_folder(Path(folder), values)
    if file is not None:
        return _from_file(Path(file), values)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Net(0).parameters())
    return Input(f"the built-in net: an embedding, {Net.depth} blocks and a head, {count:,} parameters", Net, adamw)


# -- the built-in net --------------------------------------------------------------------------------


class Net(nn.Module):
    """A small language model without attention; its sizes divide by no number of ranks."""

    width, vocabulary, depth = 254, 8191, 4

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        width = self.width
        self.tokens = nn.Embedding(self.vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(self.depth)
        )
        self.head = nn.Linear(width, self.vocabulary)

    def forward(self, step: int) -> torch.Tensor:
        """The loss of one training step; the data depend on `step` alone, so every rank sees the same."""
        generator = torch.Generator().manual_seed(1000 + step)
        text = torch.randint(self.vocabulary, (33,), generator=generator)
        hidden = self.tokens(text[:-1])
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), text[1:])


# -- a module tree of given tensors ------------------------------------------------------------------


class Tree(nn.Module):
    """A module that holds given tensors under given names. Its loss is a sum over the parameters."""

    def forward(self, step: int) -> torch.Tensor:
        """The loss of one training step: ``sum(wave * (p + p*p))`` of every parameter `p`, here and below.

        `wave` depends on the step and the element's place alone. So the gradient depends on the values,
        every element gets another one, and every rank sees the same data.
        """
        total = torch.zeros(())
        for parameter in self.parameters(recurse=False):
            full = parameter.float() if parameter.dtype.itemsize < 4 else parameter
            wave = torch.cos(torch.arange(full.numel(), dtype=torch.float32) * 0.37 + step).reshape(full.shape)
            total = total + (wave * (full + full * full)).sum()
        for child in self.children():
            total = total + child(step)
        return total


def _holds_parameters(name: str, value: torch.Tensor) -> bool:
    return value.dtype in TRAINED and name.rpartition(".")[2] not in ("running_mean", "running_var")


def tree_of(shapes: Mapping[str, torch.Tensor]) -> Tree:
    """A tree with parameters and buffers like `shapes`, on their devices. Raises `RefusedInputError` for a bad name.

    Parameters are the tensors of float16, bfloat16, float32 and float64; all others, and running statistics
    of normalisations, are buffers.
    """
    root = Tree()
    for name, value in shapes.items():
        inner: nn.Module = root
        *path, last = name.split(".")
        for step in path:
            if step not in inner._modules:
                _check_name(inner, step, name)
                inner.add_module(step, Tree())
            inner = inner._modules[step]  # type: ignore[assignment]  # no module is None here
        _check_name(inner, last, name)
        if _holds_parameters(name, value):
            inner.register_parameter(last, nn.Parameter(value))
        else:
            inner.register_buffer(last, value)
    return root


def _check_name(module: nn.Module, step: str, name: str) -> None:
    if not step or hasattr(module, step):
        raise RefusedInputError(f"the tensor name {name!r} can't be a parameter's: {step!r} is empty or in use")


def _tree_input(title: str, values: dict[str, torch.Tensor]) -> Input:
    if not any(_holds_parameters(name, value) and value.numel() for name, value in values.items()):
        raise RefusedInputError(f"{title} has no floating-point tensor to train")
    shapes = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in values.items()}
    tree_of(shapes)  # refuses what it can't hold
    count = sum(math.prod(value.shape) for value in values.values())
    about = f"{title}: {len(values)} tensors, {count:,} elements, held as a plain module tree"
    return Input(about, lambda _: tree_of(shapes), adamw, values)


# -- a Hugging Face folder ---------------------------------------------------------------------------


def _from_folder(folder: Path, values: bool) -> Input:
    if not folder.is_dir():
        raise RefusedInputError(f"there is no folder {folder}")
    config = _json_of(folder / "config.json")
    found: dict[str, torch.Tensor] = {}
    for path, names in _weight_files(folder).items():
        tensors = read_safetensors(path, values)
        lacking = sorted(names - tensors.keys())
        if lacking:
            raise RefusedInputError(f"{path} lacks {lacking[:3]}, which {INDEX} says it has")
        twice = found.keys() & tensors.keys()
        if twice:
            raise RefusedInputError(f"{path} has {sorted(twice)[:3]}, which another file of {folder} has too")
        found |= tensors
    return _tree_input(f"{config.get('model_type', 'model')} in {folder}", found)


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """The weight files of a folder, each with the tensors that the index promises (none without an index)."""
    index = folder / INDEX
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise RefusedInputError(f"{folder} has no *.safetensors file; weights in other formats are not read")
        return {file: set() for file in files}
    names = _json_of(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise RefusedInputError(f"{index} has no 'weight_map' of tensor names to file names")
    found: dict[Path, set[str]] = {}
    for name, file in names.items():
        if PurePosixPath(file).name != file or "\\" in file or file in ("", ".", ".."):
            raise RefusedInputError(f"{index} names {file!r} for {name!r}; only a file of this folder may stand there")
        if not (folder / file).is_file():
            raise RefusedInputError(f"{index} names {file!r} for {name!r}, which is not in {folder}")
        found.setdefault(folder / file, set()).add(name)
    return found


def _json_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RefusedInputError(f"{path.parent} has no {path.name}; a Hugging Face folder has one") from None
    except (OSError, ValueError) as error:
        raise RefusedInputError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise RefusedInputError(f"{path} holds no JSON object")
    return found


def read_safetensors(path: Path, values: bool) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name; on the meta device unless `values`."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise RefusedInputError(f"{path} needs the package safetensors: {how_to_install('torch')}") from None
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: _keep(file.get_tensor(name), values) for name in file.keys()}  # noqa: SIM118  # no dict
    except (OSError, SafetensorError, ValueError) as error:
        raise RefusedInputError(f"{path} can't be read as safetensors: {error}") from None


def _keep(tensor: torch.Tensor, values: bool) -> torch.Tensor:
    return tensor if values else torch.empty_like(tensor, device="meta")


# -- a checkpoint file -------------------------------------------------------------------------------


def _from_file(path: Path, values: bool) -> Input:
    if not path.is_file():
        raise RefusedInputError(f"there is no file {path}")
    if path.suffix == ".safetensors":
        return _tree_input(str(path), read_safetensors(path, values))
    model, state = split_checkpoint(path, _load(path, values))
    found = _tree_input(str(path), model)
    if state is None:
        return found
    found.title += ", with optimizer state"
    return Input(found.title, found.build, _optimizer_of(path, state), found.values, state)


def _load(path: Path, values: bool) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu" if values else "meta")
    except Exception as error:  # noqa: BLE001  # unpickling raises anything
        raise RefusedInputError(
            f"{path} can't be read with torch.load(weights_only=True), which runs no code of the file: {_reason(error)}"
        ) from None


def _reason(error: Exception) -> str:
    """One line of PyTorch's text; not the ones that advise to run the file's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    unpickler = [line.partition("WeightsUnpickler error: ")[2] for line in lines if "WeightsUnpickler error: " in line]
    others = [f"{type(error).__name__}: {line}" for line in lines if "weights_only" not in line]
    found = next(iter([*unpickler, *others]), type(error).__name__)
    return found.partition(" Please use")[0]


def split_checkpoint(path: Path, content: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    """The model's tensors and the optimizer's state in what a file held, told by their form, not by their names."""
    if _is_model(content):
        return dict(content), None
    if not isinstance(content, Mapping):
        raise RefusedInputError(f"{path} holds a {type(content).__name__}, no dict of tensors")
    models = {key: value for key, value in content.items() if _is_model(value)}
    states = {key: value for key, value in content.items() if _is_optimizer(value)}
    if len(models) != 1 or len(states) > 1:
        raise RefusedInputError(
            f"{path} must hold one model and at most one optimizer; of its keys {list(content)[:8]}, "
            f"{list(models)} are models and {list(states)} optimizers"
        )
    return dict(next(iter(models.values()))), next(iter(states.values()), None)


def _is_model(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in value.items())
    )


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def _is_well_formed(state: Mapping[str, Any]) -> bool:
    slots, groups = state["state"], state["param_groups"]
    return (
        isinstance(slots, Mapping)
        and all(isinstance(each, Mapping) for each in slots.values())
        and isinstance(groups, list)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
    )


def _optimizer_of(path: Path, state: Mapping[str, Any]) -> MakeOptimizer:
    """Makes a fresh optimizer of the class that the state tells of, with the file's groups."""
    if not _is_well_formed(state):
        raise RefusedInputError(
            f"{path} has an optimizer whose 'state' or 'param_groups' have another form than PyTorch's"
        )
    keys = {key for slots in state["state"].values() for key in slots}
    known = [made for key, made in OPTIMIZERS.items() if key in keys]
    if len(known) != 1:
        raise RefusedInputError(
            f"{path} has optimizer state {sorted(map(str, keys))}; this demo knows Adam's, RMSprop's and SGD's "
            "with momentum"
        )
    listed = [list(group["params"]) for group in state["param_groups"]]
    decoupled = any(group.get("decoupled_weight_decay") for group in state["param_groups"])
    kind: Any = torch.optim.AdamW if decoupled and known[0] is torch.optim.Adam else known[0]

    def make(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        names = iter(named)
        groups = [[key if isinstance(key, str) else next(names, None) for key in keys] for keys in listed]
        if sorted(str(name) for group in groups for name in group) != sorted(named):
            groups = [list(named)]  # does not fit: the setter says in which way
        members = [{"params": [named[str(name)] for name in group]} for group in groups]
        optimizer: torch.optim.Optimizer = kind(members, lr=1e-3, foreach=False)
        return optimizer

    return make
