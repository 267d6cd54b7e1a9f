"""Real ranks: one verdict for all, odd meshes and moments; faults of the predecessor that PyTorch can show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_nets import Net

import hyperstate as hs
from hyperstate.testing import Pool
from hyperstate_torch.fabric import TorchFabric

BODIES = Path(__file__).with_name("bodies_torch_faults.py")
MOMENTS = Path(__file__).with_name("bodies_torch_moments.py")
WRONG = {
    "unexpected key": "'more.weight'",
    "missing key": "'first.bias'",
    "shape": "'first.bias'",
    "dtype": "'norm.num_batches_tracked'",
    "state shape": "'first.bias' 'exp_avg'",
    "state missing": "'first.bias'",
    "no state dict": "'stat'",
    "options": "StateDictOptions(**options)",
    "a value that is no tensor": "'first.bias'",
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("culprit", [0, 1])
def test_e12_what_is_wrong_on_one_rank_is_refused_alike_on_all(pool2: Pool, what: str, culprit: int) -> None:
    """E8, E12, E30, E50: nothing or everything."""
    texts = pool2.run(BODIES, "wrong_on_one_rank", what=what, culprit=culprit)
    assert 1 == len(set(texts)), texts
    assert WRONG[what] in texts[0], texts[0]


def test_wrong_on_one_of_four_ranks(pool4: Pool) -> None:
    texts = pool4.run(BODIES, "wrong_on_one_rank", what="shape", culprit=3)
    assert 1 == len(set(texts))
    assert "'first.bias'" in texts[0] and "rank 3" in texts[0]


@pytest.mark.parametrize("what", ["unexpected key", "shape", "sparse", "nothing", "state missing"])
def test_e30_a_wrong_value_on_the_root_ends_the_call_on_all(pool2: Pool, what: str) -> None:
    """E11, E31 as well: a root without anything is refused, and ranks that pass {} wait for nobody."""
    texts = pool2.run(BODIES, "e30_wrong_on_the_root", what=what, timeout=30)
    assert 1 == len(set(texts)) and texts[0], texts


def test_e30_odd_but_right_values_arrive(pool2: Pool) -> None:
    pool2.run(BODIES, "e30_odd_but_right_values")


def test_e32_an_optimizer_without_state_is_restored(pool2: Pool) -> None:
    pool2.run(BODIES, "e32_a_fresh_optimizer_is_restored")


def test_an_empty_dict_without_broadcast_says_which_option_is_meant(pool2: Pool) -> None:
    texts = pool2.run(BODIES, "full_cpu_without_broadcast")
    assert 1 == len(set(texts))
    assert texts[0].startswith("InvalidStateDictError") and "broadcast_from_rank0=True" in texts[0]


def test_e27_ranks_may_hold_state_in_any_order(pool2: Pool) -> None:
    pool2.run(BODIES, "e27_order_of_state_differs")


def test_s05_unused_parameters_stay_without_state_on_ranks(pool2: Pool) -> None:
    pool2.run(BODIES, "unused_on_all_ranks")


def test_a_key_that_one_member_lacks_is_named(pool2: Pool) -> None:
    texts = pool2.run(BODIES, "state_on_one_rank_only")
    assert 1 == len(set(texts))
    assert texts[0].startswith("DisagreementError") and "'first.weight' 'exp_avg'" in texts[0]


def test_group_fields_that_differ_within_a_mesh_are_named(pool2: Pool) -> None:
    texts = pool2.run(BODIES, "fields_differ")
    assert 1 == len(set(texts))
    assert texts[0].startswith("DisagreementError") and "lr" in texts[0]


@pytest.mark.parametrize("form", ["sharded", "full", "root"])
def test_partial_tensors_are_refused_in_every_form(pool2: Pool, form: str) -> None:
    for text in pool2.run(BODIES, "partial", form=form):
        assert "'w'" in text and "redistribute" in text


def test_e23_parameters_on_part_of_the_ranks_keep_their_roots(pool4: Pool) -> None:
    parts = pool4.run(BODIES, "e23_sub_mesh")
    assert [["wide"], [], ["narrow"], []] == [part["weights"] for part in parts]
    assert [["wide"], [], ["narrow"], []] == [part["state"] for part in parts]


def test_ranks_outside_a_mesh_hold_nothing_of_its_tensors(pool4: Pool) -> None:
    assert [{}, {}, {"w": True}, {}] == pool4.run(BODIES, "members_and_others")


def test_e21_two_replicated_dimensions(pool4: Pool) -> None:
    pool4.run(BODIES, "two_replicate_dimensions")


def test_fsdp2_is_resharded_before_anything_is_listed(pool2: Pool) -> None:
    pool2.run(MOMENTS, "after_a_forward_without_gradient")
    pool2.run(MOMENTS, "root_with_parameters_of_its_own")


@pytest.mark.parametrize("form", ["full", "broadcast", "sharded"])
def test_e3_a_sharded_meta_model_keeps_its_parameter_objects(pool2: Pool, form: str) -> None:
    pool2.run(MOMENTS, "meta_fsdp", form=form)


def test_e43_tied_weights_inside_a_unit(pool2: Pool) -> None:
    pool2.run(MOMENTS, "tied_sharded")


def test_values_that_others_pass_under_broadcast_are_ignored_or_compared(pool2: Pool) -> None:
    for said, refusal in pool2.run(MOMENTS, "others_values_are_ignored"):
        assert "only the source's values were used" in said
        assert "differs" in refusal


def test_s20_one_dict_serves_several_models(pool2: Pool) -> None:
    pool2.run(MOMENTS, "s20_used_twice")


def test_e1_local_state_goes_through_the_checkpoint_library_with_its_global_shape(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(MOMENTS, "e1_through_the_checkpoint_library", folder=str(tmp_path))


# -- in one process ------------------------------------------------------------------------------------


def test_e10_contradictory_options_are_refused() -> None:
    class Options:
        broadcast_from_rank0 = True

    model = Net()
    for call in (
        lambda: hs.StateDictOptions(broadcast_from_rank0=True),
        lambda: hs.set_model_state_dict(model, model.state_dict(), options=Options()),
        lambda: hs.get_model_state_dict(model, options=Options()),
    ):
        with pytest.raises(ValueError, match="full_state_dict"):
            call()


@pytest.mark.parametrize("options", [{"full_state_dict": True}, object(), 3])
def test_e48_what_is_no_options_object_is_a_type_error(options: object) -> None:
    model = Net()
    for call in (
        lambda: hs.get_model_state_dict(model, options=options),
        lambda: hs.set_model_state_dict(model, model.state_dict(), options=options),
    ):
        with pytest.raises(TypeError, match="options"):
            call()


def test_e34_one_options_object_serves_getter_and_setter() -> None:
    model, target = Net(), Net(1)
    options = hs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    hs.set_model_state_dict(target, hs.get_model_state_dict(model, options=options), options=options)
    assert torch.equal(model.first.weight, target.first.weight)


def test_e50_shapes_that_broadcasting_would_hide_are_refused() -> None:
    model = Net()
    weights = {
        **model.state_dict(),
        "first.weight": torch.zeros(1, 5),
        "norm.num_batches_tracked": torch.zeros(1).long(),
    }
    with pytest.raises(RuntimeError, match="'first.weight'") as raised:
        hs.set_model_state_dict(model, weights)
    assert "'norm.num_batches_tracked'" in str(raised.value)


def test_e12_all_faults_are_listed_in_one_message() -> None:
    model = Net()
    weights = {**model.state_dict(), "x": torch.zeros(1), "y.z": torch.zeros(1)}
    del weights["first.bias"]
    with pytest.raises(RuntimeError) as raised:
        hs.set_model_state_dict(model, weights)
    assert all(name in str(raised.value) for name in ("'x'", "'y.z'", "'first.bias'"))
    report = hs.set_model_state_dict(model, weights, options=hs.StateDictOptions(strict=False))
    assert (["first.bias"], ["x", "y.z"]) == (report.missing_keys, report.unexpected_keys)


def test_e44_unknown_flat_keys_are_errors_or_reported() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    flat = hs.get_optim_state_dict(model, optimizer, options=hs.StateDictOptions(flatten_optimizer_state_dict=True))
    odd = {**flat, "state.gone.weight.exp_avg": torch.zeros(2), "other.first.weight.lr": 1.0}
    with pytest.raises(RuntimeError, match="gone.weight"):
        hs.set_optim_state_dict(model, optimizer, odd)
    report = hs.set_optim_state_dict(model, optimizer, odd, options=hs.StateDictOptions(strict=False))
    assert any("gone.weight" in key for key in report.unexpected_keys)
    assert any("other" in key for key in report.unexpected_keys)


def test_a_message_that_a_lost_peer_refuses_keeps_none_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer known to be lost refuses at once; others must not wait for what they would have got, nor be blamed."""
    posted = []

    def refuse(peer: int) -> None:
        if peer == 3:
            raise RuntimeError("connection closed by peer")
        posted.append(peer)

    monkeypatch.setattr(torch.distributed, "irecv", lambda buffer, src, tag: refuse(src))
    monkeypatch.setattr(torch.distributed, "isend", lambda buffer, dst, tag: refuse(dst))
    messages = [(peer, torch.zeros(1, dtype=torch.uint8)) for peer in (3, 0, 2)]
    with pytest.raises(hs.TransferError, match="can't exchange data with rank 3: connection closed by peer"):
        TorchFabric().exchange(messages, messages)
    assert posted == [0, 2, 0, 2]
