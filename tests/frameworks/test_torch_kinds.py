"""Real ranks: plain, DDP, FSDP2, HSDP, TP, FSDP x TP, experts, pipeline stages, uneven and empty shards."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_torch_kinds.py")
KINDS = ["plain", "ddp", "fsdp", "hsdp", "tp", "fsdp_tp", "ep", "pp", "odd"]
FORMS = ["sharded", "sharded_cpu", "full", "broadcast", "flat", "flat_broadcast"]


def test_the_pool_has_real_ranks(pool4: Pool) -> None:
    assert [4] * 4 == pool4.run(BODIES, "posted")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_training_goes_on_as_if_it_had_not_been_interrupted(pool4: Pool, kind: str, form: str) -> None:
    """S03, S24, S28 (first variant), S33, S34 among others."""
    pool4.run(BODIES, "goes_on", kind=kind, form=form)


@pytest.mark.parametrize("kind", KINDS)
def test_the_full_form_is_what_pytorch_gathers(pool4: Pool, kind: str) -> None:
    pool4.run(BODIES, "full_form_is_the_truth", kind=kind)


@pytest.mark.parametrize(
    ("source", "target"), [*permutations(["plain", "ddp", "fsdp", "hsdp"], 2), ("tp", "fsdp_tp"), ("fsdp_tp", "tp")]
)
def test_state_moves_between_ways_of_sharding(pool4: Pool, source: str, target: str) -> None:
    pool4.run(BODIES, "moves", source=source, target=target)


@pytest.mark.parametrize(("source", "target"), [("fsdp", "hsdp"), ("hsdp", "fsdp"), ("fsdp_tp", "tp")])
def test_e5_sharded_values_of_another_layout_are_redistributed(pool4: Pool, source: str, target: str) -> None:
    pool4.run(BODIES, "redistributes", source=source, target=target)


def test_a_plain_tensor_under_a_sharded_one_asks_for_the_full_form(pool4: Pool) -> None:
    errors = pool4.run(BODIES, "plain_under_sharded")
    assert 1 == len(set(errors))
    assert "'norm.weight'" in errors[0] and "full_state_dict=True" in errors[0]


def test_s42_state_survives_every_change_of_topology(pool4: Pool) -> None:
    pool4.run(BODIES, "s42_other_topologies")


def test_s28_only_the_first_replica_passes_its_shards(pool4: Pool) -> None:
    pool4.run(BODIES, "s28_replica_zero_passes_its_shards")


def test_s34_every_stage_survives_once_and_loads_alone(pool4: Pool) -> None:
    """E19, E20, E24 and the documented answer to S34: the first rank of each stage keeps its part."""
    parts = pool4.run(BODIES, "s34_stages")
    names = [[f"layers.{stage}.bias", f"layers.{stage}.weight"] for stage in (0, 1)]
    assert [names[0], [], names[1], []] == [part["model"] for part in parts]
    assert [names[0], [], names[1], []] == [part["state"] for part in parts]
    assert not set(parts[0]["flat"]) & set(parts[2]["flat"])
    assert [[], []] == [parts[1]["flat"], parts[3]["flat"]]
    assert sorted(names[1]) == sorted(name for group in parts[2]["groups"] for name in group)


@pytest.mark.parametrize("empty", ["{}", "None"])
@pytest.mark.parametrize("flat", [False, True])
def test_s27_only_the_root_holds_the_dicts(pool2: Pool, pool4: Pool, empty: str, flat: bool) -> None:
    pool4.run(BODIES, "e9_groups_are_equal_on_all_ranks", empty=empty, flat=flat)
