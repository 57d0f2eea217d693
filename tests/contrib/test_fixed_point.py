"""Fixed-point numbers: what they hold, how far they are off, what they refuse."""

from fractions import Fraction

import numpy as np
import pytest

from dpjax.contrib.paillier import FixedPoint

SMALL = FixedPoint(value_bits=8, fraction_bits=3, weight_bits=4)


def test_unit_beyond_range_is_refused():
    edges = [SMALL.largest, -16.0, 0.0, -0.0, 1 / 8, -1 / 8]
    assert SMALL.largest == 127 / 8
    assert SMALL.values("x", np.array(edges)) == [127, -128, 0, 0, 1, -1]
    # Half a unit beyond the last is rounded to even: outside above, inside below.
    for beyond in (127.5 / 8, 16.0, -129 / 8, 1e300, -1e308):
        with pytest.raises(ValueError, match=r"x holds .* at entry 1, beyond 15.875.*value_bits"):
            SMALL.values("x", np.array([0.0, beyond]))


def test_numbers_that_are_not_finite_are_refused():
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="x holds .* at entry 0"):
            SMALL.values("x", np.array([bad, 0.0]))


@pytest.mark.parametrize("bad", [-1e-9, 1.0000001, np.nan, np.inf])
def test_weights_outside_of_zero_to_one_are_refused(bad):
    assert SMALL.weights("b", np.array([0.0, 1.0, 0.5])) == [0, 16, 8]
    with pytest.raises(ValueError, match="b holds .* at entry 1; draw weights from 0 to 1"):
        SMALL.weights("b", np.array([0.0, bad]))


def test_values_are_rounded_to_half_unit():
    random = np.random.default_rng(0)
    code = FixedPoint()
    values = random.normal(size=200) * 10.0 ** random.integers(-12, 6, 200)
    for value, complete in zip(values.tolist(), code.values("x", values), strict=True):
        assert abs(Fraction(complete, 2**40) - Fraction(value)) <= Fraction(1, 2**41)
    # Beyond the 53 bits of a float64 nothing is lost either.
    assert code.values("x", np.array([2.0**22 + 2.0**-30])) == [2**62 + 2**10]
    assert code.product(2**71) == 0.5 and code.product(-3) == -3 / 2.0**72


def test_spans_cover_grain():
    assert [SMALL.span(grain) for grain in (0.0, 1e-9, 1 / 8, 0.126, 1.0)] == [1, 1, 1, 2, 8]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"value_bits": 1}, "value_bits is 1"),
        ({"value_bits": 40}, "fraction_bits is 40 of value_bits 40"),
        ({"fraction_bits": -1}, "fraction_bits is -1"),
        ({"weight_bits": 0}, "weight_bits is 0"),
        ({"weight_bits": 65}, "weight_bits is 65"),
        ({"value_bits": 64.0}, "value_bits is 64.0"),
    ],
)
def test_codes_that_hold_nothing_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        FixedPoint(**changes)
