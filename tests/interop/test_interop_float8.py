"""float8 on the host of MindSpore, which can't convert it, against PyTorch, which can."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyperstate_mindspore.float8 import decoded, encoded

KINDS = ["float8_e4m3fn", "float8_e5m2"]
CODES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_has_the_value_that_pytorch_gives_it(kind):
    expected = torch.from_numpy(CODES.copy()).view(getattr(torch, kind)).float().numpy()
    actual = decoded(CODES, kind)
    assert (np.isnan(expected) == np.isnan(actual)).all()
    assert (expected[~np.isnan(expected)].tobytes()) == actual[~np.isnan(actual)].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_that_of_pytorch(kind):
    values = decoded(CODES, kind)
    finite = np.sort(values[np.isfinite(values)])
    halves = (finite[1:] + finite[:-1]) / 2
    spread = np.arange(0, 2**32, 65537, dtype=np.uint32).view(np.float32)
    numbers = np.concatenate(
        [finite, halves, np.nextafter(halves, np.float32(-1e9)), np.nextafter(halves, np.float32(1e9)), spread]
    ).astype(np.float32)
    numbers = np.append(numbers[~np.isnan(numbers)], np.float32([np.inf, -np.inf, 0.0, -0.0]))
    expected = torch.from_numpy(numbers.copy()).to(getattr(torch, kind)).view(torch.uint8).numpy()
    assert expected.tolist() == encoded(numbers, kind).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_nan(kind):
    assert np.isnan(decoded(encoded(np.float32([np.nan]), kind), kind)).all()
