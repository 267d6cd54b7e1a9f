"""Real ranks: optimizer state of every class, factored, local, quantised; memory and messages of a load."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch_optimizers import CONFIGS

from hyperstate.testing import Pool

BODIES = Path(__file__).with_name("bodies_torch_state.py")
FORMS = ["sharded", "full", "broadcast", "flat"]
CANNOT_STEP = {
    "adafactor": "cannot step: RuntimeError",
    "adagrad_fused": "cannot step: NotImplementedError",
    "rprop": "cannot step: RuntimeError",
    "sgd_fused": "cannot step: NotImplementedError",
}
"""What PyTorch 2.13 itself can't step on sharded parameters; the day it can, these fail and become exact."""


@pytest.mark.parametrize("name", CONFIGS)
def test_every_class_goes_on_as_if_it_had_not_been_interrupted(pool2: Pool, name: str) -> None:
    """S16 (first case) and the rest of `torch.optim`."""
    assert {CANNOT_STEP.get(name, "exact")} == set(pool2.run(BODIES, "every_class", name=name, timeout=120))


def test_s16_an_optimizer_built_before_sharding_is_refused(pool2: Pool) -> None:
    for text in pool2.run(BODIES, "s16_adagrad_built_before_sharding"):
        assert "after the model was sharded" in text


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_s12_factored_moments_have_their_own_shapes_and_layouts(pool2: Pool, form: str, stepped: bool) -> None:
    pool2.run(BODIES, "s12_factored", form=form, stepped=stepped)


def test_s12_factored_moments_move_to_another_number_of_ranks(pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    file = str(tmp_path / "state.pt")
    pool4.run(BODIES, "s12_save", file=file)
    pool2.run(BODIES, "s12_load", file=file)


def test_s12_square_matrices_ask_for_the_hook_and_obey_it(pool2: Pool) -> None:
    """E39: what a shape can't tell is never guessed."""
    texts = pool2.run(BODIES, "s12_square_matrices")
    assert 1 == len(set(texts))
    assert "register_state_layout" in texts[0] and "'w'" in texts[0]


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_s13_plain_local_state_has_a_global_shape_and_comes_back_plain(pool2: Pool, form: str, stepped: bool) -> None:
    pool2.run(BODIES, "s13_local", form=form, stepped=stepped)


def test_s13_on_four_ranks_with_uneven_and_empty_shards(pool4: Pool) -> None:
    pool4.run(BODIES, "s13_local", form="broadcast", stepped=True)


@pytest.mark.parametrize("registered", [False, True])
def test_s14_quantised_state_round_trips_sharded_and_is_never_changed_silently(pool2: Pool, registered: bool) -> None:
    for errors in pool2.run(BODIES, "s14_blocks", registered=registered):
        assert 2 == len(errors)
        for text in errors:
            assert text.startswith(
                "AmbiguousLayoutError" if registered else ("AmbiguousLayoutError", "DisagreementError")
            )
            assert any(key in text for key in ("'codes'", "'absmax'")) and ("'w'" in text or "'b'" in text)


@pytest.mark.parametrize("form", FORMS)
def test_s15_state_keeps_its_precision(pool2: Pool, form: str) -> None:
    pool2.run(BODIES, "s15_precision", form=form)


@pytest.mark.parametrize("form", FORMS)
def test_s06_a_parameter_unknown_to_the_checkpoint(pool2: Pool, form: str) -> None:
    strict = pool2.run(BODIES, "s06_missing", form=form, strict=True)
    assert 1 == len(set(strict))
    assert "'first.weight'" in strict[0]
    assert ["", ""] == pool2.run(BODIES, "s06_missing", form=form, strict=False)


def test_s40_a_plain_checkpoint_goes_in_by_order_and_comes_back_exact(pool2: Pool) -> None:
    pool2.run(BODIES, "s40_plain_checkpoint")


@pytest.mark.parametrize("broadcast", [True, False])
def test_s29_a_load_grows_memory_by_less_than_three_parameters(pool2: Pool, broadcast: bool) -> None:
    """A second copy of the shards would be six."""
    grown = pool2.run(BODIES, "s29_memory", broadcast=broadcast, timeout=120)
    assert [True, True] == [one < 3 for one in grown], grown


def test_s44_messages_do_not_grow_with_the_number_of_tensors() -> None:
    """E54: at most a few exchanges per call; nobody receives more than the root needs, or than it keeps."""
    with Pool("torch", 8) as pool:
        few, many = (pool.run(BODIES, "s44_messages", tensors=n, timeout=200) for n in (20, 2000))
    for call in ("get", "set"):
        for rank in range(8):
            assert few[rank][call]["exchanges"] == many[rank][call]["exchanges"] <= 4
            assert few[rank][call]["messages"] == many[rank][call]["messages"] <= 7
    moments = 2000 * 2 * 8 * 4 * 4
    received = [many[rank]["get"]["bytes_received"] for rank in range(8)]
    assert [moments * 7 // 8] + [0] * 7 == received
    assert [0] + [moments // 8] * 7 == [many[rank]["set"]["bytes_received"] for rank in range(8)]
