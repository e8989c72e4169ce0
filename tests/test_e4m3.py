"""NumPy's e4m3 against torch's, and its rounding errors against the half step."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trtllm_workshop.e4m3 import E4M3_MAX, e4m3_values, half_step, quantize_e4m3, relative_error, saturated_share

NUMBERS = st.floats(-2000, 2000, width=32)


def test_all_codes_are_those_of_torch():
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert sorted(e4m3_values()) == sorted(theirs[theirs.isfinite()].tolist()) and len(e4m3_values()) == 254
    assert e4m3_values().max() == E4M3_MAX


@given(st.lists(NUMBERS, min_size=1, max_size=20), st.sampled_from([1.0, 0.25, 3.7, 1e-3]))
def test_values_are_rounded_as_torch_does(values, scale):
    divided = (torch.tensor(values, dtype=torch.float64) / scale).clamp(-448, 448).float()
    expected = divided.to(torch.float8_e4m3fn).double().numpy() * scale
    assert np.array_equal(quantize_e4m3(values, scale), expected)


@given(NUMBERS, st.sampled_from([5.0, 7.3]))
def test_no_error_is_larger_than_half_a_step(value, scale):
    assert abs(quantize_e4m3(value, scale) - value) <= half_step(value, scale) * (1 + 1e-6)


def test_P74_scale_one_saturates_where_amax_over_448_does_not():
    x = np.random.default_rng(0).uniform(-2000, 2000, 4000)
    assert saturated_share(x, 1.0) > 0.7 and np.abs(quantize_e4m3(x, 1.0)).max() == E4M3_MAX
    scale = np.abs(x).max() / E4M3_MAX
    normal = np.abs(x) > scale * 2.0**-6
    assert saturated_share(x, scale) == 0.0 and relative_error(x, scale)[normal].max() < 0.07


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_none(scale):
    with pytest.raises(ValueError, match="expected a positive number"):
        quantize_e4m3([1.0], scale)
    with pytest.raises(ValueError, match="expected a positive number"):
        saturated_share([1.0], scale)


def test_bfloat16_tensors_and_nan():
    assert saturated_share(torch.tensor([500.0, 1.0], dtype=torch.bfloat16), 1.0) == 0.5
    with pytest.raises(ValueError, match="1 of 2 values are NaN"):
        saturated_share([float("nan"), 1.0], 1.0)
