"""Every case of `hyperstate.testing.cases` on the backend under test.

A backend's kit may list gaps (`hyperstate.testing.kit`): those cases must fail, or the run does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hyperstate.testing import Pool
from hyperstate.testing.cases import Case, all_cases
from hyperstate.testing.pool import kit_module

CASES = list(all_cases())


def test_case_ids_are_unique() -> None:
    assert len(CASES) == len({case.id for case in CASES})


def test_gaps_name_cases(backend_name: str) -> None:
    gaps: dict[str, str] = getattr(kit_module(backend_name), "GAPS", {})
    assert set() == gaps.keys() - {case.name for case in CASES} - {case.id for case in CASES}
    assert [] == [name for name, reason in gaps.items() if not reason]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_backend_does(
    case: Case, backend_name: str, pool: Callable[[int], Pool], request: pytest.FixtureRequest
) -> None:
    gaps = getattr(kit_module(backend_name), "GAPS", {})
    if reason := gaps.get(case.name) or gaps.get(case.id):
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    run = case.run
    results = pool(run.ranks).run(case.path, case.function, timeout=run.timeout, lost=run.lost, **run.arguments)
    survivors = [result for rank, result in enumerate(results) if rank not in run.lost]
    assert [survivors[0]] * len(survivors) == survivors
