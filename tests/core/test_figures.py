"""No printed figure is below the value, and no lower bound above it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hidden_state_accountants.figures import fixed_up, round_up, text_down, text_up

VALUES = st.floats(1e-12, 1e12)


@given(VALUES, st.integers(2, 8))
def test_significant_digits(value, digits):
    step = 1.01 * 10 ** (1 - digits)
    assert value <= float(text_up(value, digits)) <= value * (1 + step)
    assert value * (1 - step) <= float(text_down(value, digits)) <= value


@given(st.floats(0, 1e6), st.integers(0, 6))
def test_decimals(value, decimals):
    text = fixed_up(value, decimals)
    assert value <= float(text) <= value + 1.01 * 10.0**-decimals
    assert len(text.partition(".")[2]) == decimals


@given(VALUES, st.integers(2, 8))
def test_what_needs_no_rounding_stays(value, digits):
    short = float(f"{value:.{digits - 1}e}")
    assert round_up(short, digits) == short
    assert float(text_up(short, digits)) == float(text_down(short, digits)) == short


@pytest.mark.parametrize("value", [0.0, math.inf])
def test_ends(value):
    assert text_up(value) == text_down(value) == f"{value:g}"
    assert fixed_up(value, 2) == f"{value:.2f}"
