"""Every error that a user can see.

    HyperstateError
    ├── OptionError (ValueError)                 options contradict each other
    ├── OptionTypeError (TypeError)              not an options object at all
    ├── ParticipantsError (ValueError)           who takes part is unclear or disputed: pass ``ranks=``
    ├── AbsentRankError (TimeoutError)           a participant did not come within ``timeout=``
    ├── InvalidStateDictError (ValueError)       what was passed is no state dict, or nobody passed one
    ├── IncompatibleStateError (RuntimeError)    keys, shapes or dtypes do not fit the target
    ├── DisagreementError (RuntimeError)         ranks hold unequal things under one name
    ├── AmbiguousLayoutError (RuntimeError)      the layout of optimizer state is unknown: register it
    ├── UnsupportedConfigurationError (RuntimeError)
    ├── TransferError (RuntimeError)             a peer was lost after the verdict: load again
    ├── CheckpointError (RuntimeError)           a checkpoint can't be written, or what is there is damaged
    └── BackendError (RuntimeError)              no backend, or the wrong one

A refusal is raised alike on every participating rank, and nothing was written when it is raised.
`TransferError` is the one exception to that: it says so in its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SCREENFUL = 40


class HyperstateError(Exception):
    """Base of all errors of this library."""


class OptionError(HyperstateError, ValueError):
    """An option value is unknown, or options contradict each other."""


class OptionTypeError(HyperstateError, TypeError):
    """The ``options`` argument is not an options object."""


class ParticipantsError(HyperstateError, ValueError):
    """The set of participating ranks can't be derived, or ranks disagree about it."""


class AbsentRankError(HyperstateError, TimeoutError):
    """A participating rank did not make the call within the timeout."""


class InvalidStateDictError(HyperstateError, ValueError):
    """The dictionary that was passed is not a state dict, or no rank passed one."""


class IncompatibleStateError(HyperstateError, RuntimeError):
    """Keys, shapes or dtypes of a state dict do not fit the target."""


class DisagreementError(HyperstateError, RuntimeError):
    """Ranks hold unequal things under one name."""


class AmbiguousLayoutError(HyperstateError, RuntimeError):
    """How a piece of optimizer state is laid out over ranks can't be told."""


class UnsupportedConfigurationError(HyperstateError, RuntimeError):
    """A configuration that this library refuses."""


class TransferError(HyperstateError, RuntimeError):
    """Data movement was interrupted from outside; a setter's target must be loaded again."""


class CheckpointError(HyperstateError, RuntimeError):
    """A checkpoint can't be written or read: no space, no such file, damaged or hostile content."""


class BackendError(HyperstateError, RuntimeError):
    """No backend serves the object, or the chosen one is not the object's."""


@dataclass(frozen=True, order=True)
class Fault:
    """One thing that is wrong, as it travels between ranks.

    `kind` is the name of an error class of this module, `rank` the lowest rank that has the fault.
    """

    rank: int
    kind: str
    text: str


def fault_of(error: Exception, rank: int) -> Fault:
    """The fault that stands for `error`; foreign exceptions travel as `HyperstateError` with their type in the text."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # a user's class; a fault that can't be told would leave the other ranks waiting
        text = "(its text can't be read)"
    return Fault(rank, kind, text) if kind in _KINDS else Fault(rank, "HyperstateError", f"{kind}: {text}")


def raise_faults(faults: Iterable[Fault], what: str) -> None:
    """Raise one error that lists all faults (up to a screenful), or return when there are none.

    The class is that of the first fault in order of rank; equal inputs give equal texts on every rank.
    """
    ordered = sorted(set(faults))
    if not ordered:
        return
    ranks: dict[str, list[int]] = {}
    for fault in ordered:
        ranks.setdefault(fault.text, []).append(fault.rank)
    lines = [f"{name_ranks(who)}: {text}" for text, who in list(ranks.items())[:SCREENFUL]]
    if len(ranks) > SCREENFUL:
        lines.append(f"… and {len(ranks) - SCREENFUL} more")
    head = f"{what} was refused on all participating ranks; nothing was changed"
    raise _KINDS.get(ordered[0].kind, HyperstateError)("\n  ".join([head + ":", *lines]))


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1, 2" or, of many, "ranks 0, 1, 2 … 63"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8] if len(ranks) <= 8 else ranks[:3]))
    return f"ranks {shown}" + (f" … {ranks[-1]}" if len(ranks) > 8 else "")


_KINDS: dict[str, type[HyperstateError]] = {
    cls.__name__: cls
    for cls in (
        HyperstateError,
        OptionError,
        OptionTypeError,
        ParticipantsError,
        AbsentRankError,
        InvalidStateDictError,
        IncompatibleStateError,
        DisagreementError,
        AmbiguousLayoutError,
        UnsupportedConfigurationError,
        TransferError,
        CheckpointError,
        BackendError,
    )
}
