"""Parts chosen together for few rounds, costs that are none, and exact errors beside DPOP's."""

import numpy as np
import pytest

from dpjax._numerics import double_precision
from dpjax.contrib import fusion, schedules
from dpjax.results import records
from experiments import tracking_fusion
from tests.support import ROOT

COSTS = fusion.make(4, seed=0)
MIXING = np.full((4, 4), 0.25)


def test_parts_for_few_rounds_need_no_knots_of_ones_own():
    parts = fusion.optimal_parts(
        COSTS, MIXING, epsilon=1.0, gradient_gap=1.0, rounds=10, iterations=3
    )
    assert np.isfinite(parts.predicted.total)
    assert len(parts.noise.relative(10)) == 10


@pytest.mark.parametrize("costs", [None, (1, 2), COSTS.matrices])
def test_costs_that_are_none_are_refused(costs):
    with pytest.raises(ValueError, match="costs is .*; give those of fusion.make"):
        fusion.problem(costs)
    with pytest.raises(ValueError, match="costs is .*; give those of fusion.make"):
        fusion.optimal_parts(costs, MIXING, epsilon=1.0, gradient_gap=1.0, rounds=10)


def exact_error_of_dpop(costs, matrix, steps, scales):
    """E sum_i |x_i - x*|^2 after x = W z - alpha (H W z - b), x(0) of N(0, I), backwards."""
    n, p = costs.linear.shape
    mean = np.tile(-costs.minimiser, (n, 1))
    left = costs.linear - costs.hessians @ costs.minimiser
    curved = [np.eye(p) - alpha * costs.hessians for alpha in steps]
    for alpha, bent in zip(steps, curved, strict=True):
        mean = np.einsum("nij,nj->ni", bent, matrix @ mean) + alpha * left
    total = (mean**2).sum()
    back = np.eye(n * p).reshape(-1, n, p)
    for bent, scale in zip(curved[::-1], scales[::-1], strict=True):
        back = matrix @ np.einsum("rni,nij->rnj", back, bent)
        total += 2 * scale**2 * (back**2).sum()
    return total + (back**2).sum()


def residuals(epsilon):
    """Stored means of 1,000 runs at the printed steps, with their standard errors."""
    rows = records.read(ROOT / "docs" / "records" / "tracking_fusion.jsonl.gz")
    rows = rows.query("steps == 'printed' and round == 1000 and setting == @epsilon")
    rows = rows.set_index("algorithm")
    return rows["residual"], rows["residual_std"] / np.sqrt(rows["trials"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "ahead", "total", "bias"),
    [(0, 0.441, 0.0235, 0.0202), (1, 0.0946, 0.945, 0.819), (2, 0.0183, 9.78, 7.01)],
    ids=["10", "1", "0.1"],
)
def test_tracking_is_ahead_of_dpop_by_exact_errors(index, ahead, total, bias):
    """Fig. 2, of one draw of the data: what 1,000 unpaired runs cannot tell at epsilon .1."""
    with double_precision():
        setting = tracking_fusion.Setting(tracking_fusion.PRESETS["cpu"], index)
        scales = np.asarray(setting.made("tracking", 1.0).noise.scales)
        assert np.array_equal(scales, np.asarray(setting.made("dpop", 1.0).noise.scales))
        steps = setting.gamma * setting.q1 ** np.arange(len(scales))
        costs = setting.data
        error = schedules.error(
            setting.matrix, costs.hessians, costs.linear, steps, setting.beta, 2 * scales**2
        )
        tracking = error.total
        dpop = exact_error_of_dpop(costs, setting.matrix, steps, scales)
    assert 1 - tracking / dpop == pytest.approx(ahead, abs=2e-3)
    # Most of it is what steps that fall to 0 leave of the start.
    assert (error.total, error.bias) == pytest.approx((total, bias), rel=4e-3)
    means, errors = residuals(setting.epsilon)
    for name, exact in (("tracking", tracking), ("dpop", dpop)):
        assert abs(means[name] - exact) < 3 * errors[name], name
