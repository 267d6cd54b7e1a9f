"""FQNs: the names that users gave, without what wrappers put in front of them.

A wrapper's segment is dropped where a wrapper *is*, by its class; a user's own submodule called
``module`` keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from hyperstate.errors import UnsupportedConfigurationError

EXTRA_STATE = "_extra_state"

_WRAPPERS = {
    "module": ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    "_orig_mod": ("torch._dynamo.eval_frame", "OptimizedModule"),
    "_checkpoint_wrapped_module": ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"),
}
"""Attribute under which a wrapper keeps its module -> module and name of the wrapper's class."""


class Visit(NamedTuple):
    """A module at one of its places in the tree."""

    module: torch.nn.Module
    prefix: str
    """Of its FQNs: empty or ending in a dot."""
    key_prefix: str
    """Of its keys in the root's state dict, which keep the segments of some wrappers."""


def _loaded(module: str, name: str) -> type | None:
    """A class of a module if that is imported; without it no object of the class can exist."""
    found: type | None = getattr(sys.modules.get(module), name, None)
    return found


def _kinds() -> list[tuple[str, type]]:
    """The wrapper classes that are in use, each with its attribute."""
    found = ((attribute, _loaded(*where)) for attribute, where in _WRAPPERS.items())
    return [(attribute, kind) for attribute, kind in found if kind is not None]


def _inside(module: torch.nn.Module, kinds: Iterable[tuple[str, type]]) -> tuple[str, torch.nn.Module] | None:
    """Attribute and module inside, if `module` is a wrapper."""
    for attribute, kind in kinds:
        if isinstance(module, kind):
            inner = module._modules.get(attribute)
            return None if inner is None else (attribute, inner)
    return None


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside any number of wrappers."""
    kinds = _kinds()
    while (found := _inside(module, kinds)) is not None:
        module = found[1]
    return module


def walk(root: torch.nn.Module) -> list[Visit]:
    """All modules in the order of `named_parameters`, shared ones at each of their places. Refuses FSDP1."""
    kinds = _kinds()
    fsdp1 = _loaded("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")
    visits: list[Visit] = []

    def descend(module: torch.nn.Module, prefix: str, key_prefix: str) -> None:
        if fsdp1 is not None and isinstance(module, fsdp1):
            raise UnsupportedConfigurationError(
                f"module {prefix[:-1] or '(root)'!r} is a FullyShardedDataParallel (FSDP1), which is not supported; "
                "use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        visits.append(Visit(module, prefix, key_prefix))
        inner = _inside(module, kinds)
        for name, child in module._modules.items():
            if child is None:
                continue
            if inner is None or name != inner[0]:
                descend(child, f"{prefix}{name}.", f"{key_prefix}{name}.")
            elif name == "_checkpoint_wrapped_module":
                # ActivationWrapper's own state-dict hooks take its segment off and put it back on.
                descend(child, prefix, key_prefix)
            else:
                descend(child, prefix, f"{key_prefix}{name}.")

    descend(root, "", "")
    return visits


def clean(key: str, prefixes: Mapping[str, str]) -> str:
    """The FQN of a state-dict key; `prefixes` maps each module's `key_prefix` to its `prefix`."""
    end = len(key)
    while (end := key.rfind(".", 0, end)) >= 0:
        found = prefixes.get(key[: end + 1])
        if found is not None:
            return found + key[end + 1 :]
    return prefixes.get("", "") + key
