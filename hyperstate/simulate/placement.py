"""How tensors are cut over a mesh, said in words: ``fsdp=8``, ``replica=2,fsdp=4``, ``dp=4,tp=2``. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from ..errors import OptionError
from ..layout import Layout, Mesh, Shape

MAX_RANKS = 16_384
SHARDING = ("fsdp", "shard", "dp_shard")
"""Mesh dimensions that shard every tensor along its first dim, as FSDP does."""
REPLICATING = ("dp", "replica", "replicate", "dp_replicate")
"""Mesh dimensions along which every tensor is replicated."""
BY_RULE = ("tp", "ep")
"""Mesh dimensions that shard what a rule names."""


@dataclass(frozen=True)
class Rule:
    """Along the mesh dimension `name`, tensors whose FQN matches `pattern` (a glob) are sharded along `dim`.

    `dim` None replicates them. Tensors with fewer than `least` dims are passed over.
    """

    name: str
    pattern: str
    dim: int | None
    least: int = 1


def _rules(name: str, dim: int, least: int, words: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(name, pattern, dim, least) for word in words.split() for pattern in (f"*{word}.weight", f"*{word}.bias")
    )


DEFAULT_RULES: tuple[Rule, ...] = (
    # Megatron's scheme, with the names of common Transformer implementations.
    *_rules("tp", 1, 2, "o_proj down_proj wo w2 out_proj c_proj attention.dense fc2 dense_4h_to_h"),
    *_rules("tp", 0, 1, "q_proj k_proj v_proj gate_proj up_proj wq wk wv w1 w3 query key value c_fc fc1"),
    *_rules("tp", 0, 2, "embed_tokens tok_embeddings wte lm_head output"),
    Rule("ep", "*experts*", 0, 3),
)


def parse_mesh(text: str) -> Mesh:
    """The mesh of ``NAME=SIZE,…``, row-major over ranks 0, 1, …. Raises `OptionError`."""
    names, sizes = [], []
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not name or not size.isdecimal() or int(size) < 1:
            raise OptionError(
                f"mesh {text!r}: {part.strip()!r} is not of the form NAME=SIZE, as in fsdp=8 or dp=4,tp=2"
            )
        names.append(name)
        sizes.append(int(size))
    if len(set(names)) != len(names):
        raise OptionError(f"mesh {text!r}: a mesh dimension stands twice")
    if prod(sizes) > MAX_RANKS:
        raise OptionError(f"mesh {text!r} has {prod(sizes):,} ranks; at most {MAX_RANKS:,} are planned for")
    return Mesh(tuple(sizes), tuple(range(prod(sizes))), tuple(names))


def parse_rule(text: str) -> Rule:
    """The rule of ``MESH_DIMENSION:GLOB=DIM``; DIM is a number, or ``replicate``. Raises `OptionError`."""
    name, colon, rest = text.partition(":")
    pattern, equals, dim = rest.rpartition("=")
    if not (colon and equals and name and pattern) or not (dim.isdecimal() or dim == "replicate"):
        raise OptionError(f"rule {text!r} is not of the form MESH_DIMENSION:GLOB=DIM, as in tp:*.q_proj.weight=0")
    return Rule(name, pattern, int(dim) if dim.isdecimal() else None, int(dim) + 1 if dim.isdecimal() else 0)


def check_names(mesh: Mesh, rules: Sequence[Rule]) -> None:
    """Raises `OptionError` for a mesh dimension that nothing says the meaning of."""
    known = {*SHARDING, *REPLICATING, *BY_RULE, *(rule.name for rule in rules)}
    for name in mesh.names or ():
        if name not in known:
            raise OptionError(
                f"mesh dimension {name!r} is unknown; known are {', '.join([*SHARDING, *REPLICATING, *BY_RULE])}. "
                f"Say what another one shards with a rule, as in {name}:*.weight=0"
            )


def layout_of(mesh: Mesh, fqn: str, shape: Shape, rules: Sequence[Rule] = ()) -> Layout:
    """How a tensor lies over `mesh`. `rules` go before the default ones; the first that fits decides.

    What a rule says splits a dim before FSDP does, as FSDP over TP has it.
    """
    first: list[list[int]] = [[] for _ in shape]
    last: list[list[int]] = [[] for _ in shape]
    for number, name in enumerate(mesh.names or ()):
        rule = _rule_for(name, fqn, len(shape), rules)
        if rule is not None:
            if rule.dim is not None:
                first[rule.dim].append(number)
        elif name in SHARDING and shape:
            last[0].append(number)
    return Layout(mesh, tuple((*a, *b) for a, b in zip(first, last, strict=True)))


def _rule_for(name: str, fqn: str, ndim: int, rules: Sequence[Rule]) -> Rule | None:
    for rule in (*rules, *DEFAULT_RULES):
        if rule.name == name and ndim >= rule.least and fnmatchcase(fqn, rule.pattern):
            return rule
    return None
