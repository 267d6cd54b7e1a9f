"""How a piece of optimizer state lies over the ranks of its parameter.

Order of evidence: recorded layout, the registry, shapes. Shapes decide only where one reading fits;
a guess is never made (`AMBIGUOUS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any

from .errors import OptionError
from .layout import Layout, Mesh, Shape
from .schema import TensorSpec

LIKE_PARAM, REPLICATED, OPAQUE_LOCAL = "like_param", "replicated", "opaque_local"
SHARDED, LOCAL, OPAQUE, AMBIGUOUS = "", "local", "opaque", "ambiguous"
"""Values of `TensorSpec.form`. LOCAL: a plain tensor of the local shape. OPAQUE and AMBIGUOUS have no full form."""

Rule = str | Callable[[TensorSpec, Shape], Layout | None]
"""One of the three words, or a function of the parameter's spec and the value's global shape that gives its layout."""

_registry: dict[type, dict[Any, Rule]] = {}

HOOK: str = "hyperstate.register_state_layout(<optimizer class>, {%r: 'like_param' | 'replicated' | 'opaque_local'})"


def register_state_layout(optimizer_type: type, layouts: Mapping[Any, Rule]) -> None:
    """Tell how an optimizer class (and its subclasses) lays out its state.

    `layouts` maps state keys to "like_param" (each rank keeps the part that its shard of the parameter
    has), "replicated" (every rank keeps all), "opaque_local" (this rank's own business: no full form),
    or a function ``(parameter spec, global shape of the value) -> Layout | None`` (None: replicated).
    Registering a key again replaces its rule. Raises `OptionError` for any other rule.
    """
    for key, rule in layouts.items():
        if not callable(rule) and rule not in (LIKE_PARAM, REPLICATED, OPAQUE_LOCAL):
            raise OptionError(f"state layout of {optimizer_type.__qualname__}[{key!r}] can't be {rule!r}")
    _registry.setdefault(optimizer_type, {}).update(layouts)


def rules_for(types: Sequence[type], known: Mapping[Any, Rule]) -> dict[Any, Rule]:
    """The rules in force for optimizers of `types`: the backend's `known` ones, then what was registered."""
    rules = dict(known)
    for kind in types:
        for cls in reversed(kind.__mro__):
            rules.update(_registry.get(cls, {}))
    return rules


def is_sharded(param: TensorSpec | None) -> bool:
    """Whether ranks hold different parts of the parameter."""
    return param is not None and param.layout is not None and bool(param.layout.used)


def read_state(spec: TensorSpec, param: TensorSpec | None, rule: Rule | None, me: int) -> TensorSpec:
    """The spec of a live state tensor with its layout and form filled in.

    `spec.shape` is the plain tensor's own shape on rank `me`. Every rank reaches the same reading
    for the same optimizer, because it depends on arithmetic alone.
    """
    if spec.layout is not None or param is None or param.layout is None or not is_sharded(param):
        return spec
    box = param.layout.box(param.shape, me)
    fits = box is not None and spec.shape == box.shape
    if rule == OPAQUE_LOCAL:
        return TensorSpec(spec.dtype, spec.shape, None, OPAQUE)
    if rule == REPLICATED:
        return spec
    if callable(rule):
        return _read_by(rule, spec, param, me)
    if not fits:
        return spec
    if rule == LIKE_PARAM or not _could_be_statistic(spec.shape, param.shape):
        return TensorSpec(spec.dtype, param.shape, param.layout, LOCAL)
    return TensorSpec(spec.dtype, spec.shape, None, AMBIGUOUS)


def _read_by(
    rule: Callable[[TensorSpec, Shape], Layout | None], spec: TensorSpec, param: TensorSpec, me: int
) -> TensorSpec:
    """The one global shape, of those that state most often has, whose layout gives rank `me` the shape of `spec`.

    Where none does, the tensor is everybody's if the rule says so.
    """
    readings = []
    for shape in {param.shape: None, **dict.fromkeys(_statistics(param.shape))}:
        layout = rule(param, shape)
        if layout is None:
            readings += [spec] * (shape == spec.shape)
        elif len(layout.splits) == len(shape) and (box := layout.box(shape, me)) and box.shape == spec.shape:
            readings.append(TensorSpec(spec.dtype, shape, layout, LOCAL))
    if not readings and rule(param, spec.shape) is None:
        return spec
    return readings[0] if len(readings) == 1 else TensorSpec(spec.dtype, spec.shape, None, AMBIGUOUS)


def _could_be_statistic(shape: Shape, param: Shape) -> bool:
    """Whether a statistic of a parameter, kept by every rank, could have this shape: a reduction, a square matrix."""
    square = len(shape) == 2 and shape[0] == shape[1] and shape[0] in param
    return prod(shape) == 1 or square or shape in _statistics(param)


def _statistics(shape: Shape) -> dict[Shape, list[tuple[tuple[int, ...], bool]]]:
    """Shapes of reductions of a tensor: shape -> [(reduced dims, kept as 1)]."""
    found: dict[Shape, list[tuple[tuple[int, ...], bool]]] = {}
    dims = range(len(shape))
    for count in range(1, len(shape) + 1):
        for reduced in combinations(dims, count):
            dropped = tuple(n for d, n in enumerate(shape) if d not in reduced)
            kept = tuple(1 if d in reduced else n for d, n in enumerate(shape))
            found.setdefault(dropped, []).append((reduced, False))
            found.setdefault(kept, []).append((reduced, True))
    return found


def fresh_state(dtype: str, shape: Shape, param: TensorSpec, rule: Rule | None) -> TensorSpec:
    """Where a fresh optimizer keeps a state tensor of global `shape`; form OPAQUE or AMBIGUOUS if nobody can tell.

    The form of sharded state is the parameter's (`TensorSpec.form`).
    """
    if not is_sharded(param):
        if param.layout is not None and shape == param.shape and rule != REPLICATED:
            return TensorSpec(dtype, shape, param.layout, param.form)
        return TensorSpec(dtype, shape)
    assert param.layout is not None
    if rule == OPAQUE_LOCAL:
        return TensorSpec(dtype, shape, None, OPAQUE)
    if callable(rule):
        return TensorSpec(dtype, shape, rule(param, shape), param.form)
    if rule == REPLICATED or (rule is None and prod(shape) == 1):
        return TensorSpec(dtype, shape)
    if shape == param.shape:
        return TensorSpec(dtype, shape, param.layout, param.form)
    layout = _reduced(param, shape) if rule is None else None
    if layout is None:
        return TensorSpec(dtype, shape, None, AMBIGUOUS)
    return TensorSpec(dtype, shape, layout, param.form)


def _reduced(param: TensorSpec, shape: Shape) -> Layout | None:
    """Layout of the statistic of `param` that has `shape`, if all reductions of that shape agree on it."""
    assert param.layout is not None
    layouts = set()
    for reduced, kept in _statistics(param.shape).get(shape, []):
        splits = [() if d in reduced else split for d, split in enumerate(param.layout.splits)]
        layouts.add(tuple(split for d, split in enumerate(splits) if kept or d not in reduced))
    return Layout(param.layout.mesh, layouts.pop()) if len(layouts) == 1 else None


def meshes_of(specs: Sequence[TensorSpec]) -> list[Mesh]:
    """The meshes on which tensors of `specs` live."""
    return list(dict.fromkeys(spec.layout.mesh for spec in specs if spec.layout is not None))
