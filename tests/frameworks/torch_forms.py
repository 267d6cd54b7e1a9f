"""The forms in which both dictionaries travel in one process, and the trip itself."""

from __future__ import annotations

from typing import Any

from torch_nets import cloned

import hyperstate as hs

FORMS = {
    "nested": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True, "cpu_offload": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
    "flat_broadcast": {
        "full_state_dict": True,
        "broadcast_from_rank0": True,
        "flatten_optimizer_state_dict": True,
    },
}


def moved(source: tuple[Any, Any], target: tuple[Any, Any], form: str = "nested", **keywords: Any) -> Any:
    options = hs.StateDictOptions(**FORMS[form])
    weights, state = map(cloned, hs.get_state_dict(*source, options=options))
    return hs.set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=options, **keywords)
