"""examples/toy_backend, the worked example of docs/backends.md, passes what the conformance suite asks of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from installing import write_metadata

import hyperstate as hs
from hyperstate import backend as backends
from hyperstate.testing import Pool
from hyperstate.testing.cases import Case, all_cases
from hyperstate.testing.pool import kit_module

PROJECT = Path(__file__).parents[2] / "examples" / "toy_backend"
CASES = [case for case in all_cases() if case.run.ranks == 1]


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Toy and its backend, as if installed. Other tests must not find them."""
    folder = tmp_path_factory.mktemp("site")
    write_metadata(PROJECT, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.syspath_prepend(PROJECT)
        yield
    backends._loaded.pop("toy", None)


def test_a_script_of_toy_calls_the_public_functions(tmp_path: Path) -> None:
    import toy

    def build(seed: int) -> tuple[toy.Model, toy.Adam]:
        model = toy.Model({"w": toy.tensor([[1.0 * seed, 2.0]]), "b": toy.tensor([3.0 * seed])})
        for parameter in model.parameters.values():
            parameter.trainable = True
        return model, toy.Adam(model.parameters.values(), lr=0.1, betas=(0.9, 0.999))

    model, optimizer = build(1)
    for step in range(3):
        model.backward(step)
        optimizer.step()
    hs.save(tmp_path / "step-3", model, optimizer, extra={"step": 3})
    other, fresh = build(2)
    assert {"step": 3} == hs.load(tmp_path / "step-3", other, fresh).extra
    for one, its in ((model, optimizer), (other, fresh)):
        one.backward(3)
        its.step()
    assert model.parameters["w"].array.tolist() == other.parameters["w"].array.tolist()


def test_gaps_name_cases_and_give_reasons() -> None:
    gaps: dict[str, str] = kit_module("toy").GAPS
    assert set() == gaps.keys() - {case.name for case in CASES} - {case.id for case in CASES}
    assert all(gaps.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_toy_does(case: Case, request: pytest.FixtureRequest) -> None:
    gaps: dict[str, str] = kit_module("toy").GAPS
    if reason := gaps.get(case.name) or gaps.get(case.id):
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    Pool("toy", 1).run(case.path, case.function, timeout=case.run.timeout, **case.run.arguments)
