"""Parts chosen together for few rounds, and costs that are none."""

import numpy as np
import pytest

from _common import fusion

COSTS, MIXING = fusion.make(4, seed=0), np.full((4, 4), 0.25)


def test_parts_for_few_rounds_need_no_knots_of_ones_own():
    parts = fusion.optimal(COSTS, MIXING, epsilon=1.0, gradient_gap=1.0, rounds=10, iterations=3)
    assert np.isfinite(parts.predicted.total)
    assert len(parts.noise.relative(10)) == 10


@pytest.mark.parametrize("costs", [None, (1, 2), COSTS.matrices])
def test_costs_that_are_none_are_refused(costs):
    with pytest.raises(ValueError, match="costs is .*; give those of fusion.make"):
        fusion.problem(costs)
    with pytest.raises(ValueError, match="costs is .*; give those of fusion.make"):
        fusion.optimal(costs, MIXING, epsilon=1.0, gradient_gap=1.0, rounds=10)
