"""`StateDictOptions`: what a caller can ask for, and the checks on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from .errors import OptionError, OptionTypeError


@dataclass(frozen=True, kw_only=True)
class StateDictOptions:
    """Options of all getters and setters.

    Every function also accepts any object that has some of these attributes, PyTorch's
    ``torch.distributed.checkpoint.state_dict.StateDictOptions`` for one.
    """

    full_state_dict: bool = False
    """Values are full tensors instead of sharded ones."""
    cpu_offload: bool = False
    """Values live on the host. With `full_state_dict`: on the root rank only."""
    ignore_frozen_params: bool = False
    """Model getters leave out parameters that need no gradient, under all their names."""
    broadcast_from_rank0: bool = False
    """Setters: only the root rank holds the full values. Needs `full_state_dict`."""
    flatten_optimizer_state_dict: bool = False
    """The optimizer dict has one level: ``state.<FQN>.<key>``, ``param_group.<FQN>.<field>``."""
    strict: bool = True
    """Unexpected and missing keys are errors."""
    keep_submodule_prefixes: bool = True
    """With ``submodules=``: keep the prefix of the whole model."""
    names: str = "own"
    """"own": as the framework calls things; "neutral": as PyTorch does, wherever both have the thing."""

    def __post_init__(self) -> None:
        if self.names not in ("own", "neutral"):
            raise OptionError(f"StateDictOptions.names must be 'own' or 'neutral', not {self.names!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "names":
                continue
            if not isinstance(value, bool):
                raise OptionError(f"StateDictOptions.{field.name} must be True or False, not {value!r}")
        if self.broadcast_from_rank0 and not self.full_state_dict:
            raise OptionError(
                "StateDictOptions.broadcast_from_rank0=True needs full_state_dict=True: "
                "the root rank holds full tensors and the others hold nothing"
            )


_MODIFIERS = "_fqn_modifiers"
_NAMES = tuple(field.name for field in fields(StateDictOptions))


def read_options(options: object) -> StateDictOptions:
    """`StateDictOptions` from None, from itself, or from any object with some of its attributes.

    Raises `OptionTypeError` for a mapping or an object with none of the known attributes,
    `OptionError` for a value that is no bool, a contradiction, or PyTorch's ``dsd_fqn_modifiers``.
    """
    if options is None:
        return StateDictOptions()
    if isinstance(options, StateDictOptions):
        return options
    if isinstance(options, Mapping):
        raise OptionTypeError(f"options is a {type(options).__name__}; pass StateDictOptions(**options) instead")
    found = {name: getattr(options, name) for name in _NAMES if hasattr(options, name)}
    if not found:
        raise OptionTypeError(f"options is a {type(options).__name__} with none of the attributes {', '.join(_NAMES)}")
    if getattr(options, "dsd_fqn_modifiers", _MODIFIERS) != _MODIFIERS:  # a field of PyTorch's options
        raise OptionError("dsd_fqn_modifiers is not supported: state-dict hooks of modules are honoured as they are")
    return StateDictOptions(**found)
