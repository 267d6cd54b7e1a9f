"""The library in one file: what each public function does, top down.

A getter describes the live objects; the sharded form returns at once, the full form agrees with the
other ranks, plans and gathers. A setter describes the target and what was passed, agrees, resolves,
allocates, gets ready, moves and commits (`setters.set_all`). Every failure before that is a *fault*
that travels to all participants, so all of them raise the same error and none waits for another.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from .flatten import unflatten_optim_state_dict as _unflatten
from .flows import Given, StateDict, get, names_of, prefixes_of, put
from .setters import IncompatibleKeys
from .template import build_model_load_template, build_optim_load_template, infer_state_keys


def get_model_state_dict(
    model: Any, *, submodules: Any = None, options: Any = None, ranks: Any = None, timeout: float | None = None
) -> StateDict:
    """The model's state by FQN.

    Sharded form (default): values as the framework holds them, live; with ``cpu_offload`` copies whose
    local shard is on the host. ``full_state_dict``: full tensors on every rank that holds the FQN; with
    ``cpu_offload`` on the host of the root rank only (the lowest rank that holds the FQN), ``{}`` elsewhere.

    The full form is a collective call of all ranks of the meshes in use (full + cpu of a plain model:
    of the whole job), or of `ranks` (numbers, a mesh or a process group). `timeout` is in seconds.
    Raises on all of them alike: `DisagreementError`, `AbsentRankError`, `ParticipantsError`,
    `UnsupportedConfigurationError`, `OptionError`. Follows PyTorch's function of the same name
    (``torch/distributed/checkpoint/state_dict.py``); docs/differences.md lists where it does not.
    """
    return get("get_model_state_dict", model, None, submodules, options, ranks, timeout)[0]


def get_optim_state_dict(
    model: Any, optimizer: Any, *, options: Any = None, ranks: Any = None, timeout: float | None = None
) -> StateDict:
    """The optimizer's state: ``{"state": {fqn: {key: value}}, "param_groups": [{"params": [fqn, …], …}]}``.

    `optimizer` is one optimizer or a sequence with disjoint parameters; none is ever stepped.
    Forms, participants and errors as in `get_model_state_dict`; `AmbiguousLayoutError` where the full
    form of a state value can't be told. ``flatten_optimizer_state_dict`` gives one level.
    """
    return get("get_optim_state_dict", model, optimizer, None, options, ranks, timeout)[1]


def get_state_dict(
    model: Any,
    optimizer: Any,
    *,
    submodules: Any = None,
    options: Any = None,
    ranks: Any = None,
    timeout: float | None = None,
) -> tuple[StateDict, StateDict]:
    """Both dictionaries, (model's, optimizer's), under one verdict."""
    return get("get_state_dict", model, optimizer, submodules, options, ranks, timeout)


def set_model_state_dict(
    model: Any,
    state_dict: Mapping[str, Any] | None,
    *,
    options: Any = None,
    ranks: Any = None,
    timeout: float | None = None,
    device: Any = None,
    check_sources: bool = False,
) -> IncompatibleKeys:
    """Put a model's state back, in place. The caller's dict is neither changed nor aliased.

    ``full_state_dict``: every rank passes full tensors and keeps its own slice; with
    ``broadcast_from_rank0`` only the root passes them, and each rank receives its own shard alone.
    Otherwise values are sharded tensors of any layout. All checks run on all ranks before the first
    write: `IncompatibleStateError`, `InvalidStateDictError` and the errors of the getters leave
    everything as it was. `TransferError`: a peer was lost while values moved.
    """
    given = Given(model_dict=state_dict, sections=("model",), device=device, check_sources=check_sources)
    return put("set_model_state_dict", model, None, given, options, ranks, timeout)


def set_optim_state_dict(
    model: Any,
    optimizer: Any,
    state_dict: Mapping[str, Any] | None,
    *,
    options: Any = None,
    ranks: Any = None,
    timeout: float | None = None,
    state_form: str | None = None,
    check_sources: bool = False,
) -> IncompatibleKeys:
    """Put an optimizer's state back: nested or flat, by FQN or by the integers of the framework's own form.

    Works on an optimizer that never stepped, without stepping it. `state_form` ("sharded" or "local")
    says how a fresh optimizer keeps state of sharded parameters. Groups are matched by FQN.
    Guarantees and errors as in `set_model_state_dict`.
    """
    given = Given(optim_dict=state_dict, sections=("optimizer",), state_form=state_form, check_sources=check_sources)
    return put("set_optim_state_dict", model, optimizer, given, options, ranks, timeout)


def set_state_dict(
    model: Any,
    optimizer: Any,
    *,
    model_state_dict: Mapping[str, Any] | None,
    optim_state_dict: Mapping[str, Any] | None,
    options: Any = None,
    ranks: Any = None,
    timeout: float | None = None,
    state_form: str | None = None,
    device: Any = None,
    check_sources: bool = False,
) -> IncompatibleKeys:
    """Put both back under one verdict: either both are loaded or neither is touched."""
    given = Given(model_state_dict, optim_state_dict, ("model", "optimizer"), state_form, device, check_sources)
    return put("set_state_dict", model, optimizer, given, options, ranks, timeout)


def unflatten_optim_state_dict(
    flat: Mapping[str, Any], model: Any, optimizer: Any = None, *, strict: bool = True, names: str = "own"
) -> StateDict:
    """The nested form of a flat optimizer dict. No communication.

    With `optimizer` its own grouping comes back; without, FQNs with equal fields form a group.
    `strict`: an FQN that the model lacks is an `IncompatibleStateError`; otherwise it is warned of. `names` as in
    `StateDictOptions`.
    """
    known, groups = names_of(model, optimizer, names)
    nested: StateDict
    nested, unexpected = _unflatten(flat, known, groups, strict=strict)
    if unexpected:
        warnings.warn(f"keys that the model does not have were left out: {unexpected[:20]}", stacklevel=2)
    return nested


__all__ = [
    "build_model_load_template",
    "build_optim_load_template",
    "get_model_state_dict",
    "get_optim_state_dict",
    "get_state_dict",
    "infer_state_keys",
    "prefixes_of",
    "set_model_state_dict",
    "set_optim_state_dict",
    "set_state_dict",
    "unflatten_optim_state_dict",
]
